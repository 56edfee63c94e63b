"""Configurations with one wrong value each, in a reproducible order, for fuzz tests."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_VALUES: list[Any] = [
    None, True, False, "false", "true", "32", "", "auto", "silu", "\x1b[31m", "\ud800",
    float("nan"), float("inf"), -float("inf"), 1e308, 1e-320, 1e-60, 0.5, 1.0, -0.5,
    -1, 0, 1, 2, 3, 5, 7, 10**4, 10**7, 2**31, 10**12, 2**63, 10**400, -(10**30),
    [], [1], [1, 2], [0.9, "0.999"], ["full_attention"], [None], [[[]]], {}, {"a": 1}, {"a": {}},
]  # fmt: skip
_OF_VALUE = [
    lambda value: str(value),
    lambda value: [value],
    lambda value: {"value": value},
    lambda value: value + 1,
    lambda value: value * 2,
    lambda value: value / 2,
    lambda value: -value,
    lambda value: float(value),
    lambda value: int(value) * 10**9,
    lambda value: value[1:],
]


def mutations(
    bases: dict[str, dict[str, Any]], *, more: list[str], count: int, seed: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield `(name, key, content)`: a base with one value at a dotted key changed or removed.

    Args:
        bases: configurations to start from.
        more: dotted keys that are set even where a base does not have them.
        count: number of mutations.
        seed: of the choice.
    """
    rng = random.Random(seed)
    names = sorted(bases)
    for number in range(count):
        name = names[number % len(names)]
        content = copy.deepcopy(bases[name])
        key = rng.choice([*_paths(content), rng.choice(more)])
        *sections, last = key.split(".")
        place: Any = content
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                break
        if not isinstance(place, dict):
            continue
        if rng.random() < 0.05:
            place.pop(last, None)
        else:
            place[last] = _changed(place.get(last), rng)
        yield name, key, content


def _paths(content: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in content.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{key}.")
    return found


def _changed(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.3:
        try:
            return rng.choice(_OF_VALUE)(value)
        # A slice of a dict is a TypeError, and from Python 3.12 on a KeyError.
        except (TypeError, ValueError, OverflowError, KeyError):
            pass
    return copy.deepcopy(rng.choice(_VALUES))


def dumped(content: dict[str, Any]) -> str:
    """The content as JSON, with NaN and Infinity as Python writes them."""
    return json.dumps(content)
