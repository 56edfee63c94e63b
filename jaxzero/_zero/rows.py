"""Share the rows of a batch between devices: equally, or in proportion to each node's speed.

A batch is an array with equally many rows for every device, cut into `k` micro-batches. With shares
`s` of the nodes, a device of node `i` runs only the first `k * s[i] / max(s)` of its micro-batches.
The rows of its other micro-batches are padding. `pad_batch` adds the missing rows, and weights that
mask them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32

from .._execute import check_microbatches
from .._mesh import AXES, LOCAL, NODE, AnyMesh, physical
from .._sharding import path_name, split_dim
from .arguments import Call, node_microbatches
from .batch_choice import is_split, rows_of
from .sharded_trees import ShardedTrees

Shares = tuple[int, ...]


def known_shares(shares: Sequence[int] | None, nodes: int, microbatches: int) -> Shares | None:
    """Check `shares`; return them divided by their greatest common divisor, None if all are equal.

    Args:
        shares: one for each node, or None.
        nodes: the number of nodes.
        microbatches: how many micro-batches the devices of the fastest node run.

    Raises:
        ValueError: `shares` are not one integer of at least 1 for each node, or the micro-batches
            cannot be divided in these proportions.
    """
    if shares is None:
        return None
    numbers = tuple(shares) if isinstance(shares, Sequence | np.ndarray) else ()
    is_number = (isinstance(x, int | np.integer) and not isinstance(x, bool) for x in numbers)
    if len(numbers) != nodes or not all(is_number) or min(numbers) < 1:
        raise ValueError(
            "`shares` must hold an integer of at least 1 for each node, and here the number of "
            f"nodes is {nodes}; got {shares!r}. `jz.Cluster(...).shares(microbatches)` gives them."
        )
    common = math.gcd(*numbers)
    ratio = tuple(int(x) // common for x in numbers)
    if microbatches % max(ratio):
        raise ValueError(
            f"`microbatches` is {microbatches}, and for `shares={ratio}` it must be a multiple of "
            f"{max(ratio)}: the devices of the fastest node run that many, and those of the others "
            f"fewer in proportion. Give `microbatches={max(ratio)}` or a multiple of it."
        )
    return None if len(set(ratio)) == 1 else ratio


def check_shares(shares: Shares | None, halves: bool, mesh: AnyMesh) -> None:
    """Check that the mesh and the option `halves` of `value_and_grad` can be used with `shares`.

    Raises:
        NotImplementedError: half-batches are compared, or the mesh has axes beside `node` and
            `local`.
    """
    if shares is None:
        return
    others = [axis for axis, size in physical(mesh).shape.items() if axis not in AXES and size > 1]
    reasons = {
        "`halves=True`: the halves would have different numbers of rows": halves,
        f"the mesh axes {others} beside {AXES}": bool(others),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise NotImplementedError(f"`shares` does not work with {reason}. Leave out one.")


def check_share_nodes(mesh: AnyMesh, shares: Shares | None) -> None:
    """Raise `ValueError` unless `shares` has one entry for each node of `mesh`.

    A program of one node, in `zero.local_steps`, has a mesh of one node.
    """
    if shares is not None and mesh.shape[NODE] != len(shares):
        raise ValueError(
            f"`shares` has {len(shares)} entries, and this program has {mesh.shape[NODE]} node. "
            "In `zero.local_steps` every node trains by itself: leave it out there."
        )


def counted_rows(
    rows: int, mesh: AnyMesh, microbatches: int, shares: Shares
) -> Bool[np.ndarray, " rows"]:
    """Return for each of `rows` rows of a batch whether it is in a micro-batch that runs."""
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    of_device = rows // (nodes * local)
    counts = np.asarray(node_microbatches(microbatches, shares)) * (of_device // microbatches)
    is_counted = np.arange(of_device) < counts[:, None]  # [nodes, rows of a device]
    return np.repeat(is_counted, local, axis=0).reshape(-1)


def pad_batch(
    batch: Any,
    zero: ShardedTrees,
    *,
    rows: int | None = None,
    microbatches: int = 1,
    shares: Sequence[int] | None = None,
) -> tuple[Any, Float32[Array, " rows"] | Float32[np.ndarray, " rows"]]:
    """Pad a batch so that its rows divide over all devices, and mark which rows count.

    The last batch of a data set is often short. With a padded batch and a weighted mean, no row is
    dropped or counted twice. The added rows repeat the last row, so a loss that is not defined for
    zeros stays finite.

    Args:
        batch: a tree of arrays `[n, ...]`. Random keys and single numbers in it are unchanged.
        zero: gives the number of devices.
        rows: number of rows to pad to, so that all batches have one shape and share a compiled
            program. By default the smallest multiple of devices x `microbatches`.
        microbatches: as given to `zero.value_and_grad`.
        shares: as given to `zero.value_and_grad`. Rows stay in order. On nodes with smaller shares,
            padding follows the rows of each device, and is not computed.

    Returns:
        `(batch, weights)`: arrays `[rows, ...]`, and float32 weights, 1 for each of the n rows and
        0 for the added rows, which are the last unless `shares` is given. For
        `zero.value_and_grad(..., weighted=True)`: the loss returns `(sum(weights * losses),
        sum(weights))`.

    Raises:
        ValueError: the batch has no rows, its arrays have different numbers of rows, an array may
            be rows or a raw random key, `rows` is too small or not a multiple of devices x
            `microbatches`, `microbatches` is not an integer of at least 1, or `shares` is not one
            integer of at least 1 for each node or does not fit `microbatches`.

    Example:
        >>> def loss_fn(params, batch):
        ...     batch, weights = batch
        ...     losses = (predict(params, batch["x"]) - batch["y"]) ** 2
        ...     return jnp.sum(weights * losses), jnp.sum(weights)
        >>> step = zero.value_and_grad(loss_fn, weighted=True)
        >>> loss, grads = step(params, jz.pad_batch(batch, zero))
    """
    check_microbatches(microbatches)
    if not isinstance(rows, int | np.integer | None):
        raise ValueError(f"`rows` must be an integer; got {rows!r}.")
    num_rows, mesh = rows_of("`batch`", batch), zero._devices
    node_shares = known_shares(shares, mesh.shape[NODE], microbatches) or (1,) * mesh.shape[NODE]
    divisor = zero.num_devices * microbatches
    # Of each `divisor` rows, so many are computed.
    counted = mesh.shape[LOCAL] * sum(node_microbatches(microbatches, node_shares))
    total = -(-num_rows // counted) * divisor if rows is None else rows
    if num_rows == 0 or total % divisor or total // divisor * counted < num_rows:
        raise ValueError(
            f"`batch` has {num_rows} rows and is to be padded to {total}, for {divisor} devices x "
            "micro-batches. It needs at least one row, and `rows` must be a "
            f"multiple of {divisor} of which {counted} in each {divisor} hold a row of the batch."
        )
    is_counted = counted_rows(total, mesh, microbatches, node_shares)
    # For each row of the result the row of `batch` that it holds; padding repeats the one before.
    numbers = np.cumsum(is_counted) - 1
    weights = (is_counted & (numbers < num_rows)).astype(np.float32)
    taken = np.clip(numbers, 0, num_rows - 1)

    def pad(path: Any, x: Any) -> Any:
        if not is_split(path_name(path), x, num_rows) or total == num_rows:
            return x
        return x[taken]

    return jax.tree_util.tree_map_with_path(pad, batch), weights


def num_rows(call: Call, arrays: Sequence[Sequence[Any]]) -> int | None:
    """Return the number of rows of the batch; None if no argument has rows."""
    for argument, x, i in call.split(arrays):
        spec = argument.specs[i]
        dim = split_dim(spec)
        if dim is not None and spec[dim] == AXES:
            return x.shape[dim]
    return None
