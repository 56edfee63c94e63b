"""The fields that configs of encoders share, as a frozen dataclass that validates itself."""

import dataclasses
from typing import Literal

from .._checked_json import JsonKeys
from ._checks import check_choices, check_dropout, check_positive
from ._layers import Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderBase:
    """Sizes of the layers of an encoder, and how they are computed.

    Parameters keep the dtype they are loaded in; `compute_dtype` is what they and the activations
    are cast to inside a layer. Softmax and normalisation statistics stay in float32.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads: the model's sizes.
        activation: activation function of the perceptron, or of its gate.
        layer_norm_epsilon: added under the square root.
        attention_dropout: rate of the probabilities of attention; like all rates it is used when
            the encoder is called with a `dropout_key`.
        compute_dtype: dtype in which layers compute.
        scan_layers: hold the layers as one stack and scan it; False for a list of them.
        remat: what layers keep for the backward pass: everything ("none"), only what enters them
            ("full"), or what the policy of that name in `jax.checkpoint_policies` keeps.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "gelu"
    layer_norm_epsilon: float = 1e-12
    attention_dropout: float = 0.0
    compute_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    scan_layers: bool = False
    remat: Remat = "none"

    def __post_init__(self):
        check_positive(self, or_zero=self._may_be_zero())
        check_choices(self)
        check_dropout(self)
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"`hidden_size` must be a multiple of `num_heads`; got {self.hidden_size} and "
                f"{self.num_heads}. Every head takes an equal slice of the hidden vector."
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def _may_be_zero(self) -> tuple[str, ...]:
        """Names of the integer fields that may be 0."""
        return ()


def check_heads(keys: JsonKeys, size: str, heads: str) -> None:
    """Raise if the keys of the hidden size and of the number of heads contradict each other.

    Args:
        keys: the `config.json`.
        size: key of the hidden size.
        heads: key of the number of heads.
    """
    if keys[size] % keys[heads]:
        raise keys.error(
            size, f"must be a multiple of `{heads}`; got {keys[size]} and {keys[heads]}"
        )
    head_size = keys[size] // keys[heads]
    if keys.get("head_dim") not in (None, head_size):
        raise keys.error(
            "head_dim", f"is {keys['head_dim']}, but the heads have {head_size} numbers each"
        )
