"""Kernels in Pallas' interpreter, which looks for races, against the same in `jax.numpy`.

Bit for bit; and the messages against numpy and float64 (`_codec_oracle`). What is exported for
CUDA here, `test_aot.py` compiles.
"""

from __future__ import annotations

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero import pallas_kernels as pk
from jaxzero.pallas_kernels import _blockwise as blocks
from jaxzero.pallas_kernels import _config as config
from tests.codecs import _codec_oracle as oracle

KINDS = ["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]

has_mosaic = jax.__version_info__ >= (0, 11, 2)
needs_mosaic = pytest.mark.skipif(
    not has_mosaic, reason="Mosaic GPU kernels and their interpreter need JAX 0.11.2"
)


def by_sums(x_kb, num, factor, tail_factor, width):
    """`_blockwise._rotate` in the order of additions of the kernels, which is not that of XLA."""
    del width  # of the matrix, which decides no sum
    x, distance = x_kb.reshape(*x_kb.shape[:-2], -1, blocks.GROUP) * jnp.float32(factor), 1
    while distance < blocks.GROUP:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    whole = num // blocks.GROUP * blocks.GROUP
    rotated = x.reshape(x_kb.shape)
    return jnp.where(blocks._index(x_kb) < jnp.uint32(whole), rotated, x_kb * tail_factor)


def run(operation, *args):
    """Jitted: in `jax.numpy`, and interpreted, with an error if there is a race."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    from jaxzero.pallas_kernels import _memory as memory

    want = jax.jit(functools.partial(operation, "xla"))(*args)
    with memory.interpreted(detect_races=True):
        got = jax.jit(functools.partial(operation, "mosaic_gpu"))(*args)
        got = np.asarray(got)
    try:
        found = interpreter.get_races().races_found  # JAX 0.12 raises by itself
    except AssertionError:
        found = False  # no kernel ran yet: what is shorter than a tile is left to XLA
    assert not found
    return np.asarray(want), got


def assert_same_bits(want, got):
    assert want.dtype == got.dtype and want.shape == got.shape
    np.testing.assert_array_equal(want.view(np.uint8), got.view(np.uint8))


def numbers(shape, dtype, seed=0):
    """Normal and heavy-tailed numbers, a block of zeros and one that is not finite."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(2, size=math.prod(shape)) * 3).astype(np.float32)
    x[100:200] = 0
    x[len(x) // 3 : len(x) // 3 + 1] = np.inf
    return jnp.asarray(x.reshape(shape).astype(dtype))


def encoded(x, format, seed=0):
    return jax.jit(lambda x: pk.quantize(x, format, seed=seed, implementation="xla"))(x)


formats = st.builds(
    pk.Format,
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([2**i for i in range(5, 14)]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    scale_dtype=st.sampled_from(["bfloat16", "float32"]),
)
shapes = st.one_of(  # o, n, i: rows of any length, and pieces of an array cut inside
    st.tuples(st.just(1), st.integers(1, 3), st.integers(0, 20_000)),
    st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 6).map(lambda i: i * 4096)),
    st.tuples(st.integers(2, 3), st.integers(1, 3), st.integers(1, 20).map(lambda i: i * 256)),
)


def surrounded(message, around):
    """Messages among other bytes, as one array, and what finds them in it.

    Args:
        message: of which there are a multiple of `count`.
        around: columns before them, columns behind them, `count` in a row; None: nothing.
    """
    if around is None:
        return message, lambda array: array
    before, behind, count = around
    rows, size = len(message) // count, message.shape[1]
    others = np.random.default_rng(1).integers(0, 256, (rows, before + behind), np.uint8)
    columns = [others[:, :before], np.asarray(message).reshape(rows, count * size)]
    array = jnp.asarray(np.concatenate([*columns, others[:, before:]], axis=1))
    return array, lambda array: pk.InPlace(array, before, size, count)


def placed(write, shape, around):
    """`write` into columns of an array of other bytes; `around` as of `surrounded`, or None."""
    if around is None:
        return write
    before, behind, _ = around
    rows, size = jax.eval_shape(functools.partial(write, "xla"), shape).shape
    width = before + size + behind
    others = np.random.default_rng(1).integers(0, 256, (rows, width), np.uint8)

    def into(how, x):
        return write(how, x, place=pk.Place(others.shape, before, jnp.asarray(others)))

    return into


def each(op, format, shape, dtype, peers=3, around=None, divisor=None, place=None):
    """One operation, on one input: the shared body of all tests of kernels."""
    outer, pieces, inner = shape
    num = outer * inner
    x = numbers(shape, dtype) if math.prod(shape) else jnp.zeros(shape, dtype)
    if op == "quantize":

        def quantize(how, x, **options):
            return pk.quantize(x, format, seed=5, implementation=how, **options)

        return run(placed(quantize, x, place), x)
    if op == "dequantize":
        options = {"outer": outer, "inner": inner, "dtype": dtype}
        array, find = surrounded(encoded(x, format), around)
        return run(
            lambda how, m: pk.dequantize(find(m), format, **options, implementation=how), array
        )
    total = num if op == "dequantize_sum" else math.prod(shape)
    rows = numbers((1, peers, total), dtype) if total else jnp.zeros((1, peers, 0), dtype)
    array, find = surrounded(encoded(rows, format), around)
    if op == "dequantize_sum":
        return run(
            lambda how, m: pk.dequantize_sum(find(m), format, num=total, implementation=how), array
        )

    def requantize(how, m, **options):
        options |= {"shape": shape, "seed": 5, "divisor": divisor or peers}
        return pk.dequantize_sum_requantize(find(m), format, format, implementation=how, **options)

    return run(placed(requantize, array, place), array)


OPERATIONS = ["quantize", "dequantize", "dequantize_sum", "dequantize_sum_requantize"]
each_operation = pytest.mark.parametrize("op", OPERATIONS)


@needs_mosaic
@each_operation
@hypothesis.given(format=formats, shape=shapes, dtype=st.sampled_from(FLOATS))
@hypothesis.settings(max_examples=10, phases=[hypothesis.Phase.generate])
def test_kernels_are_bit_exact(op, format, shape, dtype):
    assert_same_bits(*each(op, format, shape, dtype))


ROTATED = [
    ("quantize", "int8", 32, 4096 + 64),
    ("dequantize", "int8", 32, 4096 + 64),
    ("quantize", "int4", 32, 4096),
    ("dequantize", "int4", 32, 4096),
    ("quantize", "int4", 128, 8192 + 45),
    ("dequantize", "int4", 128, 8192 + 45),
    ("quantize", "float8_e4m3fn", 4096, 4096),
    ("dequantize_sum", "float8_e4m3fn", 4096, 4096),
    ("dequantize_sum", "int4", 128, 8192 + 45),
    ("dequantize_sum_requantize", "int4", 128, 8192),
    ("dequantize_sum_requantize", "int4", 128, 8192 + 45),
]


@needs_mosaic
@pytest.mark.parametrize(("op", "kind", "block", "num"), ROTATED)
def test_rotated_kernels_are_bit_exact(op, kind, block, num, monkeypatch):
    """Sums of codes are exact, in whatever order; of numbers, in the order of the kernels."""
    monkeypatch.setattr(blocks, "_rotate", by_sums)
    format = pk.Format(kind=kind, block=block, hadamard=32)
    assert_same_bits(*each(op, format, (1, 1, num), jnp.bfloat16, peers=2))


@needs_mosaic
def test_rotations_in_two_orders_are_near():
    """XLA multiplies by a matrix, a kernel adds in pairs: of 32 additions each rounds once."""
    format = pk.Format(kind="int4", block=128, hadamard=32, scale_dtype="float32")
    x = numbers((1, 1, 16_384), jnp.float32)
    want, got = run(lambda how, x: pk.quantize(x, format, implementation=how), x)
    codec = jz.Int4(block=128, hadamard=32, scale_dtype=jnp.float32)
    for message in (want, got):
        finite = np.asarray(x[0, 0, :5120]).astype(np.float64)  # before the one that is not
        head = np.concatenate([message[0, :2560], message[0, 8192 : 8192 + 40 * 4]])
        oracle.check_message(codec, finite, head)
    assert (want[0, :8192] == got[0, :8192]).mean() > 0.999


@needs_mosaic
@pytest.mark.parametrize(
    ("kind", "rounding"),
    [*((kind, "nearest") for kind in KINDS), ("int8", "stochastic"), ("float8_e5m2", "stochastic")],
)
def test_messages_of_kernels_are_those_of_numpy(kind, rounding):
    format = pk.Format(kind=kind, block=64, rounding=rounding)
    x = oracle.numbers(8192 + 33)
    codec = codec_of(format)
    _, messages = run(
        lambda how, x: pk.quantize(x, format, implementation=how), jnp.asarray(x)[None]
    )
    _, read = run(
        lambda how, m: pk.dequantize(
            m, format, outer=1, inner=x.shape[1], dtype=jnp.float32, implementation=how
        ),
        jnp.asarray(messages),
    )
    for row, message, y in zip(x, messages, read[0], strict=True):
        oracle.check_message(codec, row.astype(np.float64), message)
        oracle.check_reading(codec, message, y)


def codec_of(format):
    options = {
        "block": format.block,
        "rounding": format.rounding,
        "hadamard": format.hadamard,
        "scale_dtype": format.scale_dtype,
    }
    if format.is_integer:
        return (jz.Int8 if format.bits == 8 else jz.Int4)(**options)
    return jz.Float8(dtype=jnp.dtype(format.kind), **options)


@needs_mosaic
@pytest.mark.parametrize("divisor", [3, 6, 7, 48])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
def test_means_are_bit_exact(divisor, scale_dtype):
    """Of two products one after the other, XLA of JAX 0.11.2 took the second first in a kernel."""
    format = pk.Format(kind="int8", block=256, scale_dtype=scale_dtype)
    shape = (1, 1, 20_480)
    want = each("dequantize_sum_requantize", format, shape, jnp.float32, 5, divisor=divisor)
    assert_same_bits(*want)


@needs_mosaic
def test_many_peers_are_summed_in_a_loop():
    format = pk.Format(kind="int8", block=256)
    assert_same_bits(*each("dequantize_sum", format, (1, 1, 8192), jnp.bfloat16, peers=20))


@needs_mosaic
def test_kernels_under_vmap():
    format = pk.Format(kind="int4", block=128)
    x = numbers((2, 1, 2, 4096), jnp.bfloat16)
    want, got = run(
        lambda how, x: jax.vmap(lambda x: pk.quantize(x, format, implementation=how))(x), x
    )
    assert_same_bits(want, got)


@needs_mosaic
@each_operation
@pytest.mark.parametrize(
    ("kind", "hadamard"), [*((kind, None) for kind in KINDS), ("int4", 32), ("int8", 32)]
)
def test_kernels_are_exported_for_cuda(op, kind, hadamard):
    from jax import export

    format = pk.Format(kind=kind, block=128, rounding="stochastic", hadamard=hadamard)
    function, args = cuda_program(op, format, 2**16)
    exported = export.export(jax.jit(function), platforms=["cuda"])(*args)
    assert "mosaic_gpu" in exported.mlir_module()


def cuda_program(op, format, num, dtype=jnp.bfloat16, peers=8):
    """One operation with `mosaic_gpu`, and the shapes of its arguments."""
    how = {"implementation": "mosaic_gpu"}
    size = format.num_bytes(num)
    x = jax.ShapeDtypeStruct((1, 2, num), dtype)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    message = jax.ShapeDtypeStruct((peers, size), jnp.uint8)
    shape = {"shape": (1, 2, num // 2), "divisor": peers}
    return {
        "quantize": (lambda x, s, **to: pk.quantize(x, format, seed=s, **to, **how), (x, seed)),
        "dequantize": (
            lambda m: pk.dequantize(m, format, outer=1, inner=num, dtype=dtype, **how),
            (message,),
        ),
        "dequantize_sum": (lambda m: pk.dequantize_sum(m, format, num=num, **how), (message,)),
        "dequantize_sum_requantize": (
            lambda m, s, **to: pk.dequantize_sum_requantize(
                m, format, format, seed=s, **shape, **to, **how
            ),
            (message, seed),
        ),
    }[op]


# The dispatcher


def test_tiles_are_those_of_the_device(monkeypatch):
    large, small = config.TileConfig(elements=8192), config.TileConfig(elements=1024)
    kind = jax.local_devices()[0].device_kind
    monkeypatch.setattr(config, "TILES", {"": small, kind: large, "NVIDIA H": large})
    assert config.tile_config() == config.tile_config("NVIDIA H200") == large
    assert config.tile_config("NVIDIA A100") == small


def test_the_default_can_do_everything():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 70)))
        message = pk.quantize(x, pk.Format(block=32))
    assert message.shape == (1, 70 + 3 * 2)


