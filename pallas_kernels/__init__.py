"""Kernels that quantize arrays into messages of codes and scales, and dequantize them.

In: arrays cut into shards, and a `Format`. Out: messages in bytes, and the arrays or sums that they
hold. The codecs of jaxzero call this package.

Each operation has a reference in `jax.numpy`, a Pallas kernel for GPUs, and one function
that chooses between both:

    from jaxzero import pallas_kernels as pk

    message = pk.quantize(x[None], pk.Format(kind="int8"), implementation="mosaic_gpu")

Kernels compile for an H200 (JAX 0.11.2 or newer) and are tested in Pallas' interpreter. None
was ever executed on a GPU, so the default is "xla". `quantized_all_gather` and
`quantized_reduce_scatter` also communicate: on several GPUs each is a single kernel, which
cannot be interpreted (compiles, never executed). TPUs have kernels of their own, which are chosen
when a program is compiled for them (`_column_choice`), and were never executed either.

Installed as `jaxzero.pallas_kernels`.
"""

if __name__ != "jaxzero.pallas_kernels":
    raise ImportError(
        f"This package is a part of jaxzero and was imported as {__name__!r}. Write "
        "`from jaxzero import pallas_kernels`, and do not put the folder that holds it on "
        "`sys.path` by hand."
    )

from ._blockwise import add_up as add_up
from ._blockwise import join as join
from ._blockwise import not_above as not_above
from ._blockwise import split as split
from ._blockwise import to_float32 as to_float32
from ._collectives import exchange_bytes as exchange_bytes
from ._collectives import exchange_gap as exchange_gap
from ._collectives import quantized_all_gather as quantized_all_gather
from ._collectives import quantized_reduce_scatter as quantized_reduce_scatter
from ._collectives import remote_gap as remote_gap
from ._config import Implementation as Implementation
from ._dispatch import dequantize as dequantize
from ._dispatch import dequantize_sum as dequantize_sum
from ._dispatch import dequantize_sum_requantize as dequantize_sum_requantize
from ._dispatch import kind_gap as kind_gap
from ._dispatch import quantize as quantize
from ._format import Format as Format
from ._format import Kind as Kind
from ._in_place import InPlace as InPlace
from ._in_place import Place as Place
from ._in_place import cut_out as cut_out
from ._reference import largest as largest
from ._reference import to_rows as to_rows
from ._tiled import dequantize_sum_requantize_tiled as dequantize_sum_requantize_tiled
from ._tiled import dequantize_sum_tiled as dequantize_sum_tiled
from ._tiled import dequantize_tiled as dequantize_tiled
from ._tiled import pieces_of as pieces_of
from ._tiled import quantize_tiled as quantize_tiled
