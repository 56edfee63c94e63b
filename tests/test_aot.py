"""What is compiled for sixteen H200s, on a machine without one: `pip install jaxzero[aot]`."""

import collections
import functools

import _hlo
import _llama
import jax
import pytest
import wire
from _cost import Rates
from _h200 import h200_mesh
from _llama import LlamaSize
from timeline import timeline

import jaxzero as jz

SIZE = LlamaSize(layers=3, width=256, hidden=704, heads=4, vocabulary=512)
NODES, LOCAL = 2, 8
NORMS = SIZE.layers * SIZE.width  # elements of the largest leaf that is not quantised


@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")
    return h200_mesh(NODES, LOCAL)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("preset", [jz.zeropp, jz.zeropp4])
def test_only_bytes_scales_and_small_leaves_cross_nodes(mesh, preset):
    with jax.numpy_rank_promotion("allow"):
        text, planned = wire.compiled(jz.Zero(mesh, preset()), SIZE, 1, 32)
    crossing = [c for c in _hlo.collectives(text) if c.crosses(LOCAL)]
    elements = collections.Counter()
    for c in crossing:
        for shape in c.results:
            elements[shape.dtype] = max(elements[shape.dtype], shape.size)
    assert elements["u8"] > NORMS  # the large leaves do cross
    assert all(size <= NORMS for dtype, size in elements.items() if dtype != "u8"), elements
    assert sum(c.node_bytes(LOCAL) * c.trips * LOCAL for c in crossing) == planned


@pytest.mark.standard_promotion
def test_every_message_is_under_way_while_a_layer_computes(mesh):
    """Of what loops send, all but a little; it is what the schedule and the options are for."""
    zero = jz.Zero(mesh)
    size = LlamaSize(layers=16, width=1024, hidden=2816, heads=8, vocabulary=512)
    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((32, 512), jax.numpy.int32)
    with jax.numpy_rank_promotion("allow"):
        step = jax.jit(zero.value_and_grad(functools.partial(_llama.loss, size)))
        lowered = step.lower(params, tokens)
        text = lowered.compile(compiler_options=jz.compiler_options("cuda")).as_text()
    line = timeline(text, Rates())
    assert line.asynchronous_share > 0.95
    # One message for each hop: a layer is gathered twice and reduced once.
    assert sum(line.launches.values()) <= 2 * (3 * size.layers + 10)
