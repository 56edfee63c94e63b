"""Codecs: how numbers are written on the wire of one collective.

A codec turns rows of floats into messages, which are all that is sent, and back. `None`
in its place sends an array as it is. A message of narrow numbers is unsigned integers:
backends widen narrow floats in transit, and XLA would move a cast across a collective.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Integer, Shaped, UInt8, UInt32

from . import _blocks as blocks

_BITS = {8: jnp.uint8, 16: jnp.uint16}


def is_narrow_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a float of 8 or 16 bits, which some backends widen on the wire."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def bits_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The type as which `to_bits` views an array."""
    return jnp.dtype(_BITS[8 * jnp.dtype(dtype).itemsize] if is_narrow_float(dtype) else dtype)


def to_bits(x: Shaped[Array, ...]) -> Shaped[Array, ...]:
    """View a narrow float as unsigned integers, so that no backend widens it in transit."""
    if not is_narrow_float(x.dtype):
        return x
    return lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Shaped[Array, ...], dtype: DTypeLike) -> Shaped[Array, ...]:
    """Undo `to_bits`."""
    return lax.bitcast_convert_type(x, dtype) if is_narrow_float(dtype) else x


class Codec(abc.ABC):
    """How rows of floats are written as messages.

    The last dim is a row, which becomes one message; other dims stay. Both ways are pure
    functions of arrays, and work under `jit`, `vmap`, `scan` and `shard_map`.
    """

    @abc.abstractmethod
    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        """The bytes of the message of one row of `num` numbers of type `dtype`."""

    @abc.abstractmethod
    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> Shaped[Array, "*rows m"]:
        """The message of each row.

        Args:
            x: rows of floats.
            seed: of stochastic rounding, such as the device's index. None is 0.
        """

    @abc.abstractmethod
    def decode(
        self, message: Shaped[Array, "*rows m"], num: int, dtype: DTypeLike
    ) -> Shaped[Array, "*rows n"]:
        """The numbers in each message.

        Args:
            message: from `encode`.
            num: how many numbers there are in a row.
            dtype: the type they had, which they get again.
        """


@dataclasses.dataclass(frozen=True)
class Cast(Codec):
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

    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        return num * self.wire_dtype(dtype).itemsize

    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> Shaped[Array, "*rows n"]:
        return to_bits(x.astype(self.wire_dtype(x.dtype)))

    def decode(
        self, message: Shaped[Array, "*rows n"], num: int, dtype: DTypeLike
    ) -> Shaped[Array, "*rows n"]:
        return from_bits(message, self.wire_dtype(dtype)).astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Blocks(Codec):
    """What codecs with few bits share: codes of one size, and a scale for each block."""

    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Literal[32] | None = None
    scale_dtype: DTypeLike = jnp.bfloat16

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
        if self.hadamard not in (None, blocks.GROUP):
            raise ValueError(
                f"`hadamard` of `{name}` must be 32, the numbers rotated together, or `None` for "
                f"no rotation; got {self.hadamard!r}."
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
    @abc.abstractmethod
    def _limit(self) -> float:
        """The largest code."""

    @abc.abstractmethod
    def _codes(
        self, x_kb: Float32[Array, "*rows k b"], u_kb: Float32[Array, "*rows k b"] | None
    ) -> UInt8[Array, "*rows k b"]:
        """The bits of the codes of numbers up to `_limit`."""

    @abc.abstractmethod
    def _values(self, codes_kb: UInt8[Array, "*rows k b"]) -> Float32[Array, "*rows k b"]:
        """The numbers that codes stand for."""

    def _code_bytes(self, num: int) -> int:
        return math.ceil(num * self.bits / 8)

    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        scales = math.ceil(num / self.block) * jnp.dtype(self.scale_dtype).itemsize
        return self._code_bytes(num) + scales

    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> UInt8[Array, "*rows m"]:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"`x` of `{type(self).__name__}.encode` must be floats; got {x.dtype}. Send "
                "other types as they are."
            )
        num = x.shape[-1]
        x_kb = blocks.split(blocks.to_float32(x), self.block)
        if self.hadamard:
            x_kb = blocks.rotate(x_kb, num)
        scale_k = blocks.scales(x_kb, self._limit, self.scale_dtype)
        is_random = self.rounding == "stochastic"
        u_kb = blocks.uniforms(x_kb, scale_k, _as_uint32(seed)) if is_random else None
        codes_kb = self._codes(blocks.divide(x_kb, scale_k, self._limit), u_kb)
        codes = blocks.pack(codes_kb, num, self.bits)
        return jnp.concatenate((codes, blocks.write_scales(scale_k, self.scale_dtype)), axis=-1)

    def decode(
        self, message: UInt8[Array, "*rows m"], num: int, dtype: DTypeLike
    ) -> Float[Array, "*rows n"]:
        assert message.shape[-1] == self.num_bytes(num, dtype)
        size = self._code_bytes(num)
        scale_k = blocks.read_scales(message[..., size:], self.scale_dtype)
        codes_kb = blocks.unpack(message[..., :size], num, self.block, self.bits)
        x_kb = self._values(codes_kb)
        if self.hadamard:  # before scales come in, so that sums are exact
            x_kb = blocks.unrotate(x_kb, num)
        x = blocks.join(x_kb * scale_k[..., None], num)
        # Half a step above the largest number of a type lies infinity. NaN stays.
        largest = min(float(jnp.finfo(dtype).max), float(jnp.finfo(jnp.float32).max))
        return jnp.clip(x, -largest, largest).astype(dtype)


def _as_uint32(seed: Integer[Array, ""] | int | None) -> UInt32[Array, ""]:
    if seed is None or isinstance(seed, int):
        return jnp.uint32((seed or 0) % 2**32)
    return seed.astype(jnp.uint32)


class _Integers(_Blocks):
    """Symmetric integers, in two's complement."""

    @property
    def _limit(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def _codes(
        self, x_kb: Float32[Array, "*rows k b"], u_kb: Float32[Array, "*rows k b"] | None
    ) -> UInt8[Array, "*rows k b"]:
        integers_kb = blocks.round_to_integer(x_kb, u_kb).astype(jnp.int8)
        return lax.bitcast_convert_type(integers_kb, jnp.uint8)

    def _values(self, codes_kb: UInt8[Array, "*rows k b"]) -> Float32[Array, "*rows k b"]:
        return lax.bitcast_convert_type(codes_kb, jnp.int8).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(_Integers):
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

    Raises:
        ValueError: an option is none of these.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209); SDP4Bit (https://arxiv.org/abs/2410.15526).
    """

    bits: ClassVar[int] = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(_Integers):
    """Send floats as integers of 4 bits, from -7 to 7 times the scale of their block.

    Two go in a byte. Else, and in its options, it is as `Int8`.
    """

    block: int = 128
    bits: ClassVar[int] = 4


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
    def _limit(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def _codes(
        self, x_kb: Float32[Array, "*rows k b"], u_kb: Float32[Array, "*rows k b"] | None
    ) -> UInt8[Array, "*rows k b"]:
        floats_kb = blocks.round_to_float(x_kb, u_kb, self.dtype)
        return lax.bitcast_convert_type(floats_kb, jnp.uint8)

    def _values(self, codes_kb: UInt8[Array, "*rows k b"]) -> Float32[Array, "*rows k b"]:
        return lax.bitcast_convert_type(codes_kb, self.dtype).astype(jnp.float32)
