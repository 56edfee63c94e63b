"""Which files of a directory make up its safetensors checkpoint."""

import re
from pathlib import Path

from jaxzero._text import first_names

SINGLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"  # maps each tensor to one of several files
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


def index_in(path: Path) -> Path | None:
    """Return the index of a directory, also under another name; None if there is not just one."""
    if (path / INDEX).is_file():
        return path / INDEX
    if (path / SINGLE).is_file():
        return None
    found = [file for file in path.glob(f"*{INDEX_SUFFIX}") if file.is_file()]
    return found[0] if len(found) == 1 else None


def files_in(path: Path) -> list[Path]:
    """Return the files of a directory that has no index.

    That is `model.safetensors`; or, if it is not there, the only file of another name, or files
    that are numbered as the parts of one checkpoint.

    Raises:
        ValueError: there are several files, and nothing says which belong together; or a part of
            a numbered checkpoint is missing.
    """
    others = sorted(path.glob("*.safetensors"))
    if (path / SINGLE).is_file() or not others:
        return [path / SINGLE]
    if len(others) == 1 and _NUMBERED.fullmatch(others[0].name) is None:
        return others
    parts = [_NUMBERED.fullmatch(file.name) for file in others]
    sets = {(part[1], part[3]) for part in parts if part is not None}
    if None in parts or len(sets) != 1:
        raise ValueError(
            f"{str(path)!r} has neither {SINGLE} nor one index, and several files: "
            f"{first_names([file.name for file in others])}. Name the file to open."
        )
    ((stem, total),) = sets
    names = [f"{stem}{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    differing = sorted(set(names) ^ {file.name for file in others})
    if differing:
        raise ValueError(
            f"{str(path)!r} has files of a checkpoint in {int(total)} parts; missing, or not one "
            f"of them: {first_names(differing)}. Copy or download it again."
        )
    return others
