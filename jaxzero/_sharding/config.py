"""The options of sharding, communication and offload, as frozen dataclasses."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any, Literal

from .._mesh import AnyMesh
from .activations import Activations
from .hops import GradientHop, Hop, HpZ, PerAxis, WeightHop, check_integer
from .stages import Stages
from .ungathered import Ungathered, check_ungathered

Leaves = bool | str | tuple[str, ...]
Role = Literal["weights", "gradients", "optimizer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Keep sharded arrays in pinned host memory, and copy them to the device layer by layer.

    A weight's shard is copied to the device before it is gathered, `window` layers of a scanned
    stack (or `window` buckets of an unrolled model) ahead of its use, in forward and again in
    backward. A gradient is copied to host memory once it is reduced. Optimizer state is copied to
    the device and back, one layer at a time, in `Zero.apply_gradients`. A program does the same
    operations as without offload, in the same order. Results differ only because XLA may fuse
    multiply-adds differently, and because norms over leaves are added up in another order.

    Each of the first three options is True (all leaves), False (none), or one or more patterns for
    tree paths such as `layers.*.kernel`, in which `*` matches any characters.

    Args:
        weights: parameters, also frozen ones.
        gradients: what `value_and_grad` returns. With micro-batches, `weighted=True` or half-batch
            sums, gradients are summed up in device memory and copied once, at the end of the step.
        optimizer: optimizer state that has the shape of a parameter, by the parameter's path.
        window: the number of layers that are copied ahead.
        min_size: leaves with fewer elements than this stay in device memory.

    Raises:
        ValueError: nothing is offloaded, or an option is of another type.

    References:
        ZeRO-Offload (https://arxiv.org/abs/2101.06840);
        STRONGHOLD (SC 2022), the moving window of layers.
    """

    weights: Leaves = False
    gradients: Leaves = False
    optimizer: Leaves = False
    window: int = 1
    min_size: int = 2**20

    def __post_init__(self):
        for role in ("weights", "gradients", "optimizer"):
            value = getattr(self, role)
            patterns = (value,) if isinstance(value, str) else value
            is_patterns = isinstance(patterns, tuple) and all(
                isinstance(x, str) and x for x in patterns
            )
            if not isinstance(value, bool) and not (is_patterns and patterns):
                raise ValueError(
                    f"`{role}` of `Offload` must be True, False, or patterns for tree paths, such "
                    f"as 'layers.*'; got {value!r}."
                )
        if not (self.weights or self.gradients or self.optimizer):
            raise ValueError(
                "`Offload` offloads nothing: set one of `weights`, `gradients` and `optimizer`, "
                "or leave it out of the config."
            )
        for name, least in (("window", 1), ("min_size", 0)):
            check_integer(name, "Offload", getattr(self, name), least)

    def patterns(self, role: Role) -> tuple[str, ...]:
        """Return the patterns of an option as a tuple: `("*",)` for True, and `()` for False."""
        value = getattr(self, role)
        if isinstance(value, bool):
            return ("*",) if value else ()
        return (value,) if isinstance(value, str) else value

    @staticmethod
    def matches(pattern: str, path: str) -> bool:
        """Return whether a pattern matches the path of a leaf."""
        return fnmatch.fnmatchcase(path, pattern)

    def takes(self, role: Role, path: str, size: int) -> bool:
        """Return whether a leaf with this path and number of elements is kept in host memory.

        An array of one element is never kept there: it is not split, so it has no shards to fetch.
        """
        is_matched = any(self.matches(pattern, path) for pattern in self.patterns(role))
        return is_matched and size >= max(self.min_size, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommSchedule:
    """The schedule of gathers: when, in buckets of what size, and how long weights are held.

    The schedule does not change losses or gradients, bit for bit; only with `loop_constant_bytes`
    and `deterministic` they are rounded differently. A bucket holds the weights of a layer, where
    the program repeats itself or loops.

    Args:
        prefetch: the number of buckets that are gathered ahead, in forward and backward. If it is
            not 0, gradients are also reduced while the next bucket's gradients are computed. In a
            loop over stacked layers, the next layer's weights and the previous layer's gradients
            are in flight while a layer computes; the loop then gathers and reduces for one or two
            layers more than it has (see `separate_ends`). 0: weights are gathered where they are
            used.
        bucket_bytes: the largest bucket of several arrays, in bytes of full arrays on one device.
            0: one message for each array.
        max_reuse_distance: hold a weight between two uses if at most this many elements of weights
            are used in between (DeepSpeed's `stage3_max_reuse_distance`). `None`: hold it within
            forward and within backward, not between them.
        max_live_parameters: the most elements of weights that are held in full at any time for the
            sake of a later use (DeepSpeed's `stage3_max_live_parameters`).
        live_bytes: the same limit in bytes. It lets weights be held between forward and backward
            too, beginning with those that wait the shortest time.
        loop_constant_bytes: the most bytes of weights that enter a loop (`jax.lax.scan`) as
            constants and are held in full from its first iteration to its last. If these weights
            are larger, the body gathers each weight before its use in every iteration, and holds at
            most this many bytes from one use to the next. The same limit holds for the sums of
            their gradients: if the sums are larger, gradients are reduced in every iteration, and
            summed as shards in float32. The limit holds for the branches of a `cond` too, if all
            devices take the same one. 0: nothing is held, unless one weight is most of these bytes,
            so that this would save no memory. `None`: 1 GiB, and more if the body multiplies less
            than 220 times for each byte, since it would then wait for its weights.
        separate_ends: run the first and last iterations of a pipelined loop as short loops before
            and after it, in which messages between nodes that no layer uses are not sent. That
            sends 4 to 6% less between nodes for 32 layers, and 19% less for 8 experts in each
            layer. Each of these loops, two or three in a program, is one more copy of the layer to
            compile. `None`: only for loops inside other loops. Three kinds of loops are left whole:
            short ones, those with a loop inside that gathers weights, and those that copy from or
            to host memory. But the last iteration of a loop that updates layers
            (`Zero.value_and_update`, JAX 0.11 and later) is always separate.
        deterministic: "mesh": add up gradients and losses over devices in one order, a tree over
            the rows of the batch, so that they are equal bit for bit on every mesh of the same
            number of devices: 1 x 8, 2 x 4, 4 x 2 and 8 x 1. Sums are in float32, and rounded once.
            It needs `split="all"`, no codecs and no `hpz`, and nodes of 2, 4, 8, ... devices; or of
            another number, if none of its prime factors is larger than a prime factor of the number
            of nodes. It excludes `halves`, `shares` and `local_steps`. XLA decides how each device
            computes its rows: on CPUs fused multiply-adds may differ between meshes. Sums of the
            loss itself (`psum`) and of the optimizer (a global norm) keep XLA's order. Gradients
            are exchanged by all-to-alls, of the same bytes as the reduce-scatters; 16-bit gradients
            travel as float32 between nodes, which is twice the bytes. `None`: the fastest order.
    """

    prefetch: int = 1
    bucket_bytes: int = 2**31
    max_reuse_distance: int | None = None
    max_live_parameters: int | None = None
    live_bytes: int | None = None
    loop_constant_bytes: int | None = None
    separate_ends: bool | None = None
    deterministic: str | None = None

    def __post_init__(self):
        if self.deterministic not in ("mesh", None):
            raise ValueError(
                '`deterministic` of `CommSchedule` must be "mesh" or None; '
                f"got {self.deterministic!r}."
            )
        if not isinstance(self.separate_ends, bool | None):
            raise ValueError(
                "`separate_ends` of `CommSchedule` must be True, False or None; "
                f"got {self.separate_ends!r}."
            )
        for field in dataclasses.fields(self):
            if field.name not in ("separate_ends", "deterministic"):
                value, optional = getattr(self, field.name), field.default is None
                check_integer(field.name, "CommSchedule", value, 0, optional=optional)

    @property
    def is_bounded(self) -> bool:
        """Whether `max_reuse_distance`, `max_live_parameters` or `live_bytes` is set."""
        bounds = (self.max_reuse_distance, self.max_live_parameters, self.live_bytes)
        return any(bound is not None for bound in bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """The configuration of `Zero`: how arrays are split over devices, and how they are sent.

    Attributes:
        stage: what is split between devices (ZeRO, section 5). 0: nothing (data
            parallel). 1: optimizer state. 2: also gradients. 3: also parameters.
        split: "all" splits over every device of the two axes. "local" splits inside a
            node and replicates between nodes (HSDP, MiCS).
        weights: codecs of the weight gathers, per axis.
        gradients: codecs of the gradient reductions, per axis. Sums are in float32
            (float64 for float64 gradients without a codec).
        hpz: keep the node's slice of the weights for the step (ZeRO++); `None` gathers
            between nodes for every use.
        min_quantized_size: arrays with fewer elements than this (norms, biases) are not
            quantised in blocks, but travel unencoded. A layer of a scanned stack counts
            by itself (at `stage` 3, where the stack is cut for that).
        param_persistence_threshold: leaves with fewer elements than this are stored
            in full on every device. 0 splits everything but scalars.
        schedule: when weights are gathered, and how long they are held.
        offload: which arrays live in host memory; `None`: none.
        stages: divide the layers between nodes, as pipeline stages; `None`: every device
            runs all layers.
        activations: which activations are kept for backward; `None`: what the program keeps.
        ungathered: leaves that stay split inside a node, such as experts, to which tokens are
            sent; `None`: none.

    References:
        ZeRO (https://arxiv.org/abs/1910.02054), section 5;
        ZeRO++ (https://arxiv.org/abs/2306.10209).
    """

    stage: Literal[0, 1, 2, 3] = 3
    split: Literal["all", "local"] = "all"
    weights: PerAxis = PerAxis()
    gradients: PerAxis = PerAxis()
    hpz: HpZ | None = None
    min_quantized_size: int = 2**14
    param_persistence_threshold: int = 0
    schedule: CommSchedule = CommSchedule()
    offload: Offload | None = None
    stages: Stages | None = None
    activations: Activations | None = None
    ungathered: Ungathered | None = None

    def __post_init__(self):
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"`stage` must be 0, 1, 2 or 3; got {self.stage!r}.")
        if self.split not in ("all", "local"):
            raise ValueError(
                f'`split` must be "all" (over every device) or "local" (inside a node); '
                f"got {self.split!r}."
            )
        for name in ("weights", "gradients"):
            if not isinstance(getattr(self, name), PerAxis):
                raise ValueError(
                    f"`{name}` must be a `jz.PerAxis(node=..., local=...)`; "
                    f"got {getattr(self, name)!r}."
                )
        for name in ("param_persistence_threshold", "min_quantized_size"):
            check_integer(name, "ZeroConfig", getattr(self, name), 0)
        if not isinstance(self.schedule, CommSchedule):
            raise ValueError(f"`schedule` must be a `jz.CommSchedule(...)`; got {self.schedule!r}.")
        if self.offload is not None:
            self._check_offload(self.offload)
        if not isinstance(self.activations, Activations | None):
            raise ValueError(
                f"`activations` must be a `jz.Activations(...)` or None; got {self.activations!r}."
            )
        self._check_hops()
        self._check_use()
        if self.stages is not None:
            self._check_stages(self.stages)
        if self.schedule.deterministic:
            self._check_deterministic()
        if self.ungathered is not None:
            check_ungathered(self)

    def _check_hops(self) -> None:
        for name, hop, wanted, other, instead in (
            ("weights", self.weights.node, WeightHop, "gradients", "WeightDelta"),
            ("gradients", self.gradients.node, GradientHop, "weights", "ErrorFeedback"),
        ):
            if isinstance(hop, Hop) and not isinstance(hop, wanted):
                raise ValueError(
                    f"`{name}.node` cannot be `{type(hop).__name__}`, which is for {other}; use "
                    f"`{instead}`."
                )
        if self.hpz is not None and not isinstance(self.hpz, HpZ):
            raise ValueError(f"`hpz` must be a `jz.HpZ` or None; got {self.hpz!r}.")
        if self.hpz is not None and (self.stage < 3 or self.split != "all"):
            raise ValueError(
                "`hpz` keeps what was gathered between nodes, so it needs `stage=3` and "
                f'`split="all"`; got {self.stage} and {self.split!r}. Leave it out: nothing is '
                "gathered between nodes there."
            )
        if isinstance(self.weights.node, WeightHop) and self.hpz is None:
            raise ValueError(
                f"`weights.node={type(self.weights.node).__name__}(...)` needs the slice that "
                "differences are added to. Give `hpz=jz.HpZ(codec=None)`, which keeps it exact, or "
                "`hpz=jz.HpZ()`, which rounds it to 8 bits."
            )

    def _check_offload(self, offload: Any) -> None:
        if not isinstance(offload, Offload):
            raise ValueError(f"`offload` must be a `jz.Offload(...)` or None; got {offload!r}.")
        stages: dict[Role, int] = {"weights": 3, "gradients": 2, "optimizer": 1}
        for role, least in stages.items():
            if offload.patterns(role) and self.stage < least:
                raise ValueError(
                    f"`offload` puts {role} into host memory, which needs them sharded: `stage` of "
                    f"at least {least}; got {self.stage}."
                )

    def _check_deterministic(self) -> None:
        """Raise `ValueError` for options that would make results depend on the mesh."""
        wrong = None
        if self.split != "all":
            wrong = '`split="local"` cuts arrays by the size of a node, and adds gradients so too'
        for name in ("weights", "gradients"):
            if getattr(self, name) != PerAxis():
                wrong = f"codecs of `{name}` round each axis of the mesh apart"
        if self.hpz is not None:
            wrong = "`hpz` keeps slices that depend on the size of a node"
        if wrong:
            raise ValueError(
                f"{wrong}, so with it results cannot be equal on all meshes, as "
                '`CommSchedule(deterministic="mesh")` promises. Leave out one of the two; '
                "`jz.zero3()` and `jz.ddp()` can have it."
            )

    def _check_stages(self, stages: Any) -> None:
        if not isinstance(stages, Stages):
            raise ValueError(f"`stages` must be a `jz.Stages(...)` or None; got {stages!r}.")
        for refused, why in (
            (self.stage < 3, f"a stage gathers its layers (`stage=3`); got `stage={self.stage}`"),
            (self.needs_wire_state, "hops that keep arrays from step to step have no stages"),
            (self._offloads_layers, "`offload` of weights and gradients copies all layers"),
            (
                self.activations is not None and self.activations.host,
                "`activations` stay on the device, so `host=True` is not possible",
            ),
            (self.schedule.deterministic, "sums over stages have no order"),
        ):
            if refused:
                raise ValueError(f"With `stages`, {why}. Leave out one of the two.")

    @property
    def _offloads_layers(self) -> bool:
        offload = self.offload
        return offload is not None and bool(offload.weights or offload.gradients)

    def _check_use(self) -> None:
        """Raise `ValueError` for options that would have no effect."""
        hop = self.gradients.node
        if isinstance(hop, Hop) and (self.stage < 2 or self.split != "all"):
            raise ValueError(
                f"`gradients.node={type(hop).__name__}(...)` needs gradients that are split over "
                "nodes: "
                f'`stage` 2 or 3 and `split="all"`; got {self.stage} and {self.split!r}.'
            )
        if self.weights != PerAxis() and self.stage < 3:
            raise ValueError(
                f"`weights` are codecs of gathers, which `stage={self.stage}` has none of. "
                "Leave them out, or take `stage=3`."
            )
        if self.weights.node is not None and self.split != "all":
            raise ValueError(
                '`weights.node` has nothing to encode: with `split="local"` no weights are '
                "gathered between nodes. Leave it out."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split a leaf, major first."""
        # Weights are gathered over `node` first. `node` is minor, so that the shards that this
        # gather joins are neighbours in the array.
        return ("local", "node") if self.split == "all" else ("local",)

    def axes_at(self, stage: int) -> tuple[str, ...]:
        """Return the mesh axes that split the arrays which ZeRO splits from `stage` on.

        These arrays are the optimizer state for stage 1, gradients for 2, and parameters for 3. The
        result is empty if the config's own stage is lower, so that they are not split.
        """
        return self.axes if self.stage >= stage else ()

    def num_shards(self, mesh: AnyMesh) -> int:
        """Return the number of shards of a leaf: the number of devices of `mesh` along `axes`."""
        return math.prod(mesh.shape[axis] for axis in self.axes)

    @property
    def needs_wire_state(self) -> bool:
        """Whether a hop between nodes keeps arrays from step to step, in a wire state."""
        return isinstance(self.weights.node, Hop) or isinstance(self.gradients.node, Hop)


def without_defaults(x: Any) -> str:
    """Return the `repr` of a dataclass without the fields that have their default value."""
    if not dataclasses.is_dataclass(x):
        return repr(x)
    fields = [(field, getattr(x, field.name)) for field in dataclasses.fields(x)]
    shown = [f"{f.name}={without_defaults(value)}" for f, value in fields if value != f.default]
    return f"{type(x).__name__}({', '.join(shown)})"
