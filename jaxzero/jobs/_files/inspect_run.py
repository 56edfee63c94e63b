"""`jaxzero inspect` for checkpoints that jaxzero saved: print `jaxzero.json`."""

from pathlib import Path
from typing import Any

from rich.console import Console

from ..._checkpoint import DESCRIPTION, list_damaged, list_steps, read_description
from ..._collectives import readable_bytes
from .display import line_of, print_table


def find_checkpoint(path: Path) -> Path | None:
    """Return `path` or the newest checkpoint in it; None if there is no checkpoint of jaxzero."""
    steps = list_steps(path) if path.is_dir() else []
    folder = path / str(steps[-1]) if steps else path
    return folder if (folder / DESCRIPTION).is_file() else None


def inspect_checkpoint(folder: Path, console: Console) -> None:
    """Print the description and the leaves of a checkpoint that jaxzero saved.

    Raises:
        ValueError: its description is damaged.
    """
    try:
        said = read_description(folder)
        lines, leaves = _describe(folder, said), dict(said["leaves"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(folder / DESCRIPTION)!r} is damaged ({type(error).__name__}: {error})."
        ) from error
    for line in lines:
        console.print(line_of(line), highlight=False, soft_wrap=True)
    print_table(("leaf", ""), list(leaves.items()), console)


def _describe(folder: Path, said: dict[str, Any]) -> list[str]:
    mesh = ", ".join(f"{axis}={size}" for axis, size in said["mesh"].items())
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items())
    steps, damaged = list_steps(folder.parent), list_damaged(folder.parent)
    return [
        f"jaxzero, step {said['step']}, in {folder}",
        f"saved {said['saved']}, processes: {said['processes']}, mesh: {mesh}; {versions}",
        said["config"],
        f"{len(said['files'])} files, {readable_bytes(sum(said['files'].values()))}",
        f"steps in the directory: {', '.join(map(str, steps))}",
        *([f"damaged and set aside: {', '.join(damaged)}"] if damaged else []),
    ]
