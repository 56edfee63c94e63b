"""Decide how values are sent: over which axes, with which codecs, in which form of messages.

[Note: form of messages] CPUs and GPUs keep arrays in plain rows, so a bucket is one array
`[devices, bytes]` into which the messages of several leaves are joined. A TPU keeps the last two
dims of an array in tiles of 8 x 128. There, moving bytes between rows `[devices, m]` and the shape
of a weight crosses all tiles, and XLA compiles for minutes: reading 4M codes out of 8 rows takes 4
s of compile time, and out of `[8, m / 128, 128]` 0.1 s; an all-gather of rows of 5.5M bfloat16
takes 26 s, and one for each leaf in its own shape 0.3 s in all (JAX 0.12.0, v5e,
`benchmarks.compiled.tpu_messages`). So on TPUs large leaves travel alone: floats in their own shape
and dtype, and codes as columns, whose blocks lie across rows of lanes (`pallas_kernels._columns`).
The numbers are the same in both forms.

On GPUs a leaf is sent alone where joining it would cost more than another collective. A weight in a
joined message is copied out of it after the gather, and a gradient is copied into it. If the weight
is sent alone and split on its first dim, the gathered bytes are the weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._codecs import Cast, Codec, Column, is_narrow_float
from .._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, AnyMesh, physical
from .._sharding import CommSchedule, DimSharding, GradientHop, HpZ, PerAxis, WeightHop, ZeroConfig
from .kernel_hop import check_kernel_hops


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageForm:
    """In which shape collectives send arrays, and which arrays they join into one message.

    Attributes:
        tiled: whether each leaf is sent alone, in a shape whose minor dims fill tiles, and floats
            in their own dtype; otherwise as rows of bits, `[devices, m]`.
        join_below_bytes: leaves without a codec are joined into one message only if each sends
            fewer bytes than this; None joins all.
        copy_below_bytes: a leaf whose shards are contiguous in memory is copied into a joined
            message only if it has fewer bytes than this on the larger side of the collective (a
            gather's output, a reduction's input); None joins all.
    """

    tiled: bool = False
    join_below_bytes: int | None = None
    copy_below_bytes: int | None = None

    @classmethod
    def of(cls, mesh: AnyMesh) -> MessageForm:
        """Return the form for the platform of the devices of `mesh`."""
        return _FORMS.get(physical(mesh).devices.flat[0].platform, cls())

    def joins(self, num_bytes: int) -> bool:
        """Return whether an uncoded leaf of `num_bytes` is small enough to share a message."""
        return self.join_below_bytes is None or num_bytes < self.join_below_bytes

    def shares_kernel(self, num_bytes: int) -> bool:
        """Return whether an array of `num_bytes` in full is small enough to share a kernel."""
        return self.copy_below_bytes is None or num_bytes < self.copy_below_bytes

    def copies(self, shape: tuple[int, ...], dim: int, num_bytes: int) -> bool:
        """Return whether to copy a leaf into a message of several leaves.

        A leaf whose shards are contiguous in memory can be sent by itself without a copy. For a
        large leaf that is cheaper than the copies that a joined message needs.

        Args:
            shape: the leaf's shape; its shards along `dim` are contiguous if all dims before it are
                1.
            dim: the split dim.
            num_bytes: the leaf's bytes on the larger side of the collective.
        """
        limit = self.copy_below_bytes
        return limit is None or num_bytes < limit or math.prod(shape[:dim]) != 1


TILED = MessageForm(tiled=True, join_below_bytes=2**16)
# To read and write 32 MiB takes an H100 or H200 20 us, twice as long as to launch a collective. To
# copy 32 KiB into a message and out of it takes a CPU longer than another collective.
_GPU = MessageForm(copy_below_bytes=2**25)
_CPU = MessageForm(join_below_bytes=2**15)
_FORMS = {"tpu": TILED, "gpu": _GPU, "cuda": _GPU, "cpu": _CPU}


@dataclasses.dataclass(frozen=True)
class CommSpec:
    """How collectives send values: mesh axes and their sizes, the codecs, and the schedule."""

    axes: tuple[str, ...]  # the axes that split a leaf, major first
    sizes: Mapping[str, int]  # devices along each of the two axes
    weights: PerAxis
    gradients: PerAxis
    hpz: HpZ | None
    min_quantized_size: int
    schedule: CommSchedule
    halves: bool = False  # whether reductions also return the sum over half of the devices
    form: MessageForm = MessageForm()
    on_cpus: bool = False  # there host memory and device memory are one
    # Divides a gradient's sum over devices to give one micro-batch's mean; None: `num_devices`.
    mean_divisor: float | None = None
    # How many micro-batches the devices of each node run, where nodes run different numbers.
    node_microbatches: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        mesh: AnyMesh,
        config: ZeroConfig,
        halves: bool = False,
        node_microbatches: tuple[int, ...] | None = None,
    ) -> CommSpec:
        """Make the `CommSpec` of a program on `mesh`, with the fields that are named as arguments.

        Raises:
            ValueError: `halves` or `node_microbatches` with `deterministic="mesh"`.
            NotImplementedError: `halves` with `ungathered`, or a hop with
                `implementation="nvlink"` that `mesh` cannot run.
        """
        if config.schedule.deterministic and (halves or node_microbatches):
            raise ValueError(
                "`halves` compares sums over shards, which depend on the mesh, and with `shares` "
                "nodes run different rows, so results cannot be equal on all meshes. Leave it out, "
                'or leave out `deterministic="mesh"` of `CommSchedule`.'
            )
        if halves and config.ungathered is not None:
            raise NotImplementedError(
                "`halves` compares sums over all devices of a node, and gradients of `ungathered` "
                "leaves are no such sums. Leave out one of the two."
            )
        sizes = {axis: mesh.shape[axis] for axis in AXES}
        halves_local = halves and sizes[NODE] == 1
        check_kernel_hops(mesh, config.weights, config.gradients, halves_local=halves_local)
        is_alone = all(sizes[axis] == 1 for axis in config.axes)  # so hpZ has nothing to keep
        hpz, node = config.hpz, config.weights.node
        if node_microbatches and hpz is None and config.stage == 3 and NODE in config.axes:
            # Nodes run different numbers of micro-batches: only the first may gather over `node`.
            hpz = HpZ(codec=node if isinstance(node, Codec) else None)
        return cls(
            config.axes,
            sizes,
            config.weights,
            config.gradients,
            None if is_alone else hpz,
            config.min_quantized_size,
            config.schedule,
            halves,
            MessageForm.of(mesh),
            physical(mesh).devices.flat[0].platform == "cpu",
            node_microbatches=node_microbatches,
        )

    @property
    def num_shards(self) -> int:
        """The number of shards of a leaf, which is the number of devices along `axes`."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sums_in_tree(self) -> bool:
        """Whether sums over devices are added in the order of `tree_sums`."""
        return self.schedule.deterministic == "mesh"

    @property
    def divisor(self) -> int | float:
        """The divisor that turns a sum over devices into the mean of a micro-batch."""
        return self.num_devices if self.mean_divisor is None else self.mean_divisor

    def num_runs(self, microbatches: int) -> int:
        """Return the total of micro-batches over devices; a device runs at most `microbatches`."""
        if self.node_microbatches is None:
            return self.num_devices * microbatches
        return self.sizes[LOCAL] * sum(self.node_microbatches)

    @property
    def halves_axis(self) -> str:
        """The axis that is cut into two half-batches: the last that gradients are summed over."""
        return NODE if self.sizes[NODE] > 1 else LOCAL

    @property
    def num_sum_replicas(self) -> int:
        """The number of devices that hold the same shard of a half-batch sum."""
        return self.num_devices // self.sizes[self.halves_axis]

    def first_half_size(self, axis: str) -> int:
        """Return the number of devices in the first half of `axis`; 0 if it is not halved."""
        return self.sizes[axis] // 2 if self.halves and axis == self.halves_axis else 0

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """The mesh axes over which shards are gathered, in the order of the gathers."""
        return self.axes[::-1]

    def axes_with_peers(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return `axes` without those of a single device."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    @property
    def weight_hop(self) -> WeightHop:
        """The hop of weights between nodes; defined only if weights are sent as differences."""
        assert isinstance(self.weights.node, WeightHop)
        return self.weights.node

    @property
    def gathers_by_kernel(self) -> bool:
        """Whether a single kernel gathers weights over `local` (`kernel_hop`)."""
        return self.weights.local is not None and self.weights.local.exchange_format is not None

    def weight_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """Return the codec for gathering a weight of `num` elements (in full) over `axis`."""
        codec = getattr(self.weights, axis)
        if isinstance(codec, WeightHop):  # it needs a wire state, which this gather lacks
            codec = self.hpz and self.hpz.codec
        return self.suitable_for_weights(codec, num, dtype)

    def gradient_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """Return the codec of a gradient over `axis`. Without one, narrow floats get a `Cast`.

        If sums are added in a tree, they get None: partial sums are then sent in float32.
        """
        codec = getattr(self.gradients, axis)
        if isinstance(codec, GradientHop):
            codec = codec.codec
        codec = self.suitable(codec, num, dtype)
        if codec is None and is_narrow_float(dtype) and not self.sums_in_tree:
            return Cast(dtype)
        return codec

    def suitable_for_weights(self, codec: Codec | None, num: int, dtype: DTypeLike) -> Codec | None:
        """Return `codec` if it is `suitable` and has fewer bits than `dtype`, otherwise None.

        Weights are not summed, so wider messages would not make them more precise.
        """
        codec = self.suitable(codec, num, dtype)
        return codec if codec is not None and codec.bits < 8 * jnp.dtype(dtype).itemsize else None

    def suitable(self, codec: Codec | None, num: int, dtype: DTypeLike) -> Codec | None:
        """Return `codec` if it encodes arrays of `num` elements of type `dtype`, otherwise None."""
        if codec is None or not jnp.issubdtype(dtype, jnp.floating) or num == 0:
            return None
        return codec if codec.is_used_for(num, dtype, self.min_quantized_size) else None


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype that sums are taken in: float32 for narrower floats, otherwise `dtype`."""
    return jnp.dtype(jnp.float32) if is_narrow_float(dtype) else jnp.dtype(dtype)


@dataclasses.dataclass(frozen=True)
class ReduceSpec:
    """The reduce-scatter of one gradient over the mesh axes.

    Attributes:
        name: path of the leaf.
        shape: shape of the full gradient on each device, without padding.
        dtype: dtype of the full gradient.
        layout: split dim and padding of the result.
        hops: the mesh axes to sum over, in order. With `local` only, the result is this device's
            node slice of the sum over its node.
        exact: whether it is reduced without the codecs of the config.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    layout: DimSharding
    hops: tuple[str, ...] = REDUCTION_HOPS
    exact: bool = False

    @functools.cached_property
    def without_name(self) -> ReduceSpec:
        """This spec without the name: equal for two leaves that are reduced in the same way."""
        return dataclasses.replace(self, name="")

    def scatters(self, axis: str, comm: CommSpec) -> bool:
        """Return whether the gradient is reduce-scattered over `axis`.

        If not, it is all-reduced (`split="local"`), or not reduced over this axis at all.
        """
        return axis in self.hops and axis in comm.axes and comm.sizes[axis] > 1

    def codec(self, axis: str, comm: CommSpec) -> Codec | None:
        """Return the codec that encodes the gradient for `axis`; None: it is sent as it is."""
        size = 0 if self.exact else math.prod(self.shape)
        return comm.gradient_codec(axis, size, self.dtype)

    def exchange(self, axis: str, comm: CommSpec) -> Codec | None:
        """Return the codec of a hop over `axis` that is a single kernel (`kernel_hop`), or None."""
        codec = self.codec(axis, comm)
        return codec if codec is not None and codec.exchange_format is not None else None

    def dtype_at(self, axis: str, comm: CommSpec) -> Any:
        """Return the dtype that the gradient has before its hop over `axis`, not yet encoded."""
        before = [x for x in REDUCTION_HOPS[: REDUCTION_HOPS.index(axis)] if self.scatters(x, comm)]
        if any(self.codec(hop, comm) is not None for hop in before):
            return jnp.dtype(jnp.float32)
        return accumulator_dtype(self.dtype) if before else self.dtype

    def shard_shape(self, axis: str, comm: CommSpec) -> tuple[int, ...]:
        """Return the shape of a device's shard once `axis` and the axes before it are reduced."""
        done = REDUCTION_HOPS[: REDUCTION_HOPS.index(axis) + 1]
        shape, dim = list(self.layout.pad_shape(self.shape)), self.layout.dim
        shape[dim] //= math.prod(comm.sizes[hop] for hop in done if self.scatters(hop, comm))
        return tuple(shape)

    def is_joined(self, axis: str, comm: CommSpec) -> bool:
        """Return whether the gradient shares its message over `axis` with other gradients.

        Gradients with a codec of few bits always do: encoding writes into the message, without a
        copy. For other gradients `MessageForm.copies` decides, after the first axis with a quarter
        of its limit. There a joined message waits for the sums of all its gradients over the axis
        before, which are held meanwhile (0.25 GiB in a layer of Llama-7B).
        """
        codec = self.codec(axis, comm)
        if codec is not None and not isinstance(codec, Cast):
            return True
        shape = self.shard_shape(axis, comm)
        length, dtype = math.prod(shape), self.dtype_at(axis, comm)
        if codec is not None:
            length, dtype = self.message_column(axis, comm)
        num_bytes = comm.sizes[axis] * length * jnp.dtype(dtype).itemsize
        is_first = axis == reduce_axes([self], comm)[0]
        return comm.form.copies(shape, self.layout.dim, num_bytes * (1 if is_first else 4))

    def message_column(self, axis: str, comm: CommSpec) -> Column:
        """Return the number of elements, and the dtype, of the message to each device of `axis`."""
        codec = self.codec(axis, comm)
        assert codec is not None
        num = math.prod(self.shard_shape(axis, comm))
        return _message_size(codec, num, self.dtype_at(axis, comm))


def reduce_axes(specs: Sequence[ReduceSpec], comm: CommSpec) -> tuple[str, ...]:
    """Return the axes that a bucket is reduced over, in order: those that any gradient needs.

    At least one axis is returned, even on a single device, so that every bucket runs the same code.
    """
    axes = [axis for axis in REDUCTION_HOPS if any(axis in x.hops for x in specs)]
    return comm.axes_with_peers(tuple(axes)) or REDUCTION_HOPS[:1]


# [Note: a bucket as one gradient]
# If all gradients of a bucket have the same joinable codec on each axis, they are reduced as one:
# an array with a row for each device, in the order of the shards. The devices of an axis exchange
# ranges of these rows, so nothing is cut apart and joined again between the axes. Otherwise a
# program of unrolled layers has 28 operations more for each layer of nine weights, and XLA computes
# the sums inside the concatenation of the next message, once for each weight. Results are equal
# bit for bit.


def as_one(specs: Sequence[ReduceSpec], comm: CommSpec) -> ReduceSpec | None:
    """Return the spec that reduces a bucket as one gradient `[devices, m]`; None if impossible."""
    axes, first = reduce_axes(specs, comm), specs[0]
    if len(specs) < 2 or comm.form.tiled or any(x.dtype != first.dtype for x in specs):
        return None
    if not all(x.is_joined(axes[0], comm) for x in specs):
        return None
    num = math.prod(comm.sizes[axis] for axis in axes)
    sizes = [math.prod(x.layout.pad_shape(x.shape)) for x in specs]
    shape, layout = (num, sum(sizes) // num), DimSharding(0, num, num)
    one = ReduceSpec("", shape, first.dtype, layout, first.hops)
    for axis in axes:
        codec = one.codec(axis, comm)
        if codec is None or not codec.is_joinable:
            return None
        if not all(x.scatters(axis, comm) and x.codec(axis, comm) == codec for x in specs):
            return None
    return one


@functools.cache
def _message_size(codec: Codec, num: int, dtype: Any) -> Column:
    """Return the number of elements and the dtype of a message that encodes `num` numbers."""
    message = codec.message(num, dtype)
    return message.shape[0], message.dtype
