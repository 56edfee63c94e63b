"""Read JSON files of other programs, and check each value against the kind that its key may hold.

In: the path of a JSON file, and a table of kinds by key. Out: values of the right type and range,
or a `ValueError` that names the file and the key. The readers of `config.json` and `ds_config.json`
use this module.

Python converts too readily: `True` is an integer, `"false"` is true, NaN is a number. A kind
(`Kind`) accepts values of one type in a range, such as integers from 1 to 8. It accepts no boolean
in place of a number, no text in place of a boolean, and no NaN.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import _text
from ._regular_file import IrregularFile, read_regular

MOST_BYTES = 2**24  # configurations have some kilobytes, with long vocabularies some megabytes
MOST_LEVELS = 64  # of nesting
LARGEST = 2**31 - 1  # sizes and positions are int32


def read_json(path: Path, *, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Values are not checked. NaN and Infinity are read as Python's `json` reads them, so that
    `JsonKeys` can name the key that holds them.

    Args:
        path: the JSON file.
        remedy: advice for messages about a file that cannot be read or holds no object.

    Raises:
        ValueError: the path is that of a directory, pipe or device; or the file is larger than 16
            MiB, is not JSON in UTF-8, nests deeper than 64 levels, holds a key twice, or holds
            something other than an object.
        OSError: the file cannot be read.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode()
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except IrregularFile:  # a `ValueError` that says itself what to do
        raise
    except IsADirectoryError as error:
        raise ValueError(f"{str(path)!r} is a directory, not a JSON file. {remedy}") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON ({error}). {remedy}") from error
    except RecursionError:
        raise ValueError(_too_deep(path, remedy)) from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{str(path)!r} must hold a JSON object; got {type(content).__name__}. {remedy}"
        )
    level, levels = [content], 0
    while level := [child for each in level for child in _containers(each)]:
        levels += 1
        if levels >= MOST_LEVELS:
            raise ValueError(_too_deep(path, remedy))
    return content


def _containers(value: Any) -> list[Any]:
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _too_deep(path: Path, remedy: str) -> str:
    return f"{str(path)!r} nests objects or lists deeper than {MOST_LEVELS} levels. {remedy}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name[:80]!r} is there twice")
        content[name] = value
    return content


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of JSON value that a key may hold: how to check, convert and describe it.

    Args:
        text: completes the sentence "the key must be ...", for messages.
        accepts: returns True for an allowed value.
        convert: maps an accepted value, as it is in the file, to the value that the reader gets.
    """

    text: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def integer(least: int = 1, most: int = LARGEST) -> Kind:
    """Return the kind that accepts integers in `[least, most]`, but no booleans and no 2.0."""
    text = f"an integer from {least} to {most}"
    if most == LARGEST and least in (0, 1):
        text = "a positive integer below 2**31" if least else "0 or a positive integer below 2**31"
    return Kind(text, lambda value: type(value) is int and least <= value <= most)


def whole(least: int, most: int) -> Kind:
    """Return the kind that accepts whole numbers in `[least, most]`, and reads them as `int`.

    Unlike `integer`, it accepts 5e8 and 2.0.
    """

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
    """Return the kind that accepts finite numbers, and reads them as floats.

    A number must be in `[least, most]`, and strictly between `above` and `below`.
    """
    limits = {"at least": least, "above": above, "at most": most, "below": below}
    words = [f"{name} {limit:g}" for name, limit in limits.items() if math.isfinite(limit)]

    def accepts(value: Any) -> bool:
        return (
            type(value) in (int, float)
            and abs(value) < 2**1023  # `float(value)` is finite, also of a long integer
            and least <= value <= most
            and above < value < below
        )

    return Kind(" ".join(["a finite number", " and ".join(words)]).strip(), accepts, float)


def zero_or(kind: Kind) -> Kind:
    """Return the kind that accepts 0 and every value that `kind` accepts."""
    return Kind(
        f"0, or {kind.text}",
        lambda value: (type(value) in (int, float) and value == 0) or kind.accepts(value),
        kind.convert,
    )


def one_of(*choices: str) -> Kind:
    """Return the kind that accepts one of the given texts."""
    text = f"one of {', '.join(map(repr, choices))}"
    return Kind(text, lambda value: isinstance(value, str) and value in choices)


def exactly(only: Any) -> Kind:
    """Return the kind that accepts a single value, `only`, and reads it as `only`.

    If `only` is a number, it may be written as an integer or not, such as 1 or 1.0. If `only` is
    false, 0 or empty, null is accepted too.
    """

    def accepts(value: Any) -> bool:
        if value is None:
            return not only
        # By type too: in Python `True == 1`.
        numbers = {int, float}
        alike = type(value) is type(only) or {type(value), type(only)} <= numbers
        return alike and value == only

    return Kind(shown(only), accepts, lambda value: only)


