"""Decide which weights, or which gradients, share a collective: those of one layer, where possible.

Every collective has a fixed cost, so values are sent in groups of one layer. A layer is the body of
a loop or, where a program or a body repeats itself, one repetition. Repetitions are found as the
period in the sequence of the values' shapes (`find_repetition`). Values before, between and after
repetitions are joined up to the size of the largest layer or value, so that grouping does not raise
the peak of live weights. `bucket_bytes` bounds every group of several values.

An irregular network repeats itself in small parts, such as the gains of two norms in a row. A
repetition that is too small to be worth a message of its own (`_WORTH`) does not count as a layer.
A group that is too small is joined with a neighbour.

In a loop, the last group of gradients is reduced in the following iterations, if nothing else reads
these gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from .._collectives import ReduceSpec
from .._mesh import LOCAL
from .._program import Block, Loop, Value
from .._sharding import CommSchedule
from .block_plan import ReduceGroup
from .gradient_reductions import BlockGradients

T = TypeVar("T")

_MAX_PERIOD = 512  # values in a repetition
_LEAST_LAYER = 2**18  # the least bytes of a layer, where the body of a loop is cut into layers
_SLACK = 8  # a group may exceed the largest layer by an eighth, to take in biases and norms
# Bytes of a message worth sending: inside a node of 8 it takes twice as long as its launch, at the
# rates that predicted steps assume. In a small program, a part of its largest value.
_WORTH = 8 * 2**20
_SMALL = 16
_FULL = 4 * _WORTH  # what is joined outside of layers: of more, the first would wait for the last


def split_into_groups(
    values: Sequence[T],
    signature: Callable[[T], Hashable],
    num_bytes: Callable[[T], int],
    bucket_bytes: int,
    num_layers: int = 0,
    region: Callable[[T], Hashable] = lambda _: None,
    waits: bool = False,
) -> list[list[T]]:
    """Cut a sequence of values, in the order of their first use, into groups.

    Args:
        values: gathers or gradients.
        signature: returns a key of a value. Keys are equal if two values have the same role in two
            layers; a key may be made of shape and dtype.
        num_bytes: returns the size of a value.
        bucket_bytes: most bytes of a group of several values; 0: each value by itself.
        num_layers: the number of layers in a loop's body, if all values belong to it; 0: they
            belong to no loop. If the body is one layer, it is not searched for repetitions.
        region: returns the region of a value, such as the number of loops before it. Groups of two
            regions are not joined, since the values of one would wait for those of the other.
        waits: whether a group is sent once its last value is made (gradients), rather than before
            its first value is needed (weights). Then a small group is not joined with a large one
            before it: the large one would have to wait for the values of the small one.
    """
    if not bucket_bytes:
        return [[value] for value in values]
    if num_layers == 1:
        return _fill(values, num_bytes, bucket_bytes)
    largest = max(map(num_bytes, values), default=0)
    worth = min(_WORTH, largest // _SMALL)
    runs = _split_at_repetitions(values, signature, num_bytes, worth)
    largest = max([largest, *(sum(map(num_bytes, run)) for run, repeated in runs if repeated)])
    limit = min(bucket_bytes, largest + largest // _SLACK)
    groups: list[list[T]] = []
    for run, repeated in runs:
        groups += _fill(run, num_bytes, *((bucket_bytes,) if repeated else (limit, worth)))
    return _without_small(groups, num_bytes, worth, limit, region, waits)


def layers_of_body(
    values: Sequence[T], signature: Callable[[T], Hashable], num_bytes: Callable[[T], int]
) -> int:
    """Count the layers in the body of a loop; 1 unless repetitions make up nearly all of it.

    A repetition counts as a layer only if it is large enough to be sent by itself and has values of
    several roles, because a single layer may also have several equal matrices in a row.
    """
    runs = _split_at_repetitions(values, signature, num_bytes, _LEAST_LAYER)
    sizes = [(sum(map(num_bytes, run)), is_repeated) for run, is_repeated in runs]
    layers = [size for size, is_repeated in sizes if is_repeated]
    roles = max((len(set(map(signature, run))) for run, repeats in runs if repeats), default=0)
    is_all = sum(layers) * _SLACK >= sum(size for size, _ in sizes) * (_SLACK - 1)
    return len(layers) if roles > 1 and is_all and min(layers) >= _LEAST_LAYER else 1


def find_repetition(
    signatures: Sequence[Hashable], sizes: Sequence[int] | None = None, least: int = 0
) -> tuple[int, int, int] | None:
    """Find the longest part of a sequence that consists of repetitions.

    Args:
        signatures: the signatures of the values of the sequence.
        sizes: the sizes of the values; None: all are 0.
        least: the least size of a repetition.

    Returns:
        `(start, period, times)`, with `times >= 2`; among parts of equal length the one with the
        shortest period. None if nothing is repeated.
    """
    id_of: dict[Hashable, int] = {}
    ids = np.array([id_of.setdefault(s, len(id_of)) for s in signatures])
    before = np.cumsum([0, *(sizes or [0] * len(ids))])
    best = None
    # A run of n positions where `ids[i] == ids[i + period]` holds n // period + 1 repetitions.
    for period in range(1, min(len(ids) // 2, _MAX_PERIOD) + 1):
        same = ids[:-period] == ids[period:]
        if best and np.count_nonzero(same) + period <= best[1] * best[2]:
            continue  # not even one run of all of them would be longer
        same = np.concatenate([[False], same, [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, ends = edges[::2], edges[1::2]
        for start, length in zip(starts.tolist(), (ends - starts).tolist(), strict=True):
            times = length // period + 1
            is_large = before[start + period] - before[start] >= least
            if times >= 2 and is_large and (best is None or times * period > best[1] * best[2]):
                best = (start, period, times)
    return best


def _split_at_repetitions(
    values: Sequence[T],
    signature: Callable[[T], Hashable],
    num_bytes: Callable[[T], int],
    least: int,
) -> list[tuple[list[T], bool]]:
    """Cut a sequence into its repetitions, marked True, and the runs between them, marked False.

    A repetition has at least `least` bytes.
    """
    if not values:
        return []
    found = find_repetition([*map(signature, values)], [*map(num_bytes, values)], least)
    if found is None:
        return [(list(values), False)]
    start, period, times = found
    end = start + period * times
    runs = [(list(values[i : i + period]), True) for i in range(start, end, period)]
    before, after = (
        _split_at_repetitions(part, signature, num_bytes, least)
        for part in (values[:start], values[end:])
    )
    return [*before, *runs, *after]


def _fill(
    values: Sequence[T], num_bytes: Callable[[T], int], limit: int, worth: int = 0
) -> list[list[T]]:
    """Join neighbouring values into groups of at most `limit` bytes; a larger one stays by itself.

    If `worth` is not 0, a group that has reached `worth` bytes takes further values only up to
    `_FULL` bytes.
    """
    groups: list[list[T]] = []
    filled = 0
    for value in values:
        size = num_bytes(value)
        most = min(limit, _FULL) if worth and filled >= worth else limit
        if groups and filled + size <= most:
            groups[-1].append(value)
            filled += size
        else:
            groups.append([value])
            filled = size
    return groups


def _without_small(
    groups: list[list[T]],
    num_bytes: Callable[[T], int],
    worth: int,
    limit: int,
    region: Callable[[T], Hashable],
    waits: bool,
) -> list[list[T]]:
    """Join each group of fewer than `worth` bytes with a neighbour, up to `limit` bytes.

    `region` and `waits` forbid some joins, as in `split_into_groups`.
    """
    joined: list[list[T]] = []
    for group in groups:
        last = joined[-1] if joined else []
        sizes = [sum(map(num_bytes, each)) for each in (last, group)]
        alike = len({*map(region, last), *map(region, group)}) == 1
        would_wait = waits and sizes[0] > _FULL
        if last and alike and min(sizes) < worth and sum(sizes) <= limit and not would_wait:
            last += group
        else:
            joined.append(group)
    return joined


ReduceAxes = Callable[[Sequence[ReduceSpec]], tuple[str, ...]]  # the axes of a bucket, in order


def find_reduce_groups(
    block: Block,
    gradients: BlockGradients,
    zeros: frozenset[Value],
    schedule: CommSchedule,
    axes: ReduceAxes,
    in_loop: bool,
    num_layers: int,
) -> list[ReduceGroup]:
    """Cut the gradients that a block reduces into groups, in the order in which they are made.

    In a loop's body of several layers, each group gets an equal share of the bytes, since the
    program makes the gradients of a layer in no fixed order.

    Args:
        block: the program, or a loop's body.
        gradients: the gradients that the block reduces.
        zeros: gradients that are known to be zero, which get no group.
        schedule: the bucket size; without prefetch, no group is deferred.
        axes: returns the mesh axes of a group, in order, given how its gradients are reduced.
        in_loop: whether the block is a body that may reduce a group in a later iteration.
        num_layers: the number of layers in the body; 0 if the block is no such body.
    """
    makers = {value: i for i, op in enumerate(block.operations) for value in op.outputs}

    def made(value: Value) -> int:
        """Return the index of the operation that makes `value` or what `value` is a view of."""
        at = makers.get(value, -1)
        operation = block.operations[at] if at >= 0 else None
        is_view = operation and operation.view() is not None and operation.source in makers
        return max(map(made, operation.values)) if operation and is_view else at

    reduced = sorted((value for value in gradients.reduces if value not in zeros), key=made)

    def signature(value: Value) -> tuple:
        reduce_spec = gradients.reduces[value]
        return value.shape, value.dtype, reduce_spec.layout.dim, reduce_spec.hops

    is_layer = in_loop and not gradients.sums
    limit = schedule.bucket_bytes
    if num_layers > 1:
        layer = sum(x.num_bytes for x in reduced) // num_layers
        limit = min(limit, layer + layer // _SLACK)
    loops = np.cumsum([0, *(isinstance(operation, Loop) for operation in block.operations)])
    # Leaves of `Ungathered` get groups of their own: their gradients are not reduced over `local`.
    kinds = [
        [x for x in reduced if (LOCAL in gradients.reduces[x].hops) is y] for y in (True, False)
    ]
    groups = [
        group
        for values in kinds
        for group in split_into_groups(
            values,
            signature,
            lambda x: x.num_bytes,
            limit,
            1 if is_layer else 0,
            region=lambda x: int(loops[makers.get(x, 0)]),
            waits=True,
        )
    ]
    last_made = [max(makers.get(x, -1) for x in values) for values in groups]
    reduce_groups = [
        ReduceGroup(tuple(values), at, axes=axes([gradients.reduces[x] for x in values]))
        for at, values in sorted(zip(last_made, groups, strict=True), key=lambda x: x[0])
    ]
    return (
        _last_deferred(block, gradients, reduce_groups)
        if in_loop and schedule.prefetch
        else reduce_groups
    )


def _last_deferred(
    block: Block, gradients: BlockGradients, reduces: list[ReduceGroup]
) -> list[ReduceGroup]:
    """Return the groups of a loop's body, the last marked as reduced in the next iteration.

    No group is marked if an operation combines gradients of that group with values outside of it:
    the two would be reduced in different iterations.
    """
    if not reduces:
        return reduces
    deferred = set(reduces[-1].values)
    for index in sorted(gradients.on_shards):
        operation = block.operations[index]
        inputs = {x for x in operation.inputs if isinstance(x, Value)}
        if deferred & inputs:
            if not inputs <= deferred:
                return reduces
            deferred.update(operation.outputs)
    return [*reduces[:-1], dataclasses.replace(reduces[-1], deferred=True)]
