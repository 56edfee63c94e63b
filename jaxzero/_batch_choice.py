"""Which argument of a call is the batch, whose rows are split over all devices.

Taking another argument for it gives a wrong number without an error: a table of class weights as
long as the batch is wide would be cut into pieces. So the batch is the one argument that can be
one, and where several can be, the caller says which.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._paths import path_name
from ._stored_array import flatten, is_array

BatchArgnums = int | str | Sequence[int | str] | None


def has_rows(value: Any) -> bool:
    """Whether an argument can be a batch: it holds an array with a dim that is no random key."""
    return any(_is_rows(leaf) for leaf in jax.tree.leaves(value))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a random key: typed, of any shape, or raw, `uint32[2]` or `uint32[4]`."""
    if not is_array(leaf):
        return False
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return True
    return leaf.dtype == jnp.uint32 and tuple(leaf.shape) in ((2,), (4,))


def choose_batch(names: Sequence[str], candidates: Sequence[int]) -> int:
    """The one argument that can be the batch.

    Args:
        names: of all arguments, for the message.
        candidates: the arguments that can be one, at least one of them.

    Raises:
        ValueError: there are several.
    """
    if len(candidates) > 1:
        listed = ", ".join(names[i] for i in candidates)
        raise ValueError(
            f"{listed}: each of these arguments can be the batch, whose rows are split over all "
            "devices, and the others are given whole to every device. Say which is the batch, "
            "with `batch_argnums=`: a position, the name of an argument, or several of them."
        )
    return candidates[0]


def asked_batches(
    asked: BatchArgnums, num_positional: int, keywords: Sequence[str], parameters: Sequence[str]
) -> list[int] | None:
    """`batch_argnums` as positions among all arguments of a call; None: it was not given.

    Args:
        asked: positions, names of keyword arguments, or names of the function's parameters.
        num_positional: how many arguments were given by position.
        keywords: the names of the others, in order.
        parameters: the names of the function's positional parameters, as far as known.

    Raises:
        ValueError: there is no such argument.
    """
    if asked is None:
        return None
    positions = []
    for one in (asked,) if isinstance(asked, int | str) else tuple(asked):
        if isinstance(one, bool) or not isinstance(one, int | str):
            raise ValueError(
                "`batch_argnums` must be a position, the name of an argument, or several of them; "
                f"it holds {one!r}."
            )
        place = None
        if isinstance(one, int) and -num_positional <= one < num_positional:
            place = one % num_positional
        elif isinstance(one, str) and one in keywords:
            place = num_positional + list(keywords).index(one)
        elif isinstance(one, str) and one in parameters[:num_positional]:
            place = list(parameters).index(one)
        if place is None:
            given = ", ".join(map(repr, keywords)) or "none"
            raise ValueError(
                f"`batch_argnums` names {one!r}, but {num_positional} arguments were given by "
                f"position, and by keyword: {given}."
            )
        positions.append(place)
    return positions


def rows_of(name: str, value: Any) -> int:
    """The number of rows of a batch: dim 0 of all its arrays but keys and single numbers.

    Raises:
        ValueError: it has none, or its arrays have different numbers of rows.
    """
    paths, leaves, _ = flatten(value)
    rows = {
        path_name(path): x.shape[0] for path, x in zip(paths, leaves, strict=True) if _is_rows(x)
    }
    if not rows:
        raise ValueError(
            f"{name} is to be the batch, but holds no array with rows. Say with `batch_argnums=` "
            "which argument is; `batch_argnums=()` if there is none."
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
    """Warn that every device computes the same, because no argument is split."""
    if num_devices > 1:
        warnings.warn(
            f"No argument of this function is a batch, so each of {num_devices} devices computes "
            "all of it. If it closes over the batch, pass the batch as an argument: "
            "`loss_fn(params, batch)`. If there is none, say so with `batch_argnums=()`.",
            stacklevel=5,
        )


def _is_rows(leaf: Any) -> bool:
    return is_array(leaf) and len(leaf.shape) > 0 and not is_key(leaf)
