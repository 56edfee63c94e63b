"""Read keys of a DeepSpeed configuration, and record which of them had an effect."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Keys:
    """A nested dict that records which keys were used ("honoured").

    A key is a dotted path: `zero_optimization.stage`.
    """

    def __init__(self, content: Mapping[str, Any], values: Mapping[str, Any]):
        self._flat = dict(_flatten(content))
        self._flat |= values
        self._honoured: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, and mark the key as honoured.

        Raises:
            ValueError: the value is "auto", which DeepSpeed expects its caller to replace.
        """
        self._honoured.add(key)
        value = self._flat.get(key)
        if value == "auto":
            raise ValueError(
                f'`{key}` is "auto" in the file, which the caller of DeepSpeed replaces. Give its '
                f"value: `values={{{key!r}: ...}}`."
            )
        return default if value is None else value

    def honours(self, key: str, value: Any) -> None:
        """Mark a key as honoured if it is absent or equals `value`, the only supported value."""
        if self._flat.get(key, value) == value:
            self._honoured.add(key)

    def section(self, name: str) -> bool:
        """Return True if a section is enabled; if not, mark all its keys as honoured."""
        held = [key for key in self._flat if key.startswith(f"{name}.")]
        enabled = bool(self.get(f"{name}.enabled", False))
        if not enabled:
            self._honoured.update(held)
        return enabled

    def unhonoured(self) -> tuple[str, ...]:
        """List the keys that were never used, in the order of the file."""
        return tuple(key for key in self._flat if key not in self._honoured)


def read_keys(config: Path | str | Mapping[str, Any], values: Mapping[str, Any]) -> Keys:
    """Read a configuration.

    Raises:
        ValueError: it is not a JSON object.
    """
    if isinstance(config, Mapping):
        return Keys(config, values)
    path = Path(config)
    if not path.is_file():
        raise ValueError(
            f"`config` must be a JSON file, or a dict; there is no file {str(path)!r}."
        )
    try:
        content = json.loads(path.read_text(), object_pairs_hook=_without_duplicates)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not a DeepSpeed configuration: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} holds {type(content).__name__}, not a JSON object.")
    return Keys(content, values)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return content


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
