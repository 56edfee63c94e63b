"""`Int8`: integers of 8 bits, and a scale for each block."""

from __future__ import annotations

import dataclasses

from .. import pallas_kernels as kernels
from .format_codec import FormatCodec


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
            any. Their messages are equal but for roundings in the last place, and each reads
            the other's.

    Raises:
        ValueError: an option is none of these.

    References:
        ZeRO++ (https://arxiv.org/abs/2306.10209); SDP4Bit (https://arxiv.org/abs/2410.15526).
    """

    @property
    def _kind(self) -> kernels.Kind:
        return "int8"
