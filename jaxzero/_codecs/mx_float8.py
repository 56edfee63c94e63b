"""`MXFloat8`: the OCP microscaling formats of 8 bits, MXFP8."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Float64, UInt8

from .blockwise import BlockCodec, to_float32

_LEAST_EXPONENT = -127  # of a scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFloat8(BlockCodec):
    """Send floats as 8-bit floats with a power of two as the scale of each 32 (MXFP8).

    The format of the OCP microscaling specification: a scale is a byte, the exponent
    `floor(log2(max|x|))` of the block minus that of the largest element, which is 8 (15 for
    `jnp.float8_e5m2`). Products with a scale are exact. It needs as many bits as `Float8` with
    blocks of 64, and hardware multiplies matrices in it. But its scale may be too small by a
    factor of almost two; then the largest numbers of a block are rounded to the largest element,
    which is off by up to an eighth. `Float8` rounds them by at most a sixteenth.

    A block with a number that is not finite arrives as NaN. Arithmetic is in float32, so
    numbers below 2**-126 may arrive as zero. Rounding is to the nearest, ties to even; there is
    no stochastic rounding and no rotation, because the specification has neither.

    Args:
        dtype: dtype of the elements, `jnp.float8_e4m3fn`, or `jnp.float8_e5m2` with a bit less of
            precision and a wider range.
        block: numbers for each scale. Only 32 is MXFP8, which hardware reads.
        implementation: "xla", or `None` for the default, which is "xla". There are no kernels.

    Raises:
        ValueError: an option is none of these.
        NotImplementedError: `implementation` has no kernels for this codec.

    References:
        OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 and 6.3
        (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf);
        Microscaling Data Formats for Deep Learning (https://arxiv.org/abs/2310.10537).
    """

    dtype: DTypeLike = jnp.float8_e4m3fn

    def __post_init__(self):
        super().__post_init__()
        self._set_dtype("dtype", "float8_e4m3fn", "float8_e5m2")

    def __str__(self) -> str:
        return f"mx_{self.dtype}/{self.block}"

    @property
    def bits(self) -> int:
        return 8

    def scale_bytes(self, num_blocks: int) -> int:
        return num_blocks

    @property
    def _limit(self) -> float:
        """The largest finite element: 448 for float8_e4m3fn, 57344 for float8_e5m2."""
        return float(jnp.finfo(self.dtype).max)

    @property
    def _largest_exponent(self) -> int:
        """The exponent of the largest element."""
        return int(np.floor(np.log2(self._limit)))

    def quantize(
        self, x_kb: Float32[Array, "*rows k b"]
    ) -> tuple[UInt8[Array, "*rows k b"], UInt8[Array, "*rows k"]]:
        # Magnitudes are compared as integers: XLA takes what is below 2**-126 for zero, and NaN
        # and infinity have the largest exponent, 255.
        bits = lax.bitcast_convert_type(x_kb, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
        exponent_k = jnp.max(bits, axis=-1) >> jnp.uint32(23)
        least = jnp.uint32(self._largest_exponent)
        scale_k = jnp.maximum(exponent_k, least) - least  # plus 127, as it is sent
        inverse_k = lax.bitcast_convert_type((254 - scale_k) << jnp.uint32(23), jnp.float32)
        scaled_kb = jnp.clip(x_kb * inverse_k[..., None], -self._limit, self._limit)
        codes_kb = lax.bitcast_convert_type(scaled_kb.astype(self.dtype), jnp.uint8)
        is_finite_k = exponent_k < jnp.uint32(255)
        return codes_kb, jnp.where(is_finite_k, scale_k, jnp.uint32(255)).astype(jnp.uint8)

    def dequantize(
        self, codes_kb: UInt8[Array, "*rows k b"], scales: UInt8[Array, "*rows k"]
    ) -> Float32[Array, "*rows k b"]:
        x_kb = lax.bitcast_convert_type(codes_kb, self.dtype).astype(jnp.float32)
        exponent_k = scales.astype(jnp.uint32)
        # 2**-127 is not a normal float32, and XLA takes it for zero: half of 2**-126.
        x_kb = jnp.where((exponent_k == 0)[..., None], x_kb * jnp.float32(0.5), x_kb)
        bits_k = jnp.maximum(exponent_k, jnp.uint32(1)) << jnp.uint32(23)
        scale_k = lax.bitcast_convert_type(bits_k, jnp.float32)
        scale_k = jnp.where(exponent_k == jnp.uint32(255), jnp.float32(jnp.nan), scale_k)
        return x_kb * scale_k[..., None]

    def error_bound(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Half a step between elements, or the excess over the largest one, times the scale."""
        near, wide = to_float32(x).astype(np.float64), x.astype(np.float64)
        largest, info = self.largest(near), jnp.finfo(self.dtype)
        exponent = np.frexp(np.where(np.isfinite(largest), largest, 0.0))[1] - 1
        scale = np.exp2(np.maximum(exponent - self._largest_exponent, _LEAST_EXPONENT))
        sizes = np.where(np.isfinite(near), np.abs(near), 0.0)
        binade = np.exp2(np.frexp(sizes / scale)[1] - 1.0)
        step = np.maximum(binade, float(info.smallest_normal)) * float(info.eps) * scale
        bound = np.maximum(step / 2, sizes - self._limit * scale)
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(largest), bound + np.abs(wide - near), np.inf)
