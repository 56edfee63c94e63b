"""Which values are sent together: one message for each unit, and not one for each value.

A unit is what a person would call a layer: the body of a loop, or the values of one
repetition, where a program repeats itself, found as the period of the sequence of shapes
(`find_repetition`). What lies before, between and after is joined as long as no message
gets larger than the largest that the block needs anyway: so units cost no memory.
`bucket_bytes` bounds them all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_MAX_PERIOD = 512  # values in a repetition
_SLACK = 8  # a message that is full may grow by an eighth, for small values


def group(
    values: Sequence[T],
    signature: Callable[[T], Hashable],
    num_bytes: Callable[[T], int],
    bucket_bytes: int,
    is_layer: bool,
) -> list[list[T]]:
    """Cut a sequence of values, in the order of their first use, into units.

    Args:
        values: to be sent.
        signature: what two values have in common that play the same part in two layers.
        num_bytes: of one value.
        bucket_bytes: the most bytes of a unit of several values; 0: each by itself.
        is_layer: whether all of them are one layer: the body of a loop.
    """
    if not bucket_bytes:
        return [[value] for value in values]
    if is_layer:
        return _fill(values, num_bytes, bucket_bytes)
    runs = _runs(values, signature)
    repetitions = [run for run in runs if run[1]]
    largest = max((sum(map(num_bytes, run)) for run, _ in repetitions), default=0)
    largest = max(largest, max(map(num_bytes, values), default=0))
    limit = min(bucket_bytes, largest + largest // _SLACK)
    gather_groups: list[list[T]] = []
    for run, repeated in runs:
        gather_groups += _fill(run, num_bytes, bucket_bytes if repeated else limit)
    return gather_groups


def find_repetition(signatures: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """The longest stretch of a sequence that repeats itself.

    Returns:
        `(start, period, times)`, with `times >= 2`; of stretches of equal length the one
        with the shortest period. None: nothing is repeated.
    """
    known: dict[Hashable, int] = {}
    ids = np.array([known.setdefault(s, len(known)) for s in signatures])
    best = None
    for period in range(1, min(len(ids) // 2, _MAX_PERIOD) + 1):
        same = np.concatenate([[False], ids[:-period] == ids[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, ends = edges[::2], edges[1::2]
        for start, length in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
            times = length // period + 1
            if times >= 2 and (best is None or times * period > best[1] * best[2]):
                best = (start, period, times)
    return best


def _runs(values: Sequence[T], signature: Callable[[T], Hashable]) -> list[tuple[list[T], bool]]:
    """Repetitions (True), and what lies between."""
    if not values:
        return []
    found = find_repetition([signature(value) for value in values])
    if found is None:
        return [(list(values), False)]
    start, period, times = found
    end = start + period * times
    runs = [(list(values[i : i + period]), True) for i in range(start, end, period)]
    return [*_runs(values[:start], signature), *runs, *_runs(values[end:], signature)]


def _fill(values: Sequence[T], num_bytes: Callable[[T], int], limit: int) -> list[list[T]]:
    """Join neighbours up to a limit."""
    gather_groups: list[list[T]] = []
    filled = 0
    for value in values:
        size = num_bytes(value)
        if gather_groups and filled + size <= limit:
            gather_groups[-1].append(value)
            filled += size
        else:
            gather_groups.append([value])
            filled = size
    return gather_groups
