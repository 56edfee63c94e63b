"""`docs/howto/extending*.md`: every block runs, is short, and does what the page says."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero import interop
from jaxzero._sharding import xla_options
from jaxzero.interop._huggingface import families
from jaxzero.interop._load import open as forms
from tests import zoo

pytestmark = pytest.mark.standard_promotion  # optax, Flax

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
BLOCKS = {
    title: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for page in ("extending.md", "extending_checkpoints.md")
    for title, text in re.findall(
        r"^## (.+?)\n(.*?)(?=^## |\Z)", (HOWTO / page).read_text(), re.M | re.S
    )
}


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What a block registers is forgotten after its test."""
    monkeypatch.setattr(xla_options, "_registered", {})
    monkeypatch.setattr(families, "_registered", {})
    monkeypatch.setattr(forms, "_registered", [])


def _run(title: str) -> dict:
    """The names that the only block of a section defines."""
    (code,) = BLOCKS[title]
    names: dict = {"__name__": "extending"}
    exec(compile(code, f"extending: {title}", "exec"), names)
    return names


@pytest.mark.parametrize("title", BLOCKS)
def test_every_block_runs_and_is_short(title):
    (code,) = BLOCKS[title]
    assert len([line for line in code.splitlines() if line.strip()]) < 30
    _run(title)


def test_the_codec_stays_within_its_bound_and_trains():
    names = _run("A codec")
    codec, config = names["codec"], names["config"]
    x = np.random.default_rng(0).standard_t(3, (4, 100)).astype(np.float32)
    message = codec.encode_rows(jnp.asarray(x))
    assert message.shape == (4, codec.num_bytes(100, x.dtype)) and message.dtype == jnp.uint8
    got = np.asarray(codec.decode_rows(message, 100, jnp.float32))
    assert np.all(np.abs(got - x) <= codec.error_bound(x)) and np.any(got != x)
    zero = jz.Zero(jz.make_mesh(nodes=2), dataclasses.replace(config, min_quantized_size=0))
    params = zero.shard({"w": x})
    loss = zero.value_and_grad(lambda p, rows: jnp.mean((rows @ p["w"]) ** 2))
    value, _ = loss(params, np.eye(4, dtype=np.float32)[np.arange(16) % 4])
    np.testing.assert_allclose(value, np.mean(x**2), rtol=0.05)


def test_the_batch_rule_decides_in_a_jitted_step_and_is_saved(tmp_path):
    names = _run("A batch rule of SimiGrad")
    zero, tx = jz.Zero(jz.make_mesh(nodes=2)), names["tx"]
    params = zero.shard({"w": np.ones((16, 8), np.float32)})
    state = zero.init_optimizer(tx, params)

    @jax.jit
    def step(state, sign):
        # Gradients of alternating sign: the halves of every batch disagree.
        gradient = jax.tree.map(lambda x: sign * jnp.ones_like(x), params)
        return tx.update(gradient, state, params)[1]

    steps, misses = [], []
    for i in range(12):
        state = step(state, jnp.float32((-1) ** i))
        if int(state.count) == 0:  # a batch is full
            steps.append(int(state.steps))
            misses.append(int(state.memory["misses"]))
    # Batches of 2: below the target each time. After two of them the batch is doubled. Then
    # halves of two micro-batches have a mean of 0, whose cosine is no number: the size stays.
    assert steps[:3] == [2, 4, 4] and misses[:2] == [1, 0]
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"opt_state": state})
        like = {"opt_state": zero.init_optimizer(tx, params)}
        _, restored, _ = checkpoints.restore(like)
    assert int(restored["opt_state"].memory["misses"]) == int(state.memory["misses"])
    assert int(restored["opt_state"].steps) == steps[-1]


def test_the_hop_keeps_half_of_what_error_feedback_keeps():
    names = _run("A hop")
    zero, hop = names["zero"], names["hop"]
    feedback = jz.zero3(gradients=jz.PerAxis(node=jz.ErrorFeedback(codec=hop.codec)))
    whole = {"w": zoo.normal(jax.random.key(0), 0, 128, 256)}
    x = zoo.normal(jax.random.key(0), 1, 16, 128, scale=1.0)

    def errors(zero):
        params = zero.shard(whole)
        step = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
        _, grads, state = step(params, x, wire_state=zero.init_wire_state(params))
        return np.asarray(grads["w"]), np.asarray(state.errors["w"], np.float32)

    (grads, half), (wanted, lost) = errors(zero), errors(jz.Zero(zero.mesh, feedback))
    np.testing.assert_array_equal(grads, wanted)  # the residuals of the first step are 0
    assert lost.any()
    np.testing.assert_array_equal(half, lost / 2)


_CONFIG = {
    "model_type": "renamed_llama",
    "width": 32,
    "depth": 2,
    "vocab_size": 37,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


def test_the_family_reads_and_writes_its_checkpoints(tmp_path):
    from flax import nnx

    from jaxzero.models import Decoder, DecoderConfig

    family = _run("A decoder family")["Renamed"]()
    source = tmp_path / "source"
    config = DecoderConfig(**family.fields(_CONFIG, source / "config.json"))
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1]
    tensors = interop.tensors_from(params, family.rules(config))
    assert "model.tokens.weight" in tensors and "model.embed_tokens.weight" not in tensors
    interop.save_tensors(tensors, source)
    (source / "config.json").write_text(json.dumps(_CONFIG))
    for options in ({}, {"family": family}):  # registered, and passed
        loaded = interop.load_decoder(source, **options)
        read = jax.tree.map(lambda x: x.read(), loaded.params, is_leaf=_is_lazy)
        jax.tree.map(np.testing.assert_array_equal, read, params)
        export = interop.export_decoder(read, tmp_path / f"export{len(options)}", source=source)
        copy = interop.open_checkpoint(export)
        assert set(copy) == set(tensors)
        np.testing.assert_array_equal(
            copy["model.tokens.weight"].read(), tensors["model.tokens.weight"].read()
        )
    scanned = interop.load_decoder(source, scan_layers=True).params
    assert scanned["layers"]["mlp"]["up"]["kernel"].get_value().shape == (2, 32, 48)


def _is_lazy(x) -> bool:
    return isinstance(x, interop.LazyTensor)


def test_the_form_opens_its_files_everywhere(tmp_path):
    npz = _run("A form of checkpoint")["Npz"]
    path = tmp_path / "weights.npz"
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.savez(path, w=w)
    forms._registered.clear()
    checkpoint = interop.open_checkpoint(path, forms=[npz()])
    assert checkpoint.form == "npz"
    np.testing.assert_array_equal(checkpoint["w"][1:2, :], w[1:2])
    interop.register_checkpoint_form(npz())
    shapes = {"kernel": jax.ShapeDtypeStruct(w.shape, w.dtype)}
    loaded = interop.load_into(shapes, path, rules=[interop.Rule("kernel", "w")])
    zero = jz.Zero(jz.make_mesh(nodes=2))
    np.testing.assert_array_equal(zero.unshard(zero.shard(loaded))["kernel"], w)


def test_the_options_are_in_force():
    before = jz.compiler_options("cuda")
    options = _run("Compiler options of a platform")["options"]
    assert options == before | {"xla_gpu_enable_triton_gemm": False}
    assert jz.compiler_options("gpu") == before
    assert jz.compiler_options("my_accelerator") == {}
