"""ModernBERT against transformers, both ways, and what its windows, bases and configs must do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxzero as jz
from jaxzero import interop
from jaxzero.models import ModernBert, ModernBertConfig, Rope

from . import tiny_models
from .tiny_models import read

IDS = np.random.default_rng(1).integers(3, 37, (3, 14)).astype(np.int32)
MASK = np.arange(14)[None] < np.array([14, 9, 4])[:, None]
SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "local_attention": 6,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
}
BASES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }
}
ODD = {
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "local_attention": 5,
    "layer_types": ["sliding_attention", *["full_attention"] * 2, "sliding_attention"],
    "norm_eps": 1e-3,
}


def write_config(folder: Path, *parts: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    content: dict[str, Any] = {"model_type": "modernbert"}
    for part in parts:
        content |= part
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def tiny_config(**changes: Any) -> ModernBertConfig:
    fields = {
        "vocabulary_size": 37,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_layers": 3,
        "num_heads": 2,
        "rope": Rope(rotary_size=4),
        "local_rope": Rope(rotary_size=4),
        "local_window": 3,
    }
    return ModernBertConfig(**fields | changes)


def hidden(loaded: interop.LoadedEncoder, params: Any, ids: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda params, ids, mask: nnx.merge(loaded.graph, params)(ids, mask))
    return np.asarray(run(params, ids, MASK))


@pytest.mark.parametrize(
    ("change", "scanned"),
    [
        (BASES, True),
        (ODD, False),
        pytest.param(BASES, False, marks=pytest.mark.exhaustive),
        pytest.param(ODD, True, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_transformers_and_a_round_trip_is_exact(
    change: dict[str, Any], scanned: bool, tmp_path: Path
):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model = tiny_models.make("modernbert", SIZES | change, causal=False)
    source = tiny_models.save(model, tmp_path / "source")
    want = tiny_models.outputs(model, IDS, MASK).last_hidden_state.detach().numpy()
    loaded = interop.load_encoder(source, scan_layers=scanned)
    params = read(loaded.params)
    got = hidden(loaded, params, IDS)
    # As for decoders: rounding errors of a sum grow as the root of its length.
    atol = 10 * 4 * np.sqrt(48) * np.finfo(np.float32).eps * np.abs(want[MASK]).max()
    np.testing.assert_allclose(got[MASK], want[MASK], rtol=0, atol=atol)

    export = interop.export_encoder(params, tmp_path / "export", source=source)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, export))
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    again = transformers.AutoModel.from_pretrained(export).state_dict()
    assert all(torch.equal(again[key], held) for key, held in model.state_dict().items())
    np.testing.assert_allclose(
        interop.embed_with_transformers(export, IDS, MASK),
        interop.embed_with_transformers(source, IDS, MASK),
        rtol=0,
        atol=0,
    )


def test_gradients_equal_those_of_torch(tmp_path: Path):
    """Of the mean square of the tokens' vectors weighted by a fixed random matrix."""
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    model = tiny_models.make("modernbert", SIZES | BASES, causal=False)
    source = tiny_models.save(model, tmp_path / "source")
    weights = np.random.default_rng(2).normal(size=(*IDS.shape, 32)).astype(np.float32)
    weights *= MASK[:, :, None] / MASK.sum()
    vectors = tiny_models.outputs(model, IDS, MASK).last_hidden_state
    (vectors * torch.from_numpy(weights)).sum().backward()
    gradients = tiny_models.make("modernbert", SIZES | BASES, causal=False)
    with torch.no_grad():
        for parameter, held in zip(gradients.parameters(), model.parameters(), strict=True):
            parameter.copy_(held.grad)
    want = load_file(tiny_models.save(gradients, tmp_path / "want") / "model.safetensors")

    loaded = interop.load_encoder(source, remat="full", scan_layers=True)
    params = read(loaded.params)
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zero3())

    def loss(params, batch):
        vectors = nnx.merge(loaded.graph, params)(batch["ids"], batch["mask"])
        return (vectors * batch["weights"]).sum()

    batch = {"ids": IDS, "mask": MASK, "weights": weights}
    one_device = jax.jit(jax.grad(loss))(params, batch)
    export = interop.export_encoder(one_device, tmp_path / "ours", source=source)
    got = load_file(export / "model.safetensors")
    assert got.keys() == want.keys()
    total = np.sqrt(sum(np.sum(np.square(array)) for array in want.values()))
    for key, array in want.items():
        # Twice as many sums as forward; a small gradient is a sum of larger ones that cancel.
        atol = 20 * 4 * np.sqrt(48) * np.finfo(np.float32).eps
        atol *= max(np.abs(array).max(), 0.01 * total)
        np.testing.assert_allclose(got[key], array, rtol=0, atol=atol, err_msg=key)
    # The batch is padded to the devices: 8 rows, of which 5 count nothing. The mean over devices is
    # an eighth of the sum.
    padded = jax.tree.map(
        lambda x: np.concatenate([x, np.zeros((5, *x.shape[1:]), x.dtype)]), batch
    )
    _, grads = zero.value_and_grad(loss)(zero.shard(loaded.params), padded)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(one_device))
    for each, held in zip(
        jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(one_device), strict=True
    ):
        atol = 20 * 4 * np.sqrt(48) * np.finfo(np.float32).eps * largest
        np.testing.assert_allclose(8 * np.asarray(each), held, rtol=0, atol=atol)


