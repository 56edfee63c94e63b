"""Represent sums over devices: as messages not yet added up, or together with a half-batch sum.

SimiGrad compares the gradients of two half-batches, and needs the sum over the first half of the
devices in addition to the sum over all devices (`CommSpec.halves`). Both sums are taken on the
receiving device, from the shards that all its peers sent, so the second sum sends no more bytes.
Without half-batches, gradients without a codec are summed by a reduce-scatter; with them, their
shards are exchanged all-to-all and summed here, as encoded ones always are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Shaped

from .. import pallas_kernels as kernels
from .._codecs import Codec
from ..pallas_kernels import add_up


@dataclasses.dataclass(frozen=True)
class HalfBatchSum:
    """The sum over all devices along an axis, together with the sum over the first half of them.

    It is a pytree, so that linear operations can be mapped over both sums.

    Attributes:
        total: sum over all devices.
        first: sum over the first half.
    """

    total: Shaped[Array, ...]
    first: Shaped[Array, ...]

    @classmethod
    def of(cls, x: Shaped[Array, "devices ..."], half: int) -> HalfBatchSum:
        """Sum `x` over dim 0; the first `half` entries of dim 0 are the first half."""
        return cls(add_up(x), add_up(x[:half]))


jax.tree_util.register_dataclass(HalfBatchSum, ["total", "first"], [])

Sum = Array | HalfBatchSum


@dataclasses.dataclass(frozen=True)
class PartialSums:
    """The messages that one device received for its shard of a sum, not decoded yet.

    If the sum is encoded again for the next axis, the codec can decode, sum and encode in one
    kernel (`Codec.recode`), so the sum is taken as late as possible.

    Attributes:
        message: one row from each sender; `InPlace` is a range of columns of a larger array. If
            `tiled`, messages of `Codec.encode_tiled`, `[senders, ...]`. None if the kernel that
            received them has added them up (`kernel_hop`).
        codec: the codec of the messages.
        shape: shape of the sum.
        num_summed: number of devices over which each message is a mean.
        tiled: whether the messages are tiled.
        decoded: the result of `total`, if `decoded_together` or a kernel has computed it.
    """

    message: Shaped[Array, "num ..."] | kernels.InPlace | None
    codec: Codec
    shape: tuple[int, ...]
    num_summed: int = 1
    tiled: bool = False
    decoded: Float32[Array, ...] | None = None

    @jax.named_scope("decode")
    def total(self) -> Shaped[Array, ...]:
        """Decode the messages and return their sum, added in float32.

        It is the sum over the devices of this axis and of the axes that were reduced before.
        """
        if self.decoded is not None:
            return self.decoded
        assert self.message is not None
        if self.tiled:
            assert not isinstance(self.message, kernels.InPlace)
            total = self.codec.sum_tiled(self.message, self.shape)
        else:
            num = math.prod(self.shape)
            total = self.codec.decode_sum(self.message, num).reshape(self.shape)
        return total if self.num_summed == 1 else total * jnp.float32(self.num_summed)

    def halved(self, half: int) -> HalfBatchSum:
        """Decode the messages; return their sum, and the sum of the first `half` of them."""
        assert self.message is not None, "`check_kernel_hops` refuses sums over half of the devices"
        if self.tiled:
            assert not isinstance(self.message, kernels.InPlace)
            first = self.message[:half]
        else:
            first = kernels.InPlace.whole(self.message).rows(half)
        of_half = dataclasses.replace(self, message=first, decoded=None)
        return HalfBatchSum(self.total(), of_half.total())


def summed_by_kernel(total: Float32[Array, ...], codec: Codec) -> PartialSums:
    """Wrap the result of a reduction by one kernel as `PartialSums` that are added up already."""
    return PartialSums(None, codec, tuple(total.shape), decoded=total)


def decoded_together(sums: Sequence[PartialSums]) -> list[PartialSums]:
    """Return the same sums, with neighbours decoded and added up as one array where possible.

    It is possible if their codec is joinable and their messages are side by side in one array.
    Decoded one by one, each sum takes several operations for each sender, and a program of unrolled
    layers has as many sums as layers times weights. The results are equal bit for bit.
    """
    result: list[PartialSums] = []
    for parts in _joinable(sums):
        if len(parts) == 1:
            result += parts
            continue
        first = parts[0].message
        assert isinstance(first, kernels.InPlace)
        sizes = [math.prod(x.shape) for x in parts]
        messages = [x.message for x in parts if isinstance(x.message, kernels.InPlace)]
        joined = dataclasses.replace(first, size=sum(x.size for x in messages))
        total = dataclasses.replace(parts[0], message=joined, shape=(sum(sizes),)).total()
        for x, size, end in zip(parts, sizes, itertools.accumulate(sizes), strict=True):
            decoded = lax.slice_in_dim(total, end - size, end).reshape(x.shape)
            result.append(dataclasses.replace(x, decoded=decoded))
    return result


def _joinable(sums: Sequence[PartialSums]) -> list[list[PartialSums]]:
    """Group `sums`, in order, into runs whose messages can be decoded as one array."""
    runs: list[list[PartialSums]] = []
    for x in sums:
        if runs and _continues(runs[-1][-1], x):
            runs[-1].append(x)
        else:
            runs.append([x])
    return runs


def _continues(x: PartialSums, y: PartialSums) -> bool:
    """Return whether `x` and `y` can be decoded as one array.

    They can if their codecs are equal and joinable, and the columns of `y` follow those of `x`.
    """
    before, after = x.message, y.message
    return (
        x.codec.is_joinable
        and x.codec == y.codec
        and isinstance(before, kernels.InPlace)
        and isinstance(after, kernels.InPlace)
        and before.array is after.array
        and before.count == after.count == 1
        and before.start + before.size == after.start
    )


def total_of(x: Array | PartialSums) -> Array:
    """Return `x` if it is an array; decode and add up `PartialSums`."""
    return x.total() if isinstance(x, PartialSums) else x


def sum_of(x: Sum | PartialSums, half: int) -> Sum:
    """Add up `PartialSums`; return any other sum unchanged.

    If `half` is not 0, the result is a `HalfBatchSum`: it also has the sum over the first `half`
    senders.
    """
    if not isinstance(x, PartialSums):
        return x
    return x.halved(half) if half else x.total()


def as_pair(x: Any) -> tuple[Any, HalfBatchSum | None]:
    """Split a sum into an array and an optional half-batch sum.

    Returns `(x.total, x)` for a `HalfBatchSum`, and `(x, None)` for any other sum.
    """
    return (x.total, x) if isinstance(x, HalfBatchSum) else (x, None)
