"""Find tensors that fuse query, key and value, where the model has one parameter for each.

Two layouts have the same shape. In one the parts are whole, `[query; key; value]` (GPT-2, Phi-3);
in the other they are fused head by head, `[query, key, value of head 0; of head 1; ...]`
(GPT-NeoX, BLOOM, Falcon). Names and shapes do not tell which, so both rules are reported and none
is chosen.
"""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxzero.interop._rules import RotaryPairs, Rule, Split, SplitHeads, Transpose

from .names import Module, Tensor, similarity, words_of
from .pairs import Steps, possible_steps
from .proposal import generalize

_PARTS = ("query", "key", "value")
_UNKNOWN = (0, 0, 0)  # numbers of heads, until `_with_heads` writes them into the text of a rule


class Found(NamedTuple):
    """The tensors found that fuse query, key and value, and the parameters that come from them.

    Attributes:
        layouts: pattern of the tensors' names -> rules as text, of which one is right: for whole
            parts, and for parts fused head by head; then, if rotary pairs may have to be reordered,
            the same two with `RotaryPairs`.
        undecided: path of a parameter -> the tensor that it is a part of.
        members: names of all fused tensors.
    """

    layouts: dict[str, tuple[str, ...]]
    undecided: dict[str, tuple[str, ...]]
    members: set[str]


def find_fused(
    ours: Sequence[Module], theirs: Sequence[Module], paths: Sequence[str], *, interleaved: bool
) -> Found:
    """Match query, key and value modules of the model with fused tensors of the checkpoint.

    Args:
        ours: modules of the model that have no counterpart in the checkpoint.
        theirs: modules of the checkpoint, single and stacked, that have no counterpart in the
            model.
        paths: paths of all parameters.
        interleaved: True if names say that rotary pairs may have to be reordered (`is_meta`).
    """
    rules: dict[Rule, int | None] = {}  # for the whole layout -> number of heads, where known
    left, members = list(theirs), set()
    for parts in _triples(ours):
        fitting = [module for module in left if _rules(parts, module)]
        if fitting:
            best = max(fitting, key=lambda module: similarity(parts[0], module))
            rules |= _rules(parts, best)
            members |= best.members
            left = [module for module in left if members.isdisjoint(module.members)]
    undecided = {path: (f"a part of {rule.theirs[0]!r}",) for rule in rules for path in rule.ours}
    general: dict[int | None, list[Rule]] = collections.defaultdict(list)
    for rule, num_heads in rules.items():
        general[num_heads].append(rule)
    layouts = {
        rule.theirs[0]: tuple(
            text
            for each in (rule, *([_turned(rule)] if interleaved else []))
            for text in (_with_heads(str(each), rule, num_heads), _head_by_head(each, num_heads))
        )
        for num_heads, members in general.items()
        for rule in generalize(members, paths)
    }
    return Found(layouts, undecided, members)


def _triples(modules: Sequence[Module]) -> list[tuple[Module, ...]]:
    """List (query, key, value) for modules whose names differ only in these three words."""
    groups: dict[tuple, dict[str, Module]] = collections.defaultdict(dict)
    for module in modules:
        words = words_of(module.name)
        part = [word for word in _PARTS if word in words]
        if len(part) == 1:
            numbers = tuple(re.findall(r"\d+", module.name))
            roles = frozenset(module.tensors)
            groups[words - {part[0]}, numbers, roles][part[0]] = module
    return [tuple(group[part] for part in _PARTS) for group in groups.values() if len(group) == 3]


def _rules(parts: tuple[Module, ...], fused: Module) -> Mapping[Rule, int | None]:
    """Return rules that split a fused module into whole query, key and value; {} if none fits.

    Each rule is mapped to the number of heads of the key, or None where shapes do not tell it.

    Args:
        parts: the modules of the model for query, key and value.
        fused: the module of the checkpoint. There is one rule for each role, such as `weight`.
    """
    if fused.tensors.keys() != parts[0].tensors.keys():
        return {}
    rules = {}
    for role, tensor in fused.tensors.items():
        members = [module.tensors[role] for module in parts]
        rule = _rule(members, tensor, fused.stack)
        if rule is None:
            return {}
        shape = members[1].shape  # of the key: its heads are the blocks, also if they are fewer
        split = len(shape) - len(fused.stack) > len(tensor.shape)
        rules[rule] = shape[-2] if split else None
    return rules


