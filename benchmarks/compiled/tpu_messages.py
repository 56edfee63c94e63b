"""Compile messages for a TPU in the form of rows and in that of leaves: seconds of the CPU.

    python -m benchmarks.compiled.tpu_messages

Needs `libtpu`, as `benchmarks.compiled.tpu` does. Nothing is run. The leaves are the weights of a
layer of TinyLlama in bfloat16, over 8 devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax

from benchmarks.shared._rows import append_row

from ._tpu import compile_seconds, tpu_mesh

_AXES = ("node", "local")
_NUM = 8  # devices
_LEAVES = ((2048, 2048), (2048, 256), (2048, 256), (2048, 2048), *((2048, 5632),) * 3)
_SQUARE = (2048, 2048)
_BEFORE = 32 * 100  # bytes of another leaf in a row, before the codes that are read


def main(topology: str = "v5e:2x4") -> None:
    """Compile each operation in both forms, and append a row for each."""
    mesh = tpu_mesh(topology, 2)
    compile_seconds(mesh, lambda x: x + 1, _struct(8, 128, dtype=jnp.float32))  # starts libtpu
    for operation, form, function, arrays in _operations():
        figures = {"topology": topology, "operation": operation, "form": form}
        append_row("tpu_messages", {**figures, **compile_seconds(mesh, function, *arrays)})


def _struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _operations() -> Iterator[tuple[str, str, Callable, list[jax.ShapeDtypeStruct]]]:
    """Operation, form, function of one device and its arguments."""
    shards = [_struct(rows // _NUM, columns) for rows, columns in _LEAVES]
    yield "all-gather", "rows", _gather_joined, shards
    yield "all-gather", "leaves", lambda *x: [_gathered(leaf) for leaf in x], shards
    square = [_struct(*_SQUARE)]
    yield "all-to-all", "rows", lambda x: _exchanged(x.reshape(_NUM, -1)), square
    yield "all-to-all", "leaves", lambda x: _exchanged(x.reshape(_NUM, -1, _SQUARE[1])), square
    size = math.prod(_SQUARE) // _NUM
    rows = [_struct(_NUM, _BEFORE + size, dtype=jnp.uint8)]
    yield "read codes", "rows", lambda x: _read(x[:, _BEFORE:]), rows
    tiles = [_struct(_NUM, size // 128, 128, dtype=jnp.uint8)]
    yield "read codes", "tiles", _read, tiles


def _gather_joined(*shards: Any) -> list[Any]:
    row = _gathered(jnp.concatenate([x.reshape(1, -1) for x in shards], axis=1))
    full, start = [], 0
    for shape, shard in zip(_LEAVES, shards, strict=True):
        full.append(row[:, start : start + shard.size].reshape(shape))
        start += shard.size
    return full


def _gathered(x: Any) -> Any:
    return lax.all_gather(x, _AXES, tiled=True)


def _exchanged(x: Any) -> Any:
    return lax.all_to_all(x, _AXES, 0, 0).reshape(_SQUARE)


def _read(codes: Any) -> Any:
    return codes.reshape(_SQUARE).astype(jnp.bfloat16)


if __name__ == "__main__":
    tyro.cli(main)
