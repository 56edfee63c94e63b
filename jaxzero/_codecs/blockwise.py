"""Codecs with few bits: codes of one size in blocks, and a scale for each block.

What is in a message, and what reads and writes it, is `pallas_kernels`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Integer, Shaped, UInt8

from .. import pallas_kernels as kernels
from .codec import Codec, cut, joined


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks(Codec):
    """What codecs with few bits share: codes of one size, and a scale for each block."""

    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Literal[32] | None = None
    scale_dtype: DTypeLike = jnp.bfloat16
    # Not compared: whoever wrote a message, its bytes mean the same.
    implementation: kernels.Implementation | None = dataclasses.field(default=None, compare=False)

    bits: ClassVar[int]  # of a code

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
        if self.implementation not in (None, "xla", "mosaic_gpu"):
            raise ValueError(
                f'`implementation` of `{name}` must be "xla", "mosaic_gpu", a kernel for GPUs, or '
                f"`None` for the default; got {self.implementation!r}."
            )
        self._set_dtype("scale_dtype", "bfloat16", "float32")

    def _set_dtype(self, field: str, *names: str) -> None:
        """Make a `dtype` of a field, which must be one of those named."""
        given = getattr(self, field)
        try:
            dtype = jnp.dtype(given)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in names:
            wanted = " or ".join(f"`jnp.{name}`" for name in names)
            raise ValueError(
                f"`{field}` of `{type(self).__name__}` must be {wanted}; got {given!r}."
            )
        object.__setattr__(self, field, dtype)

    def __str__(self) -> str:
        options = ["H32"] * bool(self.hadamard) + ["SR"] * (self.rounding == "stochastic")
        return "+".join([f"{self._name}/{self.block}", *options])

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    @property
    def format(self) -> kernels.Format:
        """What the messages are made of."""
        return kernels.Format(
            kind=self._kind,
            block=self.block,
            rounding=self.rounding,
            hadamard=self.hadamard,
            scale_dtype=self.scale_dtype,
        )

    @property
    @abc.abstractmethod
    def _kind(self) -> kernels.Kind:
        """Of the codes."""

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
        return kernels.dequantize_sum(
            message, self.format, num=num, implementation=self.implementation
        )

    def recode(
        self,
        message: Shaped[Array, "peers m"] | kernels.InPlace,
        source: Codec,
        shape: tuple[int, ...],
        dim: int,
        num: int,
        *,
        divisor: int,
        dtype: DTypeLike,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> UInt8[Array, "num _"]:
        if not isinstance(source, _Blocks) or source.implementation != self.implementation:
            options = {"divisor": divisor, "dtype": dtype, "seed": seed, "place": place}
            return super().recode(message, source, shape, dim, num, **options)
        # Not rounded to `dtype`: what follows is float32, so XLA would leave that out too.
        return kernels.dequantize_sum_requantize(
            message,
            source.format,
            self.format,
            shape=cut(shape, dim, num),
            seed=seed,
            divisor=divisor,
            place=place,
            implementation=self.implementation,
        )

    def _quantize(
        self,
        x_oni: Shaped[Array, "o n i"],
        seed: Integer[Array, ""] | int | None,
        place: kernels.Place | None = None,
    ) -> UInt8[Array, "n _"]:
        if not jnp.issubdtype(x_oni.dtype, jnp.floating):
            raise ValueError(
                f"`x` of `{type(self).__name__}.encode` must be floats; got {x_oni.dtype}. Send "
                "other types as they are."
            )
        return kernels.quantize(
            x_oni, self.format, seed=seed, place=place, implementation=self.implementation
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
            implementation=self.implementation,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(_Blocks):
    """Send floats as integers of 8 bits, from -127 to 127 times the scale of their block.

    A block with a number that is not finite arrives as NaN. Arithmetic is in float32, so
    numbers below 2**-126 may arrive as zero.

    Stochastic rounding takes its random numbers from a hash of `seed`, the number, its place
    in its row, and its block's scale: no key, no state, and the same every time. Its weakness:
    where all four are the same, so is the rounding, and errors add up. So give devices
    whose numbers are summed a `seed` each.

    Args:
        block: numbers for each scale, a power of two from 32 to 8192.
        rounding: "nearest" has the smaller error, half a step at most; "stochastic", up to one
            step, is right on average, for what is summed over many devices or steps.
        hadamard: 32 multiplies each 32 numbers by an orthogonal matrix, which spreads outliers:
            better for heavy tails, a little worse where most numbers are zero.
        scale_dtype: of the scales, `jnp.bfloat16` or `jnp.float32`.
        implementation: what writes and reads messages: "xla", "mosaic_gpu" (kernels for NVIDIA
            GPUs, which compile and were never executed on one; JAX 0.11.2 or newer), or `None`
            for the default, "xla". Their messages are the same but for roundings in the last
            place, and each reads the other's.

    Raises:
        ValueError: an option is none of these.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209); SDP4Bit (https://arxiv.org/abs/2410.15526).
    """

    bits: ClassVar[int] = 8

    @property
    def _kind(self) -> kernels.Kind:
        return "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(_Blocks):
    """Send floats as integers of 4 bits, from -7 to 7 times the scale of their block.

    Two go in a byte. Else, and in its options, it is as `Int8`.
    """

    block: int = 128
    bits: ClassVar[int] = 4

    @property
    def _kind(self) -> kernels.Kind:
        return "int4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(_Blocks):
    """Send floats as floats of 8 bits times the scale of their block.

    Small numbers keep their relative precision: better than `Int8` for numbers of very
    different sizes in one block, worse for others. A step is the distance of the floats next
    to a number. Outliers do no harm, so `hadamard` has little to gain. Else it is as `Int8`.

    Args:
        dtype: `jnp.float8_e4m3fn`, or `jnp.float8_e5m2` with a bit less of precision and a
            wider range.
    """

    dtype: DTypeLike = jnp.float8_e4m3fn
    bits: ClassVar[int] = 8

    def __post_init__(self):
        super().__post_init__()
        self._set_dtype("dtype", "float8_e4m3fn", "float8_e5m2")

    @property
    def _name(self) -> str:
        return str(self.dtype)

    @property
    def _kind(self) -> kernels.Kind:
        return "float8_e5m2" if self.dtype == jnp.float8_e5m2 else "float8_e4m3fn"
