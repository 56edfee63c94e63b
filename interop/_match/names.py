"""Parse names of parameters into module, role, words (with synonyms) and numbers.

`encoder.layers.3.self_attn.q_proj.weight` and `blocks.3.attention.query.kernel` are both the
weight of module number 3 that is called "attention query".

A module of the checkpoint need not correspond to one of the model. Two kinds of modules are made up
from those of the checkpoint, so that they can be matched too: *parts*, the query, key and value of
a tensor that fuses them, and *stacks*, the layers of a checkpoint with a tensor for each, where the
model has one parameter for all layers.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

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
_MAX_NUMBERS = 6  # in a name whose modules are stacked: each pair of them is tried
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
        ranks: for each number in the name, its rank among the numbers at that position in names
            of the same form.
        stack: number of stacked modules, for each variable in the name.
        part: index of the part along the first dimension; None if the tensors are not divided.
        members: names of all checkpoint tensors that the module contains.
    """

    name: str
    tensors: Mapping[str, Tensor]
    ranks: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    part: int | None = None
    members: frozenset[str] = frozenset()


def modules_of(shapes: Mapping[str, tuple[int, ...]]) -> list[Module]:
    """Group tensors into modules."""
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


def parts_of(modules: Iterable[Module]) -> list[Module]:
    """Return query, key and value parts of each `in_proj` of `torch.nn.MultiheadAttention`.

    Only of its `in_proj_weight` and `in_proj_bias`, whose layout is known. A linear layer that is
    called `in_proj`, with an `in_proj.weight`, may have any layout.
    """
    parts = []
    for module in modules:
        prefix, _, last = module.name.rpartition("in_proj")
        suffixes = ("in_proj_weight", "in_proj_bias")
        named = all(tensor.name.endswith(suffixes) for tensor in module.tensors.values())
        rows = {tensor.shape[0] % 3 for tensor in module.tensors.values() if tensor.shape}
        if not last and named and rows == {0}:
            tensors = {
                role: Tensor(each.name, (each.shape[0] // 3, *each.shape[1:]))
                for role, each in module.tensors.items()
            }
            for number, word in enumerate(("query", "key", "value")):
                parts.append(
                    dataclasses.replace(module, name=prefix + word, tensors=tensors, part=number)
                )
    return parts


def stacks_of(modules: Sequence[Module]) -> list[Module]:
    """Stack modules whose names differ only in one or two numbers (0, 1, 2, ...).

    Modules with more than `_MAX_NUMBERS` numbers in their names are not stacked.
    """
    stacks = []
    for num_variables in (1, 2):
        groups: dict[tuple, dict[tuple[int, ...], Module]] = {}
        for module in modules:
            pieces, shapes = _pieces(module.name), _shapes(module)
            numbers = range(1, len(pieces), 2)
            if len(numbers) > _MAX_NUMBERS:
                continue
            for positions in itertools.combinations(numbers, num_variables):
                pattern = _pattern(pieces, positions)
                index = tuple(int(pieces[position]) for position in positions)
                key = (pattern, positions, module.part, shapes)
                groups.setdefault(key, {})[index] = module
        for (pattern, positions, *_), members in groups.items():
            stack = _full_range(members)
            if stack is not None:
                stacks.append(_stacked(pattern, positions, stack, members))
    return stacks


def similarity(ours: Module, theirs: Module) -> float:
    """Similarity of two names, from 0 to 2: up to 1 for shared words, up to 1 for equal ranks."""
    our_words, their_words = words_of(ours.name), words_of(theirs.name)
    every, both = _weight(our_words | their_words), _weight(our_words & their_words)
    pairs = list(zip(ours.ranks, theirs.ranks, strict=False))
    numbers = sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0
    return (both / every if every else 0.0) + numbers


def say_the_same(one: str, other: str) -> bool:
    """Return True if two names differ only in words with little information.

    Any other additional word may change the meaning: `attention_norm` is the norm before attention
    in one model, and `post_attention_layernorm` the norm after it in another.
    """
    return _FAINT.issuperset(words_of(one) ^ words_of(other))


def fuses_attention(name: str) -> bool:
    """Return True if the name says that a tensor holds query, key and value together."""
    return _FUSED.search(name) is not None


@functools.cache
def words_of(name: str) -> frozenset[str]:
    """Return the words of a module's name, synonyms replaced by one representative."""
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
    seen: dict[tuple, set[int]] = {}
    keyed = []
    for module in modules:
        pieces = _pieces(module.name)
        numbers = [int(piece) for piece in pieces[1::2]]
        kind = tuple(sorted((role, len(each.shape)) for role, each in module.tensors.items()))
        keys = [(tuple(pieces[::2]), kind, place) for place in range(len(numbers))]
        for key, number in zip(keys, numbers, strict=True):
            seen.setdefault(key, set()).add(number)
        keyed.append((module, list(zip(keys, numbers, strict=True))))
    ranks = {
        key: {number: rank for rank, number in enumerate(sorted(numbers))}
        for key, numbers in seen.items()
    }
    return [
        dataclasses.replace(module, ranks=tuple(ranks[key][number] for key, number in numbers))
        for module, numbers in keyed
    ]


def _pieces(name: str) -> list[str]:
    return re.split(r"(\d{1,18})", name)  # text and numbers in turn; Python reads no endless number


def _pattern(pieces: list[str], positions: tuple[int, ...]) -> str:
    pieces = list(pieces)
    for position, letter in zip(positions, "ij", strict=False):
        pieces[position] = f"{{{letter}}}"
    return "".join(pieces)


def _shapes(module: Module) -> tuple:
    return tuple(sorted((role, each.shape) for role, each in module.tensors.items()))


def _full_range(members: Mapping[tuple[int, ...], Module]) -> tuple[int, ...] | None:
    counts = tuple(max(numbers) + 1 for numbers in zip(*members, strict=True))
    return counts if math.prod(counts) == len(members) > 1 else None


def _stacked(
    pattern: str,
    positions: tuple[int, ...],
    stack: tuple[int, ...],
    members: Mapping[tuple[int, ...], Module],
) -> Module:
    first = next(iter(members.values()))
    left = [rank for place, rank in enumerate(first.ranks) if 2 * place + 1 not in positions]
    # A module's name begins its tensors' names, except that a part has a name of its own.
    tensors = {
        role: Tensor(_pattern(_pieces(each.name), positions), each.shape)
        for role, each in first.tensors.items()
    }
    names = frozenset(itertools.chain(*(each.members for each in members.values())))
    return Module(pattern, tensors, tuple(left), stack, first.part, names)
