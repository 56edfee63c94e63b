"""Rules, by model family, that map checkpoints to the parameters of the encoders.

A rule that matches no parameter is ignored, so one table serves models with and without biases.
"""

from collections.abc import Iterable

from jaxzero.interop._rules import Flatten, Rule, Split, Transpose
from jaxzero.models import ViTConfig

from .layer_rules import LAYER, embedding, linear, norm

_BERT_LAYER, _DISTIL, _MODERN = "encoder.layer.{i}", "transformer.layer.{i}", "layers.{i}"

_EMBEDDINGS = (
    *embedding("embeddings.word", "embeddings.word_embeddings"),
    *embedding("embeddings.position", "embeddings.position_embeddings"),
    *embedding("embeddings.token_type", "embeddings.token_type_embeddings"),
    *norm("embeddings.norm", "embeddings.LayerNorm"),
)
BERT = (
    *_EMBEDDINGS,
    *linear(f"{LAYER}.attention.query", f"{_BERT_LAYER}.attention.self.query"),
    *linear(f"{LAYER}.attention.key", f"{_BERT_LAYER}.attention.self.key"),
    *linear(f"{LAYER}.attention.value", f"{_BERT_LAYER}.attention.self.value"),
    *linear(f"{LAYER}.attention.output", f"{_BERT_LAYER}.attention.output.dense"),
    *norm(f"{LAYER}.attention_norm", f"{_BERT_LAYER}.attention.output.LayerNorm"),
    *linear(f"{LAYER}.up", f"{_BERT_LAYER}.intermediate.dense"),
    *linear(f"{LAYER}.down", f"{_BERT_LAYER}.output.dense"),
    *norm(f"{LAYER}.mlp_norm", f"{_BERT_LAYER}.output.LayerNorm"),
)

DISTILBERT = (
    *_EMBEDDINGS,
    *linear(f"{LAYER}.attention.query", f"{_DISTIL}.attention.q_lin"),
    *linear(f"{LAYER}.attention.key", f"{_DISTIL}.attention.k_lin"),
    *linear(f"{LAYER}.attention.value", f"{_DISTIL}.attention.v_lin"),
    *linear(f"{LAYER}.attention.output", f"{_DISTIL}.attention.out_lin"),
    *norm(f"{LAYER}.attention_norm", f"{_DISTIL}.sa_layer_norm"),
    *linear(f"{LAYER}.up", f"{_DISTIL}.ffn.lin1"),
    *linear(f"{LAYER}.down", f"{_DISTIL}.ffn.lin2"),
    *norm(f"{LAYER}.mlp_norm", f"{_DISTIL}.output_layer_norm"),
)


def _fused(parts: tuple[str, ...], theirs: str) -> tuple[Rule, ...]:
    """Linear layers of ours that are one in the checkpoint, their outputs one after the other."""
    return (
        Rule(
            tuple(f"{part}.kernel" for part in parts),
            f"{theirs}.weight",
            Split(0, len(parts)),
            Transpose(),
        ),
        Rule(tuple(f"{part}.bias" for part in parts), f"{theirs}.bias", Split(0, len(parts))),
    )


MODERN_BERT = (
    *embedding("embedding", "embeddings.tok_embeddings"),
    *norm("embedding_norm", "embeddings.norm"),
    *norm(f"{LAYER}.attention_norm", f"{_MODERN}.attn_norm"),
    *_fused(
        tuple(f"{LAYER}.attention.{part}" for part in ("query", "key", "value")),
        f"{_MODERN}.attn.Wqkv",
    ),
    *linear(f"{LAYER}.attention.output", f"{_MODERN}.attn.Wo"),
    *norm(f"{LAYER}.mlp_norm", f"{_MODERN}.mlp_norm"),
    *_fused((f"{LAYER}.mlp.gate", f"{LAYER}.mlp.up"), f"{_MODERN}.mlp.Wi"),
    *linear(f"{LAYER}.mlp.down", f"{_MODERN}.mlp.Wo"),
    *norm("norm", "final_norm"),
)

_VIT_LAYERS = (
    *norm(f"{LAYER}.attention_norm", f"{_BERT_LAYER}.layernorm_before"),
    *linear(f"{LAYER}.attention.query", f"{_BERT_LAYER}.attention.attention.query"),
    *linear(f"{LAYER}.attention.key", f"{_BERT_LAYER}.attention.attention.key"),
    *linear(f"{LAYER}.attention.value", f"{_BERT_LAYER}.attention.attention.value"),
    *linear(f"{LAYER}.attention.output", f"{_BERT_LAYER}.attention.output.dense"),
    *norm(f"{LAYER}.mlp_norm", f"{_BERT_LAYER}.layernorm_after"),
    *linear(f"{LAYER}.mlp.up", f"{_BERT_LAYER}.intermediate.dense"),
    *linear(f"{LAYER}.mlp.down", f"{_BERT_LAYER}.output.dense"),
    *norm("norm", "layernorm"),
)


def vit_rules(config: ViTConfig) -> tuple[Rule, ...]:
    """Rules of a `ViT`, or of a `ViTClassifier` if the config has labels."""
    kernel = (config.num_channels, *config.patch_size)
    rules = (
        Rule("class_token", "embeddings.cls_token", Flatten(0, (1, 1, config.hidden_size))),
        Rule(
            "positions",
            "embeddings.position_embeddings",
            Flatten(0, (1, config.num_patches + 1)),
        ),
        # A convolution with the stride of its kernel is a projection of each patch.
        Rule(
            "patches.kernel",
            "embeddings.patch_embeddings.projection.weight",
            Flatten(1, kernel),
            Transpose(),
        ),
        Rule("patches.bias", "embeddings.patch_embeddings.projection.bias"),
        *_VIT_LAYERS,
    )
    if not config.num_labels:
        return rules
    return (*_under("vit", rules), *linear("classifier", "classifier"))


def _under(prefix: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            tuple(f"{prefix}.{path}" for path in rule.ours),
            tuple(f"{prefix}.{name}" for name in rule.theirs),
            *rule.steps,
        )
        for rule in rules
    )
