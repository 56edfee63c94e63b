"""ModernBERT (https://arxiv.org/abs/2412.13663) in Flax NNX.

    x = norm(word(ids))
    x = x + attention(norm(x))       the first layer has no norm here: x is normalised already
    x = x + down(gelu(gate(norm(x))) up(norm(x)))
    hidden = norm(x)

Positions enter through rotation of queries and keys alone. Every third layer attends to the whole
text; the others see a window around each token, and rotate with a frequency base of their own.
There are no token types and no pooler.

Dimensions: b batch, t tokens, d hidden.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from .._checked_json import JsonKeys, shown
from ._attention import is_among, turns_if, window_if
from ._config_json import (
    CHOOSE_ANOTHER,
    check_only,
    make_config,
    read_config,
    windowed_layers,
)
from ._encoder_parts import (
    EncoderBase,
    GatedPerceptron,
    PreNormLayer,
    SelfAttention,
    check_heads,
    layer_norm,
)
from ._family import SIZES, ConfigTable
from ._layers import make_layers, run_layers
from ._parts import as_indices, dropout, split_key
from ._rope import Rope, turns

_TABLE = ConfigTable(
    sizes=SIZES
    | {
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "norm_bias": "norm_bias",
        "layer_norm_epsilon": "norm_eps",
        "attention_dropout": "attention_dropout",
        "embedding_dropout": "embedding_dropout",
        "mlp_dropout": "mlp_dropout",
    },
    defaults={
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
    },
    required={"model_type": "modernbert", "quantization_config": None},
    activation="hidden_activation",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderBase):
    """The config of a ModernBERT: its sizes and parts, and how it is computed.

    The defaults of the parts are those of ModernBERT-base. Fields that all encoders share are those
    of `EncoderConfig`.

    Args:
        vocabulary_size: rows of the word embeddings.
        max_length: longest text that the model was trained on, in tokens; not a limit.
        rope: rotation of queries and keys in layers that attend to the whole text.
        local_rope: rotation in the layers with a window.
        local_layers: indices of the layers with a window.
        local_window: in these layers a token sees the tokens fewer than `local_window` positions
            away, on both sides. It is half of `local_attention` in `config.json`, plus 1.
        attention_bias, mlp_bias, norm_bias: True if these projections and norms have a bias.
        embedding_dropout, mlp_dropout: dropout rates of the first layer's input, and of the input
            of each perceptron's last projection. `attention_dropout` is also the rate of what
            attention adds.
        scan_layers: hold the layers but the first as one stack, `layers`, and scan it; the first,
            which has one norm fewer, is `first`. False for a list of all layers.
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
        if self.scan_layers and self.num_layers == 1:
            raise ValueError(
                "`scan_layers` stacks the layers after the first; with `num_layers` 1 "
                "there are none. Set it to False."
            )

    @classmethod
    def from_json(cls, path: Path | str, **changes: Any) -> "ModernBertConfig":
        """Read a Hugging Face `config.json` (or the directory that holds one).

        Files of transformers 4 and 5 are read.

        Args:
            path: the file, or its directory.
            **changes: fields to set differently, e.g. `compute_dtype="bfloat16"`.

        Raises:
            ValueError: the file is missing, lacks a size, or describes a model that `ModernBert`
                does not compute (another `model_type`, activation or scaling of positions).
        """
        content, path = read_config(path)
        keys, fields = _TABLE.read(content, path, "ModernBERT")
        check_heads(keys, "hidden_size", "num_attention_heads")
        fields["rope"] = _read_rope(keys, "full_attention", "global_rope_theta")
        fields["local_rope"] = _read_rope(keys, "sliding_attention", "local_rope_theta")
        fields["local_layers"] = _read_local_layers(keys)
        half = keys["local_attention"] // 2
        if "sliding_window" in keys and keys["sliding_window"] != half:
            raise keys.error(
                "sliding_window",
                f"is {shown(keys['sliding_window'])}, but half of `local_attention` is {half}; "
                "transformers takes the first, and it is `local_attention` that is trained",
            )
        fields["local_window"] = half + 1  # both sides are `local_attention`; a token sees itself
        return make_config(cls, fields | changes, path)


def _read_local_layers(keys: JsonKeys) -> tuple[int, ...]:
    num_layers = keys["num_hidden_layers"]
    layers = windowed_layers(keys, num_layers, "ModernBERT")
    if layers is not None:
        return layers
    every = keys["global_attn_every_n_layers"]
    return tuple(i for i in range(num_layers) if i % every)


