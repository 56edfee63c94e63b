"""Rules that differ in numbers only, as one rule with variables."""

import itertools
import re
from collections.abc import Iterable, Sequence

from jaxzero.interop._rules import Rule, pattern_of

_NUMBER = re.compile(r"\d+")
_LETTERS = "nmlk"  # those that `_match_names` gives to stacks are others


def generalize(rules: Sequence[Rule], paths: Iterable[str]) -> tuple[Rule, ...]:
    """Put variables in the place of numbers that are the same on both sides.

    Args:
        rules: without variables in `ours`.
        paths: of all parameters. A rule with a variable speaks of no path that it did not before.
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
    """The rule with a variable for the first number that all its names share, if there is one."""
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
