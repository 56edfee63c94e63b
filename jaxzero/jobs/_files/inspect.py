"""`jaxzero inspect`: list the tensors of a checkpoint in a table, from metadata only."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..._collectives import readable_bytes
from ...interop import Checkpoint, LazyTensor, open_checkpoint
from .._settings import Inspect
from .display import line_of, print_table
from .inspect_run import find_checkpoint, inspect_checkpoint

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


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
    """Make a row per tensor, or per group of tensors that differ only in numbers of layers."""
    found: dict[tuple, _Row] = {}
    for name, tensor in named:
        pattern = name if every else _NUMBER.sub("*", name)
        key = (pattern, tensor.shape, tensor.dtype.name)
        row = found.get(key, _Row(pattern, 0, tensor.shape, tensor.dtype.name, 0))
        found[key] = row._replace(count=row.count + 1, size=row.size + tensor.size)
    return list(found.values())


def _family(path: Path) -> list[str]:
    config = path / "config.json"
    if not config.is_file():
        return []
    try:
        content = json.loads(config.read_bytes())
        kind, architectures = content["model_type"], content.get("architectures") or []
        names = [str(each) for each in architectures]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
