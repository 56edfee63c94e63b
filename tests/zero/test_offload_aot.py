"""Offload as it is compiled for H200s, on a machine without one: memory, copies, predicted time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxzero as jz
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.compiled._host_copies import (
    host_copies,
    host_to_host,
    share_spanning,
    slice_strides,
)
from benchmarks.compiled.offload import Settings, compiled_step
from benchmarks.compiled.offload import compiled as compiled_parts
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from jaxzero._hlo import Rates, timeline
from jaxzero._hlo.host_memory import compile_with_host_memory
from tests.zero.offload_policy import offload_only

pytestmark = pytest.mark.standard_promotion

GIB = 2**30
SEVEN = LlamaSize()
SEVENTY = LlamaSize(layers=80, width=8192, hidden=28672, heads=64, kv_heads=8, vocabulary=128256)
THIRTY = LlamaSize(layers=60, width=6656, hidden=17920, heads=52)
IS_NEW = jax.__version_info__ >= (0, 12)


@pytest.fixture(scope="module", autouse=True)
def _needs_compiler():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")


def compiled(size, nodes, local, preset, offload):
    """The program of one step's loss and gradients, of 2 x 2048 tokens on each device."""
    mesh = h200_mesh(nodes, local)
    zero = jz.Zero(mesh, dataclasses.replace(getattr(jz, preset)(), offload=offload))
    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2 * nodes * local, 2048), jnp.int32)
    step = jax.jit(zero.value_and_grad(functools.partial(_llama.loss, size)))
    options = jz.compiler_options("cuda", offload=offload is not None)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return compile_with_host_memory(step, (params, tokens), mesh, options=options)


BOTH = jz.Offload(weights=True, gradients=True)


@pytest.fixture(scope="module", params=["zero3", "zeropp"])
def pair(request):
    """Llama-7B on 2 x 8, with weights and gradients in host memory and without."""
    return [compiled(SEVEN, 2, 8, request.param, offload) for offload in (BOTH, None)]


def test_little_stays_on_the_device(pair):
    ours, resident = (x.memory_analysis() for x in pair)
    assert ours.argument_size_in_bytes <= 0.05 * resident.argument_size_in_bytes
    assert ours.output_size_in_bytes <= 0.05 * resident.output_size_in_bytes
    assert ours.temp_size_in_bytes <= resident.temp_size_in_bytes + 0.5 * GIB
    assert ours.host_temp_size_in_bytes == 0
    assert ours.host_argument_size_in_bytes >= 0.99 * resident.argument_size_in_bytes


def test_every_copy_of_a_loop_overlaps_with_a_matrix_product(pair):
    text = pair[0].as_text()
    assert host_to_host(text) == []
    copies = host_copies(text)
    loops = [x for x in copies if x.in_loop]
    assert sum(x.total for x in loops) >= 0.85 * sum(x.total for x in copies)
    assert [x.name for x in loops if not x.spans] == []


def test_no_address_is_derived_from_a_counter_where_xla_gets_it_wrong(pair):
    strides = slice_strides(pair[0].as_text())
    assert strides
    assert IS_NEW or set(strides.values()) == {None}


def test_the_step_takes_no_longer(pair):
    ours, resident = (timeline(x.as_text(), Rates(num_local=8)) for x in pair)
    assert ours.seconds <= 1.05 * resident.seconds
    assert ours.host_exposed_seconds <= 0.02 * ours.seconds


@pytest.mark.parametrize(
    ("size", "local"),
    [(SEVENTY, 8), (THIRTY, 1)],
    ids=["70B on 8 devices", "33B on one device"],
)
def test_models_that_do_not_fit_without(size, local):
    """Adam in float32 takes 16 bytes for a parameter: 5B of them on a device of 80 GB."""
    memory = compiled(size, 1, local, "zero3", BOTH).memory_analysis()
    on_device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert on_device + memory.output_size_in_bytes < 80e9
    num = _llama.num_parameters(size)
    assert num >= 6.5 * 80e9 * local / 16 or local > 1
    # Weights, gradients and two moments of the optimizer.
    assert 16 * num < 2e12
    assert memory.host_argument_size_in_bytes * local >= 0.99 * 4 * num


