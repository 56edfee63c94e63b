"""Which axes and codecs collectives use, and the dtype that sums are accumulated in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import DTypeLike

from .._codecs import Cast, Codec, is_narrow_float
from .._mesh import AXES, LOCAL, NODE, AnyMesh, physical
from .._sharding import CommSchedule, GradientHop, HpZ, PerAxis, WeightHop, ZeroConfig
from .ledger import Transfer
from .message_form import MessageForm


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
    halves: bool = False  # whether the first half of the devices is summed too
    form: MessageForm = MessageForm()
    on_cpus: bool = False  # there host memory and device memory are one
    # What a sum over devices is divided by to be the mean of one micro-batch; None: their number.
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
        """How a program on `mesh` communicates; `halves` and the last are those of the fields.

        Raises:
            ValueError: they cannot be had with `deterministic="mesh"`.
        """
        if config.schedule.deterministic and (halves or node_microbatches):
            raise ValueError(
                "`halves` compares sums over shards, which depend on the mesh, and with `shares` "
                "nodes run different rows, so results cannot be equal on all meshes. Leave it out, "
                'or leave out `deterministic="mesh"` of `CommSchedule`.'
            )
        sizes = {axis: mesh.shape[axis] for axis in AXES}
        is_alone = all(sizes[axis] == 1 for axis in config.axes)  # then no slice is gathered
        hpz, node = config.hpz, config.weights.node
        if node_microbatches and hpz is None and config.stage == 3 and NODE in config.axes:
            # Nothing is sent between nodes in later micro-batches: what was received is kept.
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
        """The number of shards of a leaf: the number of devices along the axes that split it."""
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
        """What the sum of a gradient over devices, in one micro-batch, is divided by."""
        return self.num_devices if self.mean_divisor is None else self.mean_divisor

    def num_runs(self, microbatches: int) -> int:
        """How many micro-batches all devices run together, if the fastest run `microbatches`."""
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
        """The number of devices in the first half of `axis`; 0 if it is not halved."""
        return self.sizes[axis] // 2 if self.halves and axis == self.halves_axis else 0

    @property
    def gather_axes(self) -> tuple[str, ...]:
        """The axes that a shard is gathered over, in this order."""
        return self.axes[::-1]

    def axes_with_peers(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """The axes among `axes` that have more than one device."""
        return tuple(axis for axis in axes if self.sizes[axis] > 1)

    def described(self, transfers: Sequence[Transfer]) -> tuple[str, ...]:
        """A line for each axis with a codec: what weights or gradients are sent as, in all."""
        lines = []
        for what, codecs in (("weights", self.weights), ("gradients", self.gradients)):
            for axis in self.axes_with_peers(AXES):
                if (asked := getattr(codecs, axis)) is None:
                    continue
                is_hop = isinstance(asked, GradientHop | WeightHop)
                names = {str(asked.codec): str(asked)} if is_hop else {}
                here = [x for x in transfers if (x.purpose, x.axis) == (what, axis)]
                sent = dict.fromkeys(names.get(form, form) for x in here for form in x.forms)
                forms = sorted(sent, key=lambda form: form != str(asked))  # the codec first
                lines += [f"{what} over {axis}: {', '.join(forms)}"] if forms else []
        if self.hpz is not None and self.hpz.codec is not None:
            lines.append(f"kept slices (hpZ): {self.hpz.codec}")
        return tuple(lines)

    @property
    def weight_hop(self) -> WeightHop:
        """The hop of weights between nodes; only where weights are sent as differences."""
        assert isinstance(self.weights.node, WeightHop)
        return self.weights.node

    def weight_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """The codec with which a weight of `num` elements (in full) is gathered over `axis`."""
        codec = getattr(self.weights, axis)
        if isinstance(codec, WeightHop):  # here without a wire state
            codec = self.hpz and self.hpz.codec
        return self.suitable_for_weights(codec, num, dtype)

    def gradient_codec(self, axis: str, num: int, dtype: DTypeLike) -> Codec | None:
        """The codec of a gradient over `axis`; narrow floats (16 bits or fewer) get a `Cast`.

        Not if sums are added in a tree: there partial sums are sent in float32.
        """
        codec = getattr(self.gradients, axis)
        if isinstance(codec, GradientHop):
            codec = codec.codec
        codec = self.suitable(codec, num, dtype)
        if codec is None and is_narrow_float(dtype) and not self.sums_in_tree:
            return Cast(dtype)
        return codec

    def suitable_for_weights(self, codec: Codec | None, num: int, dtype: DTypeLike) -> Codec | None:
        """`suitable`, if a message has fewer bits: more would carry nothing, without a sum."""
        codec = self.suitable(codec, num, dtype)
        return codec if codec is not None and codec.bits < 8 * jnp.dtype(dtype).itemsize else None

    def suitable(self, codec: Codec | None, num: int, dtype: DTypeLike) -> Codec | None:
        """`codec` if it encodes arrays of `num` elements of type `dtype`; otherwise None."""
        if codec is None or not jnp.issubdtype(dtype, jnp.floating) or num == 0:
            return None
        return codec if codec.is_used_for(num, dtype, self.min_quantized_size) else None


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that sums are accumulated in: float32 for narrower floats, otherwise `dtype`."""
    return jnp.dtype(jnp.float32) if is_narrow_float(dtype) else jnp.dtype(dtype)
