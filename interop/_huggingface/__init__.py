"""Load decoders and encoders from Hugging Face model directories, and export them.

In: a directory with `config.json`. Out: a Flax NNX model with lazy parameters; when exporting, a
directory that transformers loads.
"""

from .families import DecoderFamily as DecoderFamily
from .families import decoder_family as decoder_family
from .families import register_decoder_family as register_decoder_family
from .load import LoadedDecoder as LoadedDecoder
from .load import LoadedEncoder as LoadedEncoder
from .load import export_decoder as export_decoder
from .load import export_encoder as export_encoder
from .load import load_decoder as load_decoder
from .load import load_encoder as load_encoder
from .reference import compare_with_transformers as compare_with_transformers
from .reference import embed_with_transformers as embed_with_transformers
