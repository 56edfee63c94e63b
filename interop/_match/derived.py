"""Derive further modules from those of a checkpoint, to be matched with the model's modules.

Three kinds are derived. *Stacks*: a checkpoint may have a tensor for each layer, where the model
has one parameter for all layers. The numbers in a stack's names must fill a range 0, 1, 2, ...
There may be a hundred thousand names, each with several numbers, so groups of names that cannot
fill a range are sorted out in numpy first. *Weights*: torch may store a weight as norm and
direction (`weight_norm`), from which the weight is computed. *Parts*: a tensor that fuses query,
key and value in a known layout is divided.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jaxzero.interop._rules import Rule, Shapes, WeightNorm, pattern_of

from .names import Module, Tensor, pieces_of, shapes_of

_MAX_NUMBERS = 6  # in the name of a module that is stacked, since every pair of them is tried
Indices = tuple[int, ...]
_PARAMETRIZED = re.compile(r"((?:.*\.)?)parametrizations\.(\w+)\.original0")


def stacks_of(modules: Sequence[Module]) -> list[Module]:
    """Combine modules whose names differ only in one or two numbers (0, 1, 2, ...) into stacks.

    Modules with more than `_MAX_NUMBERS` numbers in their names are not stacked.
    """
    forms: dict[tuple, list[tuple[int, list[str]]]] = {}
    for number, module in enumerate(modules):
        pieces = pieces_of(module.name)
        if 1 < len(pieces) <= 2 * _MAX_NUMBERS + 1:
            key = (tuple(pieces[::2]), module.part, shapes_of(module))
            forms.setdefault(key, []).append((number, pieces))
    stacks = []
    for form in forms.values():
        if len(form) > 1:
            stacks += _stacks(modules, form)
    # Stacks with one variable come first, and otherwise those with earlier first modules.
    return [stack for _, stack in sorted(stacks, key=lambda each: each[0])]


def _stacks(
    modules: Sequence[Module], form: Sequence[tuple[int, list[str]]]
) -> Iterator[tuple[tuple, Module]]:
    """Yield (key to sort by, stack) for the stacks among modules of one form.

    Args:
        modules: all modules.
        form: (index in `modules`, pieces of the name) of those modules whose names have the same
            text around their numbers, and which have the same shapes.
    """
    ids: dict[str, int] = {}
    texts = [pieces[1::2] for _, pieces in form]
    as_text = np.array([[ids.setdefault(x, len(ids)) for x in each] for each in texts], np.int64)
    as_number = np.array([[int(x) for x in each] for each in texts], np.int64)
    places = range(as_text.shape[1])
    for num_variables in (1, 2):
        for varied in itertools.combinations(places, num_variables):
            kept = [place for place in places if place not in varied]
            for group in _possible_groups(as_text[:, kept], as_number[:, list(varied)]):
                indices = zip(*(as_number[group, place].tolist() for place in varied), strict=True)
                named = zip(indices, group, strict=True)
                members = {index: modules[form[i][0]] for index, i in named}
                stack = _full_range(members)
                if stack is not None:
                    first, pieces = form[group[0]]
                    positions = tuple(2 * place + 1 for place in varied)
                    pattern = _pattern(pieces, positions)
                    yield (
                        (num_variables, first, varied),
                        _stacked(pattern, positions, stack, members),
                    )


def _possible_groups(
    kept: Int64[np.ndarray, "n k"], varied: Int64[np.ndarray, "n v"]
) -> Iterator[list[int]]:
    """Group names that have some numbers in common, and yield the groups that may form a stack.

    A group is left out if it has too few names: a stack has all indices from 0 to the largest.

    Args:
        kept: k numbers for each of n names; names with the same k numbers form a group.
        varied: v further numbers for each name; they would be the indices of the stack.

    Yields:
        The indices of the names of a group, from 0 to n - 1.
    """
    group = np.zeros(len(kept), np.int64)
    for column in kept.T:
        # Numbered anew each time, or the numbers would overflow.
        _, group = np.unique(group * (column.max() + 1) + column, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    counts = np.diff(starts, append=len(group))
    # As floats: products of numbers of 18 digits would overflow int64.
    sizes = np.maximum.reduceat(varied[order], starts).astype(np.float64) + 1
    may_fill = (counts > 1) & (sizes.prod(axis=1) <= counts)
    for start, count in zip(starts[may_fill], counts[may_fill], strict=True):
        yield order[start : start + count].tolist()


def _full_range(members: Mapping[Indices, Module]) -> Indices | None:
    """Return the lengths of the stack that modules form; None if an index from 0 on has none.

    `members` maps the indices in the stack to modules. There is one length for each index.
    """
    counts = tuple(max(numbers) + 1 for numbers in zip(*members, strict=True))
    return counts if math.prod(counts) == len(members) > 1 else None


def _stacked(
    pattern: str, positions: Indices, stack: Indices, members: Mapping[Indices, Module]
) -> Module:
    first = next(iter(members.values()))
    left = [rank for place, rank in enumerate(first.ranks) if 2 * place + 1 not in positions]
    # A module's name begins its tensors' names, except that a part has a name of its own.
    tensors = {
        role: Tensor(_pattern(pieces_of(each.name), positions), each.shape)
        for role, each in first.tensors.items()
    }
    names = frozenset(itertools.chain(*(each.members for each in members.values())))
    return Module(pattern, tensors, tuple(left), stack, first.part, names)


def _pattern(pieces: list[str], positions: tuple[int, ...]) -> str:
    pieces = list(pieces)
    for position, letter in zip(positions, "ij", strict=False):
        pieces[position] = f"{{{letter}}}"
    return "".join(pieces)


class Normed(NamedTuple):
    """How a weight is computed from two tensors of the checkpoint, its norm and its direction.

    Attributes:
        old: True for `torch.nn.utils.weight_norm`, which names the tensors with `_g` and `_v`;
            False for `torch.nn.utils.parametrizations.weight_norm`.
        step: computes the weight.
    """

    old: bool
    step: WeightNorm


def with_weights(shapes: Shapes) -> tuple[dict[str, tuple[int, ...]], dict[str, Normed]]:
    """List the weight in place of each pair of norm and direction that torch's weight norm stores.

    Args:
        shapes: name -> shape of the checkpoint's tensors.

    Returns:
        Name -> shape with these replacements, in the same order; and name of each weight that was
        introduced -> how it is computed.
    """
    merged, normed, taken = {}, {}, set()
    for name, shape in shapes.items():
        parametrized = _PARAMETRIZED.fullmatch(name)
        weight = parametrized[1] + parametrized[2] if parametrized else name.removesuffix("_g")
        norms, directions = tensors_of(weight, old=not parametrized)
        dims = _dims(shape, shapes[directions]) if directions in shapes else []
        if name == norms and dims and weight not in shapes:
            merged[weight] = shapes[directions]
            normed[weight] = Normed(not parametrized, WeightNorm(dims[0]))
            taken.add(directions)
        else:
            merged[name] = shape
    return {name: shape for name, shape in merged.items() if name not in taken}, normed


def tensors_of(weight: str, *, old: bool) -> tuple[str, str]:
    """Return the names under which torch stores the norm and the direction of `weight`."""
    if old:
        return f"{weight}_g", f"{weight}_v"
    module, dot, last = weight.rpartition(".")
    start = f"{module}{dot}parametrizations.{last}.original"
    return f"{start}0", f"{start}1"


def from_tensors(rules: Iterable[Rule], normed: Mapping[str, Normed]) -> list[Rule]:
    """Rewrite rules so that they name tensors in the file: the norm and the direction of a weight.

    Args:
        rules: rules that name weights introduced by `with_weights`.
        normed: name of such a weight -> how it is computed.
    """
    derived = []
    for rule in rules:
        pattern = pattern_of(rule.theirs[0])  # of a stack, or a name
        way = next((how for name, how in normed.items() if pattern.fullmatch(name)), None)
        if way is not None:
            rule = Rule(rule.ours, tensors_of(rule.theirs[0], old=way.old), way.step, *rule.steps)
        derived.append(rule)
    return derived


def _dims(norms: tuple[int, ...], directions: tuple[int, ...]) -> list[int | None]:
    """List each `dim` for which `WeightNorm(dim)` gives the shape `norms` to the norms of a weight.

    `directions` is the shape of the weight. There are several such `dim` if a dimension has size 1;
    all of them give the same weight.
    """
    dims: list[int | None] = [None, *range(len(directions))]
    return [dim for dim in dims if WeightNorm(dim).norms_of(directions) == norms]


def parts_of(modules: Iterable[Module]) -> list[Module]:
    """Return the query, key and value of each fused `torch.nn.MultiheadAttention`, as modules.

    Only tensors called `in_proj_weight` and `in_proj_bias` are divided, since their layout is
    known. A linear layer that is called `in_proj`, with an `in_proj.weight`, may have any layout.
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
