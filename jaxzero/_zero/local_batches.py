"""The batches of a round, stacked: which leaves are split by rows, and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._mesh import NODE
from .._sharding import is_array, path_name
from .arguments import BATCH
from .batch_choice import is_split, rows_of

_STACKED = PartitionSpec(None, *BATCH)


def batch_specs(batches: Any, every: int, num_devices: int) -> list[PartitionSpec]:
    """How each leaf of `batches` is split: rows over all devices; others not at all.

    Args:
        batches: a tree of arrays `[every, ...]`.
        every: the number of steps in a round.
        num_devices: the number of devices that share a batch.

    Raises:
        ValueError: dim 0 of a leaf is not `every`, leaves have different numbers of rows, or the
            devices cannot share the rows evenly.
    """
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(batches)[0]
    named = [(path_name(path), x) for path, x in paths_and_leaves]
    for path, x in named:
        if not is_array(x) or not x.shape or x.shape[0] != every:
            got = f"{x.dtype}{list(x.shape)}" if is_array(x) else type(x).__name__
            raise ValueError(
                f"`batches` must be the batches of {every} steps, stacked on a new leading dim; "
                f"the leaf `{path}` is {got}. Stack them: `jax.tree.map(lambda *x: jnp.stack(x), "
                "*list_of_batches)`."
            )
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    try:
        num_rows = rows_of("`batches`", steps)
    except ValueError:
        shapes = ", ".join(f"`{path}` {list(x.shape)}" for path, x in named)
        raise ValueError(
            "`batches` must hold `[every, rows, ...]` with equally many rows in every leaf, beside "
            f"numbers and keys `[every]`; got {shapes}. What has no rows goes into the step by "
            "closing over it."
        ) from None
    if num_rows % num_devices:
        raise ValueError(
            f"`batches` has {num_rows} rows for each step, which {num_devices} devices cannot "
            "share evenly. Pad each batch with `jz.pad_batch`, or drop rows."
        )
    leaves = [x for _, x in jax.tree_util.tree_flatten_with_path(steps)[0]]
    return [
        _STACKED if is_split(path, x, num_rows) else PartitionSpec()
        for (path, _), x in zip(named, leaves, strict=True)
    ]


def node_specs(specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """The part of these specs that is over `node`."""
    return [PartitionSpec(None, NODE) if spec == _STACKED else PartitionSpec() for spec in specs]
