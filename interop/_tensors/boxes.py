"""Arithmetic of boxes. A box is one range of indices per dimension of a tensor."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

MAX_DIMS = 64  # limit of numpy and of PyTorch

Box = tuple[tuple[int, int], ...]  # (start, stop) per dimension; not empty, within the shape


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of an array that holds the elements of a box."""
    return tuple(stop - start for start, stop in box)


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


def common_box(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(x, z), min(y, w)) for (x, y), (z, w) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def slices_within(part: Box, box: Box) -> tuple[slice, ...]:
    """Return slices into an array that holds the elements of `box`; they select the box `part`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(part, box, strict=True)
    )


def joined(boxes: list[Box]) -> list[Box]:
    """Join disjoint boxes that are adjacent along one dimension and equal along the others."""
    boxes = sorted(boxes)
    for dim in reversed(range(len(boxes[0]) if boxes else 0)):
        rows: dict[Box, list[tuple[int, int]]] = {}
        for box in boxes:
            held = rows.setdefault(replaced(box, dim, (0, 0)), [])
            if held and held[-1][1] == box[dim][0]:
                held[-1] = (held[-1][0], box[dim][1])
            else:
                held.append(box[dim])
        boxes = sorted(replaced(rest, dim, held) for rest, row in rows.items() for held in row)
    return boxes


def replaced(entries: tuple, position: int, entry: object) -> tuple:
    """Return a tuple with `entry` in place of the entry at `position`."""
    return (*entries[:position], entry, *entries[position + 1 :])


def with_places(parts: list[Box]) -> list[tuple[Box, slice]]:
    """Pair each box with its slice in a flat array of all boxes' elements, box after box."""
    ends = list(itertools.accumulate(math.prod(box_shape(part)) for part in parts))
    starts = [0, *ends[:-1]]
    return [(part, slice(start, end)) for part, start, end in zip(parts, starts, ends, strict=True)]


def groups_of(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Divide the dimensions of two shapes into groups whose products of sizes are equal.

    A reshape from `old` to `new` mixes only dimensions of one group. There are as many groups as
    possible.

    Returns:
        For each group, its dimensions of `old` and its dimensions of `new`, adjacent in each.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        group: tuple[list[int], list[int]] = ([], [])
        left = right = 1
        while True:
            if left <= right and i < len(old) and (left < right or not group[0]):
                group[0].append(i)
                left, i = left * old[i], i + 1
            elif j < len(new) and (right < left or not group[1]):
                group[1].append(j)
                right, j = right * new[j], j + 1
            else:
                break
        groups.append(group)
    return groups


def runs(shape: tuple[int, ...], box: Box) -> tuple[np.ndarray, int]:
    """Divide a box into maximal runs of elements that are adjacent in row-major order of `shape`.

    Returns:
        The numbers of the first elements of the runs, in ascending order, int64 [runs]; and the
        number of elements in each run. `shape` must have fewer than 2**63 elements.
    """
    whole = len(shape)  # the box covers all dimensions from this one on
    while whole and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    size = math.prod(shape[whole:])
    if not whole:
        return np.zeros(1, np.int64), size
    start, stop = box[whole - 1]
    firsts, length = np.array([start * size], np.int64), (stop - start) * size
    for dim in reversed(range(whole - 1)):
        size *= shape[dim + 1]
        firsts = (np.arange(*box[dim])[:, None] * size + firsts).reshape(-1)
    return firsts, length


def boxes_of_run(sizes: list[int], run: tuple[int, int]) -> Iterator[Box]:
    """Divide consecutive elements of a tensor into boxes, in the order of the elements.

    Args:
        sizes: shape of the tensor.
        run: numbers of the run's first element and of the one after its last, in row-major order.
    """
    start, stop = run
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner  # rows that are whole
    if first > last:  # inside one row
        row = start // inner
        for part in boxes_of_run(sizes[1:], (start - row * inner, stop - row * inner)):
            yield ((row, row + 1), *part)
        return
    if start < first * inner:
        for part in boxes_of_run(sizes[1:], (start - (first - 1) * inner, inner)):
            yield ((first - 1, first), *part)
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    if last * inner < stop:
        for part in boxes_of_run(sizes[1:], (0, stop - last * inner)):
            yield ((last, last + 1), *part)


def boxes_by_group(box: Box, shape: tuple[int, ...], other: tuple[int, ...]) -> list[list[Box]]:
    """Divide a box of a tensor of `shape` into boxes of the tensor reshaped to `other`.

    Returns:
        For each group of dimensions (`groups_of`) a list of boxes over its dimensions of `other`,
        in the order of the elements of `box`. A box of the reshaped tensor combines one box of each
        group.
    """
    per_group = []
    for dims, other_dims in groups_of(shape, other):
        firsts, length = runs(tuple(shape[dim] for dim in dims), tuple(box[dim] for dim in dims))
        sizes = [other[dim] for dim in other_dims]
        held = ((first, first + length) for first in firsts.tolist())
        per_group.append([part for run in held for part in boxes_of_run(sizes, run)])
    return per_group
