"""An abstract mesh of TPUs, for compiling ahead of time on a machine without one; its collectives.

Needs `libtpu` (`make .venv-tpu/.installed`). XLA runs a collective beside compute in one of two
ways on a TPU: as a start and a done, or in pieces inside several fusions ("async collective
fusion"), each of which repeats the collective with the same `chain_id`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from jaxzero._hlo.collectives import collectives

_CHAIN = re.compile(r'chain_id="(\d+)"')
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_CONDITION = r"^%?{} \(.*?^}}"
_CONTEXT = re.compile(r", [us]32\[\](?:\{[^}]*\})?(?=[,)])")
_LIMIT = re.compile(r"= [su]32\[\]\S* constant\((\d+)\)")
# What libtpu would otherwise ask the metadata server of a cloud machine for, and its lock against
# a second process with the same TPU. Values that are set already stay.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def tpu_mesh(topology: str = "v5e:2x4", nodes: int = 2, slices: int = 1) -> jax.sharding.Mesh:
    """The chips of a topology as `nodes` x local; before any other use of JAX's devices.

    Args:
        topology: generation and shape of a slice, such as "v5e:2x4" or "v6e:2x4".
        nodes: of the mesh; a single slice has only fast links, whatever the axes are called.
        slices: joined by the data centre's network.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    options = {"num_slices": slices} if slices > 1 else {}
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **options
    ).devices
    return jz.make_mesh(nodes, devices=devices)


def compile_seconds(mesh: Any, function: Callable, *arrays: Any) -> dict[str, float]:
    """Seconds to compile a function under `shard_map`.

    Args:
        mesh: of a topology's devices.
        function: of the arrays of one device.
        arrays: structs of one device's shards; the global arrays are split on dim 0.
    """
    axes = PartitionSpec(("node", "local"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
    sharding = NamedSharding(mesh, axes)
    structs = [
        jax.ShapeDtypeStruct((mesh.size * x.shape[0], *x.shape[1:]), x.dtype, sharding=sharding)
        for x in arrays
    ]
    lowered: Any = jax.jit(mapped).lower(*structs)
    wall, cpu = time.perf_counter(), time.process_time()
    lowered.compile(compiler_options=jz.compiler_options("tpu"))
    return {
        "compile_cpu_seconds": round(time.process_time() - cpu, 2),
        "compile_seconds": round(time.perf_counter() - wall, 2),
    }


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of a compiled program.

    Attributes:
        received_bytes: that enter a device in one execution.
        asynchronous_bytes: the part of them in collectives that run beside compute.
        launches: executions, by collective.
        dtypes: bytes received, by dtype.
    """

    received_bytes: int
    asynchronous_bytes: int
    launches: dict[str, int]
    dtypes: dict[str, int]


def traffic(text: str) -> Traffic:
    """Read the collectives of a program; one that is fused in pieces counts once.

    Raises:
        ValueError: a loop's trip count cannot be read, as in programs of GSPMD that gather and
            multiply in one loop: these may advance by two, which the condition does not show.
    """
    if "windowed_dot_general" in text:
        raise ValueError(
            "`text` has loops of GSPMD (`windowed_dot_general`) whose trip counts cannot be read. "
            "Read the collectives of other programs only."
        )
    chains: set[str] = set()
    received = asynchronous = 0
    launches: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for c in collectives(_as_for_gpus(text)):
        chain = _CHAIN.search(c.line)
        if chain and chain[1] in chains:
            continue
        if chain:
            chains.add(chain[1])
        size = c.entering_bytes * c.trips
        received += size
        asynchronous += size if chain or "-start(" in c.line else 0
        launches[c.op] += c.trips
        dtypes[c.results[0].dtype] += size
    return Traffic(received, asynchronous, dict(launches), dict(dtypes))


def _as_for_gpus(text: str) -> str:
    """The program as XLA writes it for GPUs: loops with trip counts, starts without semaphores.

    Loops of JAX count from 0 up to the one constant of their condition, by one.
    """

    def line_with_count(line: str) -> str:
        if "-start(" in line:  # the result has semaphores beside operands and results
            line = _CONTEXT.sub("", line)
        match = _WHILE.search(line)
        if match is None or "known_trip_count" in line:
            return line
        pattern = _CONDITION.format(re.escape(match[1]))
        condition = re.search(pattern, text, re.MULTILINE | re.DOTALL)
        limits = set(_LIMIT.findall(condition[0])) if condition else set()
        if len(limits) != 1:
            raise ValueError(f"cannot read how often a loop runs: {line.strip()[:200]}")
        return f'{line}, backend_config={{"known_trip_count":{{"n":"{limits.pop()}"}}}}'

    return "\n".join(map(line_with_count, text.splitlines()))
