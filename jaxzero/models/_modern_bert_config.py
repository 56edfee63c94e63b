"""Configuration of a ModernBERT, as a frozen dataclass that validates itself."""

import dataclasses

from ._encoder_base import EncoderBase
from ._rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderBase):
    """Sizes and parts of a ModernBERT, and how it is computed.

    The defaults of the parts are those of ModernBERT-base. Fields that all encoders share are those
    of `EncoderConfig`.

    Args:
        vocabulary_size: rows of the word embeddings.
        max_length: longest text that the model was trained on, in tokens; not a limit.
        rope: rotation of queries and keys in layers that attend to the whole text.
        local_rope: rotation in the layers with a window.
        local_layers: indices of the layers with a window.
        local_window: in these layers a token sees those that are fewer than `local_window`
            positions away, on both sides: half of `local_attention` in `config.json`, and 1.
        attention_bias, mlp_bias, norm_bias: True if these projections and norms have a bias.
        embedding_dropout, mlp_dropout: rates of what enters the first layer, and of what enters the
            last projection of each perceptron. `attention_dropout` is also the rate of what
            attention adds.
        scan_layers: must be False: the first layer has one norm fewer than the others.
    """

    vocabulary_size: int
    max_length: int = 8192
    rope: Rope
    local_rope: Rope
    local_layers: tuple[int, ...] = ()
    local_window: int = 65
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    layer_norm_epsilon: float = 1e-5
    embedding_dropout: float = 0.0
    mlp_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("rope", "local_rope"):
            given = getattr(self, name).rotary_size
            if given != self.head_size:
                raise ValueError(
                    f"`rotary_size` of `{name}` must be {self.head_size}, the width of a head; got "
                    f"{given}. ModernBERT rotates whole heads."
                )
        if self.scan_layers:
            raise ValueError(
                "`scan_layers` needs layers that are alike, but the first layer of ModernBERT has "
                "one norm fewer than the others. Set it to False."
            )
