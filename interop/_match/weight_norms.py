"""Weights that torch stores as norm and direction (`weight_norm`), matched as the weight itself."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxzero.interop._rules import Rule, Shapes, WeightNorm, pattern_of

_PARAMETRIZED = re.compile(r"((?:.*\.)?)parametrizations\.(\w+)\.original0")


class Normed(NamedTuple):
    """Two tensors of the checkpoint that are one weight.

    Attributes:
        old: of `torch.nn.utils.weight_norm`, with the endings `_g` and `_v`.
        step: computes the weight.
    """

    old: bool
    step: WeightNorm


def with_weights(shapes: Shapes) -> tuple[dict[str, tuple[int, ...]], dict[str, Normed]]:
    """Put the weight in place of each norm and direction.

    Returns:
        Name -> shape, in the same order; and name of a weight -> how it is made.
    """
    made, normed, taken = {}, {}, set()
    for name, shape in shapes.items():
        found = _PARAMETRIZED.fullmatch(name)
        weight = found[1] + found[2] if found else name.removesuffix("_g")
        norms, directions = tensors_of(weight, old=not found)
        dims = _dims(shape, shapes[directions]) if directions in shapes else []
        if name == norms and dims and weight not in shapes:
            made[weight] = shapes[directions]
            normed[weight] = Normed(not found, WeightNorm(dims[0]))
            taken.add(directions)
        else:
            made[name] = shape
    return {name: shape for name, shape in made.items() if name not in taken}, normed


def tensors_of(weight: str, *, old: bool) -> tuple[str, str]:
    """The names of the norm and the direction of a weight."""
    if old:
        return f"{weight}_g", f"{weight}_v"
    module, dot, last = weight.rpartition(".")
    start = f"{module}{dot}parametrizations.{last}.original"
    return f"{start}0", f"{start}1"


def from_tensors(rules: Iterable[Rule], normed: Mapping[str, Normed]) -> list[Rule]:
    """Rules that begin at norm and direction, where they speak of the weight."""
    made = []
    for rule in rules:
        pattern = pattern_of(rule.theirs[0])  # of a stack, or a name
        way = next((how for name, how in normed.items() if pattern.fullmatch(name)), None)
        if way is not None:
            rule = Rule(rule.ours, tensors_of(rule.theirs[0], old=way.old), way.step, *rule.steps)
        made.append(rule)
    return made


def _dims(norms: tuple[int, ...], directions: tuple[int, ...]) -> list[int | None]:
    """The dims of which each element has a norm; more than one where the result is the same."""
    dims: list[int | None] = [None, *range(len(directions))]
    return [dim for dim in dims if WeightNorm(dim).norms_of(directions) == norms]
