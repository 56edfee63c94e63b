"""A `jax.Array`, on devices of one process or of many, as a tensor that is read slice by slice."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .lazy import Box, LazyTensor


@dataclasses.dataclass(frozen=True)
class ShardedTensor(LazyTensor):
    """An array on devices, without the zeros that `jz.Zero` may have padded it with.

    Attributes:
        array: may be larger than `shape`: what is beyond is padding.
        shape: the true shape.
        label: the path of the parameter.
    """

    array: jax.Array
    shape: tuple[int, ...]
    label: str

    @property
    def dtype(self) -> np.dtype:
        """Of the array."""
        return np.dtype(self.array.dtype)

    @property
    def collective(self) -> bool:
        """Whether a part lies on devices of another process."""
        return not self.array.is_fully_addressable

    def _read_box(self, box: Box) -> np.ndarray:
        inside = tuple(slice(start, stop) for start, stop in box)
        if not self.collective and _is_in_host_memory(self.array):
            return _assemble(self.array, inside)
        array, inside = _cut_unsplit(self.array, inside)
        return _assemble(_in_each_process(array) if self.collective else array, inside)


def _is_in_host_memory(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.sharding.device_set)


def _cut_unsplit(
    array: jax.Array, inside: tuple[slice, ...]
) -> tuple[jax.Array, tuple[slice, ...]]:
    """Cut off, on the devices, what is not asked for: other layers of a stack.

    Only in dimensions that every device has whole, so that nothing moves between devices.
    """
    own = array.sharding.shard_shape(array.shape)
    starts, sizes, left = [], [], []
    for part, size, own_size in zip(inside, array.shape, own, strict=True):
        unsplit = own_size == size
        starts.append(part.start if unsplit else 0)
        sizes.append(part.stop - part.start if unsplit else size)
        left.append(slice(0, part.stop - part.start) if unsplit else part)
    if tuple(sizes) != array.shape:
        array = _cut(array.sharding)(array, np.array(starts, np.int32), tuple(sizes))
    return array, tuple(left)


@functools.cache
def _cut(sharding: jax.sharding.Sharding):
    def cut(array: jax.Array, starts: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        return jax.lax.dynamic_slice(array, list(starts), sizes)

    return jax.jit(cut, static_argnums=2, out_shardings=sharding)


def _in_each_process(array: jax.Array) -> jax.Array:
    """The same array so that each process has all of it, between its devices. Collective.

    Along a dim that the process's own axes of the mesh divide, if possible the one that is split
    already: all else XLA would first copy whole to each device. Where there is none, each gets one.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"A parameter on devices of several processes must have a `NamedSharding`; got "
            f"{sharding}. Put it there by `zero.shard`, or `jax.device_put`."
        )
    mesh = sharding.mesh
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    own = tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if (owners == owners.take([0], axis)).all()
    )
    num = math.prod(mesh.shape[name] for name in own)
    dims = [dim for dim, size in enumerate(array.shape) if size and size % num == 0]
    split = [dim for dim, names in enumerate(sharding.spec) if names]
    chosen = min(dims, key=lambda dim: dim not in split, default=None)
    spec = [own if dim == chosen else None for dim in range(array.ndim)]
    return _move(NamedSharding(mesh, PartitionSpec(*spec)))(array)


@functools.cache
def _move(sharding: NamedSharding):
    return jax.jit(lambda array: array, out_shardings=sharding)


def _assemble(array: jax.Array, inside: tuple[slice, ...]) -> np.ndarray:
    box = [(part.start, part.stop) for part in inside]
    whole, seen = None, set()
    for shard in array.addressable_shards:
        bounds = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, box, strict=True)]
        if tuple(common) in seen or any(start >= stop for start, stop in common):
            continue
        seen.add(tuple(common))
        source = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(common, bounds, strict=True)
        )
        part = _to_host(shard.data)[source]
        if common == box:
            return part
        if whole is None:
            whole = np.empty([stop - start for start, stop in box], array.dtype)
        target = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(common, box, strict=True)
        )
        whole[target] = part
    assert whole is not None
    return whole


def _to_host(data: jax.Array) -> np.ndarray:
    # JAX keeps a host copy with the array that was asked for it, here one that is dropped at once:
    # otherwise host memory would come to hold all that is saved.
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))