def _read_rope(keys: JsonKeys, kind: str, base: str) -> Rope:
    """Return the rotation of the layers of one kind.

    Args:
        keys: the `config.json`.
        kind: key of the kind in `rope_parameters` of transformers 5.
        base: key under which transformers 4 wrote the base of this kind.
    """
    if keys.section("rope_scaling"):
        raise keys.error(
            "rope_scaling", "scales positions, which ModernBERT does not", remedy=CHOOSE_ANOTHER
        )
    both = keys.section("rope_parameters")
    for key in ("rope_theta", "rope_type"):
        if key in both:
            raise both.error(key, "must be given for each kind of layer, in an object of its own")
    given = both.section(kind)
    check_only(given, "rope_type", "default", "ModernBERT")
    head_size = keys["hidden_size"] // keys["num_attention_heads"]
    if head_size % 2:
        raise keys.error(
            "hidden_size",
            f"makes heads of {head_size} numbers; it must be an even number, as they rotate in "
            "pairs",
        )
    return Rope(rotary_size=head_size, base=given.get("rope_theta", keys[base]))


class ModernBert(nnx.Module):
    """An encoder, which maps token ids to one hidden vector per token.

    Build it under `nnx.eval_shape` when the parameters come from a checkpoint: then no random
    weights are ever made.
    """

    def __init__(self, config: ModernBertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocabulary_size,
            config.hidden_size,
            dtype=jnp.dtype(config.compute_dtype),
            rngs=rngs,
        )
        self.embedding_norm = layer_norm(config, rngs, bias=config.norm_bias)
        # Stacked layers are alike, and the first has one norm fewer: the stack begins with layer 1.
        self.first = _layer(config, 0, rngs) if config.scan_layers else None
        self.layers = make_layers(
            lambda rngs, i: _layer(config, i + self._num_before, rngs),
            config.num_layers - self._num_before,
            kind=lambda i: i + self._num_before == 0,
            scanned=config.scan_layers,
            rngs=rngs,
        )
        self.norm = layer_norm(config, rngs, bias=config.norm_bias)

    @property
    def _num_before(self) -> int:
        """Number of layers before those in `layers`: 1 if the first layer is held apart, else 0."""
        return 1 if self.config.scan_layers else 0

    def __call__(
        self,
        ids: Int[Array, "b t"],
        mask: Bool[Array, "b t"] | None = None,
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b t d"]:
        """Encode a padded batch.

        Args:
            ids: token ids. Texts longer than `max_length` are computed, as in transformers, but
                the model was not trained on them. With an id that is not in the vocabulary, such
                as -1, vectors are NaN.
            mask: True for tokens, False for padding. No token attends to padding, so it does not
                change the vectors of the tokens; the vectors of padding are meaningless. None if
                there is no padding.
            dropout_key: turns dropout on, at the rates of the config. Give each device its own
                (`jz.fold_in_device`).
        """
        config = self.config
        embedding_key, layers_key = split_key(dropout_key, 2)
        ids = as_indices(ids, mask, config.vocabulary_size)
        x_btd = self.embedding_norm(self.embedding(ids))
        x_btd = dropout(x_btd, config.embedding_dropout, embedding_key)
        positions = jnp.arange(ids.shape[1])[None]
        whole_turns = turns(config.rope, positions)
        local_turns = turns(config.local_rope, positions)

        def step(layer: PreNormLayer, x_btd: Array, i: int | Array) -> Array:
            is_local = is_among(config.local_layers, i, config.num_layers)
            return layer(
                x_btd,
                mask,
                window=window_if(is_local, config.local_window, ids.shape[1]),
                turns=turns_if(is_local, local_turns, whole_turns),
                dropout_key=None if layers_key is None else jax.random.fold_in(layers_key, i),
            )

        def later_step(layer: PreNormLayer, x_btd: Array, i: int | Array) -> Array:
            return step(layer, x_btd, i + self._num_before)

        if self.first is not None:
            x_btd = run_layers(nnx.List([self.first]), step, x_btd, 1, config.remat)
        num_later = config.num_layers - self._num_before
        return self.norm(run_layers(self.layers, later_step, x_btd, num_later, config.remat))


def _layer(config: ModernBertConfig, number: int, rngs: nnx.Rngs) -> PreNormLayer:
    bias = config.norm_bias
    return PreNormLayer(
        attention_norm=None if number == 0 else layer_norm(config, rngs, bias=bias),
        attention=SelfAttention(
            config, bias=config.attention_bias, output_bias=config.attention_bias, rngs=rngs
        ),
        mlp_norm=layer_norm(config, rngs, bias=bias),
        mlp=GatedPerceptron(
            config, dropout_rate=config.mlp_dropout, bias=config.mlp_bias, rngs=rngs
        ),
        # One rate, as in transformers, for the probabilities and for what attention adds.
        attention_output_dropout=config.attention_dropout,
    )
