"""Reduce-scatter, also on CPUs, where XLA's now and then gives wrong sums.

Once `jax.distributed` runs, XLA:CPU reduces by Gloo, also between devices of one process. Its
reduce-scatter sends from memory to which the result may have been written before: sums of some
hundred kilobytes are wrong in one of a thousand, those of megabytes in a few of a hundred, without
an error (JAX 0.10 to 0.12; jax-ml/jax#40830). It also gives up after 30 s, whatever the limit
(#40831). There the pieces are exchanged all-to-all instead, in as many bytes, and added here.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ..pallas_kernels import add_up
from .simulated import AnyMesh, SimulatedMesh

_is_exchanged: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxzero_sums_are_exchanged", default=False
)


def errs_on(mesh: AnyMesh) -> bool:
    """Whether XLA's reduce-scatter over `mesh` may be wrong."""
    if isinstance(mesh, SimulatedMesh):
        return False
    return mesh.devices.flat[0].platform == "cpu" and jax.distributed.is_initialized()


def exchanging(function: Callable) -> Callable:
    """`function`, in which sums are exchanged and added while it is traced."""

    @functools.wraps(function)
    def traced(*args):
        token = _is_exchanged.set(True)
        try:
            return function(*args)
        finally:
            _is_exchanged.reset(token)

    return traced


def is_exchanged() -> bool:
    """Whether what is being traced is inside `exchanging`."""
    return _is_exchanged.get()


def reduce_scatter(
    x: Shaped[Array, ...], axes: str | tuple[str, ...], dim: int, *, tiled: bool = True
) -> Shaped[Array, ...]:
    """`lax.psum_scatter`: sum over devices; device i keeps the i-th piece of `dim`."""
    if not is_exchanged():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled)
    names = (axes,) if isinstance(axes, str) else axes
    num = math.prod(lax.axis_size(name) for name in names)
    pieces = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    total = add_up(lax.all_to_all(pieces, axes, split_axis=dim, concat_axis=0))
    return total if tiled else jnp.squeeze(total, dim)
