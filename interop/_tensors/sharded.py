"""Read slices of a sharded `jax.Array`, on devices of one process or several."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxzero._raw import raw

from .boxes import Box, box_shape, common_box, joined, slices_within, whole_box
from .lazy import LazyTensor


@dataclasses.dataclass(frozen=True, repr=False)
class ShardedTensor(LazyTensor):
    """A `jax.Array` as a lazy tensor, without the padding that `jz.Zero` may have added.

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

    def own(self) -> LazyTensor:
        """Return a view of the shards of this process, which are read without a collective."""
        return _OwnShards(self.array, self.shape, self.label)

    def own_boxes(self) -> list[Box]:
        """Return the boxes of this process's shards, joined where they are adjacent.

        If a shard has replicas in several processes, only the process of the first replica lists
        it.
        """
        held = (
            common_box(_bounds(shard, self.array.shape), whole_box(self.shape))
            for shard in self.array.addressable_shards
            if shard.replica_id == 0
        )
        return joined([box for box in held if box is not None])

    def _read_box(self, box: Box) -> np.ndarray:
        inside = tuple(slice(start, stop) for start, stop in box)
        # Slicing on the devices first saves transfers, of which there are none in host memory.
        if not self.collective and _is_in_host_memory(self.array):
            return _assemble(self.array, inside)
        array, inside = _cut_unsplit(self.array, inside)
        return _assemble(_in_each_process(array) if self.collective else array, inside)


class _OwnShards(ShardedTensor):
    """A view of a sharded array that reads boxes of this process's shards, without a collective."""

    @property
    def collective(self) -> bool:
        """False, since only boxes that this process holds are read."""
        return False

    def _read_box(self, box: Box) -> np.ndarray:
        return _assemble(self.array, tuple(slice(start, stop) for start, stop in box))


def _is_in_host_memory(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.sharding.device_set)


def _cut_unsplit(
    array: jax.Array, inside: tuple[slice, ...]
) -> tuple[jax.Array, tuple[slice, ...]]:
    """Slice an array on the devices by those slices of `inside` whose dimensions are not sharded.

    For example, if one layer of a stack is read, the slice drops the other layers before any
    transfer to the host. The sliced dimensions are complete on every device, so slicing needs no
    communication.

    Returns:
        The cut array; and the slices that are still to be taken from it, to get `inside`.
    """
    own = array.sharding.shard_shape(array.shape)
    starts, sizes, left = [], [], []
    for part, size, own_size in zip(inside, array.shape, own, strict=True):
        unsplit = own_size == size
        starts.append(part.start if unsplit else 0)
        sizes.append(part.stop - part.start if unsplit else size)
        left.append(slice(0, part.stop - part.start) if unsplit else part)
    if tuple(sizes) != array.shape:
        # The starts are arguments, not constants: all layers of a stack share one program.
        array = _cut(array.sharding)(array, np.array(starts, np.int32), tuple(sizes))
    return array, tuple(left)


@functools.cache
def _cut(sharding: jax.sharding.Sharding):
    def cut(array: jax.Array, starts: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
        return jax.lax.dynamic_slice(array, list(starts), sizes)

    return jax.jit(cut, static_argnums=2, out_shardings=sharding)


def _in_each_process(array: jax.Array) -> jax.Array:
    """Reshard an array so that the devices of each process together hold all of it. Collective.

    The result is sharded over the mesh axes whose devices are of one process, along a dimension
    that they divide. If possible this dimension is already sharded: for a dimension that is not,
    XLA would first replicate the array on each device. If the axes divide no dimension, the array
    is replicated.
    """
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"A parameter on devices of several processes must have a `NamedSharding`; got "
            f"{sharding}. Put it there by `zero.shard`, or `jax.device_put`."
        )
    mesh = sharding.mesh
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    own = tuple(  # axes along which all devices are of one process
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
    box = tuple((part.start, part.stop) for part in inside)
    whole, seen, filled = None, set(), 0
    for shard in array.addressable_shards:
        bounds = _bounds(shard, array.shape)
        common = common_box(bounds, box)
        if common is None or common in seen:
            continue
        seen.add(common)
        part = _to_host(shard.data, slices_within(common, bounds))
        if common == box:
            return part
        if whole is None:
            whole = np.empty(box_shape(box), array.dtype)
        raw(whole)[slices_within(common, box)] = raw(part)
        filled += part.size
    assert whole is not None and filled == whole.size, (box, seen)
    return whole


def _bounds(shard: Any, shape: tuple[int, ...]) -> Box:
    return tuple(s.indices(n)[:2] for s, n in zip(shard.index, shape, strict=True))


def _to_host(data: jax.Array, inside: tuple[slice, ...]) -> np.ndarray:
    sizes = tuple(part.stop - part.start for part in inside)
    if sizes != data.shape and not _is_in_host_memory(data):
        # A layer of a stack is cut out on the device, so that the host does not hold the stack.
        starts = np.array([part.start for part in inside], np.int32)
        data, inside = _cut(data.sharding)(data, starts, sizes), tuple(slice(n) for n in sizes)
    # `np.asarray` caches the host copy in the array. Converting a temporary array drops the cache
    # at once; otherwise host memory would grow by everything that is saved.
    held = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.asarray(held)[(*inside, ...)]  # with `...`, a scalar is an array too