@pytest.fixture(scope="module", params=["zero3", "zeropp"])
def programs(request):
    """A step of 7B on 2 x 8 with AdamW's update in the backward loop; its parts without offload."""
    mesh, settings = h200_mesh(2, 8), Settings(update="overlap")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        step = compiled_step(mesh, settings, request.param, settings.offload())
        return step, compiled_parts(mesh, settings, request.param, None)


@pytest.fixture(scope="module")
def step(programs):
    return programs[0]


def test_stacks_are_updated_in_their_place(step):
    memory = step.memory_analysis()
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes > 0
    assert memory.host_temp_size_in_bytes == 0
    assert host_to_host(step.as_text()) == []


def test_every_copy_of_an_update_in_the_loop_overlaps_with_a_matrix_product(step, request):
    loops = [x for x in host_copies(step.as_text()) if x.in_loop and x.trips >= SEVEN.layers - 1]
    assert [x.name for x in loops if not x.spans] == []
    # Seven leaves of a layer: three arrays of each are written in backward; these are also read in
    # backward, and the weights once in forward and, without node slices, once in backward.
    weights = 1 if request.node.callspec.params["programs"] == "zeropp" else 2
    assert sum(1 for x in loops if x.to_host) == 7 * 3
    assert sum(1 for x in loops if x.from_host) == 7 * (3 + weights)
    strides = slice_strides(step.as_text())
    assert IS_NEW or {strides[x.name] for x in loops} == {None}


def test_a_step_with_its_update_does_not_wait_for_the_host(step):
    line = timeline(step.as_text(), Rates(num_local=8))
    assert line.host_exposed_seconds <= 0.035 * line.seconds


def test_few_copies_of_a_step_with_its_update_overlap_with_no_matrix_product(step):
    assert share_spanning(step.as_text()) >= (0.955 if IS_NEW else 0.95)


@pytest.mark.xfail(
    reason="with ZeRO-3 it takes 0.57 GiB more, of 0.5 that are allowed: 0.22 GiB of it are arrays",
    strict=False,
)
def test_a_step_with_its_update_takes_little_more_time_and_memory(programs):
    step, parts = programs
    seconds = sum(timeline(x.as_text(), Rates(num_local=8)).seconds for x in parts)
    assert (
        timeline(step.as_text(), Rates(num_local=8)).seconds
        <= (1.025 if IS_NEW else 1.05) * seconds
    )
    most = max(x.memory_analysis().temp_size_in_bytes for x in parts)
    assert step.memory_analysis().temp_size_in_bytes <= most + 0.5 * GIB


def test_offloaded_activations_come_back_in_time():
    layers, width = 24, 4096
    mesh = h200_mesh(2, 8)
    policies = jax.checkpoint_policies
    offloads = offload_only("h")

    def loss(policy, params, x):
        def layer(h, weights):
            h = checkpoint_name(h, "h")
            up, down = (w.astype(jnp.bfloat16) for w in weights)
            return h + jnp.tanh(h @ up) @ down, None

        h, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def program(policy):
        zero = jz.Zero(mesh)
        stack = jnp.zeros, (layers, width, width)
        params = zero.abstract(lambda: (stack[0](stack[1]), stack[0](stack[1])))
        x = jax.ShapeDtypeStruct((64, 2048, width), jnp.bfloat16)
        step = jax.jit(zero.value_and_grad(functools.partial(loss, policy)))
        with jax.set_mesh(mesh):
            lowered = step.lower(params, x)
        return lowered.compile(compiler_options=jz.compiler_options("cuda", offload=True))

    ours, kept = program(offloads), program(policies.save_only_these_names("h"))
    saved = layers * 4 * 2048 * width * 2  # bytes of the activations of one device
    assert ours.memory_analysis().host_temp_size_in_bytes == saved
    temporary = [x.memory_analysis().temp_size_in_bytes for x in (ours, kept)]
    assert temporary[0] <= temporary[1] - 0.9 * saved
    copies = host_copies(ours.as_text())
    assert sum(x.total for x in copies if x.spans) >= 0.95 * sum(x.total for x in copies)
