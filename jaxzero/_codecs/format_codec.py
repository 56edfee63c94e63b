"""Codecs whose messages `pallas_kernels` reads and writes: `Int8`, `Int4`, `Float8`.

A `Format` says what a message contains: codes of one kind in blocks, and a scale for each block.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Float32, Float64, Integer, Shaped, UInt8

from .. import pallas_kernels as kernels
from .blockwise import ROTATED, largest_of_blocks, rotated_groups, to_float32
from .codec import Codec
from .rows import cut, joined

# Divides what follows the full groups of a rotated row; near sqrt(32), by which rotation shrinks.
_TAIL = 8.0
_TINY = 2.0**-126  # the smallest scale
_EPS = 2.0**-24  # relative error of one rounding in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatCodec(Codec):
    """Base class of `Int8`, `Int4` and `Float8`: codes of few bits, and a scale for each block."""

    _kind: ClassVar[kernels.Kind]  # of the codes, as `pallas_kernels` names it
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Literal[32] | None = None
    scale_dtype: DTypeLike = jnp.bfloat16
    # Not compared: every implementation reads a message the same way.
    implementation: Literal["xla", "mosaic_gpu", "nvlink"] | None = dataclasses.field(
        default=None, compare=False
    )

    def __post_init__(self):
        name = type(self).__name__
        if not isinstance(self.block, int) or self.block not in [2**i for i in range(5, 14)]:
            raise ValueError(
                f"`block` of `{name}` must be a power of two from 32 to 8192; got "
                f"{self.block!r}. Errors are smaller in small blocks, messages with large ones."
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'`rounding` of `{name}` must be "nearest", or "stochastic", which is right on '
                f"average; got {self.rounding!r}."
            )
        if self.hadamard not in (None, 32):
            raise ValueError(
                f"`hadamard` of `{name}` must be 32, the numbers rotated together, or `None` for "
                f"no rotation; got {self.hadamard!r}."
            )
        if self.implementation not in (None, "xla", "mosaic_gpu", "nvlink"):
            raise ValueError(
                f'`implementation` of `{name}` must be "xla", "mosaic_gpu" or "nvlink" (kernels '
                f"for GPUs), or `None` for the default; got {self.implementation!r}."
            )
        self._set_dtype("scale_dtype", "bfloat16", "float32")
        if self.implementation == "nvlink" and (reason := kernels.exchange_gap(self.format)):
            nvlink = f'`implementation="nvlink"` of `{name}`'
            raise ValueError(f'{nvlink}: {reason}. Change that option, or take "xla".')

    def __str__(self) -> str:
        options = ["H32"] * bool(self.hadamard) + ["SR"] * (self.rounding == "stochastic")
        name = "+".join([f"{self._name}/{self.block}", *options])
        return f"{name} (nvlink)" if self.implementation == "nvlink" else name

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    @property
    def format(self) -> kernels.Format:
        """The format of the messages, as kernels take it."""
        return kernels.Format(
            kind=self._kind,
            block=self.block,
            rounding=self.rounding,
            hadamard=self.hadamard,
            scale_dtype=self.scale_dtype,
        )

    @property
    def bits(self) -> int:
        return self.format.bits

    @property
    def exchange_format(self) -> kernels.Format | None:
        return self.format if self.implementation == "nvlink" else None

    @property
    def _kernels(self) -> kernels.Implementation | None:  # of messages outside of an exchange
        return None if self.implementation == "nvlink" else self.implementation

    def format_for(self, implementation: kernels.Implementation | None) -> kernels.Format | None:
        return self.format if implementation == self._kernels else None

    @property
    def writes_in_place(self) -> bool:
        return self.implementation == "mosaic_gpu"

    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        return self.format.num_bytes(num)

    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> UInt8[Array, "*rows m"]:
        *rows, num = x.shape
        message = self._quantize(x.reshape(1, math.prod(rows), num), seed)
        return message.reshape(*rows, message.shape[1])

    def decode(
        self, message: UInt8[Array, "*rows m"], num: int, dtype: DTypeLike
    ) -> Float[Array, "*rows n"]:
        *rows, size = message.shape
        assert size == self.num_bytes(num, dtype)
        return self._dequantize(message.reshape(math.prod(rows), size), 1, num, dtype).reshape(
            *rows, num
        )

    def encode_pieces(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> UInt8[Array, "num _"]:
        return self._quantize(x.reshape(cut(x.shape, dim, num)), seed, place)

    def decode_pieces(
        self,
        message: UInt8[Array, "num m"] | kernels.InPlace,
        shape: tuple[int, ...],
        dim: int,
        dtype: DTypeLike,
    ) -> Float[Array, ...]:
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim:])
        x = self._dequantize(message, outer, inner, dtype)
        return joined(x, shape, dim, len(message))

    def decode_sum(
        self, message: UInt8[Array, "peers m"] | kernels.InPlace, num: int
    ) -> Float32[Array, " num"]:
        return kernels.dequantize_sum(message, self.format, num=num, implementation=self._kernels)

    def recode(
        self,
        message: Shaped[Array, "peers m"] | kernels.InPlace,
        source: Codec,
        shape: tuple[int, ...],
        dim: int,
        num: int,
        *,
        divisor: int,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> UInt8[Array, "num _"]:
        source_format = source.format_for(self._kernels)
        if source_format is None:
            options = {"divisor": divisor, "seed": seed, "place": place}
            return super().recode(message, source, shape, dim, num, **options)
        return kernels.dequantize_sum_requantize(
            message,
            source_format,
            self.format,
            shape=cut(shape, dim, num),
            seed=seed,
            divisor=divisor,
            place=place,
            implementation=self._kernels,
        )

    def encode_mean(
        self,
        total: Float32[Array, ...],
        dim: int,
        num: int,
        *,
        divisor: int,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> UInt8[Array, "num _"]:
        options = {"seed": seed, "place": place, "implementation": self._kernels}
        pieces = total.reshape(cut(total.shape, dim, num))
        return kernels.quantize(pieces, self.format, divisor=divisor, **options)

    def encode_tiled(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
    ) -> UInt8[Array, "num ..."]:
        if self.implementation == "mosaic_gpu":  # kernels write rows
            return super().encode_tiled(x, dim, num, seed=seed)
        self._check_floats(x)
        pieces, implementation = kernels.pieces_of(x, dim, num), self._kernels
        return kernels.quantize_tiled(pieces, self.format, seed=seed, implementation=implementation)

    def decode_tiled(
        self, message: UInt8[Array, "num ..."], shape: tuple[int, ...], dim: int, dtype: DTypeLike
    ) -> Float[Array, ...]:
        if self.implementation == "mosaic_gpu":
            return super().decode_tiled(message, shape, dim, dtype)
        options = {"shape": shape, "dtype": dtype, "implementation": self._kernels}
        pieces = kernels.dequantize_tiled(message, self.format, **options)
        return joined(jnp.moveaxis(pieces, 0, dim), shape, dim, len(message))

    def sum_tiled(
        self, message: UInt8[Array, "peers ..."], shape: tuple[int, ...]
    ) -> Float32[Array, ...]:
        if self.implementation == "mosaic_gpu":
            return super().sum_tiled(message, shape)
        options = {"shape": shape, "implementation": self._kernels}
        return kernels.dequantize_sum_tiled(message, self.format, **options)

    def recode_tiled(
        self,
        message: Shaped[Array, "peers ..."],
        source: Codec,
        shape: tuple[int, ...],
        dim: int,
        num: int,
        *,
        divisor: int,
        seed: Integer[Array, ""] | int | None = None,
    ) -> UInt8[Array, "num ..."]:
        source_format = source.format_for(self._kernels)
        if self.implementation == "mosaic_gpu" or source_format is None:
            options = {"divisor": divisor, "seed": seed}
            return super().recode_tiled(message, source, shape, dim, num, **options)
        return kernels.dequantize_sum_requantize_tiled(
            message,
            source_format,
            self.format,
            shape=shape,
            dim=dim,
            num=num,
            seed=seed,
            divisor=divisor,
            implementation=self._kernels,
        )

    def _quantize(
        self,
        x_oni: Shaped[Array, "o n i"],
        seed: Integer[Array, ""] | int | None,
        place: kernels.Place | None = None,
    ) -> UInt8[Array, "n _"]:
        self._check_floats(x_oni)
        return kernels.quantize(
            x_oni, self.format, seed=seed, place=place, implementation=self._kernels
        )

    def _dequantize(
        self,
        message: UInt8[Array, "n m"] | kernels.InPlace,
        outer: int,
        inner: int,
        dtype: DTypeLike,
    ) -> Float[Array, "o n i"]:
        return kernels.dequantize(
            message,
            self.format,
            outer=outer,
            inner=inner,
            dtype=dtype,
            implementation=self._kernels,
        )

    def error_bound(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Return half the distance of neighbouring codes (all of it if stochastic) times the scale.

        In a rotated block, a number's error is at most the sum of the errors in its group of 32.
        """
        near, wide = to_float32(x).astype(np.float64), x.astype(np.float64)
        bound = self._code_bound(near, np.zeros_like(near))
        if self.hadamard:
            rotated = rotated_groups(near, 1 / ROTATED, 1 / _TAIL)
            # 32 additions in float32 round at most 32 times.
            doubt = (
                ROTATED * _EPS * rotated_groups(np.abs(near), 1 / ROTATED, 1 / _TAIL, signed=False)
            )
            of_rotated = self._code_bound(rotated, doubt) + doubt
            of_rotated = rotated_groups(of_rotated, 1.0, _TAIL, signed=False)
            is_kept, may_be_kept = (self._is_kept(near, least) for least in (0.0, _TINY))
            of_rotated = np.where(may_be_kept, np.maximum(bound, of_rotated), of_rotated)
            bound = np.where(is_kept, bound, of_rotated)
        bound = np.where(np.isnan(bound), np.inf, bound)
        with np.errstate(invalid="ignore"):
            return bound + np.where(np.isfinite(wide), np.abs(wide - near), 0.0)

    def _is_kept(
        self, x: Float64[np.ndarray, "*rows n"], zero: float
    ) -> Bool[np.ndarray, "*rows n"]:
        """Return for each number whether its block has a zero (`abs(x) <= zero`): not rotated."""
        is_zero = (np.abs(x) <= zero).astype(np.float64)
        is_zero[..., x.shape[-1] // ROTATED * ROTATED :] = 0
        return largest_of_blocks(is_zero, self.block) > 0

    def _code_bound(
        self, x: Float64[np.ndarray, "*rows n"], doubt: Float64[np.ndarray, "*rows n"]
    ) -> Float64[np.ndarray, "*rows n"]:
        """Return the error bound of encoding numbers that differ from `x` by up to `doubt`."""
        largest = largest_of_blocks(np.abs(x) + doubt, self.block)
        least = np.maximum(largest_of_blocks(x, self.block) / self.format.limit, _TINY)
        # The constant 1/limit and a product with it are rounded, and a bfloat16 upwards.
        upwards = 2.0**-7 if self.format.scale_bytes == 2 else 0.0
        scale = np.maximum(largest / self.format.limit, _TINY) * (1 + upwards + 4 * _EPS)
        with np.errstate(invalid="ignore"):
            step = self.format.step((np.abs(x) + doubt) / least * (1 + 4 * _EPS))
            share = 1.0 if self.rounding == "stochastic" else 0.5
            return np.where(np.isfinite(largest), share * step * scale + 8 * _EPS * largest, np.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(FormatCodec):
    """Send floats as integers of 8 bits, from -127 to 127 times the scale of their block.

    A block with a number that is not finite arrives as NaN. Arithmetic is in float32, so
    numbers below 2**-126 may arrive as zero.

    Stochastic rounding takes its random numbers from a hash of `seed`, the number, its place
    in its row, and its block's scale, so it needs no key and no state, and is reproducible. Where
    all four are equal, roundings are equal too, and errors add up: give devices whose numbers
    are summed different seeds.

    Args:
        block: numbers for each scale, a power of two from 32 to 8192.
        rounding: "nearest" has the smaller error, half a step at most; "stochastic", up to one
            step, is right on average, for what is summed over many devices or steps.
        hadamard: 32 multiplies each 32 numbers by an orthogonal matrix, which spreads outliers:
            better for heavy tails. Blocks with an exact zero are not multiplied, so that it arrives
            as zero.
        scale_dtype: dtype of the scales, `jnp.bfloat16` or `jnp.float32`.
        implementation: what writes and reads messages: "xla", "mosaic_gpu" (kernels for NVIDIA
            GPUs, which compile and were never executed on one; JAX 0.11.2 or newer), or `None`
            for the default: "xla" and, in programs compiled for TPUs, kernels where there are
            any. Messages are equal but for roundings in the last place, and each reads the
            other's. "nvlink", for `PerAxis.local`: one kernel encodes, stores into the node's
            GPUs and decodes or adds up, with the bits of "xla". One process, no `hadamard`,
            blocks up to 2048; it compiles, never executed.

    Raises:
        ValueError: an option is none of these.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209); SDP4Bit (https://arxiv.org/abs/2410.15526).
    """

    _kind = "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(FormatCodec):
    """Send floats as integers of 4 bits, from -7 to 7 times the scale of their block.

    Each byte holds two codes. Options and numerics are those of `Int8`, except that blocks have
    128 numbers by default.
    """

    _kind = "int4"
    block: int = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(FormatCodec):
    """Send floats as 8-bit floats times the scale of their block.

    Small numbers keep their relative precision: better than `Int8` for numbers of very
    different sizes in one block, worse for others. The step that `rounding` speaks of is the
    distance between neighbouring 8-bit floats. Outliers do no harm, so `hadamard` gains little.
    Stochastic rounding, scales and numbers that are not finite are as in `Int8`.

    Args:
        dtype: `jnp.float8_e4m3fn`, or `jnp.float8_e5m2` with a bit less of precision and a
            wider range.
    """

    dtype: DTypeLike = jnp.float8_e4m3fn

    def __post_init__(self):
        super().__post_init__()
        self._set_dtype("dtype", "float8_e4m3fn", "float8_e5m2")

    @property
    def _name(self) -> str:
        return str(self.dtype)

    @property
    def _kind(self) -> kernels.Kind:
        return "float8_e5m2" if self.dtype == jnp.float8_e5m2 else "float8_e4m3fn"
