"""Plan how kernels for TPUs walk over a message in columns, and decide which messages they take.

A piece, `[rows, width]`, is a part of an array that is encoded as one message. Row j of the piece
is column j of the message (`_columns`): its `width / b` blocks, each of b numbers with a scale of
their own, are below each other. The message has rows of codes, then rows of scales. A grid step
takes 128 columns of a message and a chunk of the blocks in them. The rows of scales are one more
chunk, so a chunk has at least as many rows. The core's memory (VMEM) holds the input and output of
a step twice, since the next step is loaded while one is computed. It also holds the scales of 128
columns, in 32 bits for each byte, from the first step to the last.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import DTypeLike

from ._format import Format

LANES = 128  # of a vector register of a TPU
TILE_ROWS = 32  # of an array of bytes
# The most bytes that a grid step reads and writes, unless no possible chunk is so small.
_STEP_BYTES = 2**21
_MEMORY = 12 * 2**20  # bytes of VMEM for a kernel, of the 16 MiB that XLA grants it on a v5e


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a message: the codes of the `num_blocks` blocks in a column, then scales."""

    format: Format
    num_blocks: int

    @property
    def of_block(self) -> int:
        """Number of rows that hold the codes of one block."""
        return self.format.code_bytes(self.format.block)

    @property
    def of_codes(self) -> int:
        return self.num_blocks * self.of_block

    @property
    def of_scales(self) -> int:
        """Number of rows that hold the scales of all blocks, filled up to whole tiles."""
        rows = self.num_blocks * self.format.scale_bytes
        return math.ceil(rows / TILE_ROWS) * TILE_ROWS

    @property
    def kept_bytes(self) -> int:
        """Bytes of VMEM that hold the scales of 128 columns."""
        return 4 * self.of_scales * LANES


@dataclasses.dataclass(frozen=True)
class Walk:
    """How the grid of a kernel walks over one piece of an array: in chunks of blocks.

    A block is the numbers that share a scale. The blocks of a row of the piece are in one column of
    its message, and each grid step takes 128 columns.

    Attributes:
        num_blocks: blocks in a column.
        chunk: blocks of each column that one grid step takes; it divides `num_blocks`.
    """

    num_blocks: int
    chunk: int

    @property
    def num_chunks(self) -> int:
        return self.num_blocks // self.chunk

    @classmethod
    def of(
        cls, num_blocks: int, rows: list[Rows], block_bytes: int, kept_bytes: int
    ) -> Walk | None:
        """Choose a chunk; return None if no chunk fits into the core's memory.

        Args:
            num_blocks: blocks in a column of the piece's message.
            rows: the rows of the messages that are read and written.
            block_bytes: bytes that a step reads and writes for each block, in 128 columns.
            kept_bytes: bytes of VMEM for the scales of all messages, in 128 columns.
        """
        chunks = [
            n
            for n in range(1, num_blocks + 1)
            if num_blocks % n == 0 and all(n * x.of_block >= x.of_scales for x in rows)
        ]
        small = [n for n in chunks if n * block_bytes <= _STEP_BYTES]
        chunk = max(small, default=min(chunks, default=0))
        # Pallas holds two steps: the next one is fetched while one is computed.
        fits = 2 * chunk * block_bytes + kept_bytes <= _MEMORY
        return cls(num_blocks, chunk) if chunk and fits else None


def takes(*formats: Format, dtype: DTypeLike = jnp.float32) -> bool:
    """Return whether the kernels can be called here, for these formats and numbers of `dtype`.

    They can if codes are integers, blocks have 128 to 1024 numbers, and numbers are bfloat16 or
    float32. XLA cannot partition a kernel, so the caller must also be traced in a `shard_map` over
    all axes of the mesh.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    return (
        all(f.is_integer and 128 <= f.block <= 1024 for f in formats)
        and jnp.dtype(dtype).name in ("bfloat16", "float32")
        and bool(names)
        and all(map(_is_bound, names))
    )


def _is_bound(axis: str) -> bool:
    """Return whether the caller is traced in a `shard_map` over the mesh axis."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True
