"""`pad_batch`: pad the rows of a batch to a multiple of the devices, with weights to mask them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .._sharding import path_name
from .batch_choice import is_split, rows_of
from .sharded_trees import ShardedTrees


def pad_batch(
    batch: Any, zero: ShardedTrees, *, rows: int | None = None, microbatches: int = 1
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

    Returns:
        `(batch, weights)`: arrays `[rows, ...]`, and float32 weights, 1 for each of the first n
        rows and 0 for those that were added. For `zero.value_and_grad(..., weighted=True)`: the
        loss returns `(sum(weights * losses), sum(weights))`.

    Raises:
        ValueError: the batch has no rows, its arrays have different numbers of rows, an array may
            be rows or a raw random key, or `rows` is less than n or not such a multiple.

    Example:
        >>> def loss_fn(params, batch):
        ...     batch, weights = batch
        ...     losses = (predict(params, batch["x"]) - batch["y"]) ** 2
        ...     return jnp.sum(weights * losses), jnp.sum(weights)
        >>> step = zero.value_and_grad(loss_fn, weighted=True)
        >>> loss, grads = step(params, jz.pad_batch(batch, zero))
    """
    num_rows = rows_of("`batch`", batch)
    divisor = microbatches * zero.num_devices
    total = -(-num_rows // divisor) * divisor if rows is None else rows
    if num_rows == 0 or total < num_rows or total % divisor:
        raise ValueError(
            f"`batch` has {num_rows} rows and is to be padded to {total}, for {divisor} devices x "
            "micro-batches. It needs at least one row, and `rows` must be a multiple of "
            f"{divisor} that is not less than the rows of the batch."
        )
    missing = total - num_rows

    def pad(path: Any, x: Any) -> Any:
        if not is_split(path_name(path), x, num_rows) or not missing:
            return x
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.concatenate([x, xp.repeat(x[-1:], missing, axis=0)])

    weights = np.repeat(np.asarray([1, 0], np.float32), [num_rows, missing])
    return jax.tree_util.tree_map_with_path(pad, batch), weights