@needs_mosaic
def test_a_named_implementation_is_refused_with_its_reason():
    with (
        jax.enable_x64(True),
        pytest.raises(NotImplementedError, match='"mosaic_gpu"` cannot do this `quantize`.*64'),
    ):
        pk.quantize(jnp.zeros((1, 1, 64), np.float64), pk.Format(), implementation="mosaic_gpu")


@pytest.mark.skipif(has_mosaic, reason="this JAX has what kernels need")
def test_an_old_jax_is_named_as_the_reason():
    with pytest.raises(NotImplementedError, match="needs JAX 0.11.2 or newer, and this is 0.1"):
        pk.quantize(jnp.zeros((1, 1, 64)), pk.Format(), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="needs JAX 0.11.2"):
        jz.Int8(implementation="mosaic_gpu").encode(jnp.zeros(64))


@pytest.mark.parametrize(
    ("option", "value"),
    [("kind", "int2"), ("block", 100), ("rounding", "up"), ("hadamard", 16), ("scale_dtype", "i4")],
)
def test_wrong_formats(option, value):
    format = pk.Format()
    object.__setattr__(format, option, value)  # annotations are checked before `__post_init__`
    with pytest.raises(ValueError, match=f"`{option}`.*must be"):
        format.__post_init__()


def test_codecs_of_two_implementations_are_the_same_codec():
    """Their messages are, so nothing is decoded and encoded again between them."""
    one, other = jz.Int4(implementation="mosaic_gpu"), jz.Int4()
    assert one == other and hash(one) == hash(other) and str(one) == str(other)


def test_a_wrong_implementation():
    codec = jz.Int8()
    object.__setattr__(codec, "implementation", "triton")
    with pytest.raises(ValueError, match="`implementation` of `Int8` must be .*got 'triton'"):
        codec.__post_init__()
