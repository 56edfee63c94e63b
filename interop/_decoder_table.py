"""How the parameters of `jaxzero.models.Decoder` are called in checkpoints, as rules by family.

Most families say what Llama says, and a rule that matches no parameter is passed over: so one
table, with and without biases, norms of queries and keys, and a head, serves most of them, and the
norms around the two halves of a layer are what is left to tell apart. `{i}` is a layer, `{e}` an
expert. Scanned layers are the same rules without `{i}` on our side.
"""

from collections.abc import Iterable

from jaxzero.interop._rules import Rule
from jaxzero.interop._steps import Split, Transpose
from jaxzero.models import DecoderConfig

_OURS, _THEIRS = "layers.{i}", "model.layers.{i}"

# In files, but no parameters: masks and speeds of rotation, which are computed here.
BUFFERS = ("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq")
HEAD = "lm_head.weight"


def rules_of(model_type: str, config: DecoderConfig) -> tuple[Rule, ...]:
    """The table of a family, for layers in a list or in a stack as `config` has them."""
    rules = _phi3(config) if model_type == "phi3" else _TABLES[model_type]
    return _stacked(rules) if config.scan_layers else rules


def without_prefix(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The names in a checkpoint of the model without its head: `h.0...`, not `transformer.h.0...`."""
    return tuple(
        Rule(rule.ours, tuple(_after_prefix(name) for name in rule.theirs), *rule.steps)
        for rule in rules
    )


def _after_prefix(name: str) -> str:
    for prefix in ("model.", "transformer."):
        name = name.removeprefix(prefix)
    return name


def _stacked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(
        Rule(tuple(path.replace(_OURS, "layers") for path in rule.ours), rule.theirs, *rule.steps)
        for rule in rules
    )


def _linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    # `torch.nn.Linear` keeps `[out, in]`, ours is `[in, out]`.
    return (
        Rule(f"{ours}.kernel", f"{theirs}.weight", Transpose()),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def _norms(**names: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{_OURS}.{ours}.scale", f"{_THEIRS}.{theirs}.weight")
        for ours, theirs in names.items()
    )


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    each = f"{_THEIRS}.{block}.experts.{{e}}"
    return (
        *_linear(f"{_OURS}.mlp.router", f"{_THEIRS}.{block}.gate"),
        Rule(f"{_OURS}.mlp.gate", f"{each}.{gate}.weight", Transpose()),
        Rule(f"{_OURS}.mlp.up", f"{each}.{up}.weight", Transpose()),
        Rule(f"{_OURS}.mlp.down", f"{each}.{down}.weight", Transpose()),
    )


_ENDS = (
    Rule("embedding.embedding", "model.embed_tokens.weight"),
    Rule("norm.scale", "model.norm.weight"),
    *_linear("head", "lm_head"),
)
_ATTENTION = (
    *_linear(f"{_OURS}.attention.query", f"{_THEIRS}.self_attn.q_proj"),
    *_linear(f"{_OURS}.attention.key", f"{_THEIRS}.self_attn.k_proj"),
    *_linear(f"{_OURS}.attention.value", f"{_THEIRS}.self_attn.v_proj"),
    *_linear(f"{_OURS}.attention.output", f"{_THEIRS}.self_attn.o_proj"),
    Rule(f"{_OURS}.attention.query_norm.scale", f"{_THEIRS}.self_attn.q_norm.weight"),
    Rule(f"{_OURS}.attention.key_norm.scale", f"{_THEIRS}.self_attn.k_norm.weight"),
)
_MLP = (
    *_linear(f"{_OURS}.mlp.gate", f"{_THEIRS}.mlp.gate_proj"),
    *_linear(f"{_OURS}.mlp.up", f"{_THEIRS}.mlp.up_proj"),
    *_linear(f"{_OURS}.mlp.down", f"{_THEIRS}.mlp.down_proj"),
)
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

_LLAMA = (*_ENDS, *_ATTENTION, *_MLP, *_NORMS_BEFORE)
_GEMMA = (*_ENDS, *_ATTENTION, *_MLP, *_NORMS_AROUND)


def _gpt2() -> tuple[Rule, ...]:
    # Its projections are `[in, out]` in the file too; queries, keys and values are one.
    theirs = "transformer.h.{i}"

    def conv(ours: str, name: str) -> tuple[Rule, ...]:
        return (
            Rule(f"{_OURS}.{ours}.kernel", f"{theirs}.{name}.weight"),
            Rule(f"{_OURS}.{ours}.bias", f"{theirs}.{name}.bias"),
        )

    def norm(ours: str, name: str) -> tuple[Rule, ...]:
        return (Rule(f"{ours}.scale", f"{name}.weight"), Rule(f"{ours}.bias", f"{name}.bias"))

    thirds = [f"{_OURS}.attention.{part}" for part in ("query", "key", "value")]
    return (
        Rule("embedding.embedding", "transformer.wte.weight"),
        Rule("positions.embedding", "transformer.wpe.weight"),
        *norm("norm", "transformer.ln_f"),
        *_linear("head", "lm_head"),
        *norm(f"{_OURS}.attention_norm", f"{theirs}.ln_1"),
        Rule(
            tuple(f"{part}.kernel" for part in thirds),
            f"{theirs}.attn.c_attn.weight",
            Split(1, 3),
        ),
        Rule(tuple(f"{part}.bias" for part in thirds), f"{theirs}.attn.c_attn.bias", Split(0, 3)),
        *conv("attention.output", "attn.c_proj"),
        *norm(f"{_OURS}.mlp_norm", f"{theirs}.ln_2"),
        *conv("mlp.up", "mlp.c_fc"),
        *conv("mlp.down", "mlp.c_proj"),
    )


def _phi3(config: DecoderConfig) -> tuple[Rule, ...]:
    # Queries, keys and values are one projection, and so are gate and up.
    num_query, num_key = config.num_heads, config.num_key_value_heads
    sizes = tuple(num * config.head_size for num in (num_query, num_key, num_key))
    return (
        *_ENDS,
        Rule(
            tuple(f"{_OURS}.attention.{part}.kernel" for part in ("query", "key", "value")),
            f"{_THEIRS}.self_attn.qkv_proj.weight",
            Split(0, sizes),
            Transpose(),
        ),
        *_linear(f"{_OURS}.attention.output", f"{_THEIRS}.self_attn.o_proj"),
        Rule(
            (f"{_OURS}.mlp.gate.kernel", f"{_OURS}.mlp.up.kernel"),
            f"{_THEIRS}.mlp.gate_up_proj.weight",
            Split(0, 2),
            Transpose(),
        ),
        *_linear(f"{_OURS}.mlp.down", f"{_THEIRS}.mlp.down_proj"),
        *_NORMS_BEFORE,
    )


_TABLES: dict[str, tuple[Rule, ...]] = {
    "gpt2": _gpt2(),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "olmo2": (*_ENDS, *_ATTENTION, *_MLP, *_NORMS_AFTER),
    # Not every layer need have experts; what this version of transformers holds in memory as one
    # tensor of all experts is a tensor for each in the file.
    "mixtral": (
        *_ENDS,
        *_ATTENTION,
        *_NORMS_BEFORE,
        *_experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen3_moe": (*_LLAMA, *_experts("mlp", "gate_proj", "up_proj", "down_proj")),
}
