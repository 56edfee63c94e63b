"""The kernels for TPUs, in Pallas' interpreter, against XLA and the codecs written in numpy.

Nothing here runs on a TPU; `tests/zero/test_aot_tpu.py` compiles programs with these kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero.pallas_kernels import _column_kernels, _columns
from jaxzero.pallas_kernels._column_walk import Rows, Walk
from tests.codecs import _codec_oracle as oracle

CODECS = {
    "int8": jz.Int8(block=256),
    "int8_float32_scales": jz.Int8(block=128, scale_dtype=jnp.float32),
    "int4": jz.Int4(block=128),
    "int4_rotated": jz.Int4(block=128, hadamard=32),
    "int8_rotated": jz.Int8(block=256, hadamard=32),
    "stochastic": jz.Int4(block=256, rounding="stochastic"),
}
SEED = jnp.uint32(3)


def _pieces(shape, codec, dtype=jnp.float32):
    """Numbers of many magnitudes; integers if the codec rotates, since their sums are exact."""
    rng = np.random.default_rng(5)
    if codec.hadamard:
        return jnp.asarray(rng.integers(-99, 100, size=shape), dtype)
    return jnp.asarray(rng.standard_t(2, size=shape) * np.exp(rng.normal(size=shape)), dtype)


def _walk(width, codec, chunks):
    num_blocks = width // codec.block
    return Walk(num_blocks, num_blocks // chunks)


def _in_xla(pieces, codec, **options):
    x = _columns.to_blocks(pieces, codec.format)
    return _columns.encode(x, codec.format, pieces.shape[1:], seed=SEED, **options)


def _by_kernel(pieces, codec, chunks=1, **options):
    walk = _walk(pieces.shape[2], codec, chunks)
    return _column_kernels.quantize(
        pieces, SEED, format=codec.format, walk=walk, interpret=True, **options
    )


def _read_by_kernel(message, codec, shape, chunks=1, dtype=jnp.float32):
    rows, width = shape
    walk = _walk(width, codec, chunks)
    return _column_kernels.dequantize_sum(
        message, format=codec.format, walk=walk, rows=rows, dtype=dtype, interpret=True
    )


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("rows", "chunks", "dtype", "divisor"),
    [(256, 2, jnp.float32, 1), (240, 1, jnp.bfloat16, 4)],
)
@pytest.mark.one_in(3)
def test_kernels_write_the_messages_of_xla(name, rows, chunks, dtype, divisor):
    codec = CODECS[name]
    x = _pieces((2, rows, 1024), codec, dtype)
    got = _by_kernel(x, codec, chunks, divisor=divisor)
    want = jax.jit(functools.partial(_in_xla, codec=codec, divisor=divisor))(x)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got[:, :, :rows], want[:, :, :rows])
    if codec.rounding == "nearest":  # with hashes, columns that are added have others
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.one_in(2)
def test_messages_are_those_of_the_codec_in_numpy(name):
    codec = CODECS[name]
    x = oracle.numbers((32, 512)).reshape(1, 128, 512)
    message = np.asarray(_by_kernel(jnp.asarray(x), codec))[0]
    codes, scales = np.split(message, [Rows(codec.format, 512 // codec.block).of_codes])
    num = 512 // codec.block * codec.format.scale_bytes
    assert not scales[num:].any()
    for row in range(128):
        planes = scales[:num, row].reshape(codec.format.scale_bytes, -1)  # of all, byte by byte
        sent = np.concatenate([codes[:, row], planes.T.reshape(-1)])
        oracle.check_message(codec, x[0, row].astype(np.float64), sent)


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38, 0.0])
def test_a_block_that_is_not_finite_is_read_as_nan(value):
    codec = jz.Int4(block=128, hadamard=32)
    x = np.ones((1, 128, 512), np.float32)
    x[0, 3, 130] = value
    message = _by_kernel(jnp.asarray(x), codec)
    got = _read_by_kernel(message[None], codec, (128, 512))[0]
    is_nan = np.zeros((128, 512), bool)
    is_nan[3, 128:256] = not np.isfinite(value)
    np.testing.assert_array_equal(np.isnan(got), is_nan)


def _on_two_of(names, cuts):
    """Each codec with all cuts but one, with which it runs in `make test-exhaustive`."""
    return [
        pytest.param(name, *cut, marks=[] if (i - j) % 3 else pytest.mark.exhaustive)
        for i, name in enumerate(names)
        for j, cut in enumerate(cuts)
    ]


@pytest.mark.parametrize(
    ("name", "rows", "chunks", "senders"),
    _on_two_of(CODECS, [(256, 2, 1), (240, 1, 3), (128, 1, 18)]),
)
@pytest.mark.one_in(3)
def test_kernels_read_and_add_up_as_xla(name, rows, chunks, senders):
    codec, shape = CODECS[name], (rows, 1024)
    x = _pieces((senders, *shape), codec)
    message = jax.jit(functools.partial(_in_xla, codec=codec))(x)
    got = _read_by_kernel(message[:, None], codec, shape, chunks)
    each = np.asarray(_columns.from_blocks(_decoded(message, codec, shape, jnp.float32), shape))
    want = functools.reduce(np.add, each)
    assert got.shape == (1, *shape)
    np.testing.assert_array_equal(got[0], want)


def _decoded(message, codec, shape, dtype):
    read = jax.jit(lambda x: _columns.decode(x, codec.format, shape, dtype))
    return read(message)


def test_kernels_read_weights_as_xla():
    codec, shape = jz.Int8(block=256), (240, 1024)
    message = _in_xla(_pieces((3, *shape), codec), codec)
    got = _read_by_kernel(message[None], codec, shape, 2, jnp.bfloat16)
    want = _columns.from_blocks(_decoded(message, codec, shape, jnp.bfloat16), shape)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "shape", "dim", "num", "chunks"),
    _on_two_of(
        ["int8", "int8_float32_scales", "int4", "stochastic", "int4_rotated"],
        [((512, 1024), 0, 2, 2), ((480, 512), 0, 2, 1), ((240, 2048), 1, 2, 2)],
    ),
)
@pytest.mark.one_in(3)
def test_kernels_sum_and_encode_again_as_xla(name, shape, dim, num, chunks):
    """Pieces are whole rows of lanes; other columns; or blocks of each column."""
    codec = CODECS[name]
    piece = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
    message = jax.jit(functools.partial(_in_xla, codec=codec))(_pieces((3, *shape), codec))
    aligned = dim == 1 or piece[0] % 128 == 0
    got = _column_kernels.dequantize_sum_requantize(
        message[:, None] if aligned else _columns.cut_columns(message, num, piece[0]),
        SEED,
        source=codec.format,
        target=codec.format,
        walk=_walk(piece[1], codec, chunks),
        num=num,
        rows=piece[0],
        source_blocks=shape[1] // codec.block,
        divisor=3,
        interpret=True,
    )

    @jax.jit
    def in_xla(message):
        pieces = _columns.decode_sum_and_cut(message, codec.format, shape, dim, num)
        return _columns.encode(pieces, codec.format, piece, seed=SEED, divisor=3)

    want = in_xla(message)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got[:, :, : piece[0]], want[:, :, : piece[0]])


def test_a_walk_fits_into_memory():
    int4 = jz.Int4(block=128).format
    rows = Rows(int4, 44)
    assert (rows.of_codes, rows.of_scales) == (2816, 96)
    walk = Walk.of(44, [rows], 128 * 128 * 2, 0)
    assert walk == Walk(44, 44)
    assert walk.num_chunks == 1
    # 64 rows for each block, at least as many as those of the scales of all.
    assert Walk.of(250, [Rows(int4, 250)], 2**16, 2**20) == Walk(250, 25)
    assert Walk.of(1009, [Rows(int4, 1009)], 2**16, 0) is None  # a prime


@pytest.mark.parametrize(("senders", "fits"), [(8, True), (32, False)])
def test_scales_of_all_messages_must_fit_into_memory(senders, fits):
    """With 32 messages of a vocabulary's rows, scales alone take 8 of the 16 MiB of a v5e."""
    codec = jz.Int4(block=128)
    rows = Rows(codec.format, 32000 // 128)
    assert senders * rows.kept_bytes == senders * 2**18
    message = jax.ShapeDtypeStruct((senders, rows.of_codes + rows.of_scales, 128), jnp.uint8)
    total = functools.partial(codec.sum_tiled, shape=(128, 32000))
    assert ("tpu_custom_call" in _lowered(total, message, "tpu")) == fits


OPERATIONS = {
    "quantize": lambda x, codec: codec.encode_tiled(x, 0, 1, seed=1),
    "dequantize": lambda x, codec: codec.decode_tiled(x, (256, 512), 0, jnp.bfloat16),
    "sum": lambda x, codec: codec.sum_tiled(x, (256, 512)),
    "requantize": lambda x, codec: codec.recode_tiled(
        x, codec, (256, 512), 0, 2, divisor=2, seed=1
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "codec",
    [
        jz.Int4(block=128, hadamard=32),
        jz.Int4(block=128, implementation="xla"),
        jz.Float8(),
        jz.Int8(block=32),
    ],
)
@pytest.mark.one_in(2)
def test_kernels_are_chosen_for_tpus(name, codec):
    """Inside a `shard_map` over all axes, for codes of integers in blocks of 128 or more.

    A named implementation is a promise.
    """
    operation = functools.partial(OPERATIONS[name], codec=codec)
    x = jax.ShapeDtypeStruct((256, 512), jnp.float32)
    message = jax.eval_shape(functools.partial(OPERATIONS["quantize"], codec=codec), x)
    if name != "quantize":
        x = jax.ShapeDtypeStruct((2, *message.shape[1:]), message.dtype)
    takes = codec == jz.Int4(block=128, hadamard=32)
    assert ("tpu_custom_call" in _lowered(operation, x, "tpu")) == takes
    assert "tpu_custom_call" not in _lowered(operation, x, "cpu")
    assert "tpu_custom_call" not in _lowered(operation, x, "tpu", other_axis=True)


def _lowered(function, x, platform, other_axis=False):
    """The StableHLO of `function` in a `shard_map` over all axes; or all but one (`other_axis`)."""
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 1), ("local", "model"), axes, devices=jax.devices()[:2])
    split = P("local")
    names = {"local"} if other_axis else {"local", "model"}
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=split, out_specs=split, axis_names=names, check_vma=False
    )
    x = jax.ShapeDtypeStruct(
        (2 * x.shape[0], *x.shape[1:]), x.dtype, sharding=NamedSharding(mesh, split)
    )
    traced = jax.jit(mapped).trace(x)
    return traced.lower(lowering_platforms=(platform,)).as_text()
