"""How the rows of a batch are shared: equally, or by `shares` in proportion to each node's speed.

A batch is an array of equally many rows for every device. With shares `s` of the nodes, a
micro-batch of `m` rows of a device of node `i` has `m * s[i] / max(s)` rows that count, before
padding that is not computed. `pad_batch` adds the rows that are missing, with weights to mask
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32

from .._mesh import AXES, LOCAL, NODE, AnyMesh, physical
from .._sharding import ZeroConfig, path_name
from .arguments import BATCH, Call
from .batch_choice import is_split, rows_of
from .sharded_trees import ShardedTrees

Shares = tuple[int, ...]


def known_shares(shares: Sequence[int] | None, nodes: int) -> Shares | None:
    """Check shares, and divide them by what they have in common; None if all are equal.

    Raises:
        ValueError: they are not one integer of at least 1 for each node.
    """
    if shares is None:
        return None
    found = tuple(shares) if isinstance(shares, Sequence | np.ndarray) else ()
    is_number = (isinstance(x, int | np.integer) and not isinstance(x, bool) for x in found)
    if len(found) != nodes or not all(is_number) or min(found) < 1:
        raise ValueError(
            "`shares` must hold an integer of at least 1 for each node, and here the number of "
            f"nodes is {nodes}; got {shares!r}. `jz.Cluster(...).shares(rows)` gives them."
        )
    common = math.gcd(*found)
    return None if len(set(found)) == 1 else tuple(int(x) // common for x in found)


def check_shares(
    shares: Shares | None, weighted: bool, halves: bool, mesh: AnyMesh, config: ZeroConfig
) -> None:
    """Check that the other options of `value_and_grad` go with `shares`.

    Raises:
        ValueError: the loss is not weighted.
        NotImplementedError: half-batches are compared, the config offloads, or the mesh has
            axes of its own.
    """
    if shares is None:
        return
    if not weighted:
        raise ValueError(
            "`shares` needs `weighted=True`: nodes with fewer rows count less in the mean. Let the "
            "function return `(sum of losses, number of rows)`."
        )
    others = [axis for axis, size in physical(mesh).shape.items() if axis not in AXES and size > 1]
    reasons = {
        "`halves=True`: the halves would have different numbers of rows": halves,
        "`Offload`": config.offload is not None,
        f"the mesh axes {others} beside {AXES}": bool(others),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise NotImplementedError(f"`shares` does not work with {reason}. Leave out one.")


def check_share_rows(
    call: Call, arrays: Sequence[Sequence[Any]], mesh: AnyMesh, microbatches: int, shares: Shares
) -> None:
    """Check the arguments of a call with `shares`.

    Raises:
        ValueError: `shares` has another number of nodes than the mesh (in a program of one node),
            no argument has rows, one is split other than by rows over all devices, or the rows
            of a micro-batch cannot be divided in these proportions.
    """
    if mesh.shape[NODE] != len(shares):
        raise ValueError(
            f"`shares` has {len(shares)} entries, and this program has {mesh.shape[NODE]} node. "
            "In `zero.local_steps` every node trains by itself: leave it out there."
        )
    divisor = mesh.shape[NODE] * mesh.shape[LOCAL] * microbatches * max(shares)
    num_split = 0
    for argument, x, i in call.split(arrays):
        num_split += 1
        if argument.specs[i] != BATCH:
            raise ValueError(
                f"{argument.name} is split by {argument.specs[i]}. With `shares`, arguments are "
                "split by `zero.batch_spec` or not at all."
            )
        if x.shape[0] % divisor:
            raise ValueError(
                f"{argument.name} has {x.shape[0]} rows. For `shares={shares}` and {microbatches} "
                f"micro-batches on {mesh.size} devices that must be a multiple of {divisor}. Pad "
                f"it: `jz.pad_batch(batch, zero, microbatches={microbatches}, shares={shares})`."
            )
    if not num_split:
        raise ValueError("`shares` says how rows are split, and no argument is a batch.")


def counted_rows(
    rows: int, mesh: AnyMesh, microbatches: int, shares: Shares
) -> Bool[np.ndarray, " rows"]:
    """Which rows of a batch of `rows` rows are computed."""
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    each = rows // (nodes * local * microbatches)
    counts = np.asarray(shares) * each // max(shares)
    is_counted = np.arange(each) < counts[:, None]  # [nodes, each]
    return np.repeat(is_counted, local * microbatches, axis=0).reshape(-1)


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
        shares: likewise. Rows stay in order, and padding follows the rows of every micro-batch of
            nodes with smaller shares; it takes memory and no time.

    Returns:
        `(batch, weights)`: arrays `[rows, ...]`, and float32 weights, 1 for each of the n rows and
        0 for those that were added, which are the last unless `shares` is given. For
        `zero.value_and_grad(..., weighted=True)`: the loss returns `(sum(weights * losses),
        sum(weights))`.

    Raises:
        ValueError: the batch has no rows, its arrays have different numbers of rows, an array may
            be rows or a raw random key, `rows` is too few or not such a multiple, or `shares` is
            not one integer of at least 1 for each node.

    Example:
        >>> def loss_fn(params, batch):
        ...     batch, weights = batch
        ...     losses = (predict(params, batch["x"]) - batch["y"]) ** 2
        ...     return jnp.sum(weights * losses), jnp.sum(weights)
        >>> step = zero.value_and_grad(loss_fn, weighted=True)
        >>> loss, grads = step(params, jz.pad_batch(batch, zero))
    """
    num_rows, mesh = rows_of("`batch`", batch), zero._devices
    known = known_shares(shares, mesh.shape[NODE]) or (1,) * mesh.shape[NODE]
    divisor = microbatches * zero.num_devices * max(known)
    counted = mesh.shape[LOCAL] * microbatches * sum(known)  # of each `divisor` rows
    total = -(-num_rows // counted) * divisor if rows is None else rows
    if num_rows == 0 or total % divisor or total // divisor * counted < num_rows:
        raise ValueError(
            f"`batch` has {num_rows} rows and is to be padded to {total}, for {divisor} devices x "
            "micro-batches x largest share. It needs at least one row, and `rows` must be a "
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
