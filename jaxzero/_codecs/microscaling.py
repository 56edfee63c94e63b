"""`MXFloat8` and `NVFloat4`: MXFP8 and NVFP4, microscaling formats that hardware multiplies."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Float64, UInt8

from .. import pallas_kernels as kernels
from .blockwise import BlockCodec, to_float32

# Of `MXFloat8`.
_LEAST_EXPONENT = -127  # of a scale

# Of `NVFloat4`.
_LIMIT = 6.0  # the largest element
_SCALE_DTYPE = jnp.float8_e4m3fn
_SCALE_LIMIT = 448.0  # the largest scale of a block
_LEAST_ROW_SCALE = 2.0**-117  # with it the smallest scale, 2**-9 times this, is a normal float32
_NAN = 0x7F  # of a block's scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFloat8(BlockCodec):
    """Send floats as 8-bit floats with a power of two as the scale of each 32 (MXFP8).

    The format is that of the OCP microscaling specification. A scale is a byte, the exponent
    `floor(log2(max|x|))` of the block minus that of the largest element, which is 8 (15 for
    `jnp.float8_e5m2`). Products with a scale are exact. The format needs as many bits as `Float8`
    with blocks of 64, and hardware multiplies matrices in it. But its scale may be too small by a
    factor of almost two; then the largest numbers of a block are rounded to the largest element,
    which is off by up to an eighth. `Float8` rounds them by at most a sixteenth.

    A block with a number that is not finite arrives as NaN. Arithmetic is in float32, so numbers
    below 2**-126 may arrive as zero. Rounding is to the nearest, ties to even; there is no
    stochastic rounding and no rotation, because the specification has neither.

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
        """The exponent of the largest finite value of `dtype`: 8 or 15."""
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
        """Return the largest error of each number of `x` when it is decoded.

        It is half the distance of neighbouring elements at the number's size, times the block's
        scale. A number above the largest element times the scale is off by the excess.
        """
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFloat4(BlockCodec):
    """Send floats as 4-bit floats with an 8-bit float as the scale of each 16 (NVFP4).

    Elements are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign (E2M1), two in a byte, the first in
    its lower half. A block's scale, `max|x| / 6`, is a float8_e4m3fn in units of the message's
    own scale, a float32: the largest scale of a block is then 448. Compared with `Int4`, whose
    blocks of 32 need as many bits, small numbers next to large ones keep more of their precision,
    and large ones less.

    A block with a number that is not finite arrives as NaN. A block whose largest number is
    below 2**-19 of its message's largest arrives as zeros, as do numbers below 2**-124. The
    message's scale has 16 significant bits, so that every product of the two scales and an
    element is exact, in whatever order a compiler takes them. Rounding is to the nearest, ties
    to even; there is no stochastic rounding and no rotation.

    Args:
        block: numbers for each scale. Only 16 is NVFP4, which hardware reads.
        implementation: "xla", or `None` for the default, which is "xla". There are no kernels.

    Raises:
        ValueError: an option is none of these.
        NotImplementedError: `implementation` has no kernels for this codec.

    References:
        Pretraining Large Language Models with NVFP4 (https://arxiv.org/abs/2509.25149),
        appendices B and C; Introducing NVFP4
        (https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference);
        E2M1: OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
    """

    block: int = 16

    @property
    def bits(self) -> int:
        return 4

    def scale_bytes(self, num_blocks: int) -> int:
        """Return one byte for each block's scale, and four bytes for the message's own scale."""
        return num_blocks + 4

    def quantize(
        self, x_kb: Float32[Array, "*rows k b"]
    ) -> tuple[UInt8[Array, "*rows k b"], UInt8[Array, "*rows m"]]:
        largest_k = jnp.max(jnp.abs(x_kb), axis=-1)
        is_finite_k = jnp.isfinite(largest_k)
        largest_k = jnp.where(is_finite_k, largest_k, 0)
        row_scale = _row_scale(jnp.max(largest_k, axis=-1, initial=0.0))
        scaled_k = largest_k * (1 / (row_scale * jnp.float32(_LIMIT)))[..., None]
        scale_k = jnp.minimum(scaled_k, jnp.float32(_SCALE_LIMIT)).astype(_SCALE_DTYPE)
        product_k = scale_k.astype(jnp.float32) * row_scale[..., None]  # exact
        is_used_k = is_finite_k & (product_k > 0)
        inverse_k = 1 / jnp.where(is_used_k, product_k, 1)
        scaled_kb = jnp.where(is_used_k[..., None], x_kb * inverse_k[..., None], 0)
        bytes_k = lax.bitcast_convert_type(scale_k, jnp.uint8)
        bytes_k = jnp.where(is_finite_k, bytes_k, jnp.uint8(_NAN))
        return _to_codes(scaled_kb), jnp.concatenate(
            (bytes_k, lax.bitcast_convert_type(row_scale, jnp.uint8)), axis=-1
        )

    def dequantize(
        self, codes_kb: UInt8[Array, "*rows k b"], scales: UInt8[Array, "*rows m"]
    ) -> Float32[Array, "*rows k b"]:
        bytes_k, row_scale = (
            scales[..., :-4],
            lax.bitcast_convert_type(scales[..., -4:], jnp.float32),
        )
        scale_k = lax.bitcast_convert_type(bytes_k, _SCALE_DTYPE).astype(jnp.float32)
        return _from_codes(codes_kb) * (scale_k * row_scale[..., None])[..., None]

    def error_bound(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Return the largest error of each number of `x` when it is decoded.

        It is half the distance of neighbouring elements at the number's size, times the block's
        scale. A number above the largest element times the scale is off by the excess. The scale
        is rounded too, by up to 1/16 of it, or 2**-10 of the message's scale.
        """
        near, wide = to_float32(x).astype(np.float64), x.astype(np.float64)
        largest = self.largest(near)
        finite = np.where(np.isfinite(largest), largest, 0.0)
        of_row = finite.max(-1, keepdims=True, initial=0.0)
        row_scale = np.maximum(of_row / _LIMIT / _SCALE_LIMIT, _LEAST_ROW_SCALE) * (1 + 2.0**-15)
        exact, sizes = finite / _LIMIT, np.where(np.isfinite(near), np.abs(near), 0.0)
        off = np.maximum(exact / 16, row_scale * 2.0**-10) + 2.0**-14 * exact
        low, high = np.maximum(exact - off, 0.0), exact + off
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(sizes > 0, sizes / low, 0.0)
        step = np.where(scaled < 2, 0.5, np.where(scaled < 4, 1.0, 2.0))
        # 4 roundings in float32, of 2**-24 each, on the way to a code.
        bound = step / 2 * high + np.maximum(sizes - _LIMIT * low, 0.0) + 2.0**-22 * finite
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(largest), bound + np.abs(wide - near), np.inf)


def _row_scale(largest: Float32[Array, "*rows"]) -> Float32[Array, "*rows"]:
    """Return each message's scale from its largest number, rounded up to 16 significant bits."""
    exact = largest * kernels.not_above(1 / (_LIMIT * _SCALE_LIMIT))
    bits = lax.bitcast_convert_type(jnp.maximum(exact, _LEAST_ROW_SCALE), jnp.uint32)
    bits = (bits + jnp.uint32(0xFF)) & jnp.uint32(0xFFFFFF00)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _to_codes(x: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Round numbers to E2M1 elements; return their 4-bit codes: a sign, and a magnitude's index.

    Magnitudes are multiples of 0.5 up to 2, of 1 up to 4, and of 2 up to 6. Even codes are even
    multiples, so that `round` rounds ties to even codes.
    """
    size = jnp.abs(x)
    code = jnp.where(
        size < 2,
        jnp.round(size * 2),
        jnp.where(size < 4, jnp.round(size) + 2, jnp.round(size * jnp.float32(0.5)) + 4),
    )
    code = jnp.minimum(code, 7).astype(jnp.uint8)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> jnp.uint32(31)).astype(jnp.uint8)
    return code | (sign << jnp.uint8(3))


def _from_codes(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Decode 4-bit codes to floats: bit 3 is the sign, bits 0 to 2 index the magnitudes."""
    code = (codes & jnp.uint8(7)).astype(jnp.float32)
    size = jnp.where(code < 4, code * jnp.float32(0.5), jnp.where(code < 6, code - 2, code * 2 - 8))
    return jnp.where(codes < 8, size, -size)