def test_a_file_of_transformers_4_is_read_alike(tmp_path: Path):
    """It has the two bases and the distance of global layers as keys of their own."""
    types = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    new = write_config(tmp_path / "new", SIZES, BASES, types)
    keys = {
        "global_rope_theta": 300.0,
        "local_rope_theta": 20.0,
        "global_attn_every_n_layers": 2,
        "position_embedding_type": "absolute",
    }
    old = write_config(tmp_path / "old", SIZES, keys)
    config = ModernBertConfig.from_json(old)
    assert config == ModernBertConfig.from_json(new)
    assert config.local_layers == (1, 3) and config.local_window == 4
    assert config.rope == Rope(rotary_size=8, base=300.0)
    assert config.local_rope == Rope(rotary_size=8, base=20.0)


def test_defaults_are_those_of_modernbert_base(tmp_path: Path):
    sizes = {key: SIZES[key] for key in list(SIZES)[:6]}
    config = ModernBertConfig.from_json(write_config(tmp_path, sizes))
    assert config.local_layers == (1, 2) and config.local_window == 65
    assert config.rope.base == 160_000 and config.local_rope.base == 10_000
    assert config.layer_norm_epsilon == 1e-5 and config.activation == "gelu"


def test_local_layers_see_both_sides_of_the_window_and_no_farther():
    """With local layers alone a change of one token reaches as many positions per layer."""
    config = tiny_config(num_layers=2, local_layers=(0, 1))
    model = ModernBert(config, rngs=nnx.Rngs(0))
    ids = np.ones((1, 15), np.int32)
    changed = ids.copy()
    changed[0, 7] = 5
    moved = np.abs(np.asarray(model(jnp.asarray(changed))) - np.asarray(model(jnp.asarray(ids))))[
        0
    ].max(-1)
    np.testing.assert_array_equal(moved > 0, np.abs(np.arange(15) - 7) <= 2 * 2)


@pytest.mark.parametrize("local_layers", [(), (0, 2), (0, 1, 2)])
def test_a_scan_computes_what_a_list_does(local_layers: tuple[int, ...]):
    """With windows in no layer, in some, and in all: in a scan these take different paths."""
    config = tiny_config(local_layers=local_layers, local_rope=Rope(rotary_size=4, base=20.0))
    scanned = ModernBert(dataclasses.replace(config, scan_layers=True), rngs=nnx.Rngs(0))
    listed = ModernBert(config, rngs=nnx.Rngs(1))
    params, state = nnx.to_pure_dict(nnx.state(scanned)), nnx.state(listed)
    first, later = params.pop("first"), params["layers"]
    params["layers"] = {0: first} | {
        i: jax.tree.map(lambda stack, i=i: stack[i - 1], later) for i in (1, 2)
    }
    nnx.replace_by_pure_dict(state, params)
    nnx.update(listed, state)
    got, want = (np.asarray(model(jnp.asarray(IDS))) for model in (scanned, listed))
    # Numbers of order 1 after three layers with sums of at most 14 terms, in another order.
    atol = 10 * 3 * np.sqrt(14) * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_dropout_is_that_of_the_key():
    rates = dict.fromkeys(("attention_dropout", "mlp_dropout", "embedding_dropout"), 0.2)
    config = tiny_config(local_layers=(1, 2), **rates)
    graph, params = nnx.split(ModernBert(config, rngs=nnx.Rngs(0)))
    run = jax.jit(
        lambda key: nnx.merge(graph, params)(jnp.asarray(IDS), jnp.asarray(MASK), dropout_key=key)
    )
    key, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(run(key), run(key))
    assert not np.allclose(run(key), run(other), atol=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "quick_gelu"}, r"`hidden_activation` in .*'quick_gelu'"),
        ({"layer_types": ["full_attention"]}, r"`layer_types` in .* 1 entries for 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, r"`layer_types` in .*'chunked_attention'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            r"`rope_parameters.full_attention.rope_type` in .*'yarn'",
        ),
        ({"rope_parameters": {"rope_theta": 10.0}}, r"`rope_parameters\S*` in .*kind of layer"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, r"`rope_scaling\S*` in "),
        ({"local_attention": -1}, r"`local_attention` in .* got -1"),
        ({"local_attention": 128.0}, r"`local_attention` in .* got 128\.0"),
        ({"norm_eps": "1e-5"}, r"`norm_eps` in .* got '1e-5'"),
        ({"attention_bias": "false"}, r"`attention_bias` in .* got 'false'"),
        ({"num_attention_heads": 5}, r"multiple"),
        ({"hidden_size": 36, "num_attention_heads": 12}, r"even"),
        ({"head_dim": 6}, r"`head_dim` in .* 6"),
        ({"sliding_window": 6}, r"`sliding_window` in .* is 6, but half of `local_attention` is 3"),
        ({"global_attn_every_n_layers": 0}, r"`global_attn_every_n_layers` in .* got 0"),
        ({"quantization_config": {"bits": 4}}, r"`quantization_config` in "),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str, tmp_path: Path):
    write_config(tmp_path, SIZES, change)
    with pytest.raises(ValueError, match=message):
        ModernBertConfig.from_json(tmp_path)


def test_one_layer_is_not_scanned(tmp_path: Path):
    write_config(tmp_path, SIZES, {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="`scan_layers` .* with `num_layers` 1 there are none"):
        ModernBertConfig.from_json(tmp_path, scan_layers=True)


def test_a_checkpoint_with_a_head_is_refused(tmp_path: Path):
    pytest.importorskip("transformers", reason="needs transformers")
    model = tiny_models.make("modernbert", SIZES, auto="AutoModelForMaskedLM")
    source = tiny_models.save(model, tmp_path / "source")
    with pytest.raises(ValueError, match=r"lacks .* holds unknown .*AutoModel.from_pretrained"):
        interop.load_encoder(source)
