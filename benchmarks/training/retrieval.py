"""The main job with several seeds and wires: held-out retrieval before and after training.

    python -m benchmarks.training.retrieval --wires zeropp zeropp4 float32

Appends a row as each run ends, and one for all seeds of a wire; a seed whose row is there, for the
same wire, settings and code, is not run again.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from benchmarks.shared._rows import append_row, is_current, read_rows
from jaxzero import jobs

_NAME = "retrieval"
_CODE = ("jaxzero", "interop", "benchmarks/training/retrieval.py")


def _run(
    wire: jobs.Wire, seed: int, optimization: jobs.Optimization, directory: Path
) -> dict[str, Any]:
    settings = jobs.Train(
        optimization=dataclasses.replace(optimization, seed=seed),
        sharding=jobs.Sharding(wire=wire),
        run=jobs.Run(name=f"{wire}-seed-{seed}", runs=directory),
    )
    outcome = jobs.train(settings, Console())
    result = dataclasses.asdict(outcome)
    del result["directory"]
    return {"seed": seed, **result}


def _done(wire: jobs.Wire, optimization: jobs.Optimization) -> dict[int, dict[str, Any]]:
    wanted = {**vars(optimization), "seed": None}
    return {
        row["results"]["run"]["seed"]: row["results"]["run"]
        for row in read_rows(_NAME)
        if "run" in row["results"]
        and row["results"].get("wire") == wire
        and {**row["results"]["optimization"], "seed": None} == wanted
        and is_current(row, *_CODE)
    }


def _mean_and_range(runs: list[dict[str, Any]], when: str, score: str) -> dict[str, float]:
    values = [run[when][score] for run in runs]
    return {"mean": statistics.mean(values), "min": min(values), "max": max(values)}


def main(
    seeds: tuple[int, ...] = (0, 1, 2),
    wires: tuple[jobs.Wire, ...] = ("zeropp",),
    optimization: jobs.Optimization = jobs.Optimization(),  # noqa: B008
) -> None:
    """Run the job once for each wire and seed.

    Args:
        seeds: which decide the order of the pairs.
        wires: how weights and gradients travel.
        optimization: everything else about learning.
    """
    for wire in wires:
        _run_seeds(wire, seeds, optimization)


def _run_seeds(wire: jobs.Wire, seeds: tuple[int, ...], optimization: jobs.Optimization) -> None:
    same: dict[str, Any] = {"optimization": vars(optimization), "wire": wire}
    done = _done(wire, optimization)
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            if seed not in done:
                done[seed] = _run(wire, seed, optimization, Path(directory))
                append_row(_NAME, {**same, "run": done[seed]})
    runs = [done[seed] for seed in seeds]
    scores = [field for field in runs[0]["before"] if field != "pairs"]
    summary = {
        when: {score: _mean_and_range(runs, when, score) for score in scores}
        for when in ("before", "after")
    }
    append_row(_NAME, {**same, "seeds": list(seeds), **summary})


if __name__ == "__main__":
    tyro.cli(main)
