"""Find out whether an output has a value for each row of the batch.

A float leaf of `aux` is averaged over devices unless the user says otherwise. For the loss of each
row that would be a mean of different rows. Its dim 0 is the number of rows, but so may be that of
batch statistics. The function is traced again with twice as many rows: only the first grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._mesh import AXES, bare
from .._sharding import split_dim


def shapes_with_twice_the_rows(
    outputs: Callable[[list[Any]], Any], inputs: Sequence[Any], specs: Sequence[PartitionSpec]
) -> list[tuple[int, ...]] | None:
    """The shapes of the outputs if the batch had twice as many rows.

    Args:
        outputs: from the inputs to a tree of arrays.
        inputs: the arrays of one device, with its rows.
        specs: how each input is split over devices.

    Returns:
        One shape for each leaf; None if the function takes no other number of rows.
    """
    more = [_with_twice_the_rows(x, spec) for x, spec in zip(inputs, specs, strict=True)]
    try:
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(outputs, more))]
    except Exception:  # whatever the user's function raises
        return None


def _with_twice_the_rows(x: Any, spec: PartitionSpec) -> Any:
    dim = split_dim(spec)
    if dim is None or spec[dim] != AXES:
        return bare(x)
    shape = (*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)
