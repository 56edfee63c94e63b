"""Find the argument of a call that is the batch, whose rows are split over all devices.

A wrong choice gives wrong numbers without an error: a table of class weights would be split as if
it were rows. So an argument is chosen only if no other argument can be the batch; otherwise the
caller must name the batch. A function may close over its batch and take one argument with rows that
is not a batch, such as running statistics. That argument is chosen, wrongly, unless the caller says
`batch_argnums=()`: there is no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._sharding import Registry, is_array, is_stored, named_leaves, split_dim
from .._warnings import warn

BatchArgnums = int | str | Sequence[int | str] | None


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf looks like a random key: typed, or raw (`uint32[2]` or `uint32[4]`)."""
    is_typed = is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return is_typed or _is_like_raw_key(leaf)


def is_split(path: str, leaf: Any, num_rows: int) -> bool:
    """Return whether devices split a leaf of the batch along dim 0; otherwise it is replicated.

    Single numbers and random keys are replicated. An array of `num_rows` typed keys, one for each
    row, is split.

    Raises:
        ValueError: the leaf is uint32 with one element per row and the size of a raw key (2 or 4),
            so it can be either a key or labels.
    """
    if not is_array(leaf) or not leaf.shape:
        return False
    if _is_like_raw_key(leaf) and leaf.shape[0] == num_rows:
        raise ValueError(
            f"The leaf `{path}`, uint32[{num_rows}], of a batch of {num_rows} rows can be a raw "
            "random key or a number for each row. Pass a typed key (`jax.random.key`), or rows of "
            "another dtype."
        )
    return not _is_key(leaf) or leaf.shape[0] == num_rows


def find_batch(
    values: Sequence[Any],
    names: Sequence[str],
    given: Sequence[Any],
    argnums: Sequence[int],
    registry: Registry,
    states: Registry,
) -> list[int]:
    """Return `[position]` of the only argument that can be the batch; `[]` if no argument can.

    An argument can be the batch if it has rows, and is not a tree that this `Zero` has laid out.

    A tree may look laid out: it has the structure and shapes of a laid-out tree. If its arrays are
    certainly not laid out (NumPy arrays), it can be the batch. In a traced program this is not
    known. Then the tree is an error if it has as many rows as the only candidate.

    A single array that is or looks laid out is chosen only if no other argument can be the batch.

    Args:
        values: all arguments.
        names: their names, for error messages.
        given: for each argument the specs from `in_specs`, or None.
        argnums: the positions of differentiated arguments.
        registry: looks up the layouts of parameter trees.
        states: looks up the layouts of optimizer states.

    Raises:
        ValueError: several arguments can be the batch; an argument can be the batch although
            `in_specs` splits another one; or the argument can also be a part of the parameters.
    """
    free = [
        i
        for i, value in enumerate(values)
        if i not in argnums and given[i] is None and _has_rows(value)
    ]
    readings = [_reading(values[i], registry, states) for i in free]
    candidates = [i for i, is_batch in zip(free, readings, strict=True) if is_batch]
    doubtful = [i for i, is_batch in zip(free, readings, strict=True) if is_batch is None]
    bare = [
        i for i in free if i not in candidates and is_array(values[i]) and not is_stored(values[i])
    ]
    split = [i for i, spec in enumerate(given) if _is_split_by(spec)]
    if split and candidates:
        raise ValueError(
            f"`in_specs` splits {names[split[0]]} and says nothing of {names[candidates[0]]}, "
            "which has rows too. Give each such argument a spec: `zero.batch_spec` splits it, "
            "`PartitionSpec()` gives it whole to every device."
        )
    possible = [] if split else candidates or bare
    if not possible:
        return []
    batch = _choose(names, possible, doubtful, values)
    if not is_array(values[batch]) and registry.may_hold_parts(values[batch]):
        raise ValueError(
            f"{names[batch]} can be the batch, or a part of the parameters: its arrays have their "
            "shapes. Say which with `batch_argnums=`: its position or name, or `()` if there is no "
            "batch."
        )
    return [batch]


def _reading(value: Any, registry: Registry, states: Registry) -> bool | None:
    """Return whether an argument can be the batch; None if that cannot be known.

    - False: the argument is a tree that this `Zero` has laid out.
    - True: no laid-out tree has the argument's structure and shapes.
    - Otherwise the argument looks like a laid-out tree. The result is False if its arrays have
      different numbers of rows; True if its arrays are certainly not laid out; else None.
    """
    if registry.holds_laid_out(value):
        return False
    layout = registry.find(value) or states.find(value)
    if layout is None:
        return True
    if _common_rows(value) is None:
        return False
    return True if registry.is_placed_otherwise(value, layout) else None


