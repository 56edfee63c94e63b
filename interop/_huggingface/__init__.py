"""Load decoders and encoders from Hugging Face model directories, and export them.

In: a directory with `config.json`. Out: a Flax NNX model with lazy parameters; when exporting, a
directory that transformers loads.
"""

from .decoder import LoadedDecoder as LoadedDecoder
from .decoder import export_decoder as export_decoder
from .decoder import load_decoder as load_decoder
from .encoder import LoadedEncoder as LoadedEncoder
from .encoder import export_encoder as export_encoder
from .encoder import load_encoder as load_encoder
from .family import DecoderFamily as DecoderFamily
from .family import decoder_family as decoder_family
from .family import register_decoder_family as register_decoder_family
from .reference import compare_with_transformers as compare_with_transformers
from .reference import embed_with_transformers as embed_with_transformers
