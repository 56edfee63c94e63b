"""`Codec`, the base class: how numbers are written on the wire of one collective.

A codec turns rows of floats into messages, which are sent in place of the floats, and messages into
floats again. Where a codec is expected, `None` sends an array without encoding. The collectives,
the wire state, the report and checkpoints use only the methods of this class, so a new codec is one
subclass.
"""

from __future__ import annotations

import abc
import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Float64, Integer, Shaped

from .. import pallas_kernels as kernels
from ..pallas_kernels import add_up
from .rows import joined_rows, rows_of


class Codec(abc.ABC):
    """How rows of floats are written as messages: the base class of every codec.

    A subclass gives `bits`, `num_bytes`, `encode`, `decode` and `error_bound`; every other method
    has a default that calls these, in XLA. The last dim of an array is a row, which becomes one
    message; other dims stay. Encoding and decoding are pure functions of arrays, and work under
    `jit`, `vmap`, `scan` and `shard_map`.

    Programs are cached by their codecs, and stored messages are distinguished by them, so a codec
    must be hashable and equal to its copies: make it a frozen dataclass.
    """

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of one number's code, without parts that numbers share, such as scales."""

    @abc.abstractmethod
    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        """Return the bytes of the message of a row of `num` numbers of type `dtype`."""

    @abc.abstractmethod
    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> Shaped[Array, "*rows m"]:
        """Return the message of each row, uint8 `[*rows, num_bytes]`.

        Args:
            x: rows of floats.
            seed: seed of stochastic rounding, such as the device's index; None means 0.
        """

    @abc.abstractmethod
    def decode(
        self, message: Shaped[Array, "*rows m"], num: int, dtype: DTypeLike
    ) -> Shaped[Array, "*rows n"]:
        """Return the numbers in each message.

        Args:
            message: the result of `encode`.
            num: how many numbers there are in a row.
            dtype: the float type of the result, which may differ from that of the numbers that were
                encoded.
        """

    @abc.abstractmethod
    def error_bound(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Return a bound on `abs(decoded - x)` for each number of `x`, decoded as float32.

        It is derived from the format, holds for every seed, and is infinite for numbers that may
        arrive as NaN or infinity. It leaves out two errors: the error of float32 for numbers near
        2**-126, at most 2**-120, and the rounding to a type narrower than float32. It is computed
        in numpy, for tests and for the choice of a codec; no compiled program uses it.

        Args:
            x: rows of floats of any type.
        """

    def __str__(self) -> str:
        """Return the codec's name, as plans, reports and errors print it."""
        return type(self).__name__.lower()

    # What the collectives ask before they encode.

    def is_used_for(self, num: int, dtype: DTypeLike, min_quantized_size: int) -> bool:
        """Return whether an array of `num` floats of type `dtype` is encoded before it is sent."""
        return num >= min_quantized_size

    @property
    def is_elementwise(self) -> bool:
        """Whether each number is encoded independently of the others, as by a cast.

        If so, a weight may be sliced and cast before it is encoded, with the same result.
        """
        return False

    @property
    def is_joinable(self) -> bool:
        """Whether joining the messages of two rows gives the message of the two rows joined.

        If so, the gradients of a bucket are encoded, decoded and added as one array, which makes
        programs of unrolled layers smaller.
        """
        return False

    @property
    def writes_in_place(self) -> bool:
        """Whether `encode_pieces` and `recode` write straight into their argument `place`.

        Otherwise they make the messages first, and copy them there.
        """
        return False

    def format_for(self, implementation: kernels.Implementation | None) -> kernels.Format | None:
        """Return this codec's message format, as a kernel of `pallas_kernels` takes it.

        None if `implementation` has no kernel that reads messages of this codec. Then they are read
        by `decode` only.
        """
        return None

    @property
    def exchange_format(self) -> kernels.Format | None:
        """The format in which one kernel does a whole hop over `local`; None without such a kernel.

        The kernel encodes, exchanges and decodes (or adds up), and its numbers are those of
        `encode` and `decode`. Without it, a hop is an encoding, XLA's collective and a decoding.
        """
        return None

    def message(self, num: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """Return the shape and type of one row's message: `num_bytes` of uint8.

        Raises:
            ValueError: `num_bytes` is not a number of bytes that could hold `num` codes.
        """
        size: Any = self.num_bytes(num, dtype)
        least = math.ceil(num * self.bits / 8)
        if not isinstance(size, int) or size < least:
            raise ValueError(
                f"`{type(self).__name__}.num_bytes` must return an int of at least {least}, for "
                f"{num} codes of `bits` = {self.bits}; got {size!r}. Count codes and scales, in "
                "bytes, and round up."
            )
        return jax.ShapeDtypeStruct((size,), jnp.uint8)

    # Encoding and decoding with checks.

    def encode_rows(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> Shaped[Array, "*rows m"]:
        """Call `encode`, and check its result.

        Raises:
            ValueError: the message does not have the shape and type that `message` gives.
        """
        *rows, num = x.shape
        row = self.message(num, x.dtype)
        said = f"the message of {num} numbers of {x.dtype} in each row, as `num_bytes` counts it"
        return self._checked("encode", self.encode(x, seed=seed), (*rows, *row.shape), row, said)

    def decode_rows(
        self, message: Shaped[Array, "*rows m"], num: int, dtype: DTypeLike
    ) -> Shaped[Array, "*rows n"]:
        """Call `decode`, and check its result.

        Raises:
            ValueError: the result is not `num` numbers of type `dtype` for each message.
        """
        shape, row = (*message.shape[:-1], num), jax.ShapeDtypeStruct((num,), dtype)
        said = "`num` numbers of type `dtype` for each message"
        return self._checked("decode", self.decode(message, num, dtype), shape, row, said)

    def _checked(
        self, method: str, x: Any, shape: tuple[int, ...], row: jax.ShapeDtypeStruct, said: str
    ) -> Any:
        wanted, got = (shape, row.dtype), (getattr(x, "shape", None), getattr(x, "dtype", None))
        if got == wanted:
            return x
        given = repr(x) if None in got else f"{got[1]}{list(got[0] or ())}"
        raise ValueError(
            f"`{type(self).__name__}.{method}` must return {row.dtype}{list(shape)}: {said}; got "
            f"{given}. Change `{method}`, or what it disagrees with."
        )

    def _check_floats(self, x: Shaped[Array, ...]) -> None:
        """Raise `ValueError` unless `x` is an array of floats."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"`x` of `{type(self).__name__}.encode` must be floats; got {x.dtype}. Send "
                "other types as they are."
            )

    def _set_dtype(self, field: str, *names: str) -> None:
        """Convert the value of attribute `field` to a dtype, which must be one of `names`."""
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

    # Arrays in pieces and sums, which kernels may do in fewer passes.

    def encode_pieces(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> Shaped[Array, "num _"]:
        """Cut an array into `num` pieces along `dim`, and encode each piece as a message.

        With `place`, some columns of a larger array, the messages are written there, and the larger
        array is returned; otherwise the messages.
        """
        message = self.encode_rows(rows_of(x, dim, num), seed=seed)
        return message if place is None else place.put(message)

    def decode_pieces(
        self,
        message: Shaped[Array, "num m"] | kernels.InPlace,
        shape: tuple[int, ...],
        dim: int,
        dtype: DTypeLike,
    ) -> Shaped[Array, ...]:
        """Decode each message to a piece of `shape`, and join the pieces along `dim`."""
        rows = self.decode_rows(kernels.cut_out(message), math.prod(shape), dtype)
        return joined_rows(rows, shape, dim)

    def decode_sum(
        self, message: Shaped[Array, "peers m"] | kernels.InPlace, num: int
    ) -> Float32[Array, " num"]:
        """Decode messages of `num` numbers each, and add them up in float32.

        Messages that are columns of a larger array (`InPlace`) are cut out first.
        """
        return add_up(self.decode_rows(kernels.cut_out(message), num, jnp.float32))

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
    ) -> Shaped[Array, "num _"]:
        """Sum messages of `source`, divide by `divisor`, and encode each piece of the result.

        Sums and means are in float32.

        Args:
            message: encoded arrays of `shape`, one per peer.
            source: the codec that wrote them.
            shape: shape of the sum.
            dim: the dim that the sum is cut along.
            num: number of pieces.
            divisor: the number that the sum is divided by, to give a mean.
            seed: seed of stochastic rounding; None means 0.
            place: columns of a larger array to write the messages into.
        """
        total = source.decode_sum(message, math.prod(shape)).reshape(shape)
        return self.encode_mean(total, dim, num, divisor=divisor, seed=seed, place=place)

    def encode_mean(
        self,
        total: Float32[Array, ...],
        dim: int,
        num: int,
        *,
        divisor: int,
        seed: Integer[Array, ""] | int | None = None,
        place: kernels.Place | None = None,
    ) -> Shaped[Array, "num _"]:
        """Encode `total / divisor`, cut into `num` pieces along `dim`.

        This is the last part of `recode`, for a sum that is decoded already.
        """
        mean = total if divisor == 1 else total / jnp.float32(divisor)
        return self.encode_pieces(mean, dim, num, seed=seed, place=place)

    # Messages in a form that fills the tiles of an array on a TPU, instead of rows of bytes. By
    # default they are rows.

    def encode_tiled(
        self,
        x: Shaped[Array, ...],
        dim: int,
        num: int,
        *,
        seed: Integer[Array, ""] | int | None = None,
    ) -> Shaped[Array, "num ..."]:
        """Cut an array into `num` pieces along `dim`, and encode each, for TPUs.

        A message may have any shape that `decode_tiled` can read, such as one that fills tiles.
        """
        return self.encode_pieces(x, dim, num, seed=seed)

    def decode_tiled(
        self, message: Shaped[Array, "num ..."], shape: tuple[int, ...], dim: int, dtype: DTypeLike
    ) -> Shaped[Array, ...]:
        """Decode messages of `encode_tiled` to pieces, and join them, like `decode_pieces`."""
        return self.decode_pieces(message, shape, dim, dtype)

    def sum_tiled(
        self, message: Shaped[Array, "peers ..."], shape: tuple[int, ...]
    ) -> Float32[Array, ...]:
        """Decode and add up messages of `encode_tiled`, each of an array of `shape`."""
        return self.decode_sum(message, math.prod(shape)).reshape(shape)

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
    ) -> Shaped[Array, "num ..."]:
        """Sum messages of `encode_tiled`, and encode the result as such messages, like `recode`."""
        total = source.sum_tiled(message, shape)
        mean = total if divisor == 1 else total / jnp.float32(divisor)
        return self.encode_tiled(mean, dim, num, seed=seed)


def check_is_value(codec: Codec) -> None:
    """Raise `ValueError` unless a codec is hashable and equal to its copy."""
    name = type(codec).__name__
    remedy = "Make the class a frozen dataclass with hashable fields: `@dataclasses.dataclass("
    remedy += "frozen=True)`."
    try:
        number = hash(codec)
    except TypeError as error:
        raise ValueError(
            f"`{name}.__hash__` must give a number, for programs are cached by their codecs; got "
            f"{error}. {remedy}"
        ) from None
    other = copy.copy(codec)
    if codec != other or number != hash(other):
        raise ValueError(
            f"`{name}.__eq__` must find a copy of a codec equal to it, with the same hash, for "
            f"stored messages are told apart by their codecs; got two that differ. {remedy}"
        )