def _rule(parts: list[Tensor], fused: Tensor, stack: tuple[int, ...]) -> Rule | None:
    lead = len(stack)
    if any(part.shape[:lead] != stack for part in parts):
        return None
    shapes = [part.shape[lead:] for part in parts]
    for dim, total in enumerate(fused.shape):
        rest = math.prod(fused.shape) // total if total else 0
        sizes = tuple(math.prod(shape) // rest for shape in shapes) if rest else ()
        if sum(sizes) != total or 0 in sizes:
            continue
        pieces = [(*fused.shape[:dim], size, *fused.shape[dim + 1 :]) for size in sizes]
        steps = _common_steps(parts, shapes, pieces, dim)
        if steps is not None:
            split = Split(dim, 3 if len(set(sizes)) == 1 else sizes)
            return Rule(tuple(part.name for part in parts), fused.name, split, *steps)
    return None


def _common_steps(
    parts: list[Tensor], shapes: list[tuple[int, ...]], pieces: list[tuple[int, ...]], dim: int
) -> Steps | None:
    """Return steps that turn each of three pieces of a fused tensor into its parameter.

    The steps are the same for query, key and value; None if no steps fit all three.

    Args:
        parts: the parameters of query, key and value.
        shapes: their shapes, without stacked dimensions.
        pieces: the shapes of the pieces.
        dim: the dimension along which the tensor was split.
    """
    role = parts[0].name.rpartition(".")[2]
    ways = [possible_steps(role, ours, piece) for ours, piece in zip(shapes, pieces, strict=True)]
    common = [way for way in ways[0] if all(way in others for others in ways[1:])]
    if len(pieces[0]) == 2 and len(common) > 1:
        # The fused dimension is that of the outputs: the last one of a `kernel`, else the first.
        transposed = dim == (0 if role == "kernel" else 1)
        common = [way for way in common if (Transpose() in way) == transposed]
    return common[0] if common else None


def _head_by_head(rule: Rule, num_heads: int | None) -> str:
    """Return, as text, the rule for parts fused head by head, given the rule for whole parts.

    `H` stands for an unknown number of heads.
    """
    split = rule.steps[0]
    assert isinstance(split, Split)
    heads = "H" if num_heads is None else str(num_heads)
    sizes = str(split.sizes)
    if isinstance(split.sizes, tuple):
        each = (f"{x} // H" if num_heads is None else str(x // num_heads) for x in split.sizes)
        sizes = f"({', '.join(each)})"
    step = f"{SplitHeads.__name__}(dim={split.dim}, num_heads={heads}, sizes={sizes})"
    return _with_heads(str(rule).replace(repr(split), step, 1), rule, num_heads)


def _turned(rule: Rule) -> Rule:
    split, *rest = rule.steps
    assert isinstance(split, Split)
    turn = RotaryPairs(_UNKNOWN, dim=split.dim)
    return Rule(rule.ours, rule.theirs, split, turn, *rest)


def _with_heads(text: str, rule: Rule, num_heads: int | None) -> str:
    """Complete the text of a rule: its `RotaryPairs` gets the numbers of heads of query and key.

    Args:
        text: the rule as text, with a placeholder for the numbers.
        rule: the rule for whole parts, which shows how many heads the query has.
        num_heads: heads of the key; None writes `H` and `G` for the numbers.
    """
    split = rule.steps[0]
    assert isinstance(split, Split)
    equal = isinstance(split.sizes, int)
    query, key = ("H", "H" if equal else "G") if num_heads is None else (num_heads, num_heads)
    if num_heads is not None and isinstance(split.sizes, tuple):
        query = num_heads * split.sizes[0] // split.sizes[1]
    return text.replace(str(_UNKNOWN), f"({query}, {key}, 0)")
