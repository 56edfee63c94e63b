"""`State` says how a value depends on the rows of the batch; `row_mixing` computes the states.

The `n` rows of one call on a device may be a dim of an array, a part of a dim (after a reshape that
merged dims), or several dims (after one that split it). So each dim is written as *parts*, from the
major to the minor part. A part is `(size, stride)`: index `i` along a part adds `i * stride` to the
number of the row, so a part of stride 0 has no rows. `[n, t]` merged to one dim is `((n, 1), (t,
0))`. `[n]` cut into groups of 4 rows is two dims, `((n / 4, 4),)` and `((4, 1),)`.

The part with `size * stride == n` is the *outer* one. While a value has the outer part, each
element belongs to one group of neighbouring rows. A sum over other parts adds up rows inside a
group, which lies on one device. A sum over the outer part adds up all rows of a device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Part = tuple[int, int]  # size, stride
Parts = tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Mixing:
    """An operation that combines several rows of the batch, and is neither a sum nor a mean.

    Sums and means over rows are no mixings, as long as the result is linear in them (see `Sum`).

    Attributes:
        kind: "statistic": a sum over rows is combined with rows again; "function": a function of a
            sum; "product" or "ratio" of two sums; "pairs": values of two rows meet; "order": a sort
            of rows; "extreme": another reduction of rows, such as a maximum; "key": all devices
            draw equal random bits.
        source: the operation over rows, such as a sum; for "ratio" and "pairs" the one where two
            values meet; for "key" the one that draws random bits.
        at: the operation that uses what `source` makes.
        is_mean: whether `source` is a sum that is divided by a number.
    """

    kind: str
    source: Any
    at: Any
    is_mean: bool = False


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over all rows of a device. A value is linear in the sums of its `State`."""

    operation: Any
    is_mean: bool = False  # whether it is divided by a number


@dataclasses.dataclass(frozen=True)
class State:
    """How a value depends on rows.

    Attributes:
        rows: for each dim with rows, its parts. Inside a loop over rows, the row of the current
            iteration has a negative number in place of a dim.
        sums: the sums over rows that the value is linear in.
        mixings: the mixings that the value depends on. If there are any, one device with all rows
            would compute another value.
        noise: the operations that drew random bits, equal on all devices, which the value depends
            on.
        noise_dims: the dims along which these bits differ.
        differs: whether the value depends on the index of the device or micro-batch.
        settled: the mesh axes over which a collective has combined the value.
        index: `(dim, columns)` if the value holds indices, as an `iota` does: each element equals
            its own index along `dim`, in these columns of the last dim (None: in all). None if it
            holds no indices.
        is_known: False for the result of an operation without a rule: nothing is said about it.
    """

    rows: tuple[tuple[int, Parts], ...] = ()
    sums: frozenset[Sum] = frozenset()
    mixings: frozenset[Mixing] = frozenset()
    noise: frozenset[Any] = frozenset()
    noise_dims: frozenset[int] = frozenset()
    differs: bool = False
    settled: frozenset[str] = frozenset()
    index: tuple[int, frozenset[int] | None] | None = None
    is_known: bool = True

    def parts(self, dim: int) -> Parts | None:
        """Return the parts of a dim; None if it has no rows."""
        for key, parts in self.rows:
            if key == dim:
                return parts
        return None

    @property
    def depends(self) -> bool:
        """Whether the value is computed from rows of this device."""
        return bool(self.rows or self.sums)


CONSTANT = State()


def unknown(*states: State) -> State:
    """Return the state of a result of an operation without a rule, given the inputs' states."""
    return State(
        mixings=frozenset().union(*(x.mixings for x in states)),
        differs=any(x.differs for x in states),
        settled=settled(states),
        is_known=not any(x.depends or not x.is_known for x in states),
    )


def settled(states: Sequence[State]) -> frozenset[str]:
    """Return the axes over which collectives have combined every input that depends on rows."""
    found = [x.settled for x in states if x.depends or x.mixings or not x.is_known]
    return frozenset.intersection(*found) if found else frozenset()


def as_rows(rows: Mapping[int, Parts]) -> tuple[tuple[int, Parts], ...]:
    """Return the dims that have rows, sorted, in the form of `State.rows`."""
    kept = {dim: simplified(parts) for dim, parts in rows.items() if _has_rows(parts)}
    return tuple(sorted(kept.items()))


