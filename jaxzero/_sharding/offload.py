"""Which arrays live in host memory, and how far ahead they are copied to the device."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Literal

Leaves = bool | str | tuple[str, ...]
Role = Literal["weights", "gradients", "optimizer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Keep sharded arrays in pinned host memory, and copy them to the device layer by layer.

    A weight's shard is copied to the device before it is gathered, `window` layers of a scanned
    stack (or `window` buckets of an unrolled model) ahead of its use, in forward and again in
    backward. A gradient is copied to host memory once it is reduced. Optimizer state is copied to
    the device and back, one layer at a time, in `Zero.apply_gradients`. The operations are those
    without offload, in the same order: results differ only where XLA fuses multiply-adds otherwise,
    and norms over leaves are added up in another order.

    Each of the first three options is True (all leaves), False (none), or one or more patterns
    for tree paths such as `layers.*.kernel`, in which `*` matches any characters.

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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"`{name}` of `Offload` must be an integer of at least {least}; got {value!r}."
                )

    def patterns(self, role: Role) -> tuple[str, ...]:
        """The patterns of one of the options; `("*",)` for True, and none for False."""
        value = getattr(self, role)
        if isinstance(value, bool):
            return ("*",) if value else ()
        return (value,) if isinstance(value, str) else value

    @staticmethod
    def matches(pattern: str, path: str) -> bool:
        """Whether a pattern matches the path of a leaf."""
        return fnmatch.fnmatchcase(path, pattern)

    def takes(self, role: Role, path: str, size: int) -> bool:
        """Whether a leaf with this path and number of elements goes to host memory.

        An array of one element never does: a scalar has no dim to be fetched and gathered over.
        """
        found = any(self.matches(pattern, path) for pattern in self.patterns(role))
        return found and size >= max(self.min_size, 2)
