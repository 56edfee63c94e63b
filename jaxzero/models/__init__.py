"""Flax NNX models that converted checkpoints run in. `jaxzero.interop` fills their parameters."""

from ._encoder import Encoder as Encoder
from ._encoder_config import EncoderConfig as EncoderConfig
from ._pooling import mean_pool as mean_pool
from ._pooling import normalize as normalize
