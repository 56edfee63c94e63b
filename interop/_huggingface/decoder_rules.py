"""Rules that map tensors of a checkpoint to parameters of `jaxzero.models.Decoder`, by family.

Most families use Llama's names, and a rule that matches no parameter is ignored. So one table
serves most families, with and without biases, query and key norms, and a head; the tables differ
mainly in the norms before and after attention and the MLP. `{i}` is a layer, `{e}` an expert.
Scanned layers have the same rules without `{i}` in the paths of parameters.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxzero.interop._rules import Flatten, Rule, Split, SplitHeads, Step, Transpose, Unflatten
from jaxzero.models import DecoderConfig

from .layer_rules import GATE_UP, LAYER, QUERY_KEY_VALUE, attention, embedding, fused, linear, norm

_THEIRS = "model.layers.{i}"

# Tensors in files that are no parameters: masks and rotary frequencies, which our models compute.
BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq")
HEAD = "lm_head.weight"
PREFIXES = ("model.", "transformer.", "gpt_neox.")  # of the names of all tensors but the head
EMBEDDINGS = "embedding.embedding"  # path of the parameter in our models


class Names(NamedTuple):
    """How a family names its tensors: its rules, buffers and head, as in a `DecoderFamily`."""

    rules: Callable[[DecoderConfig], tuple[Rule, ...]]  # for layers in a list
    buffers: tuple[str, ...] = BUFFERS
    head: str = HEAD


def without_prefix(rules: tuple[Rule, ...], names: Iterable[str]) -> tuple[Rule, ...]:
    """Adapt rules to a checkpoint whose tensor names may lack a prefix such as `model.`.

    A model that was saved without its language-model head has names without the prefix. Such a
    checkpoint is complete if the head is tied to the embeddings.

    Args:
        rules: rules of a family, whose tensor names have the prefix.
        names: names of the tensors in a checkpoint.
    """
    if any(name.startswith(PREFIXES) for name in names):
        return rules
    return tuple(
        Rule(rule.ours, tuple(_after_prefix(name) for name in rule.theirs), *rule.steps)
        for rule in rules
    )


def _after_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _norms(**names: str) -> tuple[Rule, ...]:
    return tuple(
        rule
        for ours, theirs in names.items()
        for rule in norm(f"{LAYER}.{ours}", f"{_THEIRS}.{theirs}")
    )


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    expert = f"{_THEIRS}.{block}.experts.{{e}}"
    return (
        *linear(f"{LAYER}.mlp.router", f"{_THEIRS}.{block}.gate"),
        Rule(f"{LAYER}.mlp.gate", f"{expert}.{gate}.weight", Transpose()),
        Rule(f"{LAYER}.mlp.up", f"{expert}.{up}.weight", Transpose()),
        Rule(f"{LAYER}.mlp.down", f"{expert}.{down}.weight", Transpose()),
    )


_ENDS = (
    *embedding("embedding", "model.embed_tokens"),
    *norm("norm", "model.norm"),
    *linear("head", "lm_head"),
)
_PROJECTIONS = attention(f"{_THEIRS}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
_ATTENTION = (
    *_PROJECTIONS,
    *norm(f"{LAYER}.attention.query_norm", f"{_THEIRS}.self_attn.q_norm"),
    *norm(f"{LAYER}.attention.key_norm", f"{_THEIRS}.self_attn.k_norm"),
)
_GATED = ("gate_proj", "up_proj", "down_proj")


def _gated(ours: str, theirs: str) -> tuple[Rule, ...]:
    return tuple(
        rule
        for name in _GATED
        for rule in linear(f"{ours}.{name.removesuffix('_proj')}", f"{theirs}.{name}")
    )


_MLP = _gated(f"{LAYER}.mlp", f"{_THEIRS}.mlp")
_NORMS_BEFORE = _norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
_NORMS_AFTER = _norms(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)
_NORMS_AROUND = _norms(
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def _gpt2() -> tuple[Rule, ...]:
    # GPT-2's projections are `[in, out]` in the file too, so they are not transposed; query, key
    # and value are one tensor.
    theirs = "transformer.h.{i}"

    def conv(ours: str, name: str) -> tuple[Rule, ...]:
        return (
            Rule(f"{LAYER}.{ours}.kernel", f"{theirs}.{name}.weight"),
            Rule(f"{LAYER}.{ours}.bias", f"{theirs}.{name}.bias"),
        )

    kernels, biases = (
        tuple(f"{part}.{kind}" for part in QUERY_KEY_VALUE) for kind in ("kernel", "bias")
    )
    return (
        *embedding("embedding", "transformer.wte"),
        *embedding("positions", "transformer.wpe"),
        *norm("norm", "transformer.ln_f"),
        *linear("head", "lm_head"),
        *norm(f"{LAYER}.attention_norm", f"{theirs}.ln_1"),
        Rule(kernels, f"{theirs}.attn.c_attn.weight", Split(1, 3)),
        Rule(biases, f"{theirs}.attn.c_attn.bias", Split(0, 3)),
        *conv("attention.output", "attn.c_proj"),
        *norm(f"{LAYER}.mlp_norm", f"{theirs}.ln_2"),
        *conv("mlp.up", "mlp.c_fc"),
        *conv("mlp.down", "mlp.c_proj"),
    )


def _neox(config: DecoderConfig) -> tuple[Rule, ...]:
    # Query, key and value are one projection, in which the three parts of a head are adjacent.
    theirs = "gpt_neox.layers.{i}"
    split = SplitHeads(0, config.num_heads, 3)
    return (
        *embedding("embedding", "gpt_neox.embed_in"),
        *norm("norm", "gpt_neox.final_layer_norm"),
        *linear("head", "embed_out"),
        *norm(f"{LAYER}.attention_norm", f"{theirs}.input_layernorm"),
        *fused(QUERY_KEY_VALUE, f"{theirs}.attention.query_key_value", split),
        *linear(f"{LAYER}.attention.output", f"{theirs}.attention.dense"),
        *norm(f"{LAYER}.mlp_norm", f"{theirs}.post_attention_layernorm"),
        *linear(f"{LAYER}.mlp.up", f"{theirs}.mlp.dense_h_to_4h"),
        *linear(f"{LAYER}.mlp.down", f"{theirs}.mlp.dense_4h_to_h"),
    )


def _phi3(config: DecoderConfig) -> tuple[Rule, ...]:
    # Query, key and value are one projection, and so are gate and up.
    num_query, num_key = config.num_heads, config.num_key_value_heads
    sizes = tuple(num * config.head_size for num in (num_query, num_key, num_key))
    return (
        *_ENDS,
        *fused(QUERY_KEY_VALUE, f"{_THEIRS}.self_attn.qkv_proj", Split(0, sizes)),
        *linear(f"{LAYER}.attention.output", f"{_THEIRS}.self_attn.o_proj"),
        *fused(GATE_UP, f"{_THEIRS}.mlp.gate_up_proj", Split(0, 2)),
        *linear(f"{LAYER}.mlp.down", f"{_THEIRS}.mlp.down_proj"),
        *_NORMS_BEFORE,
    )


def _gpt_oss(config: DecoderConfig) -> tuple[Rule, ...]:
    # All experts are one tensor, in which columns of gate and up alternate.
    experts = config.experts
    width = config.intermediate_size if experts is None else experts.intermediate_size
    theirs = f"{_THEIRS}.mlp.experts"

    def alternate(dim: int) -> tuple[Step, ...]:
        return Unflatten(dim, (width, 2)), Split(dim + 1, 2), Flatten(dim, (width, 1))

    return (
        *_ENDS,
        *_ATTENTION,
        Rule(f"{LAYER}.attention.sinks", f"{_THEIRS}.self_attn.sinks"),
        *_NORMS_BEFORE,
        *linear(f"{LAYER}.mlp.router", f"{_THEIRS}.mlp.router"),
        Rule(GATE_UP, f"{theirs}.gate_up_proj", *alternate(2)),
        Rule(
            tuple(f"{each}_bias" for each in GATE_UP), f"{theirs}.gate_up_proj_bias", *alternate(1)
        ),
        Rule(f"{LAYER}.mlp.down", f"{theirs}.down_proj"),
        Rule(f"{LAYER}.mlp.down_bias", f"{theirs}.down_proj_bias"),
    )


_DEEPSEEK = (
    *_ENDS,
    *linear(f"{LAYER}.attention.query", f"{_THEIRS}.self_attn.q_proj"),
    *linear(f"{LAYER}.attention.query_down", f"{_THEIRS}.self_attn.q_a_proj"),
    *norm(f"{LAYER}.attention.query_norm", f"{_THEIRS}.self_attn.q_a_layernorm"),
    *linear(f"{LAYER}.attention.query_up", f"{_THEIRS}.self_attn.q_b_proj"),
    *linear(f"{LAYER}.attention.key_value_down", f"{_THEIRS}.self_attn.kv_a_proj_with_mqa"),
    *norm(f"{LAYER}.attention.key_value_norm", f"{_THEIRS}.self_attn.kv_a_layernorm"),
    *linear(f"{LAYER}.attention.key_value_up", f"{_THEIRS}.self_attn.kv_b_proj"),
    *linear(f"{LAYER}.attention.output", f"{_THEIRS}.self_attn.o_proj"),
    *_NORMS_BEFORE,
    *_MLP,
    *_experts("mlp", *_GATED),
    Rule(f"{LAYER}.mlp.correction", f"{_THEIRS}.mlp.gate.e_score_correction_bias"),
    *_gated(f"{LAYER}.mlp.shared", f"{_THEIRS}.mlp.shared_experts"),
)

# StableLM has a norm for each head `{h}`, each a tensor; here all of them are one parameter.
_NORMS_OF_HEADS = tuple(
    Rule(
        f"{LAYER}.attention.{ours}_norm.scale",
        f"{_THEIRS}.self_attn.{theirs}_layernorm.norms.{{h}}.weight",
    )
    for ours, theirs in (("query", "q"), ("key", "k"))
)


def _fixed(*rules: Rule) -> Names:
    """Return the `Names` of a family that has these rules whatever its config says."""
    return Names(lambda config: rules)


# transformers 5 holds all experts of a layer as one tensor in memory, but writes one for each.
_MIXTRAL = (*_ENDS, *_ATTENTION, *_NORMS_BEFORE, *_experts("block_sparse_moe", "w1", "w3", "w2"))
_STARCODER = (
    *_ENDS,
    *_ATTENTION,
    *linear(f"{LAYER}.mlp.up", f"{_THEIRS}.mlp.c_fc"),
    *linear(f"{LAYER}.mlp.down", f"{_THEIRS}.mlp.c_proj"),
    *_NORMS_BEFORE,
)
_LIKE_LLAMA = (
    "llama",
    "smollm3",
    "granite",
    "gemma",
    "cohere",
    "cohere2",
    "mistral",
    "qwen2",
    "qwen3",
)

DECODER_NAMES: dict[str, Names] = {
    **dict.fromkeys(_LIKE_LLAMA, _fixed(*_ENDS, *_ATTENTION, *_MLP, *_NORMS_BEFORE)),
    **dict.fromkeys(("gemma2", "gemma3_text"), _fixed(*_ENDS, *_ATTENTION, *_MLP, *_NORMS_AROUND)),
    "gpt2": _fixed(*_gpt2()),
    "stablelm": _fixed(*_ENDS, *_PROJECTIONS, *_NORMS_OF_HEADS, *_MLP, *_NORMS_BEFORE),
    "starcoder2": _fixed(*_STARCODER),
    "olmo2": _fixed(*_ENDS, *_ATTENTION, *_MLP, *_NORMS_AFTER),
    "mixtral": _fixed(*_MIXTRAL),
    "qwen3_moe": _fixed(*_ENDS, *_ATTENTION, *_MLP, *_NORMS_BEFORE, *_experts("mlp", *_GATED)),
    # DeepSeek-V3 has 61 layers. Layer 61 is its multi-token prediction, which is used in training
    # only and which our decoder does not have.
    "deepseek_v3": _fixed(*_DEEPSEEK)._replace(buffers=(*BUFFERS, "model.layers.61.*")),
    "gpt_neox": Names(
        _neox,
        buffers=(*BUFFERS, "*.attention.bias", "*.attention.masked_bias"),
        head="embed_out.weight",
    ),
    "gpt_oss": Names(_gpt_oss),
    "phi3": Names(_phi3),
}
