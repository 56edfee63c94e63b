"""Kinds of JSON values: what a key may hold, in words and as a test.

Python converts too readily: `True` is an integer, `"false"` is true, NaN is a number. A kind
accepts an integer, a number, a flag or a text in a range, and nothing that only converts to it.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from .. import _text

LARGEST = 2**31 - 1  # sizes and positions are int32


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a key may hold.

    Args:
        text: completes the sentence "the key must be ...".
        accepts: returns True for an allowed value.
        convert: makes an accepted value the one that the reader gets.
    """

    text: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def integer(least: int = 1, most: int = LARGEST) -> Kind:
    """An integer in `[least, most]`; neither a boolean nor 2.0."""
    text = f"an integer from {least} to {most}"
    if most == LARGEST and least in (0, 1):
        text = "a positive integer below 2**31" if least else "0 or a positive integer below 2**31"
    return Kind(text, lambda value: type(value) is int and least <= value <= most)


def whole(least: int, most: int) -> Kind:
    """An integer in `[least, most]`, also if it is written as 5e8."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and value == int(value)

    return Kind(f"a whole number from {least} to {most}", accepts, int)


def number(
    least: int | float = -math.inf,
    most: int | float = math.inf,
    *,
    above: int | float = -math.inf,
    below: int | float = math.inf,
) -> Kind:
    """A finite number, as a float: in `[least, most]`, and strictly between `above` and `below`."""
    limits = {"at least": least, "above": above, "at most": most, "below": below}
    words = [f"{name} {limit:g}" for name, limit in limits.items() if math.isfinite(limit)]

    def accepts(value: Any) -> bool:
        return (
            type(value) in (int, float)
            and abs(value) < 2**1023  # also as float; neither infinite nor NaN
            and least <= value <= most
            and above < value < below
        )

    return Kind(" ".join(["a finite number", " and ".join(words)]).strip(), accepts, float)


def zero_or(kind: Kind) -> Kind:
    """0, or what `kind` accepts."""
    return Kind(
        f"0, or {kind.text}",
        lambda value: (type(value) in (int, float) and value == 0) or kind.accepts(value),
        kind.convert,
    )


def one_of(*choices: str) -> Kind:
    """One of these texts."""
    text = f"one of {', '.join(map(repr, choices))}"
    return Kind(text, lambda value: isinstance(value, str) and value in choices)


def exactly(only: Any) -> Kind:
    """`only`; where that is false or 0, null as well."""

    def accepts(value: Any) -> bool:
        if value is None:
            return not only
        numbers = {int, float}
        alike = type(value) is type(only) or {type(value), type(only)} <= numbers
        return alike and value == only

    return Kind(shown(only), accepts, lambda value: only)


def optional(kind: Kind) -> Kind:
    """Null, which is read as None, or what `kind` accepts."""
    return Kind(
        f"{kind.text}, or null",
        lambda value: value is None or kind.accepts(value),
        lambda value: None if value is None else kind.convert(value),
    )


def list_of(kind: Kind, *, length: int | None = None) -> Kind:
    """A list, as a tuple, each entry of which `kind` accepts."""
    num = "" if length is None else f"{length} entries, "
    return Kind(
        f"a list of {num}each {kind.text}",
        lambda value: (
            isinstance(value, list | tuple)
            and length in (None, len(value))
            and all(map(kind.accepts, value))
        ),
        lambda value: tuple(map(kind.convert, value)),
    )


ANYTHING = Kind("any value", lambda value: True)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def shown(value: Any) -> str:
    """A value in a message: a constant as in JSON, or a `repr` of bounded length."""
    is_constant = value is None or isinstance(value, bool)
    return json.dumps(value) if is_constant else _text.shown(value)
