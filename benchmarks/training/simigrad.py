"""Compare training with adaptive and fixed batches, at equal numbers of examples.

    python -m benchmarks.training.simigrad  # all runs of all tasks, tables and figures
    python -m benchmarks.training.simigrad --tasks digits  # of one of them
    python -m benchmarks.training.simigrad --summary  # of the runs that are there

Every variant sees the same examples in the same order and differs only in how many of them one
update takes: always as many, doubled at fixed times, or as SimiGrad finds. Learning rates go
with the batch over the smallest, or its square root, and fall with the examples seen. A row is
appended as each run ends; a run whose row is there, for the same settings and code, is not run
again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import jaxzero as jz
from benchmarks.shared._rows import RESULTS, append_row, is_current, read_rows, rounded

from ._adaptive_tasks import TASKS, Task

_NAME = "simigrad"
_CODE = (
    "jaxzero/_simigrad",
    "benchmarks/shared/_byte_decoder.py",
    *(f"benchmarks/training/{name}.py" for name in ("simigrad", "_adaptive_tasks")),
)
_ADAPTIVE = ("doubling", "walk", "jump", "noise_scale")
_WARMUP_PART = 0.05  # of the budget
_AT_NOISE_SCALE = 1 / 3  # the similarity at which a batch is as large as the noise scale
_SEEDS = {"digits": 5, "bytes": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Which runs are made.

    Attributes:
        tasks: what is trained.
        seeds: how many runs of every variant; by default 5 of the short task, 3 of the long.
        variants: their names ("fixed 8", "doubling", "walk", "jump", "noise_scale"); none: all.
        summary: run nothing; print the tables and draw the figures.
    """

    tasks: tuple[Literal["digits", "bytes"], ...] = ("digits", "bytes")
    seeds: int | None = None
    variants: tuple[str, ...] = ()
    summary: bool = False


def variants_of(task: Task) -> tuple[str, ...]:
    """The names of all variants."""
    return (*(f"fixed {size}" for size in task.sizes), *_ADAPTIVE)


@dataclasses.dataclass(frozen=True)
class Doubling:
    """A rule that measures nothing: twice the batch after each of `parts` of the budget."""

    initial: int
    budget: int
    parts: tuple[float, ...] = (0.2, 0.4, 0.6)

    def init(self):
        return jnp.zeros([], jnp.float32)  # examples seen

    def wanted(self, similarity, steps, weight, target, memory):
        seen = memory + weight
        passed = sum((seen >= part * self.budget).astype(jnp.float32) for part in self.parts)
        return self.initial * 2**passed, seen


# One run.


def _optimizer(task: Task, variant: str) -> optax.GradientTransformationExtraArgs:
    smallest, largest = task.sizes[0], task.sizes[-1]
    rules = {
        "doubling": (Doubling(smallest, task.budget), task.target),
        "walk": (jz.WalkRule(), task.target),
        "jump": (jz.JumpRule(), task.target),
        "noise_scale": (jz.JumpRule(), _AT_NOISE_SCALE),
    }
    fixed = None if variant in rules else int(variant.removeprefix("fixed "))
    rule, target = rules.get(variant, (jz.WalkRule(), task.target))
    # A batch that stays is its own initial one, so its learning rate is set here.
    ratio = 1.0 if fixed is None else fixed / smallest
    scale = ratio if task.lr_scaling == "linear" else math.sqrt(ratio)
    warmup = _WARMUP_PART * task.budget
    cosine = optax.warmup_cosine_decay_schedule(0.0, 1.0, int(warmup), task.budget, 0.01)
    return jz.simigrad(
        task.optimizer(task.learning_rate * scale),
        target_similarity=target,
        initial=fixed or smallest,
        min_steps=fixed or smallest,
        max_steps=fixed or largest,
        rule=rule,
        lr_scaling=task.lr_scaling,
        # The warm-up starts at 0, where the first batch would be lost.
        schedule=lambda seen: cosine(seen + task.rows),
    )


@functools.cache
def _several(task: Task, variant: str) -> Callable:
    """Many micro-batches in one call: `(state, batches) -> (state, losses)`; for all seeds."""
    tx = _optimizer(task, variant)

    def one(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, weight=task.rows)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(lambda state, batches: jax.lax.scan(one, state, batches))


