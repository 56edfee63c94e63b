"""Configure leaves, such as experts, that stay split over the devices of a node.

Such a leaf is split over the mesh axis `local` along one dim, and never gathered over that axis.
With `local` devices in a node, a device has `size / local` entries of the dim, and the program sees
only these. The leaf is further split over `node`, along another dim. It is gathered, and its
gradient is reduced, over `node` only. The gradient on a device already covers the rows of all
devices of its node, since they send it their tokens; so the sum over nodes is the sum over all
rows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._mesh import LOCAL, AnyMesh
from .hops import check_integer


@dataclasses.dataclass(frozen=True)
class Ungathered:
    """Leaves of which each device of a node keeps its own part of one dim, such as its experts.

    With `local` devices in a node, this dim is cut into `local` contiguous parts. Device `i` has
    part `i`, and inside a step the loss sees only this part. Outside, shapes are whole. Tokens have
    to be sent to the devices that have their experts: `jz.exchange_tokens`. Any other code that
    reads such a leaf sees this device's part, without a warning: a sum over all experts, as in
    weight decay inside the loss, has to be `jax.lax.psum(x, "local")`. Optimizers see whole shapes.

    Args:
        leaves: one or more patterns for tree paths, such as "layers.experts.*", in which `*`
            matches any characters.
        dim: the dim that is split, counted from the first: 0 for `[experts, ...]`, 1 for `[layers,
            experts, ...]`.

    Raises:
        ValueError: `leaves` has no pattern, or `dim` is no integer of at least 0.
    """

    leaves: str | tuple[str, ...]
    _: dataclasses.KW_ONLY
    dim: int

    def __post_init__(self):
        patterns = self.patterns
        if not patterns or not all(isinstance(x, str) and x for x in patterns):
            raise ValueError(
                "`leaves` of `Ungathered` must be a pattern for tree paths, such as "
                f"'layers.experts.*', or several; got {self.leaves!r}."
            )
        check_integer("dim", "Ungathered", self.dim, 0)

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.leaves,) if isinstance(self.leaves, str) else tuple(self.leaves)

    def split(self, path: str, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec | None:
        """Return the split of a leaf over `local`; None if it is not split.

        A leaf is not split if no pattern matches it, if a node has one device, or if its shape
        cannot be split along the dim, such as the shape of statistics in an optimizer's state.
        """
        num = mesh.shape[LOCAL]
        if num == 1 or not any(fnmatch.fnmatchcase(path, x) for x in self.patterns):
            return None
        if self._fault(shape, num) is not None:
            return None
        return PartitionSpec(*[None] * self.dim, LOCAL)

    def _fault(self, shape: tuple[int, ...], num: int) -> str | None:
        """Return why a leaf of `shape` cannot be split over `num` devices; None if it can."""
        if len(shape) < 2 or self.dim >= len(shape):
            return f"has no dim {self.dim} beside another one (such as 1), which nodes split"
        if shape[self.dim] % num:
            return f"has {shape[self.dim]} in dim {self.dim}, which the {num} devices do not divide"
        return None

    def check(self, leaves: Sequence[Any], mesh: AnyMesh, matched: set[str]) -> None:
        """Check that the patterns fit the leaves of a parameter tree.

        Args:
            leaves: the layouts of the leaves, `LeafSpec`s.
            mesh: gives the number of devices of a node.
            matched: the patterns that matched a leaf of an earlier tree. A pattern that matched one
                may match no leaf of this tree, such as one of adapters (LoRA). Patterns that match
                a leaf of this tree are added to the set.

        Raises:
            ValueError: a pattern has never matched a leaf, or matches one that cannot be split.
        """
        for pattern in self.patterns:
            chosen = [leaf for leaf in leaves if fnmatch.fnmatchcase(leaf.path, pattern)]
            if not chosen and pattern not in matched:
                known = ", ".join(leaf.path for leaf in leaves[:8])
                raise ValueError(
                    f"`leaves` of `Ungathered` has the pattern {pattern!r}, which matches no leaf "
                    f"of this tree; its leaves are {known}{', ...' if len(leaves) > 8 else ''}. "
                    "Correct the pattern; if it is for another tree, shard that one first."
                )
            matched |= {pattern} if chosen else set()
            for leaf in chosen:
                if fault := self._fault(leaf.shape, mesh.shape[LOCAL]):
                    raise ValueError(
                        f"The leaf `{leaf.path}` of shape {leaf.shape} is one of "
                        f"`ungathered={self!r}`, and {fault}. Leave it out of the patterns, give "
                        "another `dim`, or take a mesh with other devices in a node."
                    )


def check_ungathered(config: Any) -> None:
    """Raise `ValueError` for options of a `ZeroConfig` that `ungathered` excludes."""
    if not isinstance(config.ungathered, Ungathered):
        raise ValueError(
            f"`ungathered` must be a `jz.Ungathered(...)` or None; got {config.ungathered!r}."
        )
    if config.stage < 3:
        raise ValueError(
            f"`ungathered` needs parameters that are split; got `stage={config.stage}`. Take "
            "`stage=3`."
        )
    for refused, what in (
        (config.stages is not None, "`stages`, which divide the layers between nodes"),
        (config.needs_wire_state, "hops that keep arrays from step to step (`needs_wire_state`)"),
        (config.schedule.deterministic, "`deterministic`, an order of sums that all meshes share"),
        (config.offload is not None, "`offload`, arrays in host memory"),
    ):
        if refused:
            raise ValueError(
                f"`ungathered` cannot be had with {what} (got {config.ungathered!r}). Leave out "
                "one of the two."
            )