def optional(kind: Kind) -> Kind:
    """Return the kind that accepts null, read as None, and every value that `kind` accepts."""
    return Kind(
        f"{kind.text}, or null",
        lambda value: value is None or kind.accepts(value),
        lambda value: None if value is None else kind.convert(value),
    )


def list_of(kind: Kind, *, length: int | None = None) -> Kind:
    """Return the kind that accepts a list whose entries `kind` accepts, and reads it as a tuple.

    If `length` is given, the list must have that many entries.
    """
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
    """Format a JSON value for a message: null, true and false as in JSON, the rest as `repr`.

    A long `repr` is cut off.
    """
    is_constant = value is None or isinstance(value, bool)
    return json.dumps(value) if is_constant else _text.shown(value)


_NO_DEFAULT = object()


class JsonKeys:
    """A JSON object that checks each value when it is read, against the kind of its key.

    Only keys in `kinds` can be read, so that no value is used unchecked.

    Args:
        content: the JSON object.
        kinds: the kind of each key's value. Keys of nested objects are in the same table.
        where: the name of the file, for messages.
        remedy: advice for messages about a wrong value.
        missing: advice for messages about a missing key.
        defaults: values for keys that the object may lack. They are not checked.
        prefix: for a nested object, what messages write before its keys, such as "optimizer.".
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        kinds: Mapping[str, Kind],
        *,
        where: str,
        remedy: str,
        missing: str,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ):
        self._where = where
        self._content = content
        self._kinds = kinds
        self._remedy = remedy
        self._missing = missing
        self._defaults = defaults or {}
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        """Return True if the object has the key, even with the value null.

        A key that has only a default does not count.
        """
        return key in self._content

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, converted by its kind, or the key's default.

        Raises:
            ValueError: the value is not of the key's kind, or the key has neither a value nor a
                default.
        """
        value = self.get(key, _NO_DEFAULT)
        if value is _NO_DEFAULT:
            self.require(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, converted by its kind.

        If the object lacks the key, return the key's entry in the `defaults` of this object, or
        `default` if there is no such entry.

        Raises:
            ValueError: the value is not of the key's kind.
        """
        assert key in self._kinds, f"The table lacks a line for `{key}`."
        if key not in self._content:
            return self._defaults.get(key, default)
        return self._checked(key, self._content[key])

    def _checked(self, key: str, value: Any) -> Any:
        kind = self._kinds[key]
        if not kind.accepts(value):
            raise self.error(key, f"must be {kind.text}; got {shown(value)}")
        return kind.convert(value)

    def section(self, key: str) -> "JsonKeys":
        """Return the nested object that a key holds, checked like this one.

        If the value is null or missing, return the key's default, or an empty object if the key
        has none.

        Raises:
            ValueError: the value is neither an object nor null.
        """
        value = self._content.get(key)
        if not optional(OBJECT).accepts(value):
            raise self.error(key, f"must be {optional(OBJECT).text}; got {shown(value)}")
        return self._nested(value or self._defaults.get(key) or {}, f"{self._prefix}{key}.")

    def over(self, other: "JsonKeys") -> "JsonKeys":
        """Return the union of two objects; where both have a key, the value of `self` counts."""
        merged = {**other._content, **self._content}
        return self._nested(merged, self._prefix if self._content else other._prefix)

    def require(self, *keys: str) -> None:
        """Raise `ValueError` if one of the keys has neither value nor default, or is null."""
        missing = sorted(
            f"{self._prefix}{key}" for key in keys if self._value_or_default(key) is None
        )
        if missing:
            raise ValueError(f"{self._where} lacks {', '.join(missing)}. {self._missing}")

    def error(self, key: str, what: str, *, remedy: str | None = None) -> ValueError:
        """Return an error with the text "`key` in 'path' {what}. {remedy}".

        Without `remedy`, the text ends with the `remedy` that this object was made with.
        """
        where = f"`{self._prefix}{key}` in {self._where}"
        return ValueError(f"{where} {what}. {remedy or self._remedy}")

    def __bool__(self) -> bool:
        return bool(self._content)

    def _value_or_default(self, key: str) -> Any:
        return self._content.get(key, self._defaults.get(key))

    def _nested(self, content: Mapping[str, Any], prefix: str) -> "JsonKeys":
        return JsonKeys(
            content,
            self._kinds,
            where=self._where,
            remedy=self._remedy,
            missing=self._missing,
            prefix=prefix,
        )
