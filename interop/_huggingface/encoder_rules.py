"""Rules that map tensors of a checkpoint to parameters of the encoders, by family."""

from collections.abc import Iterable

from jaxzero.interop._rules import Flatten, Merge, Rule, Split, Step, Transpose, Unflatten
from jaxzero.models import ModernBertConfig, ViTConfig

from .layer_rules import (
    GATE_UP,
    LAYER,
    QUERY_KEY_VALUE,
    attention,
    embedding,
    fused,
    linear,
    norm,
    stacked,
)

_BERT, _DISTIL, _MODERN = "encoder.layer.{i}", "transformer.layer.{i}", "layers.{i}"

_EMBEDDINGS = (
    *embedding("embeddings.word", "embeddings.word_embeddings"),
    *embedding("embeddings.position", "embeddings.position_embeddings"),
    *embedding("embeddings.token_type", "embeddings.token_type_embeddings"),
    *norm("embeddings.norm", "embeddings.LayerNorm"),
)
BERT = (
    *_EMBEDDINGS,
    *attention(f"{_BERT}.attention", "self.query", "self.key", "self.value", "output.dense"),
    *norm(f"{LAYER}.attention_norm", f"{_BERT}.attention.output.LayerNorm"),
    *linear(f"{LAYER}.up", f"{_BERT}.intermediate.dense"),
    *linear(f"{LAYER}.down", f"{_BERT}.output.dense"),
    *norm(f"{LAYER}.mlp_norm", f"{_BERT}.output.LayerNorm"),
)

DISTILBERT = (
    *_EMBEDDINGS,
    *attention(f"{_DISTIL}.attention", "q_lin", "k_lin", "v_lin", "out_lin"),
    *norm(f"{LAYER}.attention_norm", f"{_DISTIL}.sa_layer_norm"),
    *linear(f"{LAYER}.up", f"{_DISTIL}.ffn.lin1"),
    *linear(f"{LAYER}.down", f"{_DISTIL}.ffn.lin2"),
    *norm(f"{LAYER}.mlp_norm", f"{_DISTIL}.output_layer_norm"),
)


_MODERN_ENDS = (
    *embedding("embedding", "embeddings.tok_embeddings"),
    *norm("embedding_norm", "embeddings.norm"),
    *norm("norm", "final_norm"),
)
_MODERN_LAYERS = (
    *norm(f"{LAYER}.attention_norm", f"{_MODERN}.attn_norm"),
    *fused(QUERY_KEY_VALUE, f"{_MODERN}.attn.Wqkv", Split(0, 3)),
    *linear(f"{LAYER}.attention.output", f"{_MODERN}.attn.Wo"),
    *norm(f"{LAYER}.mlp_norm", f"{_MODERN}.mlp_norm"),
    *fused(GATE_UP, f"{_MODERN}.mlp.Wi", Split(0, 2)),
    *linear(f"{LAYER}.mlp.down", f"{_MODERN}.mlp.Wo"),
)


def modern_bert_rules(config: ModernBertConfig) -> tuple[Rule, ...]:
    """Return the rules that map a checkpoint to a `ModernBert` with this config.

    The first layer has no norm before attention. So with scanned layers it is a module of its own,
    `first`, and the stack `layers` begins with layer 1 of the checkpoint. A variable such as `{i}`
    would count from 0; so each rule of the stack lists the names of its tensors, from layer 1 on,
    and merges them along a new dimension.
    """
    if not config.scan_layers:
        return (*_MODERN_ENDS, *_MODERN_LAYERS)
    rows = {"Wqkv": 3 * config.hidden_size, "Wi": 2 * config.intermediate_size}
    rules = list(_MODERN_ENDS)
    for rule in _MODERN_LAYERS:
        (theirs,) = rule.theirs
        names = [theirs.replace("{i}", str(i)) for i in range(config.num_layers)]
        rules.append(Rule(_renamed(rule.ours, "first"), names[0], *rule.steps))
        module = theirs.split(".")[-2]
        rules.append(
            Rule(
                _renamed(rule.ours, "layers"),
                tuple(names[1:]),
                Unflatten(0, (1, rows.get(module, config.hidden_size))),
                Merge(0, len(names) - 1),
                *map(_of_stack, rule.steps),
            )
        )
    return tuple(rules)


def _renamed(paths: tuple[str, ...], layer: str) -> tuple[str, ...]:
    return tuple(path.replace(LAYER, layer) for path in paths)


def _of_stack(step: Step) -> Step:
    """Convert a step for one layer to the step for a stack `[layers, ...]`."""
    if isinstance(step, Split):
        return Split(step.dim + 1, step.sizes)
    assert step == Transpose(), f"{step} is in no rule of these layers"
    return Transpose(0, 2, 1)


_VIT_LAYERS = (
    *norm(f"{LAYER}.attention_norm", f"{_BERT}.layernorm_before"),
    *attention(
        f"{_BERT}.attention", "attention.query", "attention.key", "attention.value", "output.dense"
    ),
    *norm(f"{LAYER}.mlp_norm", f"{_BERT}.layernorm_after"),
    *linear(f"{LAYER}.mlp.up", f"{_BERT}.intermediate.dense"),
    *linear(f"{LAYER}.mlp.down", f"{_BERT}.output.dense"),
    *norm("norm", "layernorm"),
)


def vit_rules(config: ViTConfig) -> tuple[Rule, ...]:
    """Return the rules of a `ViT`, or of a `ViTClassifier` if the config has labels."""
    kernel = (config.num_channels, *config.patch_size)
    rules = (
        Rule("class_token", "embeddings.cls_token", Flatten(0, (1, 1, config.hidden_size))),
        Rule(
            "positions", "embeddings.position_embeddings", Flatten(0, (1, config.num_patches + 1))
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
    if config.scan_layers:
        rules = stacked(rules)
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
