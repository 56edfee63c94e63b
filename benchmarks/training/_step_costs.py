"""Predicted time of training Llama-7B on 2 x 8 H200, by the number of sequences in each batch.

The step is that of `python -m benchmarks.compiled.aot --variants zeropp --batch N`: loss and
gradients under `jz.zeropp()`, compiled ahead of time and priced by a cost model with assumed rates;
the optimizer's update is left out. Between compiled batches the time is interpolated, as if 16
devices could share any number of sequences.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence

import numpy as np

import jaxzero as jz
from benchmarks.shared._rows import read_rows

LINKS = ("12.5 GB/s", "1.25 GB/s")  # that enter a node
_STEP = {
    "model": "7b",
    "form": "plain",
    "variant": "zeropp",
    "nodes": 2,
    "local": 8,
    "tokens": 2048,
    "microbatches": 1,
    "durations": False,
    "option_set": "jaxzero",
}


def predicted_seconds(updates_by_batch: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds of a run on each link.

    Args:
        updates_by_batch: pairs of the examples in a batch, each a sequence of 2,048 tokens, and the
            number of updates with such batches.

    Raises:
        ValueError: a batch is smaller or larger than those that were compiled.
    """
    batches, updates = np.array(updates_by_batch).T
    return {
        link: round(float(np.interp(batches, *_checked(batches, link)) @ updates), 1)
        for link in LINKS
    }


def _checked(batches: np.ndarray, link: str) -> tuple[list[int], list[float]]:
    compiled, seconds = _step_seconds(link)
    if not compiled or batches.min() < compiled[0] or batches.max() > compiled[-1]:
        raise ValueError(
            f"`updates_by_batch` has batches of {batches.min()} to {batches.max()} sequences; "
            f"compiled are {compiled}. Run `python -m benchmarks.compiled.aot --variants zeropp "
            "--batch N` for the smallest and the largest."
        )
    return compiled, seconds


@functools.cache
def _step_seconds(link: str) -> tuple[list[int], list[float]]:
    """Compiled batches, rising, and the seconds of the newest step of each."""
    step = _STEP | {"schedule": json.loads(json.dumps(dataclasses.asdict(jz.CommSchedule())))}
    newest = {
        row["batch"]: row["predicted"][f"{link} between nodes"]["step_seconds"]
        for row in (row["results"] for row in read_rows("aot"))
        if step.items() <= row.items() and f"{link} between nodes" in row["predicted"]
    }
    return sorted(newest), [newest[batch] for batch in sorted(newest)]
