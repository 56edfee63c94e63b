"""Cut one device's shard of a leaf into equal parts along one dim: one part for each fragment."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where the parts of a shard lie.

    If the number of parts does not divide the cut dim, the last parts begin earlier and overlap
    with those before them; `is_new` tells which elements belong to a part. A scalar is one part of
    its own, which belongs to the first fragment.

    Attributes:
        shape: of the shard.
        dim: the cut dim.
        num: the number of parts.
    """

    shape: tuple[int, ...]
    dim: int
    num: int

    @classmethod
    def of(cls, shape: tuple[int, ...], num: int) -> Cut:
        """Cut along the first dim that divides evenly, otherwise along the largest."""
        even = [dim for dim, size in enumerate(shape) if size and size % num == 0]
        largest = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
        return cls(shape, even[0] if even else largest, num)

    @property
    def size(self) -> int:
        """The size of a part along the cut dim."""
        return math.ceil(self.shape[self.dim] / self.num) if self.shape else 1

    @property
    def part_shape(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def _is_all(self) -> bool:
        return self.part_shape == self.shape

    def _start(self, number: Array) -> Array:
        return jnp.minimum(number * self.size, self.shape[self.dim] - self.size)

    def read(self, x: Shaped[Array, ...], number: Array) -> Shaped[Array, ...]:
        """Part `number` of the shard."""
        if self._is_all:
            return x
        return lax.dynamic_slice_in_dim(x, self._start(number), self.size, self.dim)

    def write(
        self, x: Shaped[Array, ...], part: Shaped[Array, ...], number: Array
    ) -> Shaped[Array, ...]:
        """The shard with part `number` replaced, where it is new."""
        new = self.is_new(number)
        if new is not None:
            part = jnp.where(new, part, self.read(x, number))
        if self._is_all:
            return part
        return lax.dynamic_update_slice_in_dim(x, part, self._start(number), self.dim)

    def is_new(self, number: Array) -> Bool[Array, ...] | None:
        """Which elements of a part are in none before it; None: all of them."""
        if not self.shape:
            return number == 0 if self.num > 1 else None
        if self.shape[self.dim] % self.num == 0:
            return None
        position = lax.broadcasted_iota(jnp.int32, self.part_shape, self.dim)
        return self._start(number) + position >= number * self.size