def asked_batches(
    asked: BatchArgnums, num_positional: int, keywords: Sequence[str], parameters: Sequence[str]
) -> list[int] | None:
    """Convert `batch_argnums` to positions among all arguments of a call; return None for None.

    Args:
        asked: positions, names of keyword arguments, or names of the function's parameters.
        num_positional: number of arguments given by position.
        keywords: names of the arguments given by keyword, in order.
        parameters: names of the function's positional parameters, as far as known.

    Raises:
        ValueError: an entry is neither an integer nor a string, or names no argument of the call.
    """
    if asked is None:
        return None
    positions = []
    for item in (asked,) if isinstance(asked, int | str) else tuple(asked):
        # `True` and `False` are integers too.
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise ValueError(
                "`batch_argnums` must be a position, the name of an argument, or several of them; "
                f"it holds {item!r}."
            )
        position = None
        if isinstance(item, int) and -num_positional <= item < num_positional:
            position = item % num_positional
        elif isinstance(item, str) and item in keywords:
            position = num_positional + list(keywords).index(item)
        elif isinstance(item, str) and item in parameters[:num_positional]:
            position = list(parameters).index(item)
        if position is None:
            given = ", ".join(map(repr, keywords)) or "none"
            raise ValueError(
                f"`batch_argnums` names {item!r}, but {num_positional} arguments were given by "
                f"position, and by keyword: {given}."
            )
        positions.append(position)
    return positions


def rows_of(name: str, value: Any) -> int:
    """Return the number of rows of a batch: the size of dim 0 of its arrays.

    Random keys and scalars do not count. But in an argument that holds nothing except keys, each
    key is a row.

    Raises:
        ValueError: no array has a dim 0, or arrays have different numbers of rows.
    """
    named = dict(named_leaves(value))
    rows = {path: x.shape[0] for path, x in named.items() if _is_rows(x)} or {
        path: x.shape[0] for path, x in named.items() if is_array(x) and x.shape
    }
    if not rows:
        raise ValueError(
            f"{name} is named as the batch, but holds no array with a dim 0. Name another with "
            "`batch_argnums=`; `batch_argnums=()` if there is no batch."
        )
    if len(set(rows.values())) > 1:
        first, other = next((a, b) for a in rows for b in rows if rows[a] != rows[b])
        raise ValueError(
            f"{name} is taken as the batch, whose dim 0 is split over all devices, but its leaf "
            f"`{first}` has {rows[first]} rows and `{other}` has {rows[other]}. Pass what is no "
            "row of the batch in an argument of its own, and say with `batch_argnums=` which is "
            "the batch; or say with `in_specs`, one entry for each positional argument, what is "
            "split: `zero.batch_spec` or `PartitionSpec()`, or a tree of them."
        )
    return next(iter(rows.values()))


def warn_of_no_batch(num_devices: int) -> None:
    """Warn that no argument is split, so that all devices repeat the same computation."""
    if num_devices > 1:
        warn(
            f"No argument of this function is a batch, so each of {num_devices} devices computes "
            "all of it. If it closes over the batch, pass the batch as an argument: "
            "`loss_fn(params, batch)`. If there is none, say so with `batch_argnums=()`."
        )


def _is_split_by(spec: Any) -> bool:
    specs = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return any(split_dim(x) is not None for x in specs)


def _choose(
    names: Sequence[str],
    candidates: Sequence[int],
    doubtful: Sequence[int],
    values: Sequence[Any],
) -> int:
    """Return the position of the batch: the only candidate.

    Args:
        names: names of all arguments, for the error message.
        candidates: positions of the arguments that can be the batch; at least one.
        doubtful: positions of arguments that are either the batch or laid-out parameters.
        values: all arguments.

    Raises:
        ValueError: there are several candidates; or another argument, doubtful or like a raw key,
            has as many rows as the only candidate. (With 2 or 4 rows, a raw key looks like labels.)
    """
    possible = list(candidates)
    if len(possible) == 1:
        num_rows = rows_of(names[possible[0]], values[possible[0]])
        possible += [
            i for i in doubtful if i not in possible and _common_rows(values[i]) == num_rows
        ]
        possible += [
            i
            for i, x in enumerate(values)
            if is_array(x) and _is_like_raw_key(x) and x.shape[0] == num_rows and i not in possible
        ]
    if len(possible) > 1:
        listed = ", ".join(names[i] for i in sorted(possible))
        raise ValueError(
            f"{listed}: each of these arguments can be the batch, whose rows are split over all "
            "devices, and the others are given whole to every device. Say which is the batch, "
            "with `batch_argnums=`: a position, the name of an argument, or several of them."
        )
    return possible[0]


def _has_rows(value: Any) -> bool:
    """Return whether an argument holds an array that has dims and is not a random key."""
    return any(_is_rows(leaf) for leaf in jax.tree.leaves(value))


def _common_rows(value: Any) -> int | None:
    """Return the number of rows of an argument's arrays; None if arrays have different numbers."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(value) if _is_rows(leaf)}
    return sizes.pop() if len(sizes) == 1 else None


def _is_rows(leaf: Any) -> bool:
    return is_array(leaf) and len(leaf.shape) > 0 and not _is_key(leaf)


def _is_like_raw_key(leaf: Any) -> bool:
    return is_array(leaf) and leaf.dtype == jnp.uint32 and tuple(leaf.shape) in ((2,), (4,))
