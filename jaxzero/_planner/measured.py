"""Measure the rates of the devices and links of a mesh by a few short programs.

All devices run each program at the same time, as they do in training, and the time of the slowest
process is taken. So the results are rates that programs reach, and not peak rates.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .._collectives import all_gather
from .._mesh import AXES, HOST, LOCAL, NODE, map_devices
from .._processes import exchange_json, process_count

_REPEATS = 5  # calls, whose median is taken: another program may interrupt one
_MEETING_SECONDS = 300.0  # the timeout in which all processes compile and time a call
_SPLIT = PartitionSpec(AXES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured rates of devices and links, per second, and sizes of memories, in bytes.

    Attributes:
        flops: operations of one device in 16-bit matrix products; on CPUs in 32-bit ones, which are
            faster there.
        memory_bandwidth: bytes of its own memory that one device reads or writes.
        memory: memory of one device; on CPUs its share of the host's.
        local_link: bytes that a device receives from the other devices of its node.
        node_link: bytes that enter a node from other nodes.
        host_link: bytes between a device and its host, each way.
        host_memory: host memory for each device; 0 where host memory is the device's memory.
    """

    flops: float
    memory_bandwidth: float
    memory: float
    local_link: float
    node_link: float
    host_link: float
    host_memory: float


def measure(mesh: Mesh) -> Measured:
    """Measure the devices of `mesh`, which has the axes `node` and `local`.

    All processes of the mesh must call this function. It takes a few seconds, most of them to
    compile.
    """
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    size, num = (512, 2**20) if on_cpu else (8192, 2**27)  # matrix side, vector length
    sent = num // 4  # length of the vectors that are gathered
    dtype = jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)
    host_link = _host_link(mesh, num)
    bandwidth = 2 * 4 * num / _seconds(mesh, lambda x: x + 1, (num,), jnp.dtype(jnp.float32))
    rates = {
        "flops": 2 * size**3 / _seconds(mesh, _product, (size, size), dtype),
        "memory_bandwidth": bandwidth,
        "local_link": bandwidth,  # if a node has one device
        "host_link": host_link or bandwidth,
        "host_memory": _of_host() / max(local, len(mesh.local_devices)) if host_link else 0.0,
    }
    if local > 1:
        taken = _seconds(mesh, _gathered(LOCAL), (sent,), dtype)
        rates["local_link"] = (local - 1) * sent * dtype.itemsize / taken
    rates["node_link"] = local * rates["local_link"]
    if nodes > 1:
        taken = _seconds(mesh, _gathered(NODE), (sent,), dtype)
        rates["node_link"] = (nodes - 1) * local * sent * dtype.itemsize / taken
    return Measured(memory=_memory(mesh), **rates)


def _product(x: Array) -> Array:
    return x @ x


def _gathered(axis: str) -> Callable[[Array], Array]:
    """Return a function that gathers an array along `axis` and returns one number of the result.

    The function has a barrier, without which XLA would gather that number alone.
    """
    return lambda x: jax.lax.optimization_barrier(all_gather(x, axis, 0))[:1]


def _seconds(
    mesh: Mesh, function: Callable[[Array], Array], shape: tuple[int, ...], dtype: Any
) -> float:
    """Return the seconds of `function`, called with an array of `shape`, in the slowest process."""
    # Random numbers: with zeros a GPU needs less power, and may run at a higher clock.
    draw = lambda: jax.random.normal(jax.random.key(0), (1, *shape), dtype)  # noqa: E731
    numbers = map_devices(draw, mesh, (), _SPLIT)
    x = jax.jit(numbers, out_shardings=NamedSharding(mesh, _SPLIT))()
    run = jax.jit(map_devices(lambda x: function(x[0])[None], mesh, (_SPLIT,), _SPLIT))
    return _slowest(lambda: run(x))


def _host_link(mesh: Mesh, num: int) -> float | None:
    """Measure copies of `num` floats to and from pinned host memory; return bytes a second.

    The rate is that of the slower direction. None: host memory is the device's memory, as on CPUs.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu" or HOST not in {x.kind for x in device.addressable_memories()}:
        return None
    memories = [jax.sharding.SingleDeviceSharding(device, memory_kind=x) for x in ("device", HOST)]
    here, there = (jax.device_put(jnp.zeros(num, jnp.float32), each) for each in memories)
    taken = [
        _slowest(lambda: jax.device_put(here, memories[1])),
        _slowest(lambda: jax.device_put(there, memories[0])),
    ]
    return 4 * num / max(taken)


def _slowest(run: Callable[[], Any]) -> float:
    """Return the median seconds of calls of `run`, in the process where this median is largest."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    median = statistics.median(taken)
    if process_count() == 1:
        return median
    return max(exchange_json("measured rates", median, _MEETING_SECONDS))


def _memory(mesh: Mesh) -> float:
    limit = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    return _of_host() / len(mesh.local_devices)


def _of_host() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
