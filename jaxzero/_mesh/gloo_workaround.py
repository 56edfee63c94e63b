"""Work around three faults of Gloo, which XLA uses for collectives on CPUs.

XLA uses it once `jax.distributed` is initialized, also between devices of one process.

- Reduce-scatter sends from a buffer that the result may have overwritten already. No error is
  raised, but one in a thousand sums of some hundred kilobytes is wrong, and a few in a hundred sums
  of megabytes (JAX 0.10 to 0.12; jax-ml/jax#40830). It also times out after 30 s, whatever limit is
  set (#40831). Here the shards are exchanged all-to-all, in as many bytes, and added.
- Two hosts that exchange a large message send one after the other, not at once. A host's signal
  that it is ready to receive is queued on the connection behind the data that it is sending, and
  the other host waits for the signal. A link is then used at 50 to 70% of its rate. Here
  all-gathers and all-to-alls between nodes are cut into pieces: the signal for the next piece
  travels while one is being sent, and both directions are busy. So are permutations in which two
  devices send to each other. Where no two do, whole messages come nearest to the rate of the link.
- Gloo connects a group of devices in the group's first collective, and that collective fails if the
  last process comes 30 s after the first one: no option of XLA changes it. Processes that compile
  at different speeds, or load from different disks, can be that far apart. The process that came
  first then raises, waits 5 minutes for the other at exit, and JAX ends both. A group that is
  connected waits longer: for `--xla_cpu_collective_timeout_seconds`. So `connect_groups` lets the
  processes wait for each other over the coordination service, and make the first collective of each
  group together.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from .._processes import meet_processes
from ..pallas_kernels import add_up
from .mesh_kinds import NODE
from .per_device import is_tracing

# The largest piece of a message between nodes, in each direction. Pieces of this size use 91% of a
# link of 100 Mbit/s, twice as large ones 85%, and half as large ones no more. Whole messages make
# steps slower.
PIECE_BYTES = 2**17

_is_worked_around: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxzero_gloo_is_worked_around", default=False
)
_SECONDS = 1800.0  # how long processes wait for each other; loading a model can take that long

_connected: set[str] = set()  # meshes, by `_name`


def uses_gloo(mesh: Mesh) -> bool:
    """Return whether XLA runs the collectives over `mesh` with Gloo."""
    return mesh.devices.flat[0].platform == "cpu" and jax.distributed.is_initialized()


def with_workaround(function: Callable) -> Callable:
    """Wrap `function` so that the collectives of this module use workarounds while it is traced."""

    @functools.wraps(function)
    def traced(*args):
        token = _is_worked_around.set(True)
        try:
            return function(*args)
        finally:
            _is_worked_around.reset(token)

    return traced


def is_worked_around() -> bool:
    """Return whether a function wrapped by `with_workaround` is being traced."""
    return _is_worked_around.get()


def reduce_scatter(
    x: Shaped[Array, ...], axes: str | tuple[str, ...], dim: int, *, tiled: bool = True
) -> Shaped[Array, ...]:
    """Sum over devices; device i keeps part i of `dim`: `lax.psum_scatter`, or its workaround."""
    if not is_worked_around():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled)
    total = add_up(_exchange(_split(x, axes, dim), axes))
    return total if tiled else jnp.squeeze(total, dim)


def all_gather(x: Shaped[Array, ...], axes: str | tuple[str, ...], dim: int) -> Shaped[Array, ...]:
    """Concatenate the arrays of all devices along `dim`: `lax.all_gather`, or its workaround."""
    if not _is_in_pieces(axes):
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    pieces = [lax.all_gather(piece, axes) for piece in _pieces(x.reshape(-1))]
    flat = jnp.concatenate(pieces, axis=1)
    return _join(flat.reshape(len(flat), *x.shape), dim)


def all_to_all(
    x: Shaped[Array, ...], axes: str | tuple[str, ...], split_dim: int, concat_dim: int
) -> Shaped[Array, ...]:
    """Send part i of `split_dim` to device i: `lax.all_to_all`, or its workaround.

    The received parts are concatenated along `concat_dim`.
    """
    if not _is_in_pieces(axes):
        return lax.all_to_all(x, axes, split_axis=split_dim, concat_axis=concat_dim, tiled=True)
    return _join(_exchange(_split(x, axes, split_dim), axes), concat_dim)


def permute(
    x: Shaped[Array, ...], axes: str | tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, ...]:
    """Send from device to device: `lax.ppermute`, in pieces where that is faster between nodes.

    It is faster if two devices send to each other. Otherwise messages may be large: a receiver's
    signal that it is ready never waits behind data that the receiver sends.
    """
    if not is_mutual(pairs) or not _is_in_pieces(axes):
        return lax.ppermute(x, axes, pairs)
    pieces = [lax.ppermute(piece, axes, pairs) for piece in _pieces(x.reshape(-1))]
    return jnp.concatenate(pieces).reshape(x.shape)


def is_mutual(pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether any two devices send to each other."""
    directions = set(pairs)
    return any(source != to and (to, source) in directions for source, to in pairs)


