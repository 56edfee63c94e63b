"""Read keys of a DeepSpeed configuration, and record which of them had an effect."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._checked_json import OBJECT, read_json, shown
from .kinds import KINDS

_MOST_LEVELS, _MOST_KEYS = 64, 10_000
_REMEDY = "Correct it in the file, or give it in `values`."


class Keys:
    """A nested dict that checks the values of its keys, and records which keys were used.

    A key is a dotted path, such as `zero_optimization.stage`; a used key is "honoured". What a key
    may hold is in `KINDS`.

    Args:
        content: the configuration.
        values: dotted path -> value, in place of those of the configuration.
        where: the configuration, for messages.
    """

    def __init__(self, content: Mapping[str, Any], values: Mapping[str, Any], where: str):
        self._where = where
        self._content = content
        self._values = dict(values)
        self._flat: dict[str, Any] = {}
        for key, value in _flatten(content):
            if len(self._flat) >= _MOST_KEYS:
                raise ValueError(f"There are more than {_MOST_KEYS} keys in {where}. Remove some.")
            self._flat[key] = value
            if KINDS.get(key) is OBJECT and value is not None:
                self._check(key, value)
        self._flat |= self._values
        self._honoured: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, and mark the key as honoured. Null is as good as no key.

        Raises:
            ValueError: the value is "auto", which DeepSpeed expects its caller to replace, or it is
                not what the key may hold.
        """
        self._honoured.add(key)
        value = self._flat.get(key)
        if isinstance(value, str) and value == "auto":
            raise ValueError(
                f'`{key}` is "auto" in the file, which the caller of DeepSpeed replaces. Give its '
                f"value: `values={{{key!r}: ...}}`."
            )
        return default if value is None else self._check(key, value)

    def honours(self, key: str, value: Any) -> None:
        """Mark a key as honoured if it is absent or equals `value`, the only supported value."""
        given = self._flat.get(key, value)
        if type(given) is type(value) and given == value:
            self._honoured.add(key)

    def holds(self, name: str) -> bool:
        """Return True if there is a section, even an empty one. Null is as good as none."""
        given = any(self._values.get(key) is not None for key in self._keys_of(name))
        return given or self._content.get(name) is not None

    def section(self, name: str) -> bool:
        """Return True if a section is enabled; if not, mark all its keys as honoured."""
        enabled = self.get(f"{name}.enabled", False)
        if not enabled:
            self._honoured.update(self._keys_of(name))
        return enabled

    def _keys_of(self, name: str) -> list[str]:
        return [key for key in self._flat if key.startswith(f"{name}.")]

    def unhonoured(self) -> tuple[str, ...]:
        """List the keys that were never used, in the order of the file."""
        unused = (key for key in self._flat if key not in self._honoured)
        return tuple(key for key in unused if not (key in KINDS and self._flat[key] is None))

    def error(self, key: str, what: str, *, remedy: str = _REMEDY) -> ValueError:
        """The error "`key` in 'path' {what}. {remedy}"."""
        where = "`values`" if key in self._values else self._where
        return ValueError(f"`{key}` in {where} {what}. {remedy}")

    def _check(self, key: str, value: Any) -> Any:
        kind = KINDS[key]
        value = value.item() if isinstance(value, np.generic) else value
        if not kind.accepts(value):
            raise self.error(key, f"must be {kind.text}; got {shown(value)}")
        return kind.convert(value)


def read_keys(config: Path | str | Mapping[str, Any], values: Mapping[str, Any]) -> Keys:
    """Read a configuration.

    Raises:
        ValueError: it is not a JSON object, or nests too deeply.
    """
    if isinstance(config, Mapping):
        return Keys(config, values, "the DeepSpeed configuration")
    if not isinstance(config, Path | str) or not Path(config).exists():
        raise ValueError(
            f"`config` must be a JSON file, or a dict; there is no file {str(config)!r}."
        )
    path = Path(config)
    content = read_json(path, remedy="Give the JSON file of a DeepSpeed configuration.")
    return Keys(content, values, repr(str(path)))


def _flatten(
    content: Mapping[str, Any], prefix: str = "", level: int = 1
) -> Iterator[tuple[str, Any]]:
    if level > _MOST_LEVELS:
        raise ValueError(f"The DeepSpeed configuration nests deeper than {_MOST_LEVELS} levels.")
    for name, value in content.items():
        # DeepSpeed knows no dotted paths: such a name is not the key that it looks like.
        key = f"{prefix}{name!r}" if "." in str(name) else f"{prefix}{name}"
        is_value = key in KINDS and KINDS[key] is not OBJECT
        if isinstance(value, Mapping) and not is_value:
            yield from _flatten(value, f"{key}.", level + 1)
        else:
            yield key, value
