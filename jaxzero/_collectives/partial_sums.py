"""What the devices of a hop add up: messages that arrived, and sums with that of the first half.

The sum over the first half of the devices is wanted where the gradients of two halves of a batch
are compared (`half_batches`). It is taken where the pieces of all devices are at hand, and moves no
byte.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .. import pallas_kernels as kernels
from .._codecs import Codec
from ..pallas_kernels import add_up


@dataclasses.dataclass(frozen=True)
class HalfBatchSum:
    """A sum over devices. What is linear is done to both of its parts alike.

    Attributes:
        total: over all devices.
        first: over the first half of them.
    """

    total: Shaped[Array, ...]
    first: Shaped[Array, ...]

    @classmethod
    def of(cls, x: Shaped[Array, "devices ..."], half: int) -> HalfBatchSum:
        """Sum over the leading dim, of which `half` are the first half."""
        return cls(add_up(x), add_up(x[:half]))


jax.tree_util.register_dataclass(HalfBatchSum, ["total", "first"], [])

Sum = Array | HalfBatchSum


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """What the devices of a hop sent of one array that they sum.

    Where the sum is written again for the next hop, its codec takes it on the way.

    Attributes:
        message: from each device, where it arrived.
        codec: that wrote them.
        shape: of the sum.
        summed: of how many devices each is the mean.
    """

    message: Shaped[Array, "num m"] | kernels.InPlace
    codec: Codec
    shape: tuple[int, ...]
    summed: int = 1

    @jax.named_scope("decode")
    def total(self) -> Shaped[Array, ...]:
        """Decoded and summed in float32."""
        total = self.codec.decode_sum(self.message, math.prod(self.shape)).reshape(self.shape)
        return total if self.summed == 1 else total * jnp.float32(self.summed)

    def halved(self, half: int) -> HalfBatchSum:
        """The same, of all and of the first `half` of the devices."""
        first = kernels.InPlace.whole(self.message).rows(half)
        return HalfBatchSum(self.total(), dataclasses.replace(self, message=first).total())


def total_of(x: Array | PartialSums) -> Array:
    """An array; the sum, if it is not taken yet."""
    return x.total() if isinstance(x, PartialSums) else x


def sum_of(x: Sum | PartialSums, half: int) -> Sum:
    """The sum, if it is not taken yet; also of the first `half` of the devices, unless 0."""
    if not isinstance(x, PartialSums):
        return x
    return x.halved(half) if half else x.total()


def as_pair(x: Any) -> tuple[Any, HalfBatchSum | None]:
    """A sum over devices; and the same in halves, if it has them."""
    return (x.total, x) if isinstance(x, HalfBatchSum) else (x, None)