def run(task: Task, variant: str, seed: int) -> dict[str, Any]:
    """Train once; what a row holds."""
    start = time.perf_counter()
    several = _several(task, variant)
    params = task.init(jax.random.key(seed))
    state = params, _optimizer(task, variant).init(params)
    track, batches = [], task.batches(seed)
    for _ in range(task.budget // (task.rows * task.per_call)):
        state, losses = several(state, next(batches))
        stats = jz.simigrad_stats(state[1])
        track.append(
            [
                rounded(np.asarray(losses).mean()),
                int(stats["steps"]) * task.rows,
                rounded(stats["similarity"]),
                rounded(stats["noise_scale"]),
            ]
        )
    stats = jz.simigrad_stats(state[1])
    updates = int(stats["updates"])
    return {
        "task": task.name,
        "variant": variant,
        "seed": seed,
        "settings": dataclasses.asdict(task),
        **{name: rounded(value) for name, value in task.evaluate(state[0]).items()},
        "updates": updates,
        "mean_batch_examples": float(stats["seen"]) / max(1, updates),
        "skipped": int(stats["skipped"]),
        "loss_batch_similarity_noise_scale": track,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _rows(task: Task) -> list[dict[str, Any]]:
    """All rows of the task: no other has these settings."""
    return read_rows(_NAME, dataclasses.asdict(task), directory=RESULTS)


def _run_all(task: Task, seeds: int, variants: tuple[str, ...]) -> None:
    done = {
        (row["results"]["variant"], row["results"]["seed"])
        for row in _rows(task)
        if is_current(row, *_CODE)
    }
    for seed in range(seeds):  # outermost: when stopped, what is there can be compared
        for variant in variants:
            if (variant, seed) not in done:
                append_row(_NAME, run(task, variant, seed))


# All runs together.


def _by_variant(task: Task) -> dict[str, list[dict[str, Any]]]:
    """The newest run of each seed that ended with a finite loss."""
    newest = {(r["results"]["variant"], r["results"]["seed"]): r["results"] for r in _rows(task)}
    found: dict[str, list[dict[str, Any]]] = {}
    for variant in variants_of(task):
        runs = [run for (name, _), run in sorted(newest.items()) if name == variant]
        runs = [run for run in runs if run["held_out_loss"] is not None]
        if runs:
            found[variant] = runs
    return found


def _mean_and_error(runs: list[dict[str, Any]], key: str = "held_out_loss") -> tuple[float, float]:
    values = [run[key] for run in runs]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


def _table(task: Task, found: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title=f"{task.name}: {task.metric}")
    table.add_column("variant", no_wrap=True)
    has_accuracy = any("held_out_accuracy" in run for runs in found.values() for run in runs)
    columns = ["loss", *["accuracy"] * has_accuracy, "batch", "updates", "seeds"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for variant, runs in found.items():
        keys = ["held_out_loss", *["held_out_accuracy"] * has_accuracy]
        metrics = (_shown(*_mean_and_error(runs, key)) for key in keys)
        table.add_row(
            variant,
            *metrics,
            f"{statistics.mean(run['mean_batch_examples'] for run in runs):.1f}",
            f"{statistics.mean(run['updates'] for run in runs):.0f}",
            str(len(runs)),
        )
    return table


def _shown(mean: float, error: float) -> str:
    return f"{mean:.4f}" if math.isnan(error) else f"{mean:.4f} ± {error:.4f}"


def _draw(task: Task, found: dict[str, list[dict[str, Any]]]) -> None:
    """The final loss against the mean batch, and the batch over the examples seen."""
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    front, sizes = figure.subplots(1, 2)
    points = []
    for variant, runs in found.items():
        loss, error = _mean_and_error(runs)
        batch = statistics.mean(run["mean_batch_examples"] for run in runs)
        is_fixed = variant not in _ADAPTIVE
        color = "gray" if is_fixed else f"C{_ADAPTIVE.index(variant)}"
        if is_fixed:
            points.append((batch, loss))
        bar = None if math.isnan(error) else error
        label = None if is_fixed else variant.replace("_", " ")
        front.errorbar(batch, loss, yerr=bar, fmt="o", color=color, capsize=3, label=label)
        if not is_fixed:
            for run in runs:
                track = run["loss_batch_similarity_noise_scale"]
                seen = np.arange(1, 1 + len(track)) * task.budget / len(track)
                batches = [size for _, size, *_ in track]
                sizes.step(seen, batches, color=color, alpha=0.6, label=label)
                label = None  # once for all seeds
    front.plot(*zip(*sorted(points), strict=True), "--", color="gray", label="fixed")
    front.set(xlabel="examples in a batch, mean", ylabel=task.metric)
    front.set_xscale("log", base=2)
    front.set_yscale("log")
    sizes.set(xlabel="examples seen", ylabel="examples in a batch")
    sizes.set_yscale("log", base=2)
    for axes in (front, sizes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
    figure.savefig(RESULTS / f"{_NAME}_{task.name}.png", dpi=150)


def main(study: Study) -> None:
    for name in study.tasks:
        task = TASKS[name]()
        known = variants_of(task)
        unknown = sorted(set(study.variants) - set(known))
        if unknown:
            raise ValueError(f"`variants` must be among {', '.join(known)}; got {unknown}.")
        if not study.summary:
            seeds = _SEEDS[name] if study.seeds is None else study.seeds
            _run_all(task, seeds, study.variants or known)
        found = _by_variant(task)
        if not any(variant not in _ADAPTIVE for variant in found):
            raise SystemExit(f"No run of a fixed batch on {name}: there is nothing to draw.")
        Console().print(_table(task, found))
        _draw(task, found)


if __name__ == "__main__":
    main(tyro.cli(Study))
