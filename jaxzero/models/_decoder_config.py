"""Configuration of a decoder, as a frozen dataclass that validates itself.

Field names are ours (spelled out, `num_` for counts). `DecoderConfig.from_json` reads the
`config.json` of every family that `_decoder_families` has a table for.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from .._attention import Implementation
from ._config_json import (
    family_of,
    make_config,
    read_config,
)
from ._config_parts import read_rope
from ._decoder_families import LAYER_NORM_FAMILIES, RMS_NORM_FAMILIES
from ._family import Family, Fields
from ._layers import Remat
from ._part_configs import ExpertsConfig, LatentConfig, check_choices, check_dropout, check_positive
from ._rope import Rope

ComputeDtype = Literal["float32", "bfloat16", "float16", "float64"]
DECODER_FAMILIES: dict[str, Family] = LAYER_NORM_FAMILIES | RMS_NORM_FAMILIES


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config of a decoder: its sizes and parts, and how it is computed.

    The defaults of the parts are Llama's. Parameters keep the dtype they are loaded in;
    `compute_dtype` is what they and the activations are cast to inside a layer. Norms, rotations,
    attention's softmax and the weights of experts are computed in float32.

    Args:
        vocabulary_size, hidden_size, intermediate_size, num_layers: the model's sizes.
        num_heads: number of query heads.
        num_key_value_heads: divides `num_heads`; equal to it without grouped queries.
        head_size: width of a head; `num_heads * head_size` may differ from `hidden_size`.
        max_length: positions that have an embedding, in tokens. With `rope` it is not a limit.
        norm: RMSNorm, RMSNorm that stores its scale less 1, or LayerNorm with or without a bias.
        norm_epsilon: added under the square root.
        norm_placement: where the norms of a layer are: before each half, after each half (on what
            it adds to the residual, not on the sum), or both.
        residual: "sequential" if the perceptron sees what attention added; "parallel" if both see
            the input of the layer, each through a norm of its own, or "parallel_shared_norm"
            through the same norm.
        residual_scale: multiplies what attention and the perceptron add.
        query_key_norm: how queries and keys are normalised: "head" by head, with a scale that all
            heads share; "each_head" by a LayerNorm with a scale of its own; or each full
            "projection" at once.
        activation: activation function of the perceptron, or of its gate.
        gated_mlp: True if the perceptron has a gate.
        query_key_value_bias, attention_output_bias, mlp_bias: True if these projections have a
            bias. In latent attention the first is for the projections to short vectors.
        tied_head: True if the head shares the word embeddings.
        embedding_scale: multiplies embeddings, rounded to `compute_dtype`.
        rope: rotation of queries and keys; None for a learned embedding of each position.
        sliding_rope: rotation in the layers with a window, if it differs.
        sliding_window: positions that a token attends to in `sliding_layers`, itself included.
        sliding_layers: indices of the layers with that window.
        unrotated_layers: indices of the layers without rotation, if `rope` is given.
        attention_scale: multiplies products of queries and keys; None for `head_size ** -0.5`.
        attention_softcap, logit_softcap: x becomes c tanh(x / c), before softmax.
        attention_sinks: True if each head has a learned logit without a key.
        latent: sizes of latent attention; None for ordinary attention.
        logit_scale: multiplies the logits of the next token, before the cap.
        experts: a mixture of experts; None for a perceptron in every layer.
        embedding_dropout, attention_dropout, residual_dropout: rates, used when the decoder is
            called with a `dropout_key`: of what enters the first layer, of the probabilities of
            attention, and of what each half of a layer adds.
        initializer_range: standard deviation of fresh weights.
        scan_layers: hold the layers as one stack and scan it; False for a list of them.
        remat: what layers keep for the backward pass: everything ("none"), only what enters them
            ("full"), or what the policy of that name in `jax.checkpoint_policies` keeps.
        expert_loop: "ragged" sorts tokens by expert and computes each expert for its own tokens,
            with all experts of a layer in memory; "scan" computes one expert after another for
            every token, so that ZeRO gathers one expert at a time, for
            num_experts / num_experts_per_token times the arithmetic.
        attention_implementation: `implementation` of `jax.nn.dot_product_attention`; or a function
            to call instead, which takes the other arguments of `jax.nn.dot_product_attention`.
    """

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_size: int
    max_length: int = 2048
    norm: Literal["rms", "rms_plus_one", "layer", "layer_without_bias"] = "rms"
    norm_epsilon: float = 1e-6
    norm_placement: Literal["before", "after", "both"] = "before"
    residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
    residual_scale: float = 1.0
    query_key_norm: Literal["none", "head", "each_head", "projection"] = "none"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    query_key_value_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    embedding_scale: float = 1.0
    rope: Rope | None = None
    sliding_rope: Rope | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_sinks: bool = False
    latent: LatentConfig | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    initializer_range: float = 0.02
    compute_dtype: ComputeDtype = "float32"
    scan_layers: bool = False
    remat: Remat = "none"
    expert_loop: Literal["scan", "ragged"] = "ragged"
    attention_implementation: Implementation = None

    def __post_init__(self):
        check_positive(self)
        check_choices(self)
        check_dropout(self)
        self._check_attention()
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.residual != "sequential" and self.norm_placement != "before":
            raise ValueError(
                f"`residual` is {self.residual!r} and `norm_placement` is "
                f"{self.norm_placement!r}; layers of this form have norms before only."
            )
        if self.scan_layers and self.experts is not None and self.experts.dense_layers:
            raise ValueError(
                f"`scan_layers` needs layers that are alike, but layers "
                f"{list(self.experts.dense_layers)} have no experts. Set it to False."
            )

    def _check_attention(self) -> None:
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_heads` must be a multiple of `num_key_value_heads`; got {self.num_heads} "
                f"and {self.num_key_value_heads}. Each key serves as many queries as any other."
            )
        for name in ("rope", "sliding_rope"):
            rope = getattr(self, name)
            if rope is not None and rope.rotary_size > self.head_size:
                raise ValueError(
                    f"`rotary_size` of `{name}` is {rope.rotary_size}, a head has {self.head_size} "
                    "numbers. Rotate at most all of them."
                )
        if self.sliding_rope is not None and (
            self.rope is None
            or self.rope.rotary_size != self.sliding_rope.rotary_size
            or self.rope.pairs != self.sliding_rope.pairs
        ):
            raise ValueError(
                "`sliding_rope` needs a `rope` of the same `rotary_size` and `pairs` for the other "
                f"layers; got {self.sliding_rope} and {self.rope}."
            )
        if bool(self.sliding_layers) != (self.sliding_window is not None):
            raise ValueError(
                f"`sliding_window` is {self.sliding_window} and `sliding_layers` is "
                f"{self.sliding_layers}. Give both or neither."
            )
        for name in ("sliding_layers", "unrotated_layers"):
            if not set(getattr(self, name)) <= set(range(self.num_layers)):
                raise ValueError(
                    f"`{name}` must be numbers from 0 to {self.num_layers - 1}; got "
                    f"{getattr(self, name)}."
                )

    def _check_latent(self, latent: LatentConfig) -> None:
        rotated = 0 if self.rope is None else self.rope.rotary_size
        if self.head_size != latent.plain_size + rotated:
            raise ValueError(
                f"`head_size` is {self.head_size}, but `plain_size` of `latent` and `rotary_size` "
                f"of `rope` are {latent.plain_size} and {rotated}. It must be their sum."
            )
        if self.query_key_norm != "none" or self.attention_sinks:
            raise ValueError(
                f"`query_key_norm` is {self.query_key_norm!r} and `attention_sinks` is "
                f"{self.attention_sinks}; latent attention has neither. Leave them out."
            )

    @classmethod
    def from_json(cls, path: Path | str, **changes: Any) -> "DecoderConfig":
        """Read a Hugging Face `config.json` (or the directory that holds one).

        Args:
            path: the file, or its directory.
            **changes: fields to set differently, e.g. `compute_dtype="bfloat16"`.

        Raises:
            ValueError: the file is missing or lacks a size; a value has another type or range than
                its key may hold; or the decoder does not support its `model_type` or one of its
                options. `interop.load_decoder(..., family=...)` reads a family of your own.
        """
        content, path = read_config(path)
        return make_config(cls, decoder_fields(content, path) | changes, path)


def decoder_fields(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that a `config.json` describes.

    Args:
        content: the content of the file.
        path: where it is, for messages.

    Raises:
        ValueError: see `DecoderConfig.from_json`.
    """
    family = family_of(content, path, DECODER_FAMILIES, "decoders")
    keys, fields = family.read(content, path, "decoder")
    if keys.get("quantization_config") is not None:
        raise keys.error(
            "quantization_config",
            "says that its weights are codes of numbers",
            remedy="Choose the checkpoint that was not quantised.",
        )
    fields |= family.heads(keys, family.sizes)
    layers = fields["num_layers"]
    fields["sliding_layers"] = family.windows(keys, layers)
    fields["sliding_window"] = keys["sliding_window"] if fields["sliding_layers"] else None
    if family.experts is not None:
        fields["experts"] = family.experts(keys, layers)
    if family.has_rope:
        fields |= read_rope(
            keys,
            head_size=_rotated_size(fields),
            base_key=family.base_key,
            sliding_base_key=family.sliding_base_key,
            part_key=family.part_key,
        )
    return fields | family.more(keys, fields)


def _rotated_size(fields: Fields) -> int:
    """Return the size of a head, less the part that latent attention never rotates."""
    latent = fields.get("latent")
    return fields["head_size"] - (0 if latent is None else latent.plain_size)
