"""`BlockCodec`: codes of few bits, in blocks whose numbers share a scale.

A base class for codecs that need no kernel: it cuts rows into blocks, packs codes into bytes and
appends the scales; a subclass defines how one block is quantized. Everything is done by XLA.

Legend: k = blocks of a row, b = numbers of a block, m = bytes, `rows` = any leading dims.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Float64, Integer, Shaped, UInt8

from .. import pallas_kernels as kernels
from .codec import Codec

ROTATED = 32  # numbers that are rotated together


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockCodec(Codec):
    """Base class of codecs that write codes of `bits` bits, and a scale for each block.

    The message of `n` numbers is `ceil(n * bits / 8)` bytes of codes, packed from the lowest bit
    of the first byte on, followed by `scale_bytes(ceil(n / block))` bytes of scales.

    A subclass gives `bits`, `scale_bytes`, `quantize`, `dequantize` and `error_bound`, and may
    change the default of `block`. The seed is ignored; a codec with stochastic rounding
    overrides `encode`.

    Args:
        block: numbers for each scale. The last block of a row is filled up with zeros, of which
            no code is sent.
        implementation: "xla", or `None` for the default, which is "xla". There are no kernels.

    Raises:
        ValueError: `block` is less than 1 or has codes that do not fill whole bytes.
        NotImplementedError: `implementation` has no kernels for this codec.
    """

    block: int = 32
    # Not compared: every implementation reads a message the same way.
    implementation: kernels.Implementation | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        name = type(self).__name__
        if not 1 <= self.bits <= 8:
            raise ValueError(f"`{name}.bits` must be from 1 to 8; got {self.bits!r}.")
        if not isinstance(self.block, int) or self.block < 1 or self.block * self.bits % 8:
            raise ValueError(
                f"`block` of `{name}` must be a number of codes of {self.bits} bits that fill "
                f"whole bytes; got {self.block!r}. Take a multiple of 8."
            )
        if self.implementation not in (None, "xla", "mosaic_gpu"):
            raise ValueError(
                f'`implementation` of `{name}` must be "xla" or `None` for the default; got '
                f"{self.implementation!r}."
            )
        if (reason := kernels.kind_gap(self.implementation, name)) is not None:
            raise NotImplementedError(
                f'`implementation="{self.implementation}"` cannot write or read `{name}`: '
                f'{reason}. Take "xla", or `None` for what can.'
            )

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}/{self.block}"

    @abc.abstractmethod
    def scale_bytes(self, num_blocks: int) -> int:
        """Return the number of bytes of the scales of one row of `num_blocks` blocks."""

    @abc.abstractmethod
    def quantize(
        self, x_kb: Float32[Array, "*rows k b"]
    ) -> tuple[UInt8[Array, "*rows k b"], UInt8[Array, "*rows m"]]:
        """Return each number's code, in the lowest `bits` bits of a byte, and the scales as bytes.

        If a number of a block is not finite, the block's scale should be one that is read as NaN.
        """

    @abc.abstractmethod
    def dequantize(
        self, codes_kb: UInt8[Array, "*rows k b"], scales: UInt8[Array, "*rows m"]
    ) -> Float32[Array, "*rows k b"]:
        """Return the numbers, in float32, that codes and scales encode; reverses `quantize`."""

    def num_bytes(self, num: int, dtype: DTypeLike) -> int:
        return self._code_bytes(num) + self.scale_bytes(math.ceil(num / self.block))

    def _code_bytes(self, num: int) -> int:
        return math.ceil(num * self.bits / 8)

    def encode(
        self, x: Shaped[Array, "*rows n"], *, seed: Integer[Array, ""] | int | None = None
    ) -> UInt8[Array, "*rows m"]:
        self._check_floats(x)
        codes_kb, scales = self.quantize(kernels.split(kernels.to_float32(x), self.block))
        self._check_scales(codes_kb, scales)
        *rows, blocks, block = codes_kb.shape
        packed = pack(codes_kb.reshape(*rows, blocks * block), self.bits)
        return jnp.concatenate((packed[..., : self._code_bytes(x.shape[-1])], scales), axis=-1)

    def _check_scales(self, codes_kb: Any, scales: Any) -> None:
        size = self.scale_bytes(codes_kb.shape[-2])
        for part, shape in ((codes_kb, codes_kb.shape), (scales, (*codes_kb.shape[:-2], size))):
            if (part.shape, part.dtype) != (shape, jnp.uint8):
                raise ValueError(
                    f"`{type(self).__name__}.quantize` must return codes and scales as uint8, and "
                    f"as many bytes of scales as `scale_bytes` says, uint8{list(shape)}; got "
                    f"{part.dtype}{list(part.shape)}. View the scales as bytes with "
                    "`lax.bitcast_convert_type`."
                )

    def decode(
        self, message: UInt8[Array, "*rows m"], num: int, dtype: DTypeLike
    ) -> Float[Array, "*rows n"]:
        *rows, _ = message.shape
        size, blocks = self._code_bytes(num), math.ceil(num / self.block)
        missing = blocks * self.block * self.bits // 8 - size
        packed = jnp.pad(message[..., :size], [(0, 0)] * len(rows) + [(0, missing)])
        codes_kb = unpack(packed, self.bits).reshape(*rows, blocks, self.block)
        x = kernels.join(self.dequantize(codes_kb, message[..., size:]), num)
        # A number that was rounded up from the largest of its type would be infinite. NaN stays.
        largest = kernels.largest(dtype)
        return jnp.clip(x, -largest, largest).astype(dtype)

    def largest(self, x: Float[np.ndarray, "*rows n"]) -> Float64[np.ndarray, "*rows n"]:
        """Return, for each number, the largest magnitude in its block, for `error_bound`.

        It is infinite for a block with a number that is not finite.
        """
        return largest_of_blocks(x, self.block)


def largest_of_blocks(
    x: Float[np.ndarray, "*rows n"], block: int
) -> Float64[np.ndarray, "*rows n"]:
    """Return, for each number, its block's largest magnitude; infinite unless all are finite."""
    sizes = np.abs(x.astype(np.float64))
    sizes = np.where(np.isfinite(sizes), sizes, np.inf)
    starts = range(0, sizes.shape[-1], block)
    parts = [sizes[..., i : i + block] for i in starts]
    spread = [np.broadcast_to(part.max(-1, keepdims=True), part.shape) for part in parts]
    return np.concatenate(spread, axis=-1) if spread else sizes


