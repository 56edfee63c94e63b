"""Which layers a stage runs.

`S` stages of `L` layers run `n = ceil(L / S)` layers each, stage `s` those from `s n` on. Where the
stages do not divide the layers, the last ones have fewer, whose weights are padded with zeros. What
a padding layer makes of zeros may be NaN, so it is dropped: the layer returns the carry that it was
given, its gradients are masked as those of a missing micro-batch are, and nothing reads its other
outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

# What a layer loop scans: its stacks, and which layers are no padding (None: all).
Layers = tuple[list[Any], Array | None]

# An iteration: of the carry, and of one layer of each stack; returns the carry and new rows.
Layer = Callable[[list[Any], Layers], tuple[list[Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The layers of this stage.

    Attributes:
        total: how many layers all stages have together.
        num_stages: how many stages there are.
        stage: the number of this one.
    """

    total: int
    num_stages: int
    stage: Array

    @property
    def num(self) -> int:
        """How many layers a stage runs, with padding."""
        return -(-self.total // self.num_stages)

    @property
    def has_padding(self) -> bool:
        """Whether some stages have padding layers."""
        return self.num * self.num_stages != self.total

    def exist(self) -> Bool[Array, " n"] | None:
        """Which of this stage's layers are not padding; None: no stage has padding layers."""
        return self._numbers() < self.total if self.has_padding else None

    def of(self, whole: Shaped[Array, "L ..."]) -> Shaped[Array, "n ..."]:
        """This stage's part of an array; a padding layer has that of the last layer."""
        if self.has_padding:
            return whole[jnp.minimum(self._numbers(), self.total - 1)]
        return lax.dynamic_slice_in_dim(whole, self.stage * self.num, self.num)

    def put(
        self, whole: Shaped[Array, "L ..."], part: Shaped[Array, "n ..."]
    ) -> Shaped[Array, "L ..."]:
        """Replace this stage's part of an array by `part`, without that of padding layers."""
        if self.has_padding:
            return whole.at[self._numbers()].set(part, mode="drop")
        return lax.dynamic_update_slice_in_dim(whole, part, self.stage * self.num, 0)

    def _numbers(self) -> Int32[Array, " n"]:
        return self.stage * self.num + jnp.arange(self.num, dtype=jnp.int32)


def passing_padding(layer: Layer) -> Layer:
    """Wrap a layer so that a padding layer returns the carry that it was given."""

    def passing(carry: list[Any], layers: Layers) -> tuple[list[Any], list[Any]]:
        new, stacked = layer(carry, layers)
        _, exists = layers
        if exists is None:
            return new, stacked
        return [lax.select_n(exists, y, x) for x, y in zip(new, carry, strict=True)], stacked

    return passing
