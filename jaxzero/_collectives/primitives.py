"""Every collective that the library issues, and a ledger of them.

A ledger is written while a program is traced, so that a report says what is really sent:
which axis, how many bytes, how often.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Shaped

from .._mesh import gloo_workaround, varying
from .ledger import Axes, note

# `shares` are the bytes that each of the leaves has in a row of a message for several.


def all_gather(
    x: Shaped[Array, ...], axis: Axes, dim: int, shares: tuple[int, ...] = ()
) -> Shaped[Array, ...]:
    """Join the devices' arrays along `dim`, in the order of `axis`."""
    full = lax.all_gather(x, axis, axis=dim, tiled=True)
    note("all-gather", axis, full, shares)
    return full


def all_to_all(
    x: Shaped[Array, ...],
    axis: Axes,
    split_dim: int = 0,
    concat_dim: int = 0,
    shares: tuple[int, ...] = (),
) -> Shaped[Array, ...]:
    """Send the i-th piece of `split_dim` to device i; join what arrives along `concat_dim`."""
    note("all-to-all", axis, x, shares)
    x = varying(x, axis)
    return lax.all_to_all(x, axis, split_axis=split_dim, concat_axis=concat_dim, tiled=True)


def reduce_scatter(
    x: Shaped[Array, ...], axis: Axes, dim: int, shares: tuple[int, ...] = ()
) -> Shaped[Array, ...]:
    """Sum over devices; device i keeps the i-th piece of `dim`."""
    note("all-to-all" if gloo_workaround.is_exchanged() else "reduce-scatter", axis, x, shares)
    return gloo_workaround.reduce_scatter(x, axis, dim)


def all_reduce(x: Any, axis: Axes) -> Any:
    """Sum an array, or several in one collective, over devices."""
    for leaf in jax.tree.leaves(x):
        note("all-reduce", axis, leaf)
    return lax.psum(x, axis)
