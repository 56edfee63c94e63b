"""Decide which weights or gradients share a collective: one group for each layer, where possible.

Every collective has a fixed cost, so values are sent in groups. A group is a layer: the body of a
loop, or, where a program repeats itself, one repetition, found as the period in the sequence of
shapes (`find_repetition`). Values before, between and after repetitions are joined up to the size
of the largest layer or value, so that grouping does not raise the peak of live weights.
`bucket_bytes` bounds every group of several values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_MAX_PERIOD = 512  # values in a repetition
_SLACK = 8  # a group may exceed the largest layer by an eighth, to take in biases and norms


def split_into_groups(
    values: Sequence[T],
    signature: Callable[[T], Hashable],
    num_bytes: Callable[[T], int],
    bucket_bytes: int,
    is_layer: bool,
) -> list[list[T]]:
    """Cut a sequence of values, in the order of their first use, into groups.

    Args:
        values: gathers or gradients.
        signature: a key that is equal for two values with the same role in two layers, such as
            shape and dtype.
        num_bytes: size of a value.
        bucket_bytes: most bytes of a group of several values; 0: each value by itself.
        is_layer: whether all values belong to one layer, the body of a loop.
    """
    if not bucket_bytes:
        return [[value] for value in values]
    if is_layer:
        return _fill(values, num_bytes, bucket_bytes)
    runs = _split_at_repetitions(values, signature)
    repetitions = [run for run in runs if run[1]]
    largest = max((sum(map(num_bytes, run)) for run, _ in repetitions), default=0)
    largest = max(largest, max(map(num_bytes, values), default=0))
    limit = min(bucket_bytes, largest + largest // _SLACK)
    groups: list[list[T]] = []
    for run, repeated in runs:
        groups += _fill(run, num_bytes, bucket_bytes if repeated else limit)
    return groups


def find_repetition(signatures: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """Find the longest part of a sequence that consists of repetitions.

    Returns:
        `(start, period, times)`, with `times >= 2`; among parts of equal length the one with the
        shortest period. None if nothing is repeated.
    """
    id_of: dict[Hashable, int] = {}
    ids = np.array([id_of.setdefault(s, len(id_of)) for s in signatures])
    best = None
    # A run of n positions where `ids[i] == ids[i + period]` holds n // period + 1 repetitions.
    for period in range(1, min(len(ids) // 2, _MAX_PERIOD) + 1):
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, ends = edges[::2], edges[1::2]
        for start, length in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
            times = length // period + 1
            if times >= 2 and (best is None or times * period > best[1] * best[2]):
                best = (start, period, times)
    return best


def _split_at_repetitions(
    values: Sequence[T], signature: Callable[[T], Hashable]
) -> list[tuple[list[T], bool]]:
    """Cut a sequence into repetitions (True), and the runs between them (False)."""
    if not values:
        return []
    found = find_repetition([signature(value) for value in values])
    if found is None:
        return [(list(values), False)]
    start, period, times = found
    end = start + period * times
    runs = [(list(values[i : i + period]), True) for i in range(start, end, period)]
    before = _split_at_repetitions(values[:start], signature)
    return [*before, *runs, *_split_at_repetitions(values[end:], signature)]


def _fill(values: Sequence[T], num_bytes: Callable[[T], int], limit: int) -> list[list[T]]:
    """Join neighbours into groups of at most `limit` bytes; a larger value stays by itself."""
    groups: list[list[T]] = []
    filled = 0
    for value in values:
        size = num_bytes(value)
        if groups and filled + size <= limit:
            groups[-1].append(value)
            filled += size
        else:
            groups.append([value])
            filled = size
    return groups
