"""Codecs: how numbers are written on the wire of one collective.

A codec turns an array into what is sent and back. `None` in its place sends the
array as it is. A codec that narrows is followed by an optimisation barrier, because
XLA may otherwise move the widening across the collective and send the wide type.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Shaped

_BITS = {8: jnp.uint8, 16: jnp.uint16}


def is_narrow_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a float of 8 or 16 bits, which some backends widen on the wire."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def to_bits(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """View a narrow float as unsigned integers, so that no backend widens it in transit."""
    if not is_narrow_float(x.dtype):
        return x
    return lax.bitcast_convert_type(x, _BITS[8 * x.dtype.itemsize])


def from_bits(x: Shaped[Array, ...], dtype: DTypeLike) -> Shaped[Array, ...]:
    """Undo `to_bits`."""
    return lax.bitcast_convert_type(x, dtype) if is_narrow_float(dtype) else x


@dataclasses.dataclass(frozen=True)
class Cast:
    """Send floats rounded to a narrower float.

    Use it to gather float32 weights, or to reduce float32 gradients, in 16 bits.
    Sums are still taken in float32. Arrays that are not wider floats than `dtype`
    are sent as they are.

    Args:
        dtype: the float type on the wire, such as `jnp.bfloat16`.

    Raises:
        ValueError: `dtype` is not a floating-point type.
    """

    dtype: DTypeLike

    def __post_init__(self):
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(
                f"`dtype` of `Cast` must be a float type; got {self.dtype!r}. "
                "Use for example `jz.Cast(jnp.bfloat16)`."
            )
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def __str__(self) -> str:
        return str(self.dtype)

    def wire_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        """The type on the wire for an array of type `dtype`."""
        old, new = jnp.dtype(dtype), jnp.dtype(self.dtype)
        wider = jnp.issubdtype(old, jnp.floating) and old.itemsize > new.itemsize
        return new if wider else old

    def encode(self, x: Shaped[Array, ...]) -> Shaped[Array, ...]:
        """What is sent for `x`: the same shape, rounded to nearest."""
        wire = self.wire_dtype(x.dtype)
        return x if wire == x.dtype else jax.lax.optimization_barrier(x.astype(wire))


Codec = Cast  # every codec there is; int8, int4 and float8 blocks will join
