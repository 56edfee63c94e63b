"""A rule states which parameters come from which tensors of a checkpoint, and by which steps.

    Rule(ours, theirs, *steps)

`ours` is the dotted path of a parameter in a tree of arrays and `theirs` the name of a tensor in
the checkpoint; each is a string or a tuple of strings. `steps` (module `steps`) convert the
tensors into the parameters. Writing runs the same rules backwards, so that loading and saving
always agree. The rules of a whole model:

    rules = (
        Rule("embed.embedding", "wte.weight"),
        Rule("layers.{i}.up.kernel", "h.{i}.mlp.fc.weight", Transpose()),
        Rule(("layers.{i}.query.kernel", "layers.{i}.key.kernel", "layers.{i}.value.kernel"),
             "h.{i}.attn.qkv.weight", Split(0, 3), Transpose()),
        Rule("layers.{i}.experts.down", "h.{i}.experts.{e}.w2.weight", Transpose()),
    )

A variable such as `{i}` stands for a number, for example of a layer or an expert. A variable in
both patterns pairs `layers.3` with `h.3`. A variable in `theirs` alone is *stacked*: above, each
expert's matrix is a separate tensor in the checkpoint, and all of them are one parameter
`[experts, in, out]` in the tree, whose first dimension gives their number. Scanned layers are
written in the same way: `Rule("layers.up.kernel", "h.{i}.mlp.fc.weight", Transpose())`. Of two
stacked variables, the first in the pattern is the outer dimension. A variable in `ours` alone is
the reverse: the checkpoint has the stack. Steps are applied to one element, without the stacked
dimensions.

A rule that matches no parameter is ignored, so that one table serves models with and without
biases. A parameter that is matched by no rule, or by more than one, is an error.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxzero._text import first_names

from .steps import Step

_VARIABLE = re.compile(r"\{(\w+)\}")
_PIECES = re.compile(r"([^{]+)|\{(\w+)\}")
# What to do about tied weights: a rule for the second name would decide which of two is loaded.
TWO_NAMES = (
    "keep the rule for one of them. To load, name the other in `ignore`; to export, add it to what "
    "`tensors_from` returns: `tensors[other] = tensors[name]`."
)
Shapes = Mapping[str, tuple[int, ...]]
Index = tuple[int, ...]  # values of the variables that occur on one side only


@dataclasses.dataclass(frozen=True, init=False)
class Rule:
    """Maps tensors of a checkpoint to parameters through steps (docs/howto/rules.md).

    Attributes:
        ours: dotted paths of parameters, with variables.
        theirs: names of tensors in a checkpoint, with variables.
        steps: conversions from `theirs` to `ours`, in the order of loading.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    steps: tuple[Step, ...]

    def __init__(self, ours: str | tuple[str, ...], theirs: str | tuple[str, ...], *steps: Step):
        for side, given in (("ours", ours), ("theirs", theirs)):
            patterns = tuple(given) if isinstance(given, tuple | list) else (given,)
            if not all(isinstance(each, str) for each in patterns):
                raise ValueError(f"`{side}` must be a string or a tuple of them; got {given!r}.")
            if not patterns or len({frozenset(_variables(each)) for each in patterns}) > 1:
                raise ValueError(
                    f"The patterns of `{side}` must have the same variables; got {given!r}. Write "
                    "a rule for each."
                )
            object.__setattr__(self, side, patterns)
        for step in steps:
            if not isinstance(step, Step):
                raise ValueError(
                    f"`steps` must be steps, such as `Transpose()`; got {step!r}, after {ours!r} "
                    f"and {theirs!r}."
                )
        object.__setattr__(self, "steps", steps)

    def __str__(self) -> str:
        sides = (side[0] if len(side) == 1 else side for side in (self.ours, self.theirs))
        return f"Rule({', '.join(repr(each) for each in (*sides, *self.steps))})"


def rules_in(rules: Any) -> tuple[Rule, ...]:
    """Return a collection of rules as a tuple; raise `ValueError` if `rules` is not one."""
    given = tuple(rules) if isinstance(rules, Iterable) else ()
    if not isinstance(rules, Iterable) or not all(isinstance(each, Rule) for each in given):
        raise ValueError(f"`rules` must be a list or tuple of `interop.Rule`s; got {rules!r}.")
    return given


def patterns_in(ignore: Any) -> tuple[str, ...]:
    """Return `ignore`, a pattern or several, as a tuple; raise `ValueError` if one is no string."""
    given = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    if not all(isinstance(each, str) for each in given):
        raise ValueError(f"`ignore` must hold names of tensors, or patterns; got {ignore!r}.")
    return given


def check_moves(rules: Iterable[Rule]) -> None:
    """Raise `ValueError` if a rule computes values, since Adam's moments cannot be mapped by it."""
    for rule in rules:
        if any(step.computes for step in rule.steps):
            raise ValueError(
                f"{rule} computes a parameter from several tensors, so the moments of these are "
                "not those of the parameter. Start with a new optimizer state; weights can be "
                "loaded without it."
            )


