"""A JSON object as a mapping that checks each value when it is read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .kinds import OBJECT, Kind, optional, shown

_NO_DEFAULT = object()


class JsonKeys:
    """The keys of a JSON object, each with the kind of value that it may hold.

    Only keys in `kinds` can be read, so that no value is used unchecked.

    Args:
        content: the object.
        kinds: what each key may hold. Keys of nested objects are in the same table.
        path: of the file, for messages.
        remedy: what to do about a wrong value, for messages.
        missing: what to do about a missing key, for messages.
        defaults: values of keys that the object does not have.
        prefix: of keys in messages, for nested objects.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        kinds: Mapping[str, Kind],
        *,
        path: Path,
        remedy: str,
        missing: str,
        defaults: Mapping[str, Any] | None = None,
        prefix: str = "",
    ):
        self.path = path
        self._content = content
        self._kinds = kinds
        self._remedy = remedy
        self._missing = missing
        self._defaults = defaults or {}
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        """Return True if the object itself has the key, be it null."""
        return key in self._content

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, or its default.

        Raises:
            ValueError: the value is not of the key's kind, or there is neither value nor default.
        """
        value = self.get(key, _NO_DEFAULT)
        if value is _NO_DEFAULT:
            self.require(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; without one, its default; without that, `default`.

        Raises:
            ValueError: the value is not of the key's kind.
        """
        kind = self._kinds[key]  # a KeyError is a missing line of the table
        if key not in self._content:
            return self._defaults.get(key, default)
        value = self._content[key]
        if not kind.accepts(value):
            raise self.error(key, f"must be {kind.text}; got {shown(value)}")
        return kind.convert(value)

    def section(self, key: str) -> "JsonKeys":
        """Return a nested object; in place of null or a missing key its default, or an empty one.

        Raises:
            ValueError: the value is neither an object nor null.
        """
        value = self._content.get(key)
        if not optional(OBJECT).accepts(value):
            raise self.error(key, f"must be {optional(OBJECT).text}; got {shown(value)}")
        return self._nested(value or self._defaults.get(key) or {}, f"{self._prefix}{key}.")

    def over(self, other: "JsonKeys") -> "JsonKeys":
        """Return the keys of both, those of `self` where both have one."""
        merged = {**other._content, **self._content}
        return self._nested(merged, self._prefix if self._content else other._prefix)

    def require(self, *keys: str) -> None:
        """Raise `ValueError` if one of the keys has neither value nor default, or is null."""
        missing = sorted(
            f"{self._prefix}{key}" for key in keys if self._value_or_default(key) is None
        )
        if missing:
            raise ValueError(f"{str(self.path)!r} lacks {', '.join(missing)}. {self._missing}")

    def error(self, key: str, what: str, *, remedy: str | None = None) -> ValueError:
        """The error "`key` in 'path' {what}. {remedy}"; by default the remedy for wrong values."""
        where = f"`{self._prefix}{key}` in {str(self.path)!r}"
        return ValueError(f"{where} {what}. {remedy or self._remedy}")

    def __bool__(self) -> bool:
        return bool(self._content)

    def _value_or_default(self, key: str) -> Any:
        return self._content.get(key, self._defaults.get(key))

    def _nested(self, content: Mapping[str, Any], prefix: str) -> "JsonKeys":
        return JsonKeys(
            content,
            self._kinds,
            path=self.path,
            remedy=self._remedy,
            missing=self._missing,
            prefix=prefix,
        )
