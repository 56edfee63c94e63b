"""What is compiled for TPUs, on a machine without one: `make test-aot-tpu`. Nothing is run."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.compiled import aot
from benchmarks.compiled._tpu import tpu_mesh, traffic
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._models import llama
from jaxzero._collectives import CommSpec
from jaxzero._collectives.comm_spec import TILED

pytest.importorskip("libtpu", reason="needs libtpu, as `make test-aot-tpu` installs it")

SIZE = LlamaSize(layers=4, width=512, hidden=1408, heads=4, vocabulary=1024)
TOKENS = jax.ShapeDtypeStruct((8, 512), jnp.int32)


@pytest.fixture(scope="module")
def mesh():
    return tpu_mesh("v5e:2x4")


def _lowered(variant, mesh, size=SIZE):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return aot.lowered_step(variant, llama("", size), mesh, TOKENS, jz.CommSchedule())


def _compiled(variant, mesh, size=SIZE):
    options = {} if variant.startswith("gspmd") else jz.compiler_options("tpu")
    return _lowered(variant, mesh, size).compile(compiler_options=options)


@pytest.fixture(scope="module")
def zero3(mesh):
    return _compiled("zero3", mesh)


def test_a_tpu_gets_whole_tiles(mesh):
    assert CommSpec.of(mesh, jz.zero3()).form == TILED


def test_zero3_sends_sixteen_bits(zero3):
    """Weights twice and gradients once, in bfloat16; a pipelined loop gathers a little more."""
    sent = traffic(zero3.as_text())
    model = 2 * _llama.num_parameters(SIZE) * 7 / 8
    assert 3 * model < sent.dtypes["bf16"] < 3.6 * model
    assert sent.dtypes.get("f32", 0) < 0.001 * model  # the loss
    assert sent.received_bytes < 1.01 * sent.dtypes["bf16"]


def test_collectives_run_beside_compute(zero3):
    sent = traffic(zero3.as_text())
    assert sent.asynchronous_bytes > 0.5 * sent.received_bytes
    assert "all-to-all-start" in zero3.as_text()


def test_memory_is_near_that_of_gspmd(mesh, zero3):
    """In this model a layer's weights and gradients take more bytes than its activations.

    Beyond GSPMD's: weights and gradients of two layers in flight. Gradients are stacked as they
    are returned.
    """
    layer = num_of_layer(SIZE)
    ours = zero3.memory_analysis().temp_size_in_bytes
    theirs = _compiled("gspmd-by-hand", mesh).memory_analysis().temp_size_in_bytes
    assert ours < theirs + 4 * 2 * layer


def num_of_layer(size):
    one, two = (dataclasses.replace(size, layers=n) for n in (1, 2))
    return _llama.num_parameters(two) - _llama.num_parameters(one)


# Two layers, since each leaf of each loop compiles codecs of its own; blocks of 256 fill its rows.
CODED = dataclasses.replace(SIZE, layers=2, hidden=1536)


def test_zeropp_sends_bytes(mesh):
    sent = traffic(_compiled("zeropp", mesh, CODED).as_text())
    codes = sum(size for dtype, size in sent.dtypes.items() if dtype in ("u8", "s8"))
    assert codes > 0.9 * sent.received_bytes


def test_codes_are_exchanged_in_whole_tiles(mesh):
    """Rows of bytes, `[devices, m]`, take XLA minutes (`pallas_kernels._columns`)."""
    lines = _lowered("zeropp", mesh, CODED).as_text().splitlines()
    sent = [x.rpartition("->")[2] for x in lines if "all_gather" in x or "all_to_all" in x]
    shapes = [
        [int(n) for n in x.split("<")[1].split("xui8")[0].split("x")] for x in sent if "xui8" in x
    ]
    assert len(shapes) > 14
    assert all(len(shape) == 3 and shape[1] % 32 == shape[2] % 128 == 0 for shape in shapes)


def test_codecs_are_kernels(mesh):
    """As fusions of XLA they take several times as long to compile (`benchmarks.compiled.tpu`)."""
    size = dataclasses.replace(CODED, layers=1, width=1024, hidden=1024)  # shards of 128 rows
    lowered = _lowered("zeropp", mesh, size)
    text = lowered.as_text()
    for name in ("quantize", "dequantize_sum", "dequantize_sum_requantize"):
        assert f'kernel_name = "{name}_columns"' in text
    compiled = lowered.compile(compiler_options=jz.compiler_options("tpu")).as_text()
    assert "tpu_custom_call" in compiled


def test_two_slices_compile():
    mesh = tpu_mesh("v5e:2x4", nodes=2, slices=2)
    assert mesh.shape == {"node": 2, "local": 8}
    rows = NamedSharding(mesh, P(("node", "local")))
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32, sharding=rows)
    text = jax.jit(jnp.sum).lower(x).compile().as_text()
    assert text is not None
    assert "all-reduce" in text
