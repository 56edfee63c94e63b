"""Pair submodules of a JAX model with PyTorch's, by a mapping of names or by rules of parameters.

A rule `Rule("layers.{i}.up.kernel", "h.{i}.fc.weight", ...)` says that `layers.3.up` is `h.3.fc`.
Its steps say how the outputs correspond: rows of a weight are features of the output, so steps that
split or reorder rows, as for fused heads or rotary pairs, are applied to the output as well.
"""

import collections
import dataclasses
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxzero.interop._rules import Rule, Step, pattern_of, rules_in
from jaxzero.interop._tensors import ArrayTensor

# Names of the parameters of whole layers, whose outputs can be compared.
_OURS = ("bias", "embedding", "kernel", "scale", "weight")
_THEIRS = ("bias", "weight")
_VARIABLE = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A submodule of the JAX model, and the submodules of PyTorch that compute the same.

    Attributes:
        ours: name of the submodule of the JAX model.
        index: index of the layer in our output, if that is a stack of layers; else `()`.
        theirs: names of the submodules of PyTorch; several if one of ours fuses them.
        steps: the steps of the rule, which turn rows of PyTorch's weights into rows of ours.
        part: which result of the steps belongs to `ours`, if PyTorch fuses several of our
            submodules.
    """

    ours: str
    index: tuple[int, ...]
    theirs: tuple[str, ...]
    steps: tuple[Step, ...]
    part: int

    def readings(self, outputs: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return PyTorch's outputs in each layout that our output may have.

        Args:
            outputs: outputs of the submodules `theirs`.

        Returns:
            Name of a layout -> the output in this layout. "" is PyTorch's own layout; the other
            names are for the notes of the comparison.
        """
        layouts = {}
        if len(outputs) == 1:
            (output,) = outputs
            layouts[""] = output
            if output.ndim > 2:
                layouts["channels last"] = np.moveaxis(output, 1, -1)
            if output.ndim > 3:
                layouts["heads after tokens"] = np.swapaxes(output, 1, 2)
        if self.steps and all(each.ndim for each in outputs):
            rows = [np.moveaxis(each, -1, 0) for each in outputs]
            tensors: Any = tuple(ArrayTensor(each.reshape(len(each), -1), "") for each in rows)
            try:
                for step in self.steps:
                    tensors = step(tensors)
                output = tensors[self.part].read()
            except (ValueError, IndexError):  # a step for columns, which are not features
                pass
            else:
                layouts["as the rule says"] = output
                layouts["as the rule says, features last"] = np.moveaxis(output, -1, 0)
        return layouts


def pairs_of(
    names: Any, ours: Iterable[str], theirs: Iterable[str], dims: Mapping[str, int]
) -> list[Pair]:
    """Pair the submodules of the JAX model with those of PyTorch.

    Args:
        names: True for equal names; or a mapping from ours to theirs, with variables as in rules;
            or rules of parameters.
        ours: names of the JAX submodules that were recorded.
        theirs: names of PyTorch's submodules that were recorded.
        dims: name of a parameter of PyTorch -> its number of dimensions.
    """
    ours, theirs = list(ours), list(theirs)
    if names is True:
        rules = [Rule(name, name) for name in ours]
    elif isinstance(names, Mapping):
        rules = [Rule(name, other) for name, other in names.items()]
    else:
        rules = _of_parameters(rules_in(names), dims)
    pairs: dict[Any, Pair] = {}
    for pair in (pair for rule in rules for pair in _filled(rule, ours, theirs)):
        pairs.setdefault((pair.ours, pair.index, pair.theirs), pair)
    # Where two layers of PyTorch are added to make one of ours, neither output can be compared.
    places = collections.Counter(key[:2] for key in pairs)
    return [pair for key, pair in pairs.items() if places[key[:2]] == 1]


def _of_parameters(rules: Iterable[Rule], dims: Mapping[str, int]) -> list[Rule]:
    """Turn rules of parameters into rules of the modules that hold the parameters.

    Rules of biases come first, so that they win over the rules of weights. A bias has only the
    dimension of features, so the steps of its rule can also be applied to an output.
    """
    rules_of_modules: list[tuple[bool, Rule]] = []
    for rule in rules:
        if _ends(rule.ours) <= set(_OURS) and _ends(rule.theirs) <= set(_THEIRS):
            ours = tuple(_module(path.removeprefix("params.")) for path in rule.ours)
            theirs = tuple(_module(name) for name in rule.theirs)
            pattern = pattern_of(rule.theirs[0])
            is_bias = any(n == 1 for name, n in dims.items() if pattern.fullmatch(name))
            if "" not in ours + theirs:
                rules_of_modules.append((not is_bias, Rule(ours, theirs, *rule.steps)))
    return [rule for _, rule in sorted(rules_of_modules, key=operator.itemgetter(0))]


def _ends(names: tuple[str, ...]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _filled(rule: Rule, ours: list[str], theirs: list[str]) -> Iterator[Pair]:
    """Yield the pairs that a rule makes: one for each of our names, and for each stacked layer."""
    for name in ours:
        match = pattern_of(rule.ours[0]).fullmatch(name)
        if match is None:
            continue
        names = [_with(each, match.groupdict()) for each in rule.ours]
        wanted = [_with(each, match.groupdict()) for each in rule.theirs]
        for other in theirs:
            inner = pattern_of(wanted[0]).fullmatch(other)
            if inner is None:
                continue
            numbers = inner.groupdict()
            index = tuple(int(number) for number in numbers.values())
            others = tuple(_with(each, numbers) for each in wanted)
            if set(others) <= set(theirs):
                for part, each in enumerate(names):
                    yield Pair(each, index, others, rule.steps, part)


def _with(pattern: str, numbers: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: numbers.get(match[1], match[0]), pattern)