def _has_rows(parts: Parts) -> bool:
    return any(stride for _, stride in parts)


def simplified(parts: Parts) -> Parts:
    """Write a dim in as few parts as possible. Parts of one element that have rows stay."""
    joined: list[Part] = []
    for size, stride in parts:
        if size == 1 and not stride:
            continue
        if joined:
            before, outer = joined[-1]
            if not stride and not outer or stride and before > 1 and outer == size * stride:
                joined[-1] = before * size, stride
                continue
        joined.append((size, stride))
    return tuple(joined)


def has_outer(rows: Sequence[tuple[int, Parts]], n: int) -> bool:
    """Return whether one of the dims `rows` has the outer part of `n` rows."""
    return any(size * stride == n for _, parts in rows for size, stride in parts)


def is_paired(rows: Sequence[tuple[int, Parts]], n: int) -> bool:
    """Return whether two dims have an outer part: elements are then pairs of rows or groups."""
    outer = [size for _, parts in rows for size, stride in parts if size * stride == n]
    return len([size for size in outer if size > 1]) > 1


def merged(left: Parts | None, right: Parts | None) -> Parts | None:
    """Return the parts of a dim of an elementwise result, given the parts in both inputs.

    Raises:
        NotAligned: different rows of the two inputs meet.
    """
    if left is None or right is None or left == right:
        return left if right is None else right
    one, two, common = [*reversed(left)], [*reversed(right)], []
    while one and two:
        (size, stride), (other_size, other) = one.pop(), two.pop()
        if size != other_size:
            longer, shorter = (one, other_size) if size > other_size else (two, size)
            whole, of = (size, stride) if size > other_size else (other_size, other)
            if whole % shorter:
                raise NotAligned
            rest = whole // shorter
            longer.append((rest, of))
            if size > other_size:
                stride = stride * rest
            else:
                other = other * rest
            size = shorter
        if stride and other and stride != other:
            raise NotAligned
        common.append((size, stride or other))
    if math.prod(x for x, _ in one + two) != 1:
        raise NotAligned
    return simplified(tuple([*common, *reversed(one), *reversed(two)]))


class NotAligned(Exception):
    """Raised if different rows may meet, or a reshape cuts across rows: the result is unknown."""


def _num_ones(sizes: Iterable[int]) -> int:
    """Return how many of the leading sizes are 1."""
    return len([*itertools.takewhile(lambda x: x == 1, sizes)])


def reshaped(rows: Mapping[int, Parts], old: Sequence[int], new: Sequence[int], n: int) -> Any:
    """Return the parts of the dims after a reshape from shape `old` to `new`, by dim.

    `rows` has the parts of dims with rows before the reshape, by dim; `n` is the number of rows.

    Raises:
        NotAligned: the new dims cut across parts.
    """
    if 0 in old:
        raise NotAligned
    parts = [x for dim, size in enumerate(old) for x in rows.get(dim, ((size, 0),))]
    left = [*reversed(parts)]
    by_dim: dict[int, Parts] = {dim: x for dim, x in rows.items() if dim < 0}
    for dim, wanted in enumerate(new):
        taken, size = [], 1
        while size < wanted:
            if not left:
                raise NotAligned
            (num, stride), need = left.pop(), wanted // size
            if num > need:
                if num % need:
                    raise NotAligned
                left.append((num // need, stride))
                num, stride = need, stride * (num // need)
            taken.append((num, stride))
            size *= num
        if size != wanted:
            raise NotAligned
        # Parts of one element go to dims of one element, if there are such, to the first of them.
        if wanted == 1 and left and left[-1][0] == 1:
            taken.append(left.pop())
        while _num_ones(x for x, _ in reversed(left)) > _num_ones(new[dim + 1 :]):
            taken.append(left.pop())
        by_dim[dim] = tuple(taken)
    # `x.reshape(-1, group)` where a device has one group: with more rows it would have several.
    if n > 1 and sum(x == 1 for x in new) > sum(x == 1 for x in old):
        for dim in range(1, len(new)):
            outer = by_dim[dim][:1]
            if new[dim - 1] == 1 and outer and outer[0][0] > 1 and math.prod(outer[0]) == n:
                by_dim[dim - 1] = ((1, n),)
    return by_dim
