"""Read slices of a sharded `jax.Array`, on devices of one process or several."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .lazy import Box, LazyTensor


@dataclasses.dataclass(frozen=True)
class ShardedTensor(LazyTensor):
    """An array on devices, without the padding that `jz.Zero` may have added.

    Attributes:
        array: the stored array; elements beyond `shape` are padding.
        shape: shape without padding.
        label: path of the parameter.
    """

    array: jax.Array
    shape: tuple[int, ...]
    label: str

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return np.dtype(self.array.dtype)

    @property
    def collective(self) -> bool:
        """True if some shards are on devices of other processes."""
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
    """Slice the array on the devices, along the dimensions that are not sharded.

    This drops, for example, the other layers of a stack before any transfer. Sliced dimensions are
    complete on every device, so slicing needs no communication.
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
    """Reshard the array so that the devices of each process together hold all of it. Collective.

    It is sharded over the mesh axes within a process, along a dimension that they divide; if
    possible, along the dimension that is sharded already, since for any other XLA would replicate
    the array on each device first. If they divide no dimension, the array is replicated.
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
    # `np.asarray` caches the host copy in the array. Converting a temporary array drops the cache
    # at once; otherwise host memory would grow by everything that is saved.
    return np.asarray(jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data]))
