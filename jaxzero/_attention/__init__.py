"""Compute attention in rows of any length, whose tokens may be split over devices.

In: queries, keys and values inside a traced function. Out: for each query, the sum of values
weighted by attention. The compiler adds the collectives over the mesh axis `tokens`. Models use
`attend_split`, users `attention`.
"""

from .attention import LONG_ROW as LONG_ROW
from .attention import Implementation as Implementation
from .attention import attention as attention
from .attention import dot_product_attention as dot_product_attention
from .attention import is_library as is_library
from .form import Form as Form
from .form import default_scale as default_scale
from .split import attend_heads as attend_heads
from .split import attend_split as attend_split
from .split import back_to_tokens as back_to_tokens
from .split import exchanged as exchanged
from .split import method_for as method_for
