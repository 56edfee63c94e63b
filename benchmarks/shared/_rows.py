"""Append one JSON row per run of a benchmark: results, commit, versions and device.

    from benchmarks.shared._rows import append_row

    append_row("step_time", {"median_ms": 12.3, "spread_ms": 0.4, "bytes_moved": 4096})

A figure without its row cannot be checked, so every figure in the README has one, in
`benchmarks/results/NAME.jsonl`.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxzero._hlo import Rates

RESULTS = Path(__file__).resolve().parent.parent / "results"
_CODE = (":/", ":(top,exclude)benchmarks/results")  # rows of earlier runs are not changes
_PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "torch", "deepspeed")


def append_row(name: str, results: Mapping[str, Any], *, directory: Path = RESULTS) -> dict:
    """Append one row to `directory/NAME.jsonl`, print it, and return it.

    Args:
        name: the benchmark's name, and the file's.
        results: what was measured; names carry their units (`_ms`, `_bytes`, `_gib`).
        directory: where the files are.

    Outside a repository, the commit is that of the environment variable `COMMIT`.
    """
    row = {
        "benchmark": name,
        "command": shlex.join([Path(sys.executable).name, *_command()]),
        "commit": _git("rev-parse", "HEAD") or os.environ.get("COMMIT"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *_CODE)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "hardware": _hardware(),
        "results": dict(results),
    }
    line = json.dumps(row, allow_nan=False)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line)
    return row


def read_rows(
    name: str, settings: Mapping[str, Any] | None = None, *, directory: Path = RESULTS
) -> list[dict[str, Any]]:
    """The rows of a benchmark, oldest first; with `settings`, those whose results have the same."""
    file = directory / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if settings is None:
        return rows
    wanted = json.loads(json.dumps(settings))  # a row has lists where settings have tuples
    return [row for row in rows if row["results"]["settings"] == wanted]


def measured_rates(stated: Rates, *, directory: Path = RESULTS) -> tuple[Rates, dict | None]:
    """`stated`, with what the last row of `measured_rates` made on GPUs measured; and that row.

    The row is None where there is none. Every name in its results but `devices` is one of `Rates`.
    """
    made = read_rows("measured_rates", directory=directory)
    rows = [row for row in made if row["hardware"]["accelerator"]]
    if not rows:
        return stated, None
    found = {name: x for name, x in rows[-1]["results"].items() if name != "devices"}
    return dataclasses.replace(stated, **found), rows[-1]


def rounded(number: Any) -> float | None:
    """To five places; None: not finite, which JSON has no number for."""
    return round(float(number), 5) if math.isfinite(number) else None


def is_current(row: Mapping[str, Any], *paths: str) -> bool:
    """Whether the files under `paths`, from the root, compute what they did when `row` was made."""
    commit, root = row["commit"], _git("rev-parse", "--show-toplevel")
    if commit is None or root is None or row["uncommitted_changes"]:
        return False
    changed = _git("diff", "--name-only", commit, "--", *(f":/{path}" for path in paths))
    return changed is not None and all(
        _same_program(_git("show", f"{commit}:{name}"), Path(root, name))
        for name in changed.splitlines()
    )


def _same_program(old: str | None, file: Path) -> bool:
    """Whether a file differs from its old text only in comments, docstrings and error messages."""
    if old is None or file.suffix != ".py" or not file.exists():
        return False
    trees = (_WithoutTexts().visit(ast.parse(text)) for text in (old, file.read_text()))
    return len({ast.dump(tree) for tree in trees}) == 1


class _WithoutTexts(ast.NodeTransformer):
    """Removes docstrings and errors: neither changes what a run that ended has computed."""

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        return ast.Raise()

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def _command() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    name = Path(sys.argv[0]).name if spec is None else f"-m {spec.name}"
    return [*name.split(), *sys.argv[1:]]


def _git(*arguments: str) -> str | None:
    """What git prints, or None outside a repository or before its first commit."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    present = {dist.name for dist in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES if name in present}
    return {"python": platform.python_version(), **versions}


def _hardware() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = jax.devices()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "accelerator": None if devices[0].platform == "cpu" else devices[0].device_kind,
        "devices": f"{len(devices)} x {devices[0].platform}",
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
