"""Compile the codecs of one matrix for a TPU, each operation alone: seconds of the CPU.

    python -m benchmarks.compiled.tpu_codecs

Needs `libtpu`, as `benchmarks.compiled.tpu` does. Nothing is run. Each operation of `jz.zeropp()`
on a weight of TinyLlama is compiled three times: with messages as columns, by a kernel and by XLA,
and flattened, as they are where blocks do not fill the rows of a matrix. `noop` is a program that
adds 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared._rows import append_row
from jaxzero.extend import Codec
from jaxzero.pallas_kernels import _column_choice, _columns

from ._tpu import compile_seconds, tpu_mesh

_NODES, _LOCAL = 2, 4
_WEIGHTS, _GRADIENTS = jz.Int8(block=256), jz.Int4(block=128, hadamard=32)


# The forms, and what is switched off for each.
_WITHOUT: dict[str, Any] = {
    "kernels": contextlib.nullcontext(),
    "columns": mock.patch.object(_column_choice, "takes", lambda *_, **__: False),
    "flattened": mock.patch.object(_columns, "num_parts", lambda *_: 0),
}


def main(
    shapes: tuple[tuple[int, int], ...] = ((2048, 5632), (5632, 2048)), topology: str = "v5e:2x4"
) -> None:
    """Compile every operation in each form, and append a row for each."""
    mesh = tpu_mesh(topology, _NODES)
    # Starts libtpu.
    compile_seconds(mesh, lambda x: x + 1, jax.ShapeDtypeStruct((8, 128), jnp.float32))
    for shape in shapes:
        for form, without in _WITHOUT.items():
            with without:
                for name, function, array in _operations(shape):
                    figures = {"shape": shape, "topology": topology, "form": form}
                    seconds = compile_seconds(mesh, function, array)
                    append_row("tpu_codecs", {**figures, "operation": name, **seconds})


def _operations(shape: tuple[int, int]) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """Name, function and argument of each operation, for one device."""
    rows, columns = shape
    num = _NODES * _LOCAL
    shard, part = (rows // num, columns), (rows // _LOCAL, columns)

    def array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def messages(codec: Codec, piece: tuple[int, ...], num: int) -> Any:
        message = jax.eval_shape(lambda x: codec.encode_tiled(x, 0, 1), array(piece))
        return array((num, *message.shape[1:]), message.dtype)

    recode = {"divisor": _LOCAL, "dtype": jnp.bfloat16}
    yield "noop", lambda x: x + 1, array(shard)
    yield "encode weight", lambda x: _WEIGHTS.encode_tiled(x, 0, 1), array(shard)
    yield (
        "decode weight",
        lambda x: _WEIGHTS.decode_tiled(x, shard, 0, jnp.bfloat16),
        messages(_WEIGHTS, shard, num),
    )
    yield "encode gradient", lambda x: _GRADIENTS.encode_tiled(x, 0, _LOCAL), array(shape)
    yield (
        "sum gradients and encode",
        lambda x: _GRADIENTS.recode_tiled(x, _GRADIENTS, part, 0, _NODES, **recode),
        messages(_GRADIENTS, part, _LOCAL),
    )
    yield (
        "sum gradients",
        lambda x: _GRADIENTS.sum_tiled(x, shard),
        messages(_GRADIENTS, shard, _NODES),
    )


if __name__ == "__main__":
    tyro.cli(main)
