"""Read and validate the `config.json` of a Hugging Face directory."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_config(path: Path | str) -> tuple[dict[str, Any], Path]:
    """Return the content of the file, and its path.

    Args:
        path: the file, or its directory.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"There is no `config.json` at {str(path)!r}. Give a directory that "
            "`save_pretrained` of Hugging Face transformers wrote."
        )
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{str(path)!r} is not JSON ({error}). Copy or download the checkpoint again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object; got {type(content).__name__}.")
    return content, path


def as_float(value: Any) -> Any:
    """Convert integers to float (0 and 0.0 are equal in JSON); return other values unchanged."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def check_counts(content: Mapping[str, Any], keys: Iterable[str], path: Path) -> None:
    """Raise if one of `keys` is present and neither null nor a positive integer."""
    for key in keys:
        value = content.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"`{key}` in {str(path)!r} must be a positive integer; got {value!r}. Copy or "
                "download the checkpoint again."
            )


def check_present(content: Mapping[str, Any], keys: set[str], path: Path) -> None:
    """Raise if one of `keys` is missing."""
    missing = sorted(keys - content.keys())
    if missing:
        raise ValueError(
            f"{str(path)!r} lacks {', '.join(missing)}. Save the checkpoint again with "
            "`save_pretrained` of a current transformers release, which writes every size."
        )
