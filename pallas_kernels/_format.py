"""What a message is made of: the kind of its codes, the size of a block, its scales.

A message of `n` numbers is `ceil(n * bits / 8)` bytes of codes, and behind them the scales
of `ceil(n / block)` blocks. Every implementation reads and writes these same bytes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import DTypeLike

Kind = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How numbers are written: codes of `kind`, and a scale for each `block` of them.

    Args:
        kind: of the codes. Integers are symmetric; two of 4 bits share a byte.
        block: numbers for each scale, a power of two from 32 to 8192.
        rounding: "nearest", or "stochastic", by a hash of a seed and the number.
        hadamard: 32 multiplies each 32 numbers by Hadamard's matrix first.
        scale_dtype: of the scales, `jnp.bfloat16` or `jnp.float32`.

    Raises:
        ValueError: an option is none of these.
    """

    kind: Kind = "int8"
    block: int = 256
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Literal[32] | None = None
    scale_dtype: DTypeLike = jnp.bfloat16

    def __post_init__(self):
        if self.kind not in ("int8", "int4", "float8_e4m3fn", "float8_e5m2"):
            raise ValueError(
                f'`kind` must be "int8", "int4", "float8_e4m3fn" or "float8_e5m2"; got '
                f"{self.kind!r}."
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
        """Of a code."""
        return 4 if self.kind == "int4" else 8

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int8", "int4")

    @property
    def limit(self) -> float:
        """The largest code."""
        if self.is_integer:
            return float(2 ** (self.bits - 1) - 1)
        return float(jnp.finfo(self.kind).max)

    @property
    def unrotated(self) -> Format:
        """The same without a rotation: how the rotated numbers themselves are written."""
        return dataclasses.replace(self, hadamard=None)

    @property
    def scale_bytes(self) -> int:
        """Of one scale."""
        return jnp.dtype(self.scale_dtype).itemsize

    def code_bytes(self, num: int) -> int:
        """Of the codes of `num` numbers."""
        return math.ceil(num * self.bits / 8)

    def num_bytes(self, num: int) -> int:
        """Of the message of `num` numbers."""
        return self.code_bytes(num) + math.ceil(num / self.block) * self.scale_bytes
