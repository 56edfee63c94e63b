"""`Int4`: integers of 4 bits, two in a byte, and a scale for each block."""

from __future__ import annotations

import dataclasses

from .. import pallas_kernels as kernels
from .format_codec import FormatCodec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(FormatCodec):
    """Send floats as integers of 4 bits, from -7 to 7 times the scale of their block.

    Each byte holds two codes. Options and numerics are those of `Int8`, except that blocks have
    128 numbers by default.
    """

    block: int = 128

    @property
    def _kind(self) -> kernels.Kind:
        return "int4"
