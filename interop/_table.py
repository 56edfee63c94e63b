"""How the parameters of `jaxzero.models.Encoder` are called in checkpoints, as rules."""

from jaxzero.interop._rules import Rule
from jaxzero.interop._steps import Transpose


def _embedding(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (Rule(f"{ours}.embedding", f"{theirs}.weight"),)


def _linear(ours: str, theirs: str) -> tuple[Rule, ...]:
    # `torch.nn.Linear` keeps `[out, in]`, ours is `[in, out]`.
    return (
        Rule(f"{ours}.kernel", f"{theirs}.weight", Transpose()),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


def _norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}.scale", f"{theirs}.weight"),
        Rule(f"{ours}.bias", f"{theirs}.bias"),
    )


_OURS, _THEIRS = "layers.{i}", "encoder.layer.{i}"

BERT: tuple[Rule, ...] = (
    *_embedding("embeddings.word", "embeddings.word_embeddings"),
    *_embedding("embeddings.position", "embeddings.position_embeddings"),
    *_embedding("embeddings.token_type", "embeddings.token_type_embeddings"),
    *_norm("embeddings.norm", "embeddings.LayerNorm"),
    *_linear(f"{_OURS}.attention.query", f"{_THEIRS}.attention.self.query"),
    *_linear(f"{_OURS}.attention.key", f"{_THEIRS}.attention.self.key"),
    *_linear(f"{_OURS}.attention.value", f"{_THEIRS}.attention.self.value"),
    *_linear(f"{_OURS}.attention.output", f"{_THEIRS}.attention.output.dense"),
    *_norm(f"{_OURS}.attention_norm", f"{_THEIRS}.attention.output.LayerNorm"),
    *_linear(f"{_OURS}.up", f"{_THEIRS}.intermediate.dense"),
    *_linear(f"{_OURS}.down", f"{_THEIRS}.output.dense"),
    *_norm(f"{_OURS}.mlp_norm", f"{_THEIRS}.output.LayerNorm"),
)

# In the file, but no parameters of ours: the pooler feeds a head that the encoder does not have,
# and position ids are 0, 1, 2, ... Exporting copies them from the file that was loaded.
BERT_CARRIED = ("embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight")
