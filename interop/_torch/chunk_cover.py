"""Whether chunks cover a tensor exactly: each element is in one chunk, none in two.

The number of chunks that hold an element is a function on the grid of elements. Its mixed
difference, taken along every dimension, is zero except at corners of chunks: a corner gets +1 if an
even number of its coordinates are upper bounds, and -1 otherwise. The function can be summed back
from its mixed difference, so chunks cover a tensor exactly if and only if their corners add up to
the corners of the tensor. That takes time linear in the number of chunks, where comparing each pair
is quadratic.
"""

import collections
import itertools
from collections.abc import Sequence

from jaxzero.interop._tensors import Box

_MAX_SPLIT_DIMS = 4  # a chunk has 2^n corners in n dimensions


def covers_exactly(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return True if boxes, none of them empty, cover a shape without gap or overlap.

    Dimensions that no box divides are left out.

    Raises:
        ValueError: the boxes divide too many dimensions.
    """
    if 0 in shape:
        return not boxes
    whole = tuple((0, size) for size in shape)
    dims = [dim for dim in range(len(shape)) if any(box[dim] != whole[dim] for box in boxes)]
    if len(dims) > _MAX_SPLIT_DIMS:
        raise ValueError(
            f"chunks divide {len(dims)} dimensions, and at most {_MAX_SPLIT_DIMS} are supported"
        )
    corners: collections.Counter[tuple[int, ...]] = collections.Counter()
    for box, sign in [*((box, 1) for box in boxes), (whole, -1)]:
        for upper in itertools.product((0, 1), repeat=len(dims)):
            corner = tuple(box[dim][each] for dim, each in zip(dims, upper, strict=True))
            corners[corner] += sign * (-1) ** sum(upper)
    return not any(corners.values())