class Use(NamedTuple):
    """A rule applied once, with numbers for the variables that occur in both `ours` and `theirs`.

    Attributes:
        rule: the rule.
        ours: index -> paths of parameters. There are several indices if the tensor of the
            checkpoint is a stack of these parameters; otherwise the single key is `()`.
        theirs: index -> names of tensors. There are several indices if the parameter is a stack of
            these tensors; otherwise the single key is `()`.
    """

    rule: Rule
    ours: dict[Index, tuple[str, ...]]
    theirs: dict[Index, tuple[str, ...]]


def uses_of(rules: Iterable[Rule], shapes: Shapes) -> list[Use]:
    """Match rules with the parameters of a tree, and replace variables such as `{i}` by numbers.

    Args:
        rules: rules for all parameters.
        shapes: dotted path -> shape, for every parameter.

    Returns:
        One use for each rule and each combination of numbers of its shared variables, such as one
        per layer. Every parameter is in exactly one use.

    Raises:
        ValueError: a parameter is matched by no rule or by two, a rule names a parameter that does
            not exist, or a stack has too few dimensions.
    """
    uses = [use for rule in rules_in(rules) for use in _uses_of_one(rule, shapes)]
    rule_of: dict[str, Rule] = {}
    for use in uses:
        for path in itertools.chain(*use.ours.values()):
            if path in rule_of:
                raise ValueError(
                    f"Two rules match `{path}`: {rule_of[path]} and {use.rule}. Drop one. If the "
                    f"checkpoint has the parameter under two names (tied weights), {TWO_NAMES}"
                )
            rule_of[path] = use.rule
    unmatched = sorted(shapes.keys() - rule_of.keys())
    if unmatched:
        raise ValueError(
            f"No rule matches {first_names(unmatched)}. Add a rule to `rules` that names the "
            "tensors of the checkpoint from which they come."
        )
    return uses


def _uses_of_one(rule: Rule, shapes: Shapes) -> list[Use]:
    our_variables, their_variables = _variables(rule.ours[0]), _variables(rule.theirs[0])
    shared = [name for name in our_variables if name in their_variables]
    ours_only = [name for name in our_variables if name not in shared]
    theirs_only = [name for name in their_variables if name not in shared]
    groups: dict[Index, dict[Index, tuple[str, ...]]] = {}
    pattern = pattern_of(rule.ours[0])
    for match in filter(None, map(pattern.fullmatch, shapes)):
        numbers = {name: int(text) for name, text in match.groupdict().items()}
        paths = tuple(_filled(each, numbers) for each in rule.ours)
        absent = [path for path in paths if path not in shapes]
        if absent:
            raise ValueError(f"{rule} names `{absent[0]}`, which is not a parameter of the tree.")
        group = groups.setdefault(tuple(numbers[name] for name in shared), {})
        group[tuple(numbers[name] for name in ours_only)] = paths
    uses = []
    for values, ours in groups.items():
        _check_stack(rule, ours)
        counts = _counts(rule, theirs_only, ours, shapes)
        theirs = {
            index: _names(rule, dict(zip([*shared, *theirs_only], (*values, *index), strict=True)))
            for index in itertools.product(*map(range, counts))
        }
        uses.append(Use(rule, dict(sorted(ours.items())), theirs))
    return uses


def _names(rule: Rule, numbers: dict[str, int]) -> tuple[str, ...]:
    return tuple(_filled(each, numbers) for each in rule.theirs)


def _check_stack(rule: Rule, ours: dict[Index, tuple[str, ...]]) -> None:
    counts = [max(numbers) + 1 for numbers in zip(*ours, strict=True)]
    for index in itertools.product(*map(range, counts)):
        if index not in ours:
            raise ValueError(
                f"{rule} takes elements of a stack, but the tree has no element {index}: its "
                "numbers must be 0, 1, 2, ..."
            )


def _counts(
    rule: Rule, stacked: list[str], ours: dict[Index, tuple[str, ...]], shapes: Shapes
) -> tuple[int, ...]:
    paths = list(itertools.chain(*ours.values()))
    counts = {path: shapes[path][: len(stacked)] for path in paths}
    first = counts[paths[0]]
    for path, given in counts.items():
        if len(given) < len(stacked) or given != first:
            names = ", ".join(f"{{{name}}}" for name in stacked)
            raise ValueError(
                f"{rule} stacks over {names}, so `{path}` must begin with {len(stacked)} stacked "
                f"dimension(s), {first} as in `{paths[0]}`; its shape is {shapes[path]}."
            )
    return first


def pattern_of(pattern: str) -> re.Pattern[str]:
    """Compile a pattern to a regular expression with a named group for each variable."""
    parts, seen = [], set()
    for text, name in _PIECES.findall(pattern):
        # The first occurrence of a variable captures a number; later ones must repeat it. Numbers
        # have no leading zeros, since `_filled` writes none back.
        parts.append(
            re.escape(text)
            if text
            else f"(?P={name})"
            if name in seen
            else rf"(?P<{name}>0|[1-9][0-9]*)"
        )
        seen.add(name)
    return re.compile("".join(parts))


def _variables(pattern: str) -> list[str]:
    return list(dict.fromkeys(_VARIABLE.findall(pattern)))


def _filled(pattern: str, numbers: Mapping[str, int]) -> str:
    return _VARIABLE.sub(lambda match: str(numbers[match[1]]), pattern)
