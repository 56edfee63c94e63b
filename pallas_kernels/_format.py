"""The format of a message: the kind of its codes, the size of a block, its scales.

A message of `n` numbers is `ceil(n * bits / 8)` bytes of codes, and behind them the scales
of `ceil(n / block)` blocks. Every implementation reads and writes these same bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike, Float64

Kind = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]


@dataclasses.dataclass(frozen=True)
class CodeKind:
    """The properties of one kind of codes. Codes are the quantized numbers in a message.

    Attributes:
        bits: bits per code.
        is_integer: whether codes are integers from `-limit` to `limit`; otherwise they are floats,
            and the name of the kind is that of their dtype.
        limit: the largest code.
    """

    bits: int
    is_integer: bool
    limit: float


# The properties of every kind.
KINDS: Mapping[str, CodeKind] = {
    "int8": CodeKind(bits=8, is_integer=True, limit=127.0),
    "int4": CodeKind(bits=4, is_integer=True, limit=7.0),
    "float8_e4m3fn": CodeKind(bits=8, is_integer=False, limit=448.0),
    "float8_e5m2": CodeKind(bits=8, is_integer=False, limit=57344.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A format of quantized numbers: codes of type `kind`, and a scale for each `block` of them.

    Args:
        kind: kind of the codes. Integers are symmetric; two of 4 bits share a byte.
        block: numbers for each scale, a power of two from 32 to 8192.
        rounding: "nearest", or "stochastic", by a hash of a seed and the number.
        hadamard: 32 multiplies each 32 numbers by Hadamard's matrix before they are rounded, except
            in blocks with an exact zero, which get negative scales. None: no rotation.
        scale_dtype: dtype of the scales, `jnp.bfloat16` or `jnp.float32`.

    Raises:
        ValueError: an option has another value.
    """

    kind: Kind = "int8"
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Literal[32] | None = None
    scale_dtype: DTypeLike = jnp.bfloat16

    def __post_init__(self):
        if self.kind not in KINDS:
            *names, last = [f'"{name}"' for name in KINDS]
            raise ValueError(
                f"`kind` must be {', '.join(names)} or {last}; got {self.kind!r}. A codec with "
                "other codes is a subclass of `jaxzero.extend.Codec` and has no `Format`."
            )
        if self.block not in [2**i for i in range(5, 14)]:
            raise ValueError(
                f"`block` must be a power of two from 32 to 8192; got {self.block!r}. "
                "Errors are smaller in small blocks, messages with large ones."
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'`rounding` must be "nearest" or "stochastic"; got {self.rounding!r}.'
            )
        if self.hadamard not in (None, 32):
            raise ValueError(f"`hadamard` must be 32 or None; got {self.hadamard!r}.")
        dtype = jnp.dtype(self.scale_dtype)
        if dtype.name not in ("bfloat16", "float32"):
            raise ValueError(f"`scale_dtype` must be bfloat16 or float32; got {dtype}.")
        object.__setattr__(self, "scale_dtype", dtype)

    @property
    def bits(self) -> int:
        """Bits per code."""
        return KINDS[self.kind].bits

    @property
    def is_integer(self) -> bool:
        return KINDS[self.kind].is_integer

    @property
    def limit(self) -> float:
        """The largest code."""
        return KINDS[self.kind].limit

    @property
    def codes_per_byte(self) -> int:
        """Codes that kernels pack into a byte: 1 of 8 bits, or 2 of 4 bits.

        Raises:
            NotImplementedError: codes have another number of bits.
        """
        check_packable(self.bits)
        return 8 // self.bits

    def step(self, x: Float64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
        """Return the distance between neighbouring codes around each number of `x`.

        The numbers are those that are rounded to codes: already divided by their scales.
        """
        if self.is_integer:
            return np.ones_like(x)
        info = jnp.finfo(self.kind)
        exponent = np.frexp(np.maximum(np.abs(x), float(info.smallest_normal)))[1] - 1
        return np.exp2(exponent - float(info.nmant))

    @property
    def scale_bytes(self) -> int:
        """Bytes per scale."""
        return jnp.dtype(self.scale_dtype).itemsize

    def code_bytes(self, num: int) -> int:
        """Return how many bytes the codes of `num` numbers take."""
        return math.ceil(num * self.bits / 8)

    def num_bytes(self, num: int) -> int:
        """Return how many bytes a message of `num` numbers has."""
        return self.code_bytes(num) + math.ceil(num / self.block) * self.scale_bytes


def check_packable(bits: int) -> None:
    """Check that kernels can pack codes of `bits` bits.

    Raises:
        NotImplementedError: `bits` is not 4 or 8.
    """
    if bits not in (4, 8):
        raise NotImplementedError(
            f"Kernels and their reference pack codes of 4 or 8 bits; got {bits} bits. "
            "`jaxzero.extend.BlockCodec` packs codes of 1 to 8."
        )
