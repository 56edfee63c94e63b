"""The collectives that the library issues: `lax` collectives, each recorded in the ledger.

Other modules call these and not `lax`, so that the report counts every byte (`ledger`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from .._mesh import NODE, gloo_workaround, program_axes, varying
from .ledger import Axes, note

# `shares`: for a message of several leaves, the bytes that each leaf has in a row.
# `forms`: the codecs of the leaves, or their dtypes; none: the dtype of the message.


def all_gather(
    x: Shaped[Array, ...],
    axis: Axes,
    dim: int,
    shares: tuple[int, ...] = (),
    forms: Sequence[Any] = (),
) -> Shaped[Array, ...]:
    """Concatenate the arrays of all devices along `dim`, in the order of `axis`."""
    axes = program_axes(axis)
    if not axes:
        return x
    full = gloo_workaround.all_gather(x, axes, dim)
    note("all-gather", axes, full, shares, forms)
    return full


def gather_nodes(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """Concatenate the arrays of all nodes along dim 0, also in a program of one node."""
    full = gloo_workaround.all_gather(x, NODE, 0)
    note("all-gather", NODE, full)
    return full


def all_to_all(
    x: Shaped[Array, ...],
    axis: Axes,
    split_dim: int = 0,
    concat_dim: int = 0,
    shares: tuple[int, ...] = (),
    forms: Sequence[Any] = (),
) -> Shaped[Array, ...]:
    """Split `x` along `split_dim`, send part i to device i, and concatenate what is received.

    The parts are concatenated along `concat_dim`, in the order of `axis`. `shares` and `forms` are
    for the ledger only (see above).
    """
    axes = program_axes(axis)
    if not axes:
        return x
    note("all-to-all", axes, x, shares, forms)
    x = varying(x, axes)
    return gloo_workaround.all_to_all(x, axes, split_dim, concat_dim)


def permute(
    x: Shaped[Array, ...], axis: Axes, pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, ...]:
    """Send `x` from the first of each pair of indices over `axis` to the second.

    It is not recorded, since no training step has it.
    """
    return gloo_workaround.permute(x, axis, pairs)


def reduce_scatter(
    x: Shaped[Array, ...], axis: Axes, dim: int, shares: tuple[int, ...] = ()
) -> Shaped[Array, ...]:
    """Sum over devices; device i keeps part i along `dim`."""
    axes = program_axes(axis)
    if not axes:
        return x
    note("all-to-all" if gloo_workaround.is_worked_around() else "reduce-scatter", axes, x, shares)
    return gloo_workaround.reduce_scatter(x, axes, dim)


def all_reduce(x: Any, axis: Axes) -> Any:
    """Sum an array, or a tree of arrays in one collective, over devices."""
    axes = program_axes(axis)
    if not axes:
        return x
    for leaf in jax.tree.leaves(x):
        note("all-reduce", axes, leaf)
    return lax.psum(x, axes)


def all_max(x: Shaped[Array, ...], axis: Axes) -> Shaped[Array, ...]:
    """The maximum over devices of each element; NaN where one of them is, as in `jnp.maximum`.

    What a backend's own maximum makes of NaN is not known (NCCL's drops it), so flags are sent too.
    """
    axes = program_axes(axis)
    if not axes:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        note("all-reduce", axes, x)
        return lax.pmax(x, axes)
    is_nan = jnp.isnan(x)
    pair = jnp.stack([jnp.where(is_nan, -jnp.inf, x).astype(x.dtype), is_nan.astype(x.dtype)])
    note("all-reduce", axes, pair)
    largest, any_nan = lax.pmax(pair, axes)
    return jnp.where(any_nan > 0, jnp.nan, largest).astype(x.dtype)