def to_float32(x: Float[np.ndarray, "*rows n"]) -> Float[np.ndarray, "*rows n"]:
    """Convert to float32 as encoders do.

    They clip a finite float64 to the range of float32.
    """
    largest = float(np.finfo(np.float32).max)
    wide = x.astype(np.float64)
    return np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide).astype(np.float32)


def pack(codes: UInt8[Array, "*rows n"], bits: int) -> UInt8[Array, "*rows m"]:
    """Lay codes of `bits` bits side by side in bytes: code `i` begins at bit `i * bits`.

    Bits of a byte count from the lowest. `n` codes must fill whole bytes.
    """
    if bits == 8:
        return codes
    group, size = _group(bits)
    *rows, num = codes.shape
    codes = codes.reshape(*rows, num // group, group) & jnp.uint8(2**bits - 1)
    packed = []
    for byte in range(size):
        shifts = [(i, i * bits - 8 * byte) for i in range(group)]
        parts = [_shifted(codes[..., i], s) for i, s in shifts if -bits < s < 8]
        packed.append(_or(parts))
    return jnp.stack(packed, axis=-1).reshape(*rows, num // group * size)


def unpack(packed: UInt8[Array, "*rows m"], bits: int) -> UInt8[Array, "*rows n"]:
    """Return the codes in `packed`, each in the lowest `bits` bits of a byte of its own."""
    if bits == 8:
        return packed
    group, size = _group(bits)
    *rows, num = packed.shape
    packed = packed.reshape(*rows, num // size, size)
    codes = []
    for i in range(group):
        shifts = [(byte, 8 * byte - i * bits) for byte in range(size)]
        parts = [_shifted(packed[..., byte], s) for byte, s in shifts if -8 < s < bits]
        codes.append(_or(parts) & jnp.uint8(2**bits - 1))
    return jnp.stack(codes, axis=-1).reshape(*rows, num // size * group)


def _group(bits: int) -> tuple[int, int]:
    """Return the smallest number of codes that fill whole bytes, and the number of these bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _shifted(x: UInt8[Array, "*shape"], left: int) -> UInt8[Array, "*shape"]:
    return x << jnp.uint8(left) if left >= 0 else x >> jnp.uint8(-left)


def _or(parts: list[UInt8[Array, "*shape"]]) -> UInt8[Array, "*shape"]:
    total, *others = parts
    for part in others:
        total = total | part
    return total


def rotated_groups(
    x: Float64[np.ndarray, "*rows n"], factor: float, tail_factor: float, *, signed: bool = True
) -> Float64[np.ndarray, "*rows n"]:
    """Multiply each group of 32 numbers of a row by Hadamard's matrix and by `factor`.

    Numbers after the last full group are multiplied by `tail_factor`. If not `signed`, the matrix
    has 1 in place of every -1, which gives bounds.
    """
    signs = np.ones((1, 1))
    while len(signs) < ROTATED:
        signs = np.block([[signs, signs], [signs, -signs if signed else signs]])
    whole = x.shape[-1] // ROTATED * ROTATED
    groups = x[..., :whole].reshape(*x.shape[:-1], whole // ROTATED, ROTATED)
    with np.errstate(invalid="ignore"):
        rotated = groups @ signs * factor
    tail = x[..., whole:] * tail_factor
    return np.concatenate([rotated.reshape(*x.shape[:-1], whole), tail], axis=-1)
