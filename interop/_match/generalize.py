"""Merge rules that differ only in numbers into one rule with variables."""

import itertools
import re
from collections.abc import Iterable, Sequence

from jaxzero.interop._rules import Rule, pattern_of

_NUMBER = re.compile(r"\d+")
_LETTERS = "nmlk"  # distinct from the letters "ij" that `names` uses for stacks


def generalize(rules: Sequence[Rule], paths: Iterable[str]) -> tuple[Rule, ...]:
    """Replace numbers that occur on both sides of a rule by variables.

    Args:
        rules: rules without variables in `ours`.
        paths: paths of all parameters. A merged rule matches exactly the paths that its members
            match.
    """
    paths = list(paths)
    rules = list(rules)
    for letter in _LETTERS:
        rules, before = _one_variable(rules, letter, paths), rules
        if rules == before:
            break
    return tuple(rules)


def _one_variable(rules: list[Rule], letter: str, paths: list[str]) -> list[Rule]:
    groups: dict[Rule, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(_with_letter(rule, letter), []).append(rule)
    made = []
    for general, members in groups.items():
        before = itertools.chain(*(_speaks_of(member, paths) for member in members))
        if _speaks_of(general, paths) == sorted(before):
            made.append(general)
        else:
            made.extend(members)
    return made


def _with_letter(rule: Rule, letter: str) -> Rule:
    """Replace the first number that all names of the rule share by a variable."""
    numbers = [_NUMBER.findall(name) for name in (*rule.ours, *rule.theirs)]
    shared = set(numbers[0]).intersection(*numbers)
    number = next((each for each in numbers[0] if each in shared), None)
    if number is None:
        return rule

    def general(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            re.sub(rf"(?<!\d){number}(?!\d)", f"{{{letter}}}", name, count=1) for name in names
        )

    return Rule(general(rule.ours), general(rule.theirs), *rule.steps)


def _speaks_of(rule: Rule, paths: list[str]) -> list[str]:
    pattern = pattern_of(rule.ours[0])
    return sorted(path for path in paths if pattern.fullmatch(path))
