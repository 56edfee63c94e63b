"""Codecs: how rows of numbers are written as messages, and read back.

In: a float array `[n, m]`. Out: a message `uint8[n, bytes]` or a cast array, and its inverse. Rooms
above use `Codec` and its methods; which kernel does the work is decided in `pallas_kernels`.
"""

from .blockwise import Float8 as Float8
from .blockwise import Int4 as Int4
from .blockwise import Int8 as Int8
from .codec import Cast as Cast
from .codec import Codec as Codec
from .codec import DeferredMessage as DeferredMessage
from .codec import bits_dtype as bits_dtype
from .codec import from_bits as from_bits
from .codec import is_narrow_float as is_narrow_float
from .codec import to_bits as to_bits
from .codec import written as written
