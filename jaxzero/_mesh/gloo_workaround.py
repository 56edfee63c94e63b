"""Reduce-scatter that works around wrong sums of XLA on CPUs.

Once `jax.distributed` runs, XLA:CPU uses Gloo for reductions, also between devices of one process.
Gloo's reduce-scatter sends from a buffer that the result may have overwritten already. No error is
raised, but one in a thousand sums of some hundred kilobytes is wrong, and a few in a hundred sums
of megabytes (JAX 0.10 to 0.12; jax-ml/jax#40830). It also times out after 30 s, whatever limit is
set (#40831). In this case the shards are exchanged all-to-all, in as many bytes, and added.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from ..pallas_kernels import add_up

_is_exchanged: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxzero_sums_are_exchanged", default=False
)


def errs_on(mesh: Mesh) -> bool:
    """Whether XLA's reduce-scatter over `mesh` may give wrong sums."""
    return mesh.devices.flat[0].platform == "cpu" and jax.distributed.is_initialized()


def exchanging(function: Callable) -> Callable:
    """Wrap `function` so that `reduce_scatter` uses the workaround while it is traced."""

    @functools.wraps(function)
    def traced(*args):
        token = _is_exchanged.set(True)
        try:
            return function(*args)
        finally:
            _is_exchanged.reset(token)

    return traced


def is_exchanged() -> bool:
    """Whether a function wrapped by `exchanging` is being traced."""
    return _is_exchanged.get()


def reduce_scatter(
    x: Shaped[Array, ...], axes: str | tuple[str, ...], dim: int, *, tiled: bool = True
) -> Shaped[Array, ...]:
    """`lax.psum_scatter`, or its workaround: sum over devices; device i keeps part i of `dim`."""
    if not is_exchanged():
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=tiled)
    names = (axes,) if isinstance(axes, str) else axes
    num = math.prod(lax.axis_size(name) for name in names)
    parts = x.reshape(*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    total = add_up(lax.all_to_all(parts, axes, split_axis=dim, concat_axis=0))
    return total if tiled else jnp.squeeze(total, dim)
