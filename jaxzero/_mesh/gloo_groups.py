"""Connect the devices of CPUs of several processes before a program needs it.

Gloo connects a group of devices in the group's first collective, and that collective fails if the
last process comes 30 s after the first one: no option of XLA changes it. Processes that compile at
different speeds, or load from different disks, can be that far apart. The process that came first
then raises, waits 5 minutes for the other at exit, and JAX ends both. A group that is connected
waits longer: for `--xla_cpu_collective_timeout_seconds`.

So the processes wait for each other over the coordination service, and make the first collective of
each group together.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._processes import meet_processes
from .gloo_workaround import uses_gloo
from .per_device import is_tracing

_SECONDS = 1800.0  # that processes wait for each other; loading a model can take that long

_connected: set[str] = set()  # meshes, by `_name`


def connect(mesh: Mesh) -> None:
    """Connect the devices along each axis of `mesh`, and along several, where Gloo is used.

    The processes of the mesh must all call it. It does nothing for a mesh of one process, at a
    second call, and while `jax.jit` traces.

    Raises:
        TimeoutError: a process of the mesh did not call it within 30 minutes, or has ended.
    """
    if not uses_gloo(mesh) or (name := _name(mesh)) in _connected:
        return
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) < 2 or is_tracing():
        return
    meet_processes(f"first collectives of {name}", processes, _SECONDS)
    spec = PartitionSpec(mesh.axis_names)
    x = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, spec), lambda index: np.ones(mesh.size, np.float32)[index]
    )
    gather = jax.shard_map(
        lambda x: [lax.all_gather(x, axes, tiled=True) for axes in _groups(mesh)],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    jax.block_until_ready(jax.jit(gather)(x))
    _connected.add(name)


def _groups(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """The axes over which devices of the mesh form groups of several; an order is a group."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    for num in range(1, len(axes) + 1):
        yield from itertools.permutations(axes, num)


def _name(mesh: Mesh) -> str:
    """A name for the mesh that is the same in all processes."""
    ids = [device.id for device in mesh.devices.flat]
    return hashlib.sha256(f"{mesh.shape} {ids}".encode()).hexdigest()[:16]
