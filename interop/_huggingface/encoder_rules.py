"""Rules, by model family, that map checkpoints to the parameters of `jaxzero.models.Encoder`."""

from jaxzero.interop._rules import Rule

from .layer_rules import LAYER, embedding, linear, norm

_THEIRS, _DISTIL = "encoder.layer.{i}", "transformer.layer.{i}"

_EMBEDDINGS = (
    *embedding("embeddings.word", "embeddings.word_embeddings"),
    *embedding("embeddings.position", "embeddings.position_embeddings"),
    *embedding("embeddings.token_type", "embeddings.token_type_embeddings"),
    *norm("embeddings.norm", "embeddings.LayerNorm"),
)
_BERT = (
    *_EMBEDDINGS,
    *linear(f"{LAYER}.attention.query", f"{_THEIRS}.attention.self.query"),
    *linear(f"{LAYER}.attention.key", f"{_THEIRS}.attention.self.key"),
    *linear(f"{LAYER}.attention.value", f"{_THEIRS}.attention.self.value"),
    *linear(f"{LAYER}.attention.output", f"{_THEIRS}.attention.output.dense"),
    *norm(f"{LAYER}.attention_norm", f"{_THEIRS}.attention.output.LayerNorm"),
    *linear(f"{LAYER}.up", f"{_THEIRS}.intermediate.dense"),
    *linear(f"{LAYER}.down", f"{_THEIRS}.output.dense"),
    *norm(f"{LAYER}.mlp_norm", f"{_THEIRS}.output.LayerNorm"),
)

_DISTILBERT = (
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

# By `model_type`.
ENCODERS: dict[str, tuple[Rule, ...]] = {
    "bert": _BERT,
    "distilbert": _DISTILBERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
}

# Tensors of the file that the encoder does not use: the pooler feeds a head that it does not have,
# and position ids are 0, 1, 2, ... Exporting copies them from the file that was loaded.
ENCODER_CARRIED = ("embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight")
