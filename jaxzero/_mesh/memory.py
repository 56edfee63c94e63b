"""Host memory: where an array lies, and copies between host and device inside a traced program.

Only pinned memory is used, from which a GPU copies while it computes. JAX calls it the memory kind
"pinned_host"; a traced array there has the memory space `Host` in its type. Arrays in host memory
can be sliced and updated, but not computed with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

from .per_device import is_traced

HOST = "pinned_host"

# An array in host memory by its type, and nothing but a broadcast in the program. XLA allocates it
# there once it sees that slices in host memory are written into it. If it were moved there
# explicitly, XLA before JAX 0.11 would fill it on the device and copy it.
_empty_p = Primitive("empty_in_host")
_empty_p.def_abstract_eval(
    lambda *, shape, dtype, tag: ShapedArray(shape, dtype, memory_space=jax.memory.Space.Host)
)
_fill = mlir.lower_fun(
    lambda *, shape, dtype, tag: jnp.full(shape, tag, dtype), multiple_results=False
)
mlir.register_lowering(_empty_p, _fill)


def in_host(x: Any) -> bool:
    """Whether `x` lies in host memory.

    Args:
        x: an array, a tracer, or a `ShapeDtypeStruct` with a sharding.
    """
    if is_traced(x):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST


def memory_kind_of(x: Any) -> str | None:
    """The memory kind of `x`, as a `NamedSharding` takes it: `HOST`, or None for device memory."""
    return HOST if in_host(x) else None


def empty_in_host(shape: tuple[int, ...], dtype: Any, tag: int) -> Array:
    """An array in host memory, inside a traced program, with no particular contents.

    Args:
        shape: its shape; all of it must be overwritten, slice by slice.
        dtype: its dtype.
        tag: another number for each array of a loop. Of equal ones XLA would allocate one, and copy
            the others from it.
    """
    return _empty_p.bind(shape=tuple(shape), dtype=jnp.dtype(dtype), tag=tag)


def to_device(x: Array) -> Array:
    """Copy a traced array to device memory; one that lies there is returned unchanged."""
    return jax.device_put(x, jax.memory.Space.Device) if in_host(x) else x


def to_host(x: Array) -> Array:
    """Copy a traced array to host memory; one that lies there is returned unchanged."""
    return x if in_host(x) else jax.device_put(x, jax.memory.Space.Host)
