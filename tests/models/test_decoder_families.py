"""Decoders of every family against transformers: logits, gradients, and files in and out."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxzero import interop

from . import tiny_models
from .tiny_models import allowed, read

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

IDS = np.random.default_rng(1).integers(0, 37, (3, 14)).astype(np.int32)
MASK = np.arange(14)[None] < np.array([14, 9, 5])[:, None]
IN_CI = ("gemma3-capped-linear", "phi3-long")  # the only ones with these kinds of rotation
NAMES = [
    *tiny_models.DECODERS,
    *(
        pytest.param(name, marks=pytest.mark.ci if name in IN_CI else pytest.mark.exhaustive)
        for name in tiny_models.MORE_DECODERS
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(made, name: str):
    model, directory = made(name)
    want = tiny_models.outputs(model, IDS, MASK).logits.detach().numpy()
    loaded = interop.load_decoder(directory, scan_layers=tiny_models.SCANNED.get(name, False))

    @jax.jit
    def logits(params, ids, mask):
        return nnx.merge(loaded.graph, params)(ids, mask)

    got = np.asarray(logits(read(loaded.params), IDS, MASK))
    atol = allowed(loaded.config.num_layers) * np.abs(want).max()
    np.testing.assert_allclose(got[MASK], want[MASK], rtol=0, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_trip_is_bit_exact(made, name: str, tmp_path: Path):
    import torch
    import transformers

    model, directory = made(name)
    loaded = interop.load_decoder(directory, scan_layers=tiny_models.SCANNED.get(name, False))
    export = interop.export_decoder(read(loaded.params), tmp_path / "export", source=directory)
    before, after = (load_file(folder / "model.safetensors") for folder in (directory, export))
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert array.dtype == after[key].dtype and array.tobytes() == after[key].tobytes(), key
    again = transformers.AutoModelForCausalLM.from_pretrained(export).state_dict()
    held = model.state_dict()
    assert again.keys() == held.keys()
    assert all(torch.equal(again[key], held[key]) for key in held)


def test_weights_saved_by_torch_load_as_well(made, tmp_path: Path):
    import torch

    model, directory = made("gpt2")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # with the tied head
    want, got = (read(interop.load_decoder(each).params) for each in (directory, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek", "cohere", "cohere2", "granite-yarn"])
def test_every_part_computes_in_bfloat16(made, name: str):
    """With strict promotion, tracing finds a part that does not; nothing is compiled."""
    # For 16 bits JAX's attention and Flax's LayerNorm need promotion; with dropout ours computes.
    loaded = interop.load_decoder(
        made(name).directory, compute_dtype="bfloat16", attention_dropout=0.1
    )
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), loaded.params)
    hidden, logits = jax.eval_shape(
        lambda params, key: (
            nnx.merge(loaded.graph, params).hidden(jnp.asarray(IDS), dropout_key=key),
            nnx.merge(loaded.graph, params)(jnp.asarray(IDS), dropout_key=key),
        ),
        params,
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    assert (hidden.dtype, hidden.shape) == (jnp.bfloat16, (*IDS.shape, 32))
    assert (logits.dtype, logits.shape) == (jnp.bfloat16, (*IDS.shape, 37))


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek"])
def test_experts_by_sorting_equal_those_of_transformers(made, name: str):
    model, directory = made(name)
    want = tiny_models.outputs(model, IDS, MASK).logits.detach().numpy()
    loaded = interop.load_decoder(directory, expert_loop="ragged")
    run = jax.jit(lambda params, ids, mask: nnx.merge(loaded.graph, params)(ids, mask))
    got = np.asarray(run(read(loaded.params), IDS, MASK))
    atol = allowed(loaded.config.num_layers) * np.abs(want).max()
    np.testing.assert_allclose(got[MASK], want[MASK], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gemma3", "mixtral", "deepseek-yarn-2-shared"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("cohere2", "gpt-neox", "gpt-oss", "granite-yarn")
        ),
    ],
)
def test_gradients_equal_those_of_torch(made, name: str, tmp_path: Path):
    """Of the mean loss of the next token, written as checkpoints, so that tensors have names."""
    import torch

    model, directory = made(name)
    targets = np.where(MASK[:, 1:], IDS[:, 1:], -100)
    logits = tiny_models.outputs(model, IDS, MASK).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(targets.astype(np.int64)).flatten()
    )
    model.zero_grad()
    loss.backward()
    gradients = tiny_models.make(*(tiny_models.DECODERS | tiny_models.MORE_DECODERS)[name])
    with torch.no_grad():
        for buffer in tiny_models.corrections(gradients):
            buffer.zero_()
        for parameter, held in zip(gradients.parameters(), model.parameters(), strict=True):
            parameter.copy_(held.grad)
    want = load_file(tiny_models.save(gradients, tmp_path / "want") / "model.safetensors")

    loaded = interop.load_decoder(directory, scan_layers=True, remat="full")

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(params, ids, mask):
        logits = nnx.merge(loaded.graph, params)(ids, mask)[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)
        return -jnp.mean(chosen[..., 0], where=mask[:, 1:])

    ours, grads = loss_and_gradients(read(loaded.params), IDS, MASK)
    np.testing.assert_allclose(ours, loss.item(), rtol=allowed(loaded.config.num_layers))
    export = interop.export_decoder(grads, tmp_path / "ours", source=directory)
    got = load_file(export / "model.safetensors")
    assert got.keys() == want.keys()
    total = np.sqrt(sum(np.sum(np.square(array)) for array in want.values()))
    for key, array in want.items():
        # Twice as many sums as forward; a small gradient is a sum of larger ones that cancel.
        atol = 2 * allowed(loaded.config.num_layers) * max(np.abs(array).max(), 0.01 * total)
        np.testing.assert_allclose(got[key], array, rtol=0, atol=atol, err_msg=key)


def test_a_model_without_its_head_has_names_without_prefix(made, tmp_path: Path):
    """So is GPT-2 published, with masks in its file besides."""
    model, _ = made("gpt2")
    source = tiny_models.save(model.transformer, tmp_path / "source")
    held = load_file(source / "model.safetensors")
    buffers = {f"h.{i}.attn.bias": np.tri(32, dtype=np.float32)[None, None] for i in range(2)}
    save_file(held | buffers, source / "model.safetensors")
    loaded = interop.load_decoder(source)
    export = interop.export_decoder(read(loaded.params), tmp_path / "export", source=source)
    again = load_file(export / "model.safetensors")
    assert again.keys() == held.keys() | buffers.keys()
    assert all(again[key].tobytes() == (held | buffers)[key].tobytes() for key in again)


def test_what_is_no_parameter_is_carried(made, tmp_path: Path):
    """Masks of the first releases of Pythia, and the extra layer of DeepSeek-V3."""
    for name, extra in (
        ("gpt-neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("deepseek", "model.layers.61.eh_proj.weight"),
    ):
        _, directory = made(name)
        source = tmp_path / name
        source.mkdir()
        (source / "config.json").write_bytes((directory / "config.json").read_bytes())
        held = load_file(directory / "model.safetensors") | {extra: np.arange(3, dtype=np.float32)}
        save_file(held, source / "model.safetensors")
        params = read(interop.load_decoder(source).params)
        export = interop.export_decoder(params, tmp_path / f"{name}-export", source=source)
        again = load_file(export / "model.safetensors")
        assert again.keys() == held.keys()
        np.testing.assert_array_equal(again[extra], held[extra])


def test_a_tied_head_in_the_file_is_not_written_again(made, tmp_path: Path):
    _, directory = made("llama3-tied-1-kv-head")
    held = load_file(directory / "model.safetensors")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((directory / "config.json").read_bytes())
    head = {"lm_head.weight": held["model.embed_tokens.weight"]}
    save_file(held | head, source / "model.safetensors")
    params = read(interop.load_decoder(source).params)
    export = interop.export_decoder(params, tmp_path / "export", source=source)
    assert load_file(export / "model.safetensors").keys() == held.keys()
    head = {"lm_head.weight": np.roll(held["model.embed_tokens.weight"], 1, 0)}
    save_file(held | head, source / "model.safetensors")
    with pytest.raises(ValueError, match="`tie_word_embeddings` .*, but 'lm_head.weight' differs"):
        interop.load_decoder(source)


def test_tensors_that_do_not_fit_are_named(made, tmp_path: Path):
    _, directory = made("phi3-partial")
    held = load_file(directory / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    save_file(held | {fused: held[fused][:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{fused}' .* has shape \(63, 32\), .* \(64, 32\)"):
        interop.load_decoder(tmp_path)
    left = {key: array for key, array in held.items() if key not in (fused, "lm_head.weight")}
    save_file(left, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"lacks 'lm_head.weight', '{fused}'.*AutoModelForCausal"):
        interop.load_decoder(tmp_path)
