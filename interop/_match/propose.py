"""Propose rules that map tensors of a checkpoint to parameters, from names and shapes alone.

1. Names are parsed into modules (`names`). Two modules *fit* if they have the same roles (weight,
   bias, running mean and variance) and known steps convert each shape to the other
   (`possible_steps`).
2. Of the modules that fit, the most similar are paired (`pairs`). Ties remain undecided.
3. If several steps are possible for a tensor, it takes the steps of the other tensors of its kind;
   if there are none, the usual steps for the parameter's name.
4. Rules that differ only in numbers are merged (`generalize`).

Undecided parameters are reported rather than guessed, and `assumed` lists the decisions that rest
on names that differ.
"""

import collections
import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxzero.interop._rules import Rule, Split, Transpose
from jaxzero.interop._tensors import LazyTensor, first_names, named_leaves

from .generalize import generalize
from .names import modules_of, parts_of, stacks_of
from .pairs import Pair, pair
from .possible_steps import Steps

_LEFT_OUT = ("*num_batches_tracked",)  # torch's update counter of running statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """Proposed rules for `load_into`, and the parameters that could not be decided.

    Attributes:
        rules: rules for the parameters that were decided.
        undecided: path of each other parameter -> names of the tensors it may come from.
        unused: tensors of the checkpoint that no rule uses.
        left_out: tensors that were ignored, such as torch's `num_batches_tracked`.
        assumed: decisions that rest on similar but different names, because shapes allowed several
            choices. Check these. `*` stands for the numbers of layers.
    """

    rules: tuple[Rule, ...]
    undecided: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...]
    left_out: tuple[str, ...]
    assumed: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["rules = (", *(f"    {rule}," for rule in self.rules), ")"]
        lines += [f"assumed: {each}" for each in self.assumed]
        for path, names in self.undecided.items():
            lines.append(f"undecided: {path}: {' or '.join(names) or 'nothing fits'}")
        lines += [f"unused: {name}" for name in self.unused]
        lines += [f"left out: {name}" for name in self.left_out]
        return "\n".join(lines)

    def raise_if_undecided(self) -> None:
        """Raise unless the rules cover all parameters and tensors.

        Raises:
            ValueError: a parameter is undecided, or a tensor unused.
        """
        if self.undecided:
            path, names = next(iter(self.undecided.items()))
            raise ValueError(
                f"`rules` could not be found for {len(self.undecided)} parameters: "
                f"`{path}` may be {first_names(list(names)) if names else 'no tensor at all'}. "
                "Print `interop.match(tree, source)`, complete its rules, and pass them as `rules`."
            )
        if self.unused:
            raise ValueError(
                f"No parameter seems to come from {first_names(list(self.unused))}. If that is "
                "right, name them in `ignore`; if not, pass `rules`."
            )


def match(tree: Any, source: Mapping[str, LazyTensor], *, ignore: Iterable[str] = ()) -> Proposal:
    """Propose which parameter comes from which tensor, from names and shapes.

    It supports linear layers, convolutions and attention of Flax, Equinox and PyTorch, also fused
    as in `torch.nn.MultiheadAttention`; norms with and without running statistics; embeddings;
    layers that are numbered differently, or stacked for a scan. Names and shapes do not show in
    which order an image was flattened before a linear layer (torch has channels first): write that
    rule yourself. Review the proposed rules and keep them in your code.

    Args:
        tree: parameters of the model: arrays or `jax.ShapeDtypeStruct`s.
        source: tensors of the checkpoint, by name.
        ignore: patterns (with `*`) for names of tensors that are not parameters.
    """
    leaves = named_leaves(tree).leaves
    ours = modules_of({path: tuple(leaf.shape) for path, leaf in leaves.items()})
    ignore = (*ignore, *_LEFT_OUT)
    out = [name for name in source if any(fnmatch.fnmatchcase(name, each) for each in ignore)]
    single = modules_of({name: held.shape for name, held in source.items() if name not in out})
    single += parts_of(single)
    pairs, rivals = pair(ours, [*single, *stacks_of(single)])
    order = {path: number for number, path in enumerate(leaves)}
    pairs.sort(key=lambda each: min(order[path] for path in each.ours.members))
    decided, assumed, open_steps = _settle(pairs)
    rules, open_parts = _rules(decided)
    made = {path for rule in rules for path in rule.ours}
    undecided = rivals | open_steps | open_parts
    used = {name for each in pairs for name in each.theirs.members}
    return Proposal(
        rules=generalize(rules, leaves),
        undecided={path: undecided[path] for path in leaves if path not in made},
        unused=tuple(name for name in source if name not in used and name not in out),
        left_out=tuple(out),
        # One line for all layers.
        assumed=tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", each) for each in assumed)),
    )


def _settle(
    pairs: list[Pair],
) -> tuple[list[tuple[Pair, dict[str, Steps]]], list[str], dict[str, tuple[str, ...]]]:
    """Where several steps are possible, choose those that other tensors of the kind take."""
    habits: dict[tuple[str, int], set[bool]] = collections.defaultdict(set)
    for each in pairs:
        for role, ways in each.ways.items():
            if len(ways) == 1:
                habits[_kind(each, role)].add(_is_transposed(ways[0]))
    decided, assumed, undecided = [], [], {}
    for each in pairs:
        steps = {}
        for role, ways in each.ways.items():
            path, name = each.ours.tensors[role].name, each.theirs.tensors[role].name
            habit = habits[_kind(each, role)]
            chosen = _choose(ways, habit)
            if chosen is None:
                undecided[path] = tuple(f"{name!r} through {list(way)}" for way in ways)
            else:
                steps[role] = chosen
            if not habit:
                assumed.append(f"`{path}` is {name!r} through {list(ways[0])}, by its name")
        if each.doubt is not None:
            assumed.append(f"`{each.ours.name}` is {each.theirs.name!r}, {each.doubt}")
        decided.append((each, steps))
    return decided, assumed, undecided


def _choose(ways: list[Steps], habit: set[bool]) -> Steps | None:
    if not habit:  # no other tensor of the kind is decided: the usual steps for the name
        return ways[0]
    usual = [way for way in ways if _is_transposed(way) in habit]
    return usual[0] if len(usual) == 1 else None


def _kind(each: Pair, role: str) -> tuple[str, int]:
    return each.ours.tensors[role].name.rpartition(".")[2], len(each.theirs.tensors[role].shape)


def _is_transposed(steps: Steps) -> bool:
    return any(isinstance(step, Transpose) for step in steps)


def _rules(
    decided: list[tuple[Pair, dict[str, Steps]]],
) -> tuple[list[Rule], dict[str, tuple[str, ...]]]:
    rules, undecided = [], {}
    parts: dict[tuple[str, Steps], dict[int, str]] = collections.defaultdict(dict)
    for each, steps in decided:
        for role, chosen in steps.items():
            path, name = each.ours.tensors[role].name, each.theirs.tensors[role].name
            if each.theirs.part is None:
                rules.append(Rule(path, name, *chosen))
            else:
                parts[name, chosen][each.theirs.part] = path
    for (name, chosen), paths in parts.items():
        if len(paths) == 3:
            ours = tuple(paths[part] for part in range(3))
            rules.append(Rule(ours, name, Split(0, 3), *chosen))
        else:
            undecided |= {path: (f"a third of {name!r}",) for path in paths.values()}
    return rules, undecided
