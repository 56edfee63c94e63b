"""Host memory: where an array lies, and copies between host and device inside a traced program.

Only pinned memory is used, from which a GPU copies while it computes. JAX calls it the memory kind
"pinned_host"; a traced array there has the memory space `Host` in its type. Arrays in host memory
can be sliced and updated, but not computed with.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from .per_device import is_traced

HOST = "pinned_host"


def in_host(x: Any) -> bool:
    """Whether `x` lies in host memory.

    Args:
        x: an array, a tracer, or a `ShapeDtypeStruct` with a sharding.
    """
    if is_traced(x):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST


def to_device(x: Array) -> Array:
    """Copy a traced array to device memory; one that lies there is returned unchanged."""
    return jax.device_put(x, jax.memory.Space.Device) if in_host(x) else x


def to_host(x: Array) -> Array:
    """Copy a traced array to host memory; one that lies there is returned unchanged."""
    return x if in_host(x) else jax.device_put(x, jax.memory.Space.Host)
