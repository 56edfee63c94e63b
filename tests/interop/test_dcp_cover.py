"""Whether chunks cover an array exactly once, against counting element by element."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from jaxzero.interop._torch.dcp import covers_exactly


def counted(shape, boxes) -> np.ndarray:
    """How many boxes each element is in, element by element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(*bounds) for bounds in box)] += 1
    return counts


def grid(*sizes: tuple[int, ...]) -> list:
    """Boxes that divide each dim into parts of the given sizes."""
    bounds = [
        list(zip([0, *itertools.accumulate(parts)][:-1], itertools.accumulate(parts), strict=True))
        for parts in sizes
    ]
    return list(itertools.product(*bounds))


def test_cover_against_counting():
    rng = random.Random(0)
    exact = 0
    for _ in range(2000):
        shape = (4, 6, 2)
        boxes = grid(
            rng.choice([(4,), (1, 3)]),
            rng.choice([(6,), (2, 4), (1,) * 6]),
            rng.choice([(2,), (1, 1)]),
        )
        for _ in range(rng.choice([0, 0, 1, 2])):
            at, dim = rng.randrange(len(boxes)), rng.randrange(3)
            start, stop = sorted(rng.sample(range(shape[dim] + 1), 2))
            boxes[at] = (*boxes[at][:dim], (start, stop), *boxes[at][dim + 1 :])
        expected = bool((counted(shape, boxes) == 1).all())
        assert covers_exactly(shape, boxes) == expected
        exact += expected
    assert 500 < exact < 1800


@pytest.mark.parametrize("count", [65, 100, 5000])
def test_an_overlap_and_a_gap_among_many_chunks(count: int):
    boxes = [((row, row + 1), (0, 3)) for row in range(count)]
    assert covers_exactly((count, 3), boxes)
    # As many elements as before: two rows in the last place of a column, none in that of another.
    boxes[10] = ((10, 11), (0, 2))
    boxes[40] = ((40, 41), (0, 3))
    boxes.append(((50, 51), (1, 2)))
    assert not covers_exactly((count, 3), boxes)
    assert counted((count, 3), boxes).sum() == 3 * count


def test_corners_of_covers():
    assert covers_exactly((), [()])
    assert not covers_exactly((), [])
    assert not covers_exactly((), [(), ()])
    assert covers_exactly((0, 3), [])
    assert not covers_exactly((2,), [])
    assert covers_exactly((2, 0), [])
    with pytest.raises(ValueError, match="chunks divide 5 dimensions, and at most 4"):
        covers_exactly((2,) * 5, [((0, 1),) * 5])
