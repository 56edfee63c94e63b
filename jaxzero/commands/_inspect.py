"""`jaxzero inspect`: list the leaves or tensors of a checkpoint, from metadata only."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from .._checked_json import read_json
from .._checkpoint import DESCRIPTION, list_damaged, list_steps, read_description
from .._collectives import readable_bytes
from .._report import TextTable
from .._text import escaped
from ..interop import Checkpoint, LazyTensor, open_checkpoint
from ._settings import Inspect

_MAX_LINE = 4096  # characters
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")  # the number of a layer in a tensor's name


def line_of(text: str) -> str:
    """Return text that comes from a file as a line that is safe to print: escaped and short."""
    return escape(escaped(text, most=_MAX_LINE))


def print_table(
    headings: tuple[str, ...], rows: Sequence[Sequence[object]], console: Console
) -> None:
    """Print a table of names, shapes and numbers, in time linear in the number of rows."""
    texts = [[escaped(cell) for cell in row] for row in rows]
    lines = TextTable(headings=headings, rows=texts).lines(console.width)
    console.out("\n".join(lines), highlight=False)


class _Row(NamedTuple):
    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    size: int  # total number of elements


def inspect(settings: Inspect, console: Console) -> None:
    """Print format, path and tensors of a checkpoint.

    Raises:
        ValueError: the checkpoint cannot be opened.
    """
    if (own := find_checkpoint(settings.path)) is not None:
        if settings.key is not None:
            raise ValueError(
                f"`--key {settings.key}`: {str(own)!r} is a checkpoint of jaxzero, which holds no "
                "state dicts of PyTorch. Leave it out."
            )
        inspect_checkpoint(own, console)
        return
    checkpoint = open_checkpoint(settings.path, key=settings.key, records=settings.records)
    tensors = {name: x for name, x in checkpoint.items() if name not in checkpoint.aliases}
    size = sum(tensor.size for tensor in tensors.values())
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    lines = [
        f"{checkpoint.form} in {checkpoint.path}",
        f"{len(tensors)} tensors, {size:,} elements, {readable_bytes(num_bytes)}",
        *(f"{name} is {other}" for name, other in checkpoint.aliases.items()),
        *_family(settings.path),
        _optimizer(checkpoint),
    ]
    for line in lines:
        console.print(line_of(line), highlight=False, soft_wrap=True)
    print_table(
        ("tensor", "", "shape", "dtype", "elements"),
        [
            (row.name, f"x{row.count}" if row.count > 1 else "", list(row.shape), row.dtype)
            + (f"{row.size:,}",)
            for row in _rows(tensors.items(), every=settings.every)
        ],
        console,
    )


def _rows(named: Iterable[tuple[str, LazyTensor]], *, every: bool) -> list[_Row]:
    """Make a row for each tensor, or for each group of tensors whose names differ in a number.

    `every` asks for a row for each tensor.
    """
    rows: dict[tuple, _Row] = {}
    for name, tensor in named:
        pattern = name if every else _NUMBER.sub("*", name)
        key = (pattern, tensor.shape, tensor.dtype.name)
        row = rows.get(key, _Row(pattern, 0, tensor.shape, tensor.dtype.name, 0))
        rows[key] = row._replace(count=row.count + 1, size=row.size + tensor.size)
    return list(rows.values())


def _family(path: Path) -> list[str]:
    config = path / "config.json"
    if not config.is_file():
        return []
    try:
        content = read_json(config, remedy="Put back the `config.json` that was saved.")
        kind, architectures = content["model_type"], content.get("architectures") or []
        names = [str(name) for name in architectures]
    except (ValueError, KeyError, TypeError) as error:
        return [f"config.json says no `model_type` ({type(error).__name__}: {error})"]
    return [f"family {kind}" + (f" ({', '.join(names)})" if names else "")]


def _optimizer(checkpoint: Checkpoint) -> str:
    if checkpoint.moments is None:
        return "no optimizer state of Adam"
    try:
        moments = checkpoint.adam()
    except ValueError as error:
        return f"optimizer state: {error}"
    return f"Adam after {moments.steps_text}, moments of {len(moments.exp_avg)} parameters"


def find_checkpoint(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint of jaxzero, or the newest one in it; None without one."""
    steps = list_steps(path) if path.is_dir() else []
    folder = path / str(steps[-1]) if steps else path
    return folder if (folder / DESCRIPTION).is_file() else None


def inspect_checkpoint(folder: Path, console: Console) -> None:
    """Print the description and the leaves of a checkpoint that jaxzero saved.

    Raises:
        ValueError: the checkpoint's description is damaged.
    """
    try:
        description = read_description(folder)
        lines, leaves = _describe(folder, description), dict(description["leaves"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(folder / DESCRIPTION)!r} is damaged ({type(error).__name__}: {error})."
        ) from error
    for line in lines:
        console.print(line_of(line), highlight=False, soft_wrap=True)
    print_table(("leaf", ""), list(leaves.items()), console)


def _describe(folder: Path, fields: dict[str, Any]) -> list[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in fields["mesh"].items())
    versions = ", ".join(f"{name} {version}" for name, version in fields["versions"].items())
    steps, damaged = list_steps(folder.parent), list_damaged(folder.parent)
    return [
        f"jaxzero, step {fields['step']}, in {folder}",
        f"saved {fields['saved']}, processes: {fields['processes']}, mesh: {mesh}; {versions}",
        fields["config"],
        f"{len(fields['files'])} files, {readable_bytes(sum(fields['files'].values()))}",
        f"steps in the directory: {', '.join(map(str, steps))}",
        *([f"damaged and set aside: {', '.join(damaged)}"] if damaged else []),
    ]
