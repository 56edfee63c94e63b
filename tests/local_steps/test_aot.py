"""A round as it is compiled for H200s: every message between nodes spans the steps of its delay."""

from __future__ import annotations

import jax
import pytest

import jaxzero as jz
from benchmarks.compiled import local_steps
from benchmarks.compiled._h200 import h200_mesh
from benchmarks.compiled._spans import crossings, num_asynchronous

pytestmark = pytest.mark.standard_promotion


@pytest.fixture(scope="module", autouse=True)
def _needs_compiler():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jaxzero[aot]")


@pytest.mark.parametrize(
    ("preset", "nodes", "every", "fragments", "delay", "bits"),
    [("zero3", 2, 6, 2, 2, 4), ("zeropp", 2, 4, 2, 2, 8), ("hsdp", 4, 4, 1, 4, 32)],
    ids=["two loops", "one loop", "no codec, no outer loop"],
)
def test_messages_span_the_delay(preset, nodes, every, fragments, delay, bits):
    settings = local_steps.Settings(
        model="tiny",
        nodes=nodes,
        local=16 // nodes,
        tokens=256,
        every=every,
        fragments=fragments,
        delay=delay,
        bits=bits,
    )
    mesh = h200_mesh(settings.nodes, settings.local)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        program, report = local_steps.lowered(mesh, settings, preset)
    options = jz.compiler_options("cuda", local_steps=True)
    text = program.compile(compiler_options=options).as_text()
    found = crossings(text, settings.local)
    assert [x.op for x in found] == ["all-reduce" if bits == 32 else "all-gather"]
    assert found[0].spans == (delay,)
    assert found[0].node_bytes * found[0].trips == report.bytes_between_nodes
    # A collective of a step that had the message's stream would wait for it.
    streams = int(options["xla_gpu_experimental_parallel_collective_overlap_limit"])
    assert num_asynchronous(text) <= streams
