"""One table says how the modules of a model are called in a checkpoint; both directions read it.

A row is `(our module, their module, kind)`; a kind lists the parameters of such a module, their
names in PyTorch, and whether PyTorch stores them transposed (`torch.nn.Linear` keeps `[out, in]`,
ours is `[in, out]`). `{layer}` stands for each layer number. Since loading and exporting share the
rows, a round trip cannot disagree with itself.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax

Kind = Literal["embedding", "linear", "norm"]
Row = tuple[str, str, Kind]

# kind -> (our parameter, their parameter, transposed)
_PARAMETERS: dict[Kind, tuple[tuple[str, str, bool], ...]] = {
    "embedding": (("embedding", "weight", False),),
    "linear": (("kernel", "weight", True), ("bias", "bias", False)),
    "norm": (("scale", "weight", False), ("bias", "bias", False)),
}

BERT: tuple[Row, ...] = (
    ("embeddings.word", "embeddings.word_embeddings", "embedding"),
    ("embeddings.position", "embeddings.position_embeddings", "embedding"),
    ("embeddings.token_type", "embeddings.token_type_embeddings", "embedding"),
    ("embeddings.norm", "embeddings.LayerNorm", "norm"),
    ("layers.{layer}.attention.query", "encoder.layer.{layer}.attention.self.query", "linear"),
    ("layers.{layer}.attention.key", "encoder.layer.{layer}.attention.self.key", "linear"),
    ("layers.{layer}.attention.value", "encoder.layer.{layer}.attention.self.value", "linear"),
    ("layers.{layer}.attention.output", "encoder.layer.{layer}.attention.output.dense", "linear"),
    ("layers.{layer}.attention_norm", "encoder.layer.{layer}.attention.output.LayerNorm", "norm"),
    ("layers.{layer}.up", "encoder.layer.{layer}.intermediate.dense", "linear"),
    ("layers.{layer}.down", "encoder.layer.{layer}.output.dense", "linear"),
    ("layers.{layer}.mlp_norm", "encoder.layer.{layer}.output.LayerNorm", "norm"),
)

# In the file, but no parameters of ours: the pooler feeds a head that the encoder does not have,
# and position ids are 0, 1, 2, ... Exporting copies them from the file that was loaded.
BERT_CARRIED = frozenset({"embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"})


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a parameter is stored: the name of its tensor, and whether dimensions are reversed."""

    name: str
    transposed: bool


def expand(rows: Iterable[Row], num_layers: int) -> dict[str, Stored]:
    """Spell the table out: dotted path of each parameter -> where it is stored."""
    spelled = {}
    for ours, theirs, kind in rows:
        for layer in range(num_layers) if "{layer}" in ours else [0]:
            for our_parameter, their_parameter, transposed in _PARAMETERS[kind]:
                path = f"{ours.format(layer=layer)}.{our_parameter}"
                name = f"{theirs.format(layer=layer)}.{their_parameter}"
                spelled[path] = Stored(name, transposed)
    return spelled


def dotted(path: tuple[Any, ...]) -> str:
    """`layers.0.up.kernel` for the path JAX gives to that leaf of an NNX state or a plain dict.

    The last key of a leaf in an NNX state is the attribute `value` of its `nnx.Param`: left out.
    """
    keys = (key for key in path if not isinstance(key, jax.tree_util.GetAttrKey))
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
