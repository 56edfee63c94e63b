"""`Cast`: floats rounded to a narrower float type."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Float64, Integer, Shaped

from .. import pallas_kernels as kernels
from .codec import Codec, joined
from .narrow_floats import bits_dtype, from_bits, to_bits


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Send floats rounded to a narrower float.

    Use it to gather float32 weights, or to reduce float32 gradients, in 16 bits.
    Sums are still taken in float32. Arrays that are not wider floats than `dtype`
    are sent in their own dtype.

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

    @property
    def bits(self) -> int:
        """Bits per number on the wire, for numbers wider than `dtype`."""
        return 8 * jnp.dtype(self.dtype).itemsize

    @property
    def is_elementwise(self) -> bool:
        return True

    @property
    def is_joinable(self) -> bool:
        return True

    @property
    def decodes_into_any_dtype(self) -> bool:
        """False: `decode` infers from the original dtype whether the numbers were cast."""
        return False

    def is_used_for(self, num: int, dtype: DTypeLike, min_quantized_size: int) -> bool:
        """Whether `dtype` is a float type wider than the one on the wire.

        Arrays of any size are cast: `num` and `min_quantized_size` matter only to other codecs.
        """
        return self.wire_dtype(dtype) != dtype

    def wire_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        """The type on the wire for an array of type `dtype`."""
        old, new = jnp.dtype(dtype), jnp.dtype(self.dtype)
        wider = jnp.issubdtype(old, jnp.floating) and old.itemsize > new.itemsize
        return new if wider else old

    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        return num * self.wire_dtype(dtype).itemsize

    def message(self, num: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """One element for each number; floats of 8 and 16 bits become unsigned integers."""
        return jax.ShapeDtypeStruct((num,), bits_dtype(self.wire_dtype(dtype)))

    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> Shaped[Array, "*rows n"]:
        return to_bits(x.astype(self.wire_dtype(x.dtype)))

    def decode(
        self, message: Shaped[Array, "*rows n"], num: int, dtype: DTypeLike
    ) -> Shaped[Array, "*rows n"]:
        return from_bits(message, self.wire_dtype(dtype)).astype(dtype)

    def encode_tiled(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
    ) -> Shaped[Array, "num ..."]:
        """The pieces in their own shape, and in the float type on the wire."""
        return kernels.pieces_of(x, dim, num).astype(self.wire_dtype(x.dtype))

    def decode_tiled(
        self, message: Shaped[Array, "num ..."], shape: tuple[int, ...], dim: int, dtype: DTypeLike
    ) -> Shaped[Array, ...]:
        return joined(jnp.moveaxis(message, 0, dim), shape, dim, len(message)).astype(dtype)

    def sum_tiled(
        self, message: Shaped[Array, "peers ..."], shape: tuple[int, ...]
    ) -> Float32[Array, ...]:
        return kernels.add_up(message.astype(jnp.float32))

    def error_bound(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Half a step of `dtype`; infinite outside its range."""
        info = jnp.finfo(self.wire_dtype(x.dtype))
        wide = np.abs(x.astype(np.float64))
        if info.dtype == x.dtype:
            return np.where(np.isfinite(wide), 0.0, np.inf)
        # A step is `eps` times the power of two below a number; it is even below normal numbers.
        bound = np.maximum(wide, float(info.smallest_normal)) * float(info.eps) / 2
        return np.where(wide <= float(info.max), bound, np.inf)
