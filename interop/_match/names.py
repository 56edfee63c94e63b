"""Parse names of parameters into module, role, words (with synonyms) and numbers.

`encoder.layers.3.self_attn.q_proj.weight` and `blocks.3.attention.query.kernel` are both the
weight of module number 3 that is called "attention query".
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping

_ROLES = {
    "weight": ("kernel", "weight", "scale", "embedding", "gamma", "w"),
    "bias": ("bias", "beta", "b"),
    "mean": ("mean", "running_mean"),
    "var": ("var", "running_var"),
}
ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_COLLECTIONS = ("params", "batch_stats")  # of Flax Linen; a module has its parts in both
# Synonyms; the first word of each line represents the others.
_WORDS = (
    ("attention", "attn", "mha", "selfattention", "multiheadattention"),
    ("query", "q", "wq"),
    ("key", "k", "wk"),
    ("value", "v", "wv"),
    ("out", "output", "o", "wo"),
    ("norm", "ln", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "bn"),
    ("embed", "embedding", "embeddings", "emb", "wte", "wpe"),
    ("position", "pos", "positional", "positions"),
    ("token", "tok", "word", "tokens"),
    ("convolution", "conv"),
    ("head", "classifier", "logits", "lm"),
    ("linear", "dense", "fc", "proj", "projection"),
    ("layer", "layers", "block", "blocks", "h"),
)
# Names whose words mislead: GPT-NeoX calls its head `embed_out`.
_COMPOUNDS = {"embed_in": "token_embed", "embed_out": "head"}
_MEANING = {word: words[0] for words in _WORDS for word in words}
# Words with little information: they occur in every name, or in no name of the other side.
_FAINT = frozenset({"layer", "linear", "model", "module", "encoder", "decoder", "self", "mlp"})
_FAINT_WEIGHT = 0.2
_FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|w_pack", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a module: its full name, and its shape without stacked dimensions."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """The tensors of one module, such as a linear layer or a norm.

    Attributes:
        name: common prefix of the tensors' names.
        tensors: role (`weight`, `bias`, `mean`, `var`) -> tensor.
        ranks: for each number in the name, its rank among the numbers at that position in all names
            that differ from this one only in numbers. Layers 3, 5, 9 have the ranks 0, 1, 2.
        stack: if the module is a stack of modules (`derived`), its lengths, one for each variable
            in the name; empty if it is a single module.
        part: if the module is a third of a fused one, the number of the third, along the first
            dimension: 0 query, 1 key, 2 value; else None.
        members: names of all checkpoint tensors that the module contains.
    """

    name: str
    tensors: Mapping[str, Tensor]
    ranks: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    part: int | None = None
    members: frozenset[str] = frozenset()


def modules_of(shapes: Mapping[str, tuple[int, ...]]) -> list[Module]:
    """Group tensors, given by name and shape, into modules."""
    grouped: dict[str, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        module, role = _module_and_role(name)
        # Two tensors of one role, such as `w` and `scale`, become modules of their own.
        if role in grouped.get(module, {}):
            module, role = name, "weight"
        grouped.setdefault(module, {})[role] = Tensor(name, shape)
    modules = [
        Module(name, tensors, members=frozenset(each.name for each in tensors.values()))
        for name, tensors in grouped.items()
    ]
    return _ranked(modules)


def shapes_of(module: Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (role, shape) for each tensor of a module."""
    return tuple(sorted((role, each.shape) for role, each in module.tensors.items()))


def similarity(ours: Module, theirs: Module) -> float:
    """Rate how similar two names are, from 0 to 2.

    Shared words count up to 1, and so do numbers with equal ranks (`Module.ranks`).
    """
    words = _shared(words_of(ours.name), words_of(theirs.name))
    pairs = list(zip(ours.ranks, theirs.ranks, strict=False))
    numbers = sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0
    return words + numbers


@functools.lru_cache(maxsize=4096)
def _shared(our_words: frozenset[str], their_words: frozenset[str]) -> float:
    """Return the share of words in common, from 0 to 1; words with little meaning weigh less."""
    every, both = _weight(our_words | their_words), _weight(our_words & their_words)
    return both / every if every else 0.0


def say_the_same(one: str, other: str) -> bool:
    """Return whether two names differ only in words with little information.

    A difference in any other word may change the meaning: `attention_norm` is the norm before
    attention in one model, and `post_attention_layernorm` the norm after it in another.
    """
    return _FAINT.issuperset(words_of(one) ^ words_of(other))


def fuses_attention(name: str) -> bool:
    """Return whether a name says that its tensor holds query, key and value together."""
    return _FUSED.search(name) is not None


def words_of(name: str) -> frozenset[str]:
    """Return the words of a module's name, synonyms replaced by one representative."""
    return _words_of(re.sub(r"\d+", "0", name))


@functools.lru_cache(maxsize=2**16)
def _words_of(name: str) -> frozenset[str]:
    text = re.sub(r"\{\w+\}", " ", name)  # variables
    for compound, meaning in _COMPOUNDS.items():
        text = re.sub(rf"(?<![^\W_]){compound}(?![^\W_])", meaning, text)
    spaced = re.sub(r"[\d_\W]+|(?<=[a-z])(?=[A-Z])", " ", text)
    return frozenset(_MEANING.get(word, word) for word in spaced.lower().split())


def _weight(words: Iterable[str]) -> float:
    return sum((_FAINT_WEIGHT if word in _FAINT else 1.0 for word in words), 0.0)


def _module_and_role(name: str) -> tuple[str, str]:
    components = name.split(".")
    if components[0] in _COLLECTIONS and len(components) > 1:
        components = components[1:]
    *module, last = components
    if last in ROLE_OF and module:
        return ".".join(module), ROLE_OF[last]
    for suffix in ("_weight", "_bias"):
        if last.endswith(suffix):
            return ".".join([*module, last.removesuffix(suffix)]), suffix[1:]
    return ".".join(components), "weight"


def _ranked(modules: list[Module]) -> list[Module]:
    forms: dict[tuple, list[tuple[int, list[int]]]] = {}
    for place, module in enumerate(modules):
        pieces = pieces_of(module.name)
        kind = tuple(sorted((role, len(each.shape)) for role, each in module.tensors.items()))
        numbers = [int(piece) for piece in pieces[1::2]]
        forms.setdefault((tuple(pieces[::2]), kind), []).append((place, numbers))
    ranked = list(modules)
    for form in forms.values():
        columns = zip(*(numbers for _, numbers in form), strict=True)
        ranks = [{x: rank for rank, x in enumerate(sorted(set(column)))} for column in columns]
        for place, numbers in form:
            own = tuple(of[x] for of, x in zip(ranks, numbers, strict=True))
            ranked[place] = dataclasses.replace(modules[place], ranks=own)
    return ranked


def pieces_of(name: str) -> list[str]:
    """Split a name into text and numbers in turn; text comes first and last, and may be empty."""
    return re.split(r"(\d{1,18})", name)  # at most 18 digits, so that int64 holds each number
