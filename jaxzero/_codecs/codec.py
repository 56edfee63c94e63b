"""Codecs: how numbers are written on the wire of one collective.

A codec turns rows of floats into messages, which are all that is sent, and back. `None`
in its place sends an array as it is. A message of narrow numbers is unsigned integers:
backends widen narrow floats in transit, and XLA would move a cast across a collective.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float32, Integer, Shaped

from .. import pallas_kernels as kernels
from ..pallas_kernels import add_up

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


@dataclasses.dataclass(frozen=True)
class DeferredMessage:
    """Messages that are not written yet, so that it can be said where.

    Attributes:
        shape: of the messages, one in each row, in bytes.
        write: writes them into a `place`, or without one makes an array of them.
    """

    shape: tuple[int, int]
    write: Callable[..., Shaped[Array, "n _"]]

    @property
    def dtype(self) -> jnp.dtype:
        """Of the messages: bytes."""
        return jnp.dtype(jnp.uint8)


def written(x: Shaped[Array, "n m"] | DeferredMessage) -> Shaped[Array, "n m"]:
    """Messages as an array of their own."""
    return x.write() if isinstance(x, DeferredMessage) else x


class Codec(abc.ABC):
    """How rows of floats are written as messages.

    The last dim is a row, which becomes one message; other dims stay. Both ways are pure
    functions of arrays, and work under `jit`, `vmap`, `scan` and `shard_map`.
    """

    @property
    def writes_in_place(self) -> bool:
        """Whether `encode_pieces` and `recode` save a copy where they are given a `place`."""
        return False

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

    def encode_pieces(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> Shaped[Array, "num _"]:
        """The messages of `num` pieces of an array that is cut along `dim`.

        With `place` the larger array, whose columns there are these messages.
        """
        message = self.encode(kernels.to_rows(x.reshape(cut(x.shape, dim, num))), seed=seed)
        return message if place is None else place.put(message)

    def decode_pieces(
        self,
        message: Shaped[Array, "num m"] | kernels.InPlace,
        shape: tuple[int, ...],
        dim: int,
        dtype: DTypeLike,
    ) -> Shaped[Array, ...]:
        """The array that pieces, each of `shape`, form side by side along `dim`."""
        x = self.decode(kernels.cut_out(message), math.prod(shape), dtype).reshape(
            len(message), *shape
        )
        return joined(jnp.moveaxis(x, 0, dim), shape, dim, len(message))

    def decode_sum(
        self, message: Shaped[Array, "peers m"] | kernels.InPlace, num: int
    ) -> Float32[Array, " num"]:
        """The sum of messages of `num` numbers each, in float32."""
        return add_up(self.decode(kernels.cut_out(message), num, jnp.float32))

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
    ) -> Shaped[Array, "num _"]:
        """The sum of messages of `source`, over `divisor`, as messages of its own pieces.

        Args:
            message: of arrays of `shape`.
            source: the codec that wrote them.
            shape: of the sum.
            dim: that it is cut along.
            num: its pieces.
            divisor: what makes a mean of the sum.
            dtype: that the mean is rounded to.
            seed: as of `encode`.
            place: as of `encode_pieces`.
        """
        total = source.decode_sum(message, math.prod(shape)).reshape(shape)
        mean = total if divisor == 1 else total / jnp.float32(divisor)
        return self.encode_pieces(mean.astype(dtype), dim, num, seed=seed, place=place)


def cut(shape: tuple[int, ...], dim: int, num: int) -> tuple[int, int, int]:
    """An array of `shape` in three dims, of which the middle one counts pieces along `dim`."""
    return math.prod(shape[:dim]), num, math.prod(shape[dim:]) // num


def joined(x: Shaped[Array, ...], shape: tuple[int, ...], dim: int, num: int) -> Shaped[Array, ...]:
    """Pieces of `shape`, side by side along `dim`, without the dim that counts them."""
    return x.reshape(*shape[:dim], num * shape[dim], *shape[dim + 1 :])


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