def _is_in_pieces(axes: str | tuple[str, ...]) -> bool:
    """Return whether messages over `axes` may cross nodes: over `node`, or its part (`node.0`)."""
    names = (axes,) if isinstance(axes, str) else axes
    return is_worked_around() and any(name.partition(".")[0] == NODE for name in names)


def _exchange(
    parts: Shaped[Array, "devices ..."], axes: str | tuple[str, ...]
) -> Shaped[Array, "devices ..."]:
    """Send part i to device i; return the parts that this device receives, in order of senders."""
    if not _is_in_pieces(axes):
        return lax.all_to_all(parts, axes, 0, 0, tiled=True)
    pieces = _pieces(parts.reshape(len(parts), -1))
    received = [lax.all_to_all(piece, axes, 0, 0, tiled=True) for piece in pieces]
    return jnp.concatenate(received, axis=1).reshape(parts.shape)


def _split(
    x: Shaped[Array, ...], axes: str | tuple[str, ...], dim: int
) -> Shaped[Array, "devices ..."]:
    """Split `x` along `dim` into a part for each device."""
    num = math.prod(lax.axis_size(name) for name in ((axes,) if isinstance(axes, str) else axes))
    parts = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def _join(parts: Shaped[Array, "devices ..."], dim: int) -> Shaped[Array, ...]:
    """Concatenate the parts of all devices along `dim`."""
    shape = parts.shape[1:]
    merged = (*shape[:dim], len(parts) * shape[dim], *shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(merged)


def _pieces(x: Shaped[Array, "... n"]) -> Iterator[Shaped[Array, "... piece"]]:
    """Cut the last dim into nearly equal pieces, of at most `PIECE_BYTES` in each row."""
    count = max(1, -(-x.shape[-1] * x.dtype.itemsize // PIECE_BYTES))
    ends = [x.shape[-1] * i // count for i in range(count + 1)]
    for start, end in itertools.pairwise(ends):
        yield lax.slice_in_dim(x, start, end, axis=-1)


def connect_groups(mesh: Mesh) -> None:
    """Connect the groups of devices along each axis of `mesh`, and along several axes, for Gloo.

    It does nothing if Gloo is not used. The processes of the mesh must all call it. It also does
    nothing for a mesh of one process, at a second call, and while `jax.jit` traces.

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
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, spec), lambda index: np.ones(mesh.size, np.float32)[index]
    )
    gather = jax.shard_map(
        lambda x: [lax.all_gather(x, axes, tiled=True) for axes in _groups(mesh)],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    jax.block_until_ready(jax.jit(gather)(ones))
    _connected.add(name)


def _groups(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Yield the axes of each group that Gloo connects; a different order is a different group."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    for num in range(1, len(axes) + 1):
        yield from itertools.permutations(axes, num)


def _name(mesh: Mesh) -> str:
    """Return a name for the mesh that is the same in all processes."""
    ids = [device.id for device in mesh.devices.flat]
    return hashlib.sha256(f"{mesh.shape} {ids}".encode()).hexdigest()[:16]
