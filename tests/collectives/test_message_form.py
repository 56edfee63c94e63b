"""Collectives in the form for TPUs, forced on CPUs: the same numbers, in other shapes."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.shared import _llama
from jaxzero._collectives import CommSpec, HalfBatchSum, ReduceSpec, message_form, reduce_gradient
from jaxzero._sharding import DimSharding, pad

ROTATED = jz.Int8(block=256, hadamard=32, scale_dtype=jnp.float32)
EXACT = {
    "cast": jz.Cast(jnp.bfloat16),
    "int8": jz.Int8(),
    "int8_float32_scales": jz.Int8(block=32, scale_dtype=jnp.float32),
    "int4": jz.Int4(),
    "float8": jz.Float8(),
    "without_tiles": jz.NVFloat4(),
    "stochastic": jz.Int4(rounding="stochastic"),
}
SIZE = _llama.LlamaSize(layers=3, width=64, hidden=96, heads=4, vocabulary=64)


@contextlib.contextmanager
def _form(form):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(message_form._FORMS, "cpu", form)
        yield


@pytest.mark.parametrize("codec", [*EXACT.values(), ROTATED], ids=[*EXACT, "rotated"])
@pytest.mark.parametrize("shape", [(64, 512), (24, 37)])
def test_tiled_messages_hold_the_numbers_of_rows(codec, shape):
    """To the bit; a rotation adds up in another order, so there the codec's own bound holds."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=shape)), jnp.float32)
    for dim, num in ((0, 1), (0, 8), (1, shape[1] if shape[1] % 2 else 4)):
        piece = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
        tiled = jax.jit(lambda x, d=dim, n=num: codec.encode_tiled(x, d, n, seed=3))(x)
        rows = jax.jit(lambda x, d=dim, n=num: codec.encode_pieces(x, d, n, seed=3))(x)
        assert len(tiled) == num
        got = codec.decode_tiled(tiled, piece, dim, jnp.float32)
        total = codec.sum_tiled(tiled, piece)
        assert got.shape == shape
        assert total.shape == piece
        if codec is ROTATED:
            pieces = np.stack(np.split(np.asarray(x), num, dim)).reshape(num, -1)
            bound = codec.error_bound(pieces).reshape(num, *piece)
            away = np.abs(np.stack(np.split(np.asarray(got - x), num, dim)))
            assert (away <= bound).all()
        else:
            np.testing.assert_array_equal(got, codec.decode_pieces(rows, piece, dim, jnp.float32))
            np.testing.assert_array_equal(
                total, codec.decode_sum(rows, int(np.prod(piece))).reshape(piece)
            )


CONFIGS = {
    "zero3": jz.zero3(),
    "zeropp": dataclasses.replace(jz.zeropp(), min_quantized_size=1024),
    "zeropp4": dataclasses.replace(jz.zeropp4(), min_quantized_size=1024),
    "hsdp": jz.hsdp(gradients=jz.PerAxis(node=jz.Int8(block=32))),
}


# The presets of ZeRO++ rotate gradients, whose sums may be rounded in another order: `zeropp` with
# two micro-batches is not equal to the bit.
@pytest.mark.parametrize(
    ("config", "microbatches"),
    [
        ("zero3", 1),
        pytest.param("zero3", 2, marks=pytest.mark.exhaustive),
        pytest.param("hsdp", 2, marks=pytest.mark.exhaustive),
        pytest.param("zeropp", 1, marks=pytest.mark.ci),
        pytest.param("hsdp", 1, marks=pytest.mark.exhaustive),
        pytest.param("zeropp4", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_are_equal_to_the_bit(config, microbatches):
    tokens = jax.random.randint(jax.random.key(1), (16, 8), 0, SIZE.vocabulary)

    def step():
        zero = jz.Zero(jz.make_mesh(2), CONFIGS[config])
        params = zero.init(functools.partial(_llama.init, SIZE), jax.random.key(0))
        state = {}
        if zero.config.needs_wire_state:
            state["wire_state"] = zero.init_wire_state(params)
        loss = functools.partial(_llama.loss, SIZE)
        run = jax.jit(zero.value_and_grad(loss, microbatches=microbatches))
        return run.lower(params, tokens, **state).as_text(), run(params, tokens, **state)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        program, expected = step()
        with _form(message_form.MessageForm(tiled=True, join_below_bytes=256)):
            tiled_program, got = step()
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert _sent(program) != _sent(tiled_program)
    if config == "zero3":  # bits before, floats now
        assert not any("bf16" in x for x in _sent(program))
        assert any("bf16" in x for x in _sent(tiled_program))


def _sent(program):
    """The types of what collectives send."""
    lines = [x for x in program.splitlines() if "all_gather" in x or "all_to_all" in x]
    return sorted(x.rpartition("->")[2] for x in lines)


@pytest.mark.parametrize("codec", [None, jz.Cast(jnp.bfloat16), jz.Int8(block=32)])
def test_half_batch_sums(codec):
    mesh, layout = jz.make_mesh(2), DimSharding(1, 13, 8)
    config = jz.zero3(gradients=jz.PerAxis(node=codec, local=codec))
    config = dataclasses.replace(config, min_quantized_size=1)
    each = np.random.default_rng(1).normal(size=(8, 5, 13)).astype(np.float32)

    def reduced(g, comm):
        spec = ReduceSpec("x", (5, 13), jnp.float32, layout)
        both = reduce_gradient(g[0], spec, comm)
        assert isinstance(both, HalfBatchSum)
        return both.total, both.first

    def run():
        comm = CommSpec.of(mesh, config, halves=True)
        split = P(None, ("local", "node"))
        mapped = jax.shard_map(
            lambda g: reduced(g, comm),
            mesh=mesh,
            in_specs=P(("node", "local")),
            out_specs=(split, split),
            check_vma=False,
        )
        return jax.jit(mapped)(each)

    expected = run()
    with _form(message_form.TILED):
        got = run()
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    if codec is None:
        exact = np.asarray(pad(jnp.asarray(each.sum(0)), layout))
        # Seven additions of float32, each off by half a unit in the last place at most.
        assert (np.abs(got[0] - exact) <= 8 * 2.0**-24 * np.abs(each).sum(0).max()).all()


def test_the_platform_chooses_the_form():
    assert message_form.MessageForm.of(jz.make_mesh(2)) == message_form.MessageForm()
    with _form(message_form.TILED):
        assert CommSpec.of(jz.make_mesh(2), jz.zero3()).form == message_form.TILED
