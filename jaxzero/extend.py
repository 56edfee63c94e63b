"""Base classes for what a user's own code adds to jaxzero; nothing else needs this module.

A codec: derive from `Codec`, or from `BlockCodec` for codes with a scale for each block, and give
an instance of it wherever a `jz.Int8()` can stand.
"""

from ._codecs import BlockCodec as BlockCodec
from ._codecs import Codec as Codec
