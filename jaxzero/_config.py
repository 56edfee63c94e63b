"""What a user can decide about the sharding, as frozen dataclasses, and presets."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ._codecs import Codec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hops:
    """One codec for each mesh axis that a value crosses; `None` sends it as it is."""

    node: Codec | None = None
    local: Codec | None = None

    def __post_init__(self):
        for name in ("node", "local"):
            codec = getattr(self, name)
            if codec is not None and not isinstance(codec, Codec):
                raise ValueError(
                    f"`{name}` of `Hops` must be a codec such as `jz.Cast(jnp.bfloat16)`, or "
                    f"`None`; got {codec!r}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is split, over which devices, and how it travels.

    Attributes:
        stage: what is split between devices (ZeRO, section 5). 0: nothing (data
            parallel). 1: optimizer state. 2: and gradients. 3: and parameters.
        split: "all" splits over every device of the two axes. "local" splits inside a
            node and replicates between nodes (HSDP, MiCS).
        weights: codecs of the weight gathers, per axis.
        gradients: codecs of the gradient reductions, per axis. Sums are in float32
            (float64 for float64 gradients).
        param_persistence_threshold: leaves with fewer elements than this are stored
            whole on every device. 0 splits everything but scalars.

    References:
        ZeRO (https://arxiv.org/abs/1910.02054), section 5.
    """

    stage: Literal[0, 1, 2, 3] = 3
    split: Literal["all", "local"] = "all"
    weights: Hops = Hops()
    gradients: Hops = Hops()
    param_persistence_threshold: int = 0

    def __post_init__(self):
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"`stage` must be 0, 1, 2 or 3; got {self.stage!r}.")
        if self.split not in ("all", "local"):
            raise ValueError(
                f'`split` must be "all" (over every device) or "local" (inside a node); '
                f"got {self.split!r}."
            )
        for name in ("weights", "gradients"):
            if not isinstance(getattr(self, name), Hops):
                raise ValueError(
                    f"`{name}` must be a `jz.Hops(node=..., local=...)`; "
                    f"got {getattr(self, name)!r}."
                )
        if self.param_persistence_threshold < 0:
            raise ValueError(
                "`param_persistence_threshold` counts elements and cannot be negative; "
                f"got {self.param_persistence_threshold}."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split a leaf, major first."""
        return ("local", "node") if self.split == "all" else ("local",)


def zero3(*, weights: Hops = Hops(), gradients: Hops = Hops()) -> ZeroConfig:  # noqa: B008
    """Parameters, gradients and optimizer state split over all devices (ZeRO-3, FSDP)."""
    return ZeroConfig(weights=weights, gradients=gradients)


def hsdp(*, weights: Hops = Hops(), gradients: Hops = Hops()) -> ZeroConfig:  # noqa: B008
    """As `zero3` inside a node, replicated between nodes (HSDP, MiCS)."""
    return ZeroConfig(split="local", weights=weights, gradients=gradients)


def ddp() -> ZeroConfig:
    """Nothing split: plain data parallelism."""
    return ZeroConfig(stage=0)
