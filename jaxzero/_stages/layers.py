"""Assign layers to stages, and pad the layers of the last stages.

`S` stages of `L` layers run `n = ceil(L / S)` layers each; stage `s` runs those from number `s n`
on. If `S` does not divide `L`, the last stages have fewer layers, and are padded with layers whose
weights are zeros. A padding layer may compute NaN, so its results are dropped: it returns the carry
that it was given, its gradients are masked like those of a missing micro-batch, and its other
outputs are never read.
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
    """The numbers of the layers that this stage runs.

    Attributes:
        total: how many layers all stages have together.
        num_stages: how many stages there are.
        stage: the number of this stage.
    """

    total: int
    num_stages: int
    stage: Array

    @property
    def num(self) -> int:
        """How many layers a stage runs, padding layers included."""
        return -(-self.total // self.num_stages)

    @property
    def has_padding(self) -> bool:
        """Whether some stages have padding layers."""
        return self.num * self.num_stages != self.total

    def exist(self) -> Bool[Array, " n"] | None:
        """Return a mask of this stage's layers, False for padding; None if no stage has padding."""
        return self._numbers() < self.total if self.has_padding else None

    def of(self, whole: Shaped[Array, "L ..."]) -> Shaped[Array, "n ..."]:
        """Return this stage's layers of an array; padding layers are copies of the last layer."""
        if self.has_padding:
            return whole[jnp.minimum(self._numbers(), self.total - 1)]
        return lax.dynamic_slice_in_dim(whole, self.stage * self.num, self.num)

    def put(
        self, whole: Shaped[Array, "L ..."], part: Shaped[Array, "n ..."]
    ) -> Shaped[Array, "L ..."]:
        """Return `whole` with this stage's layers replaced by `part`, whose padding is not used."""
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
