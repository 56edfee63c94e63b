"""`Float8`: floats of 8 bits, and a scale for each block."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import DTypeLike

from .. import pallas_kernels as kernels
from .format_codec import FormatCodec


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
