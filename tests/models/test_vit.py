"""The Vision Transformer and its classifier: against transformers, both ways, and trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxzero as jz
from jaxzero import interop
from jaxzero.models import ViT, ViTClassifier, ViTConfig

from . import tiny_models
from .tiny_models import read

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
ODD = {
    "image_size": [10, 7],  # the last two rows and the last column are not seen
    "patch_size": [4, 3],
    "num_channels": 1,
    "qkv_bias": False,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-6,
}
SMALL = ViTConfig(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    image_size=(8, 8),
    patch_size=(4, 4),
    num_labels=4,
    scan_layers=True,
)
MODEL, CLASSIFIER = "AutoModel", "AutoModelForImageClassification"


def images(config: ViTConfig, num: int = 3) -> np.ndarray:
    shape = (num, config.num_channels, *config.image_size)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def run(graph: Any, params: Any, pixels: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda params, x: nnx.merge(graph, params)(x))(params, pixels))


@pytest.mark.parametrize(
    ("auto", "change", "scanned"),
    [
        (MODEL, ODD, False),
        (CLASSIFIER, {"num_labels": 5}, True),
        pytest.param(CLASSIFIER, ODD | {"hidden_act": "relu"}, False, marks=pytest.mark.exhaustive),
        pytest.param(MODEL, {"hidden_act": "silu"}, True, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_transformers_and_a_round_trip_is_exact(
    auto: str, change: dict[str, Any], scanned: bool, tmp_path: Path
):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model = tiny_models.make("vit", SIZES | change, auto=auto)
    source = tiny_models.save(model, tmp_path / "source")
    (source / "preprocessor_config.json").write_text("{}")
    loaded = interop.load_encoder(source, scan_layers=scanned)
    params = read(loaded.params)
    pixels = images(loaded.config)
    theirs = model(torch.from_numpy(pixels))
    want = (theirs.logits if auto == CLASSIFIER else theirs.last_hidden_state).detach().numpy()
    got = run(loaded.graph, params, pixels)
    # As for decoders: rounding errors of a sum grow as the root of its length.
    atol = 10 * 2 * np.sqrt(48) * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)

    export = interop.export_encoder(params, tmp_path / "export", source=source)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, export))
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    assert (export / "preprocessor_config.json").is_file()
    again = getattr(transformers, auto).from_pretrained(export)
    assert type(again) is type(model)
    states = model.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.standard_promotion  # of optax
def test_classifier_trains_as_on_one_device():
    """Which quadrant of the image is bright: the loss falls, gradients are those of one device."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: ViTClassifier(SMALL, rngs=nnx.Rngs(0))))
    whole = jax.jit(lambda: nnx.split(ViTClassifier(SMALL, rngs=nnx.Rngs(0)))[1])()
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zero3())
    labels = np.arange(16) % 4
    pixels = images(SMALL, 16)
    for row, label in enumerate(labels):
        y, x = 4 * (label // 2), 4 * (label % 2)
        pixels[row, :, y : y + 4, x : x + 4] += 2
    batch = {"images": pixels, "labels": labels.astype(np.int32)}

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    step = zero.value_and_grad(loss)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(params, state):
        value, grads = step(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    params = zero.shard(whole)
    state, values = zero.init_optimizer(optimizer, params), []
    params, state, value, grads = train(params, state)
    want, want_grads = jax.jit(jax.value_and_grad(loss))(whole, batch)
    roundings = 10 * SMALL.num_layers * np.sqrt(SMALL.intermediate_size)
    rtol = roundings * np.finfo(np.float32).eps
    np.testing.assert_allclose(value, want, rtol=rtol)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want_grads))
    for got, held in zip(
        jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want_grads), strict=True
    ):
        # Twice as many sums as forward; a small gradient is a sum of larger ones that cancel.
        np.testing.assert_allclose(got, held, rtol=0, atol=2 * rtol * largest)

    for _ in range(12):
        params, state, value, _ = train(params, state)
        values.append(float(value))
    assert want > 1.0 and values[-1] < 0.3 * want, values


def test_dropout_is_that_of_the_key():
    config = dataclasses.replace(SMALL, hidden_dropout=0.2, attention_dropout=0.2)
    graph, params = nnx.split(ViT(config, rngs=nnx.Rngs(0)))
    apply = jax.jit(lambda key: nnx.merge(graph, params)(images(config), dropout_key=key))
    key, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(apply(key), apply(key))
    assert not np.allclose(apply(key), apply(other), atol=0.1)


@pytest.mark.standard_promotion  # of statistics in Flax's LayerNorm
def test_bfloat16_computes_in_bfloat16():
    graph, params = nnx.split(ViT(SMALL, rngs=nnx.Rngs(0)))
    narrow = dataclasses.replace(SMALL, compute_dtype="bfloat16")
    narrow_graph, _ = nnx.split(nnx.eval_shape(lambda: ViT(narrow, rngs=nnx.Rngs(0))))
    pixels = images(SMALL)
    got = run(narrow_graph, params, pixels)
    assert got.dtype == jnp.bfloat16
    # Normalised vectors of numbers with 8 bits: a few rounding steps of 2**-8 apart.
    want = run(graph, params, pixels)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=0, atol=16 * 2**-8)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((2, 3, 8, 9), np.float32), r"\[batch, 3, 8, 8\] .* got \(2, 3, 8, 9\)"),
        (np.zeros((2, 8, 8, 3), np.float32), r"\(channels, height, width\); got \(2, 8, 8, 3\)"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"`images` must be floats, .* got uint8"),
    ],
)
def test_wrong_images(pixels: np.ndarray, message: str):
    model = nnx.eval_shape(lambda: ViT(SMALL, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        model(pixels)


CONFIG = SIZES | {"model_type": "vit", "architectures": ["ViTForImageClassification"]}


def from_json(directory: Path, content: dict[str, Any]) -> ViTConfig:
    (directory / "config.json").write_text(json.dumps(content))
    return ViTConfig.from_json(directory)


@pytest.mark.parametrize(
    ("change", "num_labels"),
    [
        ({}, 2),  # as transformers, which does not write it
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({"num_labels": 7}, 7),
        ({"architectures": ["ViTModel"], "num_labels": 7}, 0),
        ({"architectures": None}, 0),
    ],
)
def test_number_of_labels(change: dict[str, Any], num_labels: int, tmp_path: Path):
    assert from_json(tmp_path, CONFIG | change).num_labels == num_labels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "quick_gelu"}, r"`hidden_act` in .* 'quick_gelu'"),
        ({"image_size": 0}, r"`image_size` in .*config.json"),
        ({"patch_size": [4]}, r"`patch_size` in .*config.json"),
        ({"patch_size": "4"}, r"`patch_size` in .*config.json"),
        ({"patch_size": 9}, r"`patch_size` in .* \(9, 9\), `image_size` \(8, 8\): no patch fits"),
        ({"qkv_bias": 1}, r"`qkv_bias` in .*config.json"),
        ({"id2label": {}}, r"`id2label` in .* no label"),
        ({"head_dim": 6}, r"`head_dim` in .* 6"),
        ({"num_attention_heads": 5}, r"multiple"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, r"`architectures` in .*ViTForMasked"),
        ({"model_type": "deit"}, r"`model_type` in .*'deit'"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        from_json(tmp_path, CONFIG | change)
