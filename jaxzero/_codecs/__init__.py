"""Codecs: how rows of numbers are written as messages, and read back; one class for each codec.

In: a float array `[n, m]`. Out: a message `uint8[n, bytes]` or a cast array, and its inverse.
Packages above use only `Codec` and its methods, and name no single codec. A new codec derives from
`Codec` or `BlockCodec`. `pallas_kernels` decides which kernel does the work.
"""

from .blockwise import BlockCodec as BlockCodec
from .cast import Cast as Cast
from .codec import Codec as Codec
from .codec import check_is_value as check_is_value
from .format_codec import Float8 as Float8
from .format_codec import Int4 as Int4
from .format_codec import Int8 as Int8
from .microscaling import MXFloat8 as MXFloat8
from .microscaling import NVFloat4 as NVFloat4
from .rows import Column as Column
from .rows import DeferredMessage as DeferredMessage
from .rows import as_bytes as as_bytes
from .rows import bits_dtype as bits_dtype
from .rows import can_join as can_join
from .rows import column_bytes as column_bytes
from .rows import columns_in_place as columns_in_place
from .rows import from_bits as from_bits
from .rows import from_bytes as from_bytes
from .rows import is_narrow_float as is_narrow_float
from .rows import join_columns as join_columns
from .rows import joined_rows as joined_rows
from .rows import rows_of as rows_of
from .rows import split_columns as split_columns
from .rows import to_bits as to_bits
from .rows import written as written
