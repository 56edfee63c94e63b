"""Flax NNX models into which `jaxzero.interop` loads converted checkpoints.

In: a `config.json` or a config. Out: NNX modules for one device, without any sharding. `interop`,
jobs and scripts use it.
"""

from ._cache import Cache as Cache
from ._cache import LayerCache as LayerCache
from ._cache import make_cache as make_cache
from ._config_json import family_of as family_of
from ._config_json import make_config as make_config
from ._config_json import read_config as read_config
from ._decoder import Decoder as Decoder
from ._decoder_config import DECODER_FAMILIES as DECODER_FAMILIES
from ._decoder_config import DecoderConfig as DecoderConfig
from ._decoder_config import decoder_fields as decoder_fields
from ._encoder import Encoder as Encoder
from ._encoder import EncoderConfig as EncoderConfig
from ._encoder_parts import mean_pool as mean_pool
from ._encoder_parts import normalize as normalize
from ._experts import expert_leaves as expert_leaves
from ._generate import Generated as Generated
from ._generate import Generation as Generation
from ._generate import continue_generation as continue_generation
from ._generate import generate as generate
from ._generate import start_generation as start_generation
from ._grouped import apply_by_group as apply_by_group
from ._layers import ShapesOnly as ShapesOnly
from ._modern_bert import ModernBert as ModernBert
from ._modern_bert import ModernBertConfig as ModernBertConfig
from ._part_configs import ClampedGate as ClampedGate
from ._part_configs import ExpertsConfig as ExpertsConfig
from ._part_configs import GroupRouting as GroupRouting
from ._part_configs import LatentConfig as LatentConfig
from ._rope import DynamicScaling as DynamicScaling
from ._rope import LinearScaling as LinearScaling
from ._rope import Llama3Scaling as Llama3Scaling
from ._rope import LongScaling as LongScaling
from ._rope import Rope as Rope
from ._rope import YarnScaling as YarnScaling
from ._router_losses import RouterBalance as RouterBalance
from ._router_losses import next_correction as next_correction
from ._router_losses import router_balance as router_balance
from ._sampling import Sampling as Sampling
from ._tensor_parallel import tensor_parallel_specs as tensor_parallel_specs
from ._vit import ViT as ViT
from ._vit import ViTClassifier as ViTClassifier
from ._vit import ViTConfig as ViTConfig
