"""`quantized_all_gather` and `quantized_reduce_scatter`: what they mean, and what can be known of
their kernels without several GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero import pallas_kernels
from jaxzero._hlo import collectives as _hlo
from jaxzero.pallas_kernels import (
    Format,
    _collectives,
    quantized_all_gather,
    quantized_reduce_scatter,
)

AXIS, DEVICES = "local", 8
IS_OLD = jax.__version_info__ < (0, 11, 2)
needs_mosaic = pytest.mark.skipif(IS_OLD, reason="Mosaic kernels need JAX 0.11.2")

OPERATIONS = {"gather": quantized_all_gather, "scatter": quantized_reduce_scatter}
KINDS = ["int8", "int4", "float8_e4m3fn", "float8_e5m2"]
LIMITS = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344}


def mesh_of(devices):
    return jz.make_mesh(1, devices=jax.devices()[:devices])


def on_devices(f, mesh):
    """`f` of what each device has, which is one entry of the first dim of `x`."""

    def each(x):
        return f(x[0])[None]

    sharded = jax.shard_map(each, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.jit(sharded)


def run(operation, x, format, *, devices=DEVICES, **options):
    f = functools.partial(OPERATIONS[operation], axis=AXIS, format=format, **options)
    return np.asarray(on_devices(f, mesh_of(devices))(x))


def codes(kind, shape):
    """Codes, with the largest in each block: their scale is 1, and nothing is rounded."""
    rng = np.random.default_rng(5)
    x = rng.integers(-7, 8, size=shape).astype(np.float64)  # codes of all kinds
    flat = x.reshape(shape[0], -1)
    flat[:, ::32] = LIMITS[kind] * rng.choice([-1.0, 1.0], size=flat[:, ::32].shape)
    return x


def pieces(x, dim):
    """What each device keeps of the sum."""
    return np.stack(np.split(x.sum(0), len(x), axis=dim))


def gathered(x, dim):
    """What every device gets."""
    return np.stack([np.concatenate(list(x), axis=dim)] * len(x))


SHAPES = [((40,), 0), ((16, 3, 5), 0), ((3, 8, 7), 1), ((2, 5, 24), 2), ((1,) * 2 + (8,), -1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.one_in(2)
def test_codes_arrive_as_they_are(kind, shape, dim):
    x = codes(kind, (DEVICES, *shape))
    format = Format(kind=kind, block=32)
    got = run("gather", x.astype(np.float32), format, dim=dim)
    np.testing.assert_array_equal(got, gathered(x, dim))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.one_in(2)
def test_codes_are_summed_exactly(kind, shape, dim):
    x = codes(kind, (DEVICES, *shape))
    # Each piece has blocks of its own: its first number is made the largest.
    by_piece = np.split(x, DEVICES, axis=dim if dim < 0 else dim + 1)
    for piece in by_piece:
        rows = piece.reshape(DEVICES, -1)
        rows[:, ::32] = LIMITS[kind]
        piece[...] = rows.reshape(piece.shape)
    got = run("scatter", x.astype(np.float32), Format(kind=kind, block=32), dim=dim)
    np.testing.assert_array_equal(got, pieces(x, dim))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_errors_are_within_half_a_step(kind, dtype):
    rng = np.random.default_rng(3)
    x = rng.standard_t(3, size=(DEVICES, 8, 100)).astype(dtype)
    exact = x.astype(np.float64)
    # Every scale is at most that of the largest number, rounded up to 8 bits.
    step = np.abs(exact).max() / LIMITS[kind] * (1 + 2.0**-7)
    error = np.abs(run("gather", x, Format(kind=kind)).astype(np.float64) - gathered(exact, 0))
    rounding = float(jnp.finfo(dtype).eps) * np.abs(exact).max()
    assert error.max() <= step / 2 + rounding
    error = np.abs(run("scatter", x, Format(kind=kind)).astype(np.float64) - pieces(exact, 0))
    assert error.max() <= DEVICES * (step / 2 + 2.0**-23 * DEVICES * np.abs(exact).max())


def test_every_device_gets_the_same():
    x = np.random.default_rng(0).normal(size=(DEVICES, 300)).astype(np.float32)
    got = run("gather", x, Format(rounding="stochastic"), seed=3)
    assert (got == got[0]).all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_but_messages_is_sent(operation):
    """1 byte for a number, and 2 for each block of 256."""
    x = jax.ShapeDtypeStruct((DEVICES, 8, 1024), jnp.float32)
    f = functools.partial(OPERATIONS[operation], axis=AXIS, format=Format())
    text = on_devices(f, mesh_of(DEVICES)).lower(x).compile().as_text()
    shapes = [shape for c in _hlo.collectives(text) for shape in c.results]
    assert {shape.dtype for shape in shapes} == {"u8"}
    num = 8 * 1024 * (DEVICES if operation == "gather" else 1)
    assert sum(shape.size for shape in shapes) == num + 2 * num // 256


def test_the_sum_must_be_divisible():
    with pytest.raises(ValueError, match="`dim` 1 of `x` must be a multiple of the 8 devices"):
        run("scatter", np.zeros((DEVICES, 8, 7), np.float32), Format(), dim=1)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("format", "dtype", "size", "reason"),
    [
        (Format(hadamard=32), jnp.float32, 8, "it has no Hadamard rotation"),
        (Format(block=8192), jnp.float32, 8, "blocks may have at most 2048 numbers"),
        (Format(), jnp.float8_e5m2, 8, "it handles bfloat16.* and not float8_e5m2"),
        (Format(), jnp.float32, 0, "there is nothing to send"),
    ],
)
def test_a_named_kernel_that_cannot_says_why(operation, format, dtype, size, reason):
    x = np.zeros((DEVICES, size), dtype)
    reason = "JAX 0.11.2" if IS_OLD else reason
    with pytest.raises(NotImplementedError, match=f"mosaic_gpu.*{reason}.*xla"):
        run(operation, x, format, implementation="mosaic_gpu")


@needs_mosaic
def test_results_must_be_of_a_dtype_that_the_kernel_writes():
    options = {"dtype": jnp.float8_e5m2, "implementation": "mosaic_gpu"}
    with pytest.raises(NotImplementedError, match="and not float8_e5m2"):
        run("gather", np.zeros((DEVICES, 8), np.float32), Format(), **options)


def test_no_other_name_is_known():
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match='`implementation` must be "xla", "mosaic_gpu" or None'):
        _collectives._wants_kernel("triton", jnp.asarray(x), Format(), x.size)


def _offers():
    yield from (pallas_kernels, _collectives, quantized_all_gather, quantized_reduce_scatter)
    if not IS_OLD:
        from jaxzero.pallas_kernels import _all_gather, _reduce_scatter, _remote

        yield from (_all_gather, _all_gather.all_gather)
        yield from (_reduce_scatter, _reduce_scatter.reduce_scatter, _remote)


def test_whoever_reads_is_told():
    for offer in _offers():
        text = " ".join(offer.__doc__.split()).lower()
        assert "compiles, never executed" in text, offer


# What follows needs the kernels.

FORMATS = {
    "int8": Format(block=128),
    "int8, large blocks": Format(block=1024, scale_dtype=jnp.float32),
    "int4, at random": Format(kind="int4", block=64, rounding="stochastic"),
    "e4m3": Format(kind="float8_e4m3fn", block=32),
    "e5m2, at random": Format(kind="float8_e5m2", block=256, rounding="stochastic"),
}


@needs_mosaic
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("name", "shape", "dim", "dtype"),
    [
        ("int8", (6, 700), 0, jnp.float32),
        ("int8", (4, 2, 512), 1, jnp.bfloat16),  # tiles lie in runs
        ("int4, at random", (3, 4, 100), 1, jnp.bfloat16),
        ("e4m3", (2, 1500), 0, jnp.float16),
        ("int8, large blocks", (2, 1500), 0, jnp.float32),
        ("e5m2, at random", (2, 600), 1, jnp.float32),
    ],
)
def test_kernels_compute_what_the_reference_does(monkeypatch, operation, name, shape, dim, dtype):
    """Bit for bit; with an exchange between two halves of each kernel in place of stores."""
    from jaxzero.pallas_kernels import _memory
    from jaxzero.pallas_kernels._remote import RemoteConfig

    from . import _emulated_peers

    _emulated_peers.replace_stores(monkeypatch)
    x = np.random.default_rng(1).normal(size=(2, *shape)).astype(dtype)
    config = RemoteConfig(elements=512, blocks=2, slots=100)
    options = {"dim": dim, "devices": 2, "seed": 7, "config": config}
    want = run(operation, x, FORMATS[name], **options)
    with _memory.interpreted(detect_races=True):
        got = run(operation, x, FORMATS[name], implementation="mosaic_gpu", **options)
    np.testing.assert_array_equal(got, want)


PARTS = (700, 30, 1100)  # of 2, 1 and 3 tiles


@needs_mosaic
@pytest.mark.parametrize(
    ("operation", "name"), [("gather", "int4, at random"), ("scatter", "int4, at random")]
)
def test_kernels_encode_each_part_by_itself(monkeypatch, operation, name):
    """The same bits as alone: with the same blocks, and random numbers by the place in its part."""
    from jaxzero.pallas_kernels import _memory
    from jaxzero.pallas_kernels._remote import RemoteConfig

    from . import _emulated_peers

    _emulated_peers.replace_stores(monkeypatch)
    rows = 1 if operation == "gather" else 2
    x = np.random.default_rng(1).normal(size=(2, rows, sum(PARTS))).astype(np.float32)
    options = {"devices": 2, "seed": 7}
    each = np.split(x, np.cumsum(PARTS)[:-1], axis=2)
    want = np.concatenate([run(operation, part, FORMATS[name], **options) for part in each], axis=2)
    config = RemoteConfig(elements=512, blocks=2, slots=100)
    options |= {"implementation": "mosaic_gpu", "config": config, "parts": PARTS}
    with _memory.interpreted(detect_races=True):
        got = run(operation, x, FORMATS[name], **options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("shape", "parts"), [((DEVICES, 6), (2, 3)), ((2 * DEVICES, 6), (2, 4)), ((DEVICES,), (1,))]
)
def test_parts_must_be_those_of_rows(operation, shape, parts):
    x = np.zeros((DEVICES, *shape), np.float32)
    with pytest.raises(ValueError, match="`parts` must add up to the columns of one row"):
        run(operation, x, Format(), parts=parts)


def kernel_of(operation, name="int8", **options):
    f = OPERATIONS[operation]
    return functools.partial(
        f, axis=AXIS, format=FORMATS[name], implementation="mosaic_gpu", **options
    )


def exported(f, mesh, x):
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, P(AXIS)))
    return export.export(on_devices(f, mesh), platforms=["cuda"])(x).mlir_module()


def num_kernels(text):
    return text.count("@mosaic_gpu_v2(")


@needs_mosaic
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_are_exported_for_cuda(operation, name):
    x = jax.ShapeDtypeStruct((DEVICES, 8, 1000), jnp.bfloat16)
    assert num_kernels(exported(kernel_of(operation, name), mesh_of(DEVICES), x)) == 1


@needs_mosaic
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_mesh_of_no_devices_will_do(operation):
    x = jax.ShapeDtypeStruct((DEVICES, 8, 1000), jnp.bfloat16)
    mesh = mesh_of(DEVICES).abstract_mesh
    assert num_kernels(exported(kernel_of(operation), mesh, x)) == 1


@needs_mosaic
@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_who_asks_for_a_kernel_gets_it(operation):
    x = jax.ShapeDtypeStruct((DEVICES, 8, 1000), jnp.bfloat16)
    f = functools.partial(OPERATIONS[operation], axis=AXIS, format=Format())
    assert num_kernels(exported(f, mesh_of(DEVICES), x)) == 0


def twice_and_in_a_scan(x):
    """Gather and sum again, then once more, and then three times in a loop."""
    gather, scatter = kernel_of("gather"), kernel_of("scatter")

    def step(x, _):
        return scatter(gather(x)), None

    x = step(step(x, None)[0], None)[0]
    return jax.lax.scan(step, x, length=3)[0]


@needs_mosaic
def test_kernels_are_called_twice_and_in_a_scan():
    x = jax.ShapeDtypeStruct((DEVICES, 1000), jnp.float32)
    text = exported(twice_and_in_a_scan, mesh_of(DEVICES), x)
    assert num_kernels(text) == 6
    # What `_protocol` takes for granted: devices wait for each other before each of them.
    assert text.count("skip_device_barrier = false") == 6


@needs_mosaic
@pytest.mark.parametrize("operation", OPERATIONS)
def test_places_are_used_again(monkeypatch, operation):
    """By one device, which sends to itself: 11 tiles, 2 blocks, 2 places each."""
    from jaxzero.pallas_kernels import _memory
    from jaxzero.pallas_kernels._remote import RemoteConfig

    from . import _emulated_peers

    _emulated_peers.replace_stores(monkeypatch)
    x = np.random.default_rng(1).normal(size=(1, 5600)).astype(np.float32)
    options = {"devices": 1, "config": RemoteConfig(elements=512, blocks=2, slots=2)}
    want = run(operation, x, FORMATS["int8"], **options)
    with _memory.interpreted(detect_races=True):
        got = run(operation, x, FORMATS["int8"], implementation="mosaic_gpu", **options)
    np.testing.assert_array_equal(got, want)


@needs_mosaic
@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_run_on_several_gpus(operation, kind):
    """What nobody has seen yet: 20 calls of each kernel, of codes that nothing rounds."""
    from jaxzero.pallas_kernels._remote import RemoteConfig

    gpus = jax.devices("gpu")
    if len(gpus) < 2:
        pytest.skip("needs several GPUs")
    num = len(gpus)
    x = codes(kind, (num, num, 1 << 16))
    x[..., ::32] = LIMITS[kind]
    config = RemoteConfig(elements=1024, blocks=8, slots=2)
    format = Format(kind=kind, block=32)
    call = functools.partial(
        OPERATIONS[operation],
        axis=AXIS,
        format=format,
        implementation="mosaic_gpu",
        config=config,
    )

    signs = np.resize([1, -1, -1], 20).astype(np.float32)  # every call has other numbers

    def again(x):
        return jax.lax.scan(lambda _, sign: (None, call(x * sign)), None, signs)[1]

    got = np.asarray(on_devices(again, jz.make_mesh(1, devices=gpus))(x.astype(np.float32)))
    want = gathered(x, 0) if operation == "gather" else pieces(x, 0)
    want = np.stack([sign * want for sign in signs], axis=1)
    np.testing.assert_array_equal(got, want)
