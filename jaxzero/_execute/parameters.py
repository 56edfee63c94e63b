"""The leaves of a step's sharded arguments, and what is known about each of them.

A leaf may be split, differentiated, a table of which rows are sent, or a twin. A twin is a second
leaf for a weight: lookups read rows of the twin, and all other uses gather the weight.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._plan import MovedRows
from .._sharding import Activations, DimSharding, LeafSpec, Offload


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The leaves of all sharded arguments, in order, and which of them the ZeRO stage shards."""

    leaves: tuple[LeafSpec, ...]
    differentiated: tuple[int, ...]  # indices into `leaves` of those that get gradients
    weights_split: bool  # whether weights are sharded (stage 3)
    gradients_split: bool  # whether gradients are sharded (stages 2 and 3)
    num_shards: int = 1  # that a sharded leaf is split into
    # Indices of leaves whose gradients are combined with the other outputs, and never encoded.
    exact: frozenset[int] = frozenset()
    offload: Offload | None = None
    activations: Activations | None = None
    moves_rows: bool = True  # whether rows of tables may be sent in place of tables
    # Tables of which rows are sent, by index of the leaf.
    tables: Mapping[int, MovedRows] = dataclasses.field(default_factory=dict)
    # Weights that the program gets twice, by index: to gather, and again among the last leaves, as
    # tables that are looked up.
    twins: tuple[int, ...] = ()

    @functools.cached_property
    def weight_of(self) -> tuple[int, ...]:
        """For each leaf, its own index; for a twin, the index of the twin's weight."""
        return (*range(len(self.leaves) - len(self.twins)), *self.twins)

    def with_twins(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays of all argument leaves, and after them each twin's weight again."""
        return [arrays[i] for i in self.weight_of]

    def merged(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients without twins: the gradient of a twin is added to its weight's."""
        weights, by_weight = self.weight_of, {}
        for i, x in zip(self.differentiated, gradients, strict=True):
            k = weights[i]
            by_weight[k] = by_weight[k] + x if k in by_weight else x
        return [*by_weight.values()]

    def weight_layout(self, i: int) -> DimSharding | None:
        """Return the layout of leaf `i` if the program gathers it; otherwise None."""
        return self.leaves[i].layout if self.weights_split and i not in self.tables else None

    def has_host_gradient(self, i: int) -> bool:
        """Whether the gradient of leaf `i` goes to host memory."""
        leaf = self.leaves[i]
        return (
            self.offload is not None
            and (self.gradient_layout(i) is not None or self.num_shards == 1)
            and self.offload.takes("gradients", leaf.path, math.prod(leaf.shape))
        )

    def gradient_layout(self, i: int) -> DimSharding | None:
        return self.leaves[i].layout if self.gradients_split else None
