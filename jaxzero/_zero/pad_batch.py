"""`pad_batch`: pad the rows of a batch to a multiple of the devices, with weights to mask them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32

from .._mesh import LOCAL, NODE
from .._sharding import path_name
from .batch_choice import is_split, rows_of
from .node_shares import counted_rows, known_shares, node_microbatches
from .sharded_trees import ShardedTrees


def pad_batch(
    batch: Any,
    zero: ShardedTrees,
    *,
    rows: int | None = None,
    microbatches: int = 1,
    shares: Sequence[int] | None = None,
) -> tuple[Any, Float32[Array, " rows"] | Float32[np.ndarray, " rows"]]:
    """Pad a batch so that its rows divide over all devices, and mark which rows count.

    The last batch of a data set is often short. Pad it, and take a weighted mean, and no row is
    dropped or counted twice. The rows that are added repeat the last one, so a loss that is not
    defined for zeros stays finite.

    Args:
        batch: a tree of arrays `[n, ...]`. Random keys and single numbers in it are unchanged.
        zero: gives the number of devices.
        rows: number of rows to pad to, so that all batches have one shape and share a compiled
            program. By default the smallest multiple of devices x `microbatches`.
        microbatches: as given to `zero.value_and_grad`.
        shares: likewise. Rows stay in order, and padding follows the rows of each device of nodes
            with smaller shares; it is not computed.

    Returns:
        `(batch, weights)`: arrays `[rows, ...]`, and float32 weights, 1 for each of the n rows and
        0 for those that were added, which are the last unless `shares` is given. For
        `zero.value_and_grad(..., weighted=True)`: the loss returns `(sum(weights * losses),
        sum(weights))`.

    Raises:
        ValueError: the batch has no rows, its arrays have different numbers of rows, an array may
            be rows or a raw random key, `rows` is too few or not such a multiple, or `shares` is
            not one integer of at least 1 for each node or does not fit `microbatches`.

    Example:
        >>> def loss_fn(params, batch):
        ...     batch, weights = batch
        ...     losses = (predict(params, batch["x"]) - batch["y"]) ** 2
        ...     return jnp.sum(weights * losses), jnp.sum(weights)
        >>> step = zero.value_and_grad(loss_fn, weighted=True)
        >>> loss, grads = step(params, jz.pad_batch(batch, zero))
    """
    num_rows, mesh = rows_of("`batch`", batch), zero._devices
    known = known_shares(shares, mesh.shape[NODE], microbatches) or (1,) * mesh.shape[NODE]
    divisor = zero.num_devices * microbatches
    counted = mesh.shape[LOCAL] * sum(node_microbatches(microbatches, known))  # of `divisor` rows
    total = -(-num_rows // counted) * divisor if rows is None else rows
    if num_rows == 0 or total % divisor or total // divisor * counted < num_rows:
        raise ValueError(
            f"`batch` has {num_rows} rows and is to be padded to {total}, for {divisor} devices x "
            "micro-batches. It needs at least one row, and `rows` must be a "
            f"multiple of {divisor} of which {counted} in each {divisor} hold a row of the batch."
        )
    is_counted = counted_rows(total, mesh, microbatches, known)
    numbers = np.cumsum(is_counted) - 1  # of the row of `batch` that each row is, or follows
    weights = (is_counted & (numbers < num_rows)).astype(np.float32)
    taken = np.clip(numbers, 0, num_rows - 1)

    def pad(path: Any, x: Any) -> Any:
        if not is_split(path_name(path), x, num_rows) or total == num_rows:
            return x
        return x[taken]

    return jax.tree_util.tree_map_with_path(pad, batch), weights
