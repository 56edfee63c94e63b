"""Codecs: how rows of numbers are written as messages, and read back; one file for each family.

In: a float array `[n, m]`. Out: a message `uint8[n, bytes]` or a cast array, and its inverse.
Packages above use only `Codec` and its methods, and name no single codec. A new codec derives from
`Codec` or `BlockCodec`. `pallas_kernels` decides which kernel does the work.
"""

from .blockwise import BlockCodec as BlockCodec
from .cast import Cast as Cast
from .codec import Codec as Codec
from .codec import DeferredMessage as DeferredMessage
from .codec import check_is_value as check_is_value
from .codec import joined_rows as joined_rows
from .codec import rows_of as rows_of
from .codec import written as written
from .format_codec import Float8 as Float8
from .format_codec import Int4 as Int4
from .format_codec import Int8 as Int8
from .mx_float8 import MXFloat8 as MXFloat8
from .narrow_floats import bits_dtype as bits_dtype
from .narrow_floats import from_bits as from_bits
from .narrow_floats import is_narrow_float as is_narrow_float
from .narrow_floats import to_bits as to_bits
from .nv_float4 import NVFloat4 as NVFloat4
