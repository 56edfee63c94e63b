"""`Cast`: send floats in another float type."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Float64, Integer, Shaped

from .. import pallas_kernels as kernels
from .codec import Codec
from .rows import bits_dtype, from_bits, joined, to_bits


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
    """Send floats in `dtype`.

    Use it to gather float32 weights, or to reduce float32 gradients, in 16 bits; or to reduce
    16-bit gradients in float32, so that the sum over a node is not rounded before it is sent on.
    Sums are taken in float32 in any case. Weights that are not wider than `dtype` are sent in their
    own dtype: they are not added up, so more bits would carry nothing.

    Args:
        dtype: the float type on the wire, such as `jnp.bfloat16`.

    Raises:
        ValueError: `dtype` is not a floating-point type.
    """

    dtype: DTypeLike

    def __post_init__(self):
        try:
            is_float = jnp.issubdtype(self.dtype, jnp.floating)
        except TypeError:  # of NumPy, for a name that it does not know
            is_float = False
        if not is_float:
            raise ValueError(
                f"`dtype` of `Cast` must be a float type; got {self.dtype!r}. "
                "Use for example `jz.Cast(jnp.bfloat16)`."
            )
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def __str__(self) -> str:
        return str(self.dtype)

    @property
    def bits(self) -> int:
        """Bits per number on the wire."""
        return 8 * jnp.dtype(self.dtype).itemsize

    @property
    def is_elementwise(self) -> bool:
        return True

    @property
    def is_joinable(self) -> bool:
        return True

    def is_used_for(self, num: int, dtype: DTypeLike, min_quantized_size: int) -> bool:
        """Return whether arrays of float dtype `dtype` are cast: if the dtype on the wire differs.

        Arrays of any size are cast: `num` and `min_quantized_size` matter only to other codecs.
        """
        return jnp.issubdtype(dtype, jnp.floating) and self.dtype != dtype

    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        return num * jnp.dtype(self.dtype).itemsize

    def message(self, num: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Describe the message: one element for each number, narrow floats as unsigned integers."""
        return jax.ShapeDtypeStruct((num,), bits_dtype(self.dtype))

    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> Shaped[Array, "*rows n"]:
        self._check_floats(x)
        return to_bits(x.astype(self.dtype))

    def decode(
        self, message: Shaped[Array, "*rows n"], num: int, dtype: DTypeLike
    ) -> Shaped[Array, "*rows n"]:
        return from_bits(message, self.dtype).astype(dtype)

    def encode_tiled(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
    ) -> Shaped[Array, "num ..."]:
        """Cut `x` into `num` pieces along `dim`, and cast each; pieces keep their shape."""
        return kernels.pieces_of(x, dim, num).astype(self.dtype)

    def decode_tiled(
        self, message: Shaped[Array, "num ..."], shape: tuple[int, ...], dim: int, dtype: DTypeLike
    ) -> Shaped[Array, ...]:
        return joined(jnp.moveaxis(message, 0, dim), shape, dim, len(message)).astype(dtype)

    def sum_tiled(
        self, message: Shaped[Array, "peers ..."], shape: tuple[int, ...]
    ) -> Float32[Array, ...]:
        return kernels.add_up(message.astype(jnp.float32))

    def error_bound(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Return half the distance of neighbouring floats of the type on the wire, at each number.

        It is infinite for numbers outside the range of that type, and 0 if the type is wider.
        """
        info, given = jnp.finfo(self.dtype), jnp.finfo(x.dtype)
        wide = np.abs(x.astype(np.float64))
        if info.nmant >= given.nmant and info.nexp >= given.nexp:
            return np.where(np.isfinite(wide), 0.0, np.inf)
        # A step is `eps` times the power of two below a number; it is even below normal numbers.
        bound = np.maximum(wide, float(info.smallest_normal)) * float(info.eps) / 2
        return np.where(wide <= float(info.max), bound, np.inf)
