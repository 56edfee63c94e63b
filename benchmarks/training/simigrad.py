"""Compare training with adaptive and fixed batches, at equal numbers of examples or of updates.

    python -m benchmarks.training.simigrad  # all runs of all tasks, tables and figures
    python -m benchmarks.training.simigrad --tasks digits  # of one of them
    python -m benchmarks.training.simigrad --summary  # of the runs that are there

Every variant sees the same examples in the same order and differs only in how many of them one
update takes: always as many, doubled at fixed times, or as a measured similarity says. Learning
rates go with the batch over the smallest, or its square root, and fall with the examples seen, or
with the updates where their number is what variants have in common. Where a task tunes them, each
variant has the same trials, with a seed of its own; then come the seeds that count. A row is
appended as each run ends; a run whose row is there, for the same settings, data and code, is not
run again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxzero as jz
from benchmarks.shared._rows import RESULTS, append_row, is_current, read_rows, rounded

from ._adaptive_tasks import TASKS, Equal, Task
from ._simigrad_summary import TUNING_SEED, Run, best_rate, draw, summarize, table
from ._step_costs import predicted_seconds

_NAME = "simigrad"
_CODE = (
    "jaxzero/_simigrad",
    "benchmarks/shared/_byte_decoder.py",
    "benchmarks/shared/_corpus.py",
    *(f"benchmarks/training/{name}.py" for name in ("simigrad", "_adaptive_tasks")),
)
_ADAPTIVE = ("doubling", "norm_test", "noise_scale", "walk", "jump")
_WARMUP_PART = 0.05  # of the budget
_AT_NOISE_SCALE = 1 / 3  # the similarity at which a batch is as large as the noise scale
_SEEDS = {"digits": 5, "bytes": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Which runs are made.

    Attributes:
        tasks: what is trained.
        seeds: how many runs of every variant; by default 5 of digits and 3 of bytes.
        variants: their names ("fixed 8", "doubling", "walk", "jump", ...); none: all.
        equal: what the variants have in common: the number of examples, or of updates (bytes only).
        summary: run nothing; print the tables and draw the figures.
    """

    tasks: tuple[Literal["digits", "bytes"], ...] = ("digits", "bytes")
    seeds: int | None = None
    variants: tuple[str, ...] = ()
    equal: tuple[Equal, ...] = ("examples", "updates")
    summary: bool = False


def variants_of(task: Task) -> tuple[str, ...]:
    """The names of all variants."""
    return (*(f"fixed {size}" for size in task.sizes), *_ADAPTIVE)


# Rules that are not the library's.


@dataclasses.dataclass(frozen=True)
class Doubling:
    """A rule that measures nothing: twice the batch after each of `parts` of the budget.

    The budget is of examples or of updates.
    """

    initial: int
    budget: int
    equal: Equal = "examples"
    parts: tuple[float, ...] = (0.2, 0.4, 0.6)

    def init(self):
        return jnp.zeros([], jnp.float32)  # of the budget, what is used

    def wanted(self, similarity, steps, weight, target, memory):
        used = memory + (weight if self.equal == "examples" else 1)
        passed = sum((used >= part * self.budget).astype(jnp.float32) for part in self.parts)
        return self.initial * 2**passed, used


@dataclasses.dataclass(frozen=True)
class NormTest:
    """A batch that fails the norm test grows by as much as it fails; none shrinks.

    The test asks that the variance of the mean gradient be at most eta^2 times its square. Of two
    halves with gradients of one norm and similarity s the former over the latter is
    (1 - s) / (1 + s), so the target s* is the test with eta^2 = (1 - s*) / (1 + s*).

    References:
        DDP-Norm: Lau et al. 2024 (https://arxiv.org/abs/2412.21124).
    """

    def init(self):
        return ()

    def wanted(self, similarity, steps, weight, target, memory):
        measured, allowed = ((1 - s) / (1 + s) for s in (similarity, target))
        return jnp.maximum(steps, jnp.ceil(steps * measured / allowed)), memory


# One run.


def _optimizer(
    task: Task, variant: str, equal: Equal, learning_rate: Any
) -> optax.GradientTransformationExtraArgs:
    smallest, largest, budget = task.sizes[0], task.sizes[-1], task.budgets[equal]
    rules = {
        "doubling": (Doubling(smallest, budget, equal), task.target),
        "norm_test": (NormTest(), task.target),
        "walk": (jz.WalkRule(), task.target),
        "jump": (jz.JumpRule(), task.target),
        "noise_scale": (jz.JumpRule(), _AT_NOISE_SCALE),
    }
    fixed = None if variant in rules else int(variant.removeprefix("fixed "))
    rule, target = rules.get(variant, (jz.WalkRule(), task.target))
    # A batch that stays is its own initial one, so its learning rate is set here.
    ratio = 1.0 if fixed is None else fixed / smallest
    rate = learning_rate * (ratio if task.lr_scaling == "linear" else math.sqrt(ratio))
    cosine = optax.warmup_cosine_decay_schedule(0.0, 1.0, int(_WARMUP_PART * budget), budget, 0.01)

    # The warm-up starts at 0, where the first batch would be lost.
    def of_seen(seen):
        return cosine(seen + task.rows)

    # Micro-batches that the last call has after the last update that counts must change nothing.
    def of_updates(count):
        return rate * jnp.where(count < budget, cosine(count + 1), 0.0)

    return jz.simigrad(
        task.optimizer(rate if equal == "examples" else of_updates),
        target_similarity=target,
        initial=fixed or smallest,
        min_steps=fixed or smallest,
        max_steps=fixed or largest,
        rule=rule,
        lr_scaling=task.lr_scaling,
        schedule=of_seen if equal == "examples" else None,
    )


@functools.cache
def _several(task: Task, variant: str, equal: Equal) -> Callable:
    """Many micro-batches in one call, compiled for all learning rates and seeds.

    `(state, batches, learning rate) -> (state, (losses, updates so far))`.
    """

    @jax.jit
    def several(state, batches, learning_rate):
        tx = _optimizer(task, variant, equal, learning_rate)

        def one(state, batch):
            params, opt_state = state
            loss, grads = jax.value_and_grad(task.loss)(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params, weight=task.rows)
            made = jz.simigrad_stats(opt_state)["updates"]
            return (optax.apply_updates(params, updates), opt_state), (loss, made)

        return jax.lax.scan(one, state, batches)

    return several


def run(task: Task, of: Run) -> dict[str, Any]:
    """Train once, and return the results for its row."""
    start = time.perf_counter()
    several, limit = _several(task, of.variant, of.equal), task.budgets[of.equal]
    params = task.init(jax.random.key(of.seed))
    state = params, _optimizer(task, of.variant, of.equal, of.learning_rate).init(params)
    track, batches, updates = [], task.batches(of.seed), np.zeros(1, np.int32)
    while (_examples(task, updates) if of.equal == "examples" else updates[-1]) < limit:
        state, (losses, made) = several(state, next(batches), of.learning_rate)
        updates = np.concatenate([updates, made])
        stats = jz.simigrad_stats(state[1])
        track.append(
            [
                rounded(np.asarray(losses).mean()),
                int(stats["steps"]) * task.rows,
                rounded(stats["similarity"]),
                rounded(stats["noise_scale"]),
            ]
        )
    sizes = _batch_sizes(updates) * task.rows
    sizes = sizes if of.equal == "examples" else sizes[:limit]
    counts = sorted(collections.Counter(sizes.tolist()).items())
    return {
        "task": task.name,
        **dataclasses.asdict(of),
        "settings": dataclasses.asdict(task),
        "corpus": task.corpus,
        **{name: rounded(value) for name, value in task.evaluate(state[0]).items()},
        "updates": len(sizes),
        "mean_batch_examples": float(sizes.mean()),
        "updates_by_batch_examples": counts,
        "predicted_seconds": predicted_seconds(counts) if task.has_predicted_time else None,
        "skipped": int(jz.simigrad_stats(state[1])["skipped"]),
        "loss_batch_similarity_noise_scale": track,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _examples(task: Task, updates: np.ndarray) -> int:
    return (len(updates) - 1) * task.rows


def _batch_sizes(updates: np.ndarray) -> np.ndarray:
    """Micro-batches of each full batch, from the number of updates before and after each."""
    last = np.flatnonzero(np.diff(updates))  # the micro-batches that ended a batch
    return np.diff(last, prepend=-1)


# All runs.


def _rows(task: Task) -> list[dict[str, Any]]:
    """All rows of the task: no other has these settings."""
    return read_rows(_NAME, dataclasses.asdict(task), directory=RESULTS)


def _key(task: Task, results: dict[str, Any]) -> Run:
    """The run of a row. Rows that name neither are of equal examples and of the only rate."""
    return Run(
        results.get("equal", "examples"),
        results["variant"],
        results.get("learning_rate", task.learning_rate),
        results["seed"],
    )


def _run_all(task: Task, seeds: int, variants: tuple[str, ...], equals: tuple[Equal, ...]) -> None:
    done = {
        _key(task, row["results"]): row["results"]
        for row in _rows(task)
        if is_current(row, *_CODE) and row["results"].get("corpus") == task.corpus
    }

    def make(of: Run) -> None:
        if of not in done:
            done[of] = append_row(_NAME, run(task, of))["results"]

    # Variants are innermost: when stopped, what is there can be compared.
    for equal in task.budgets:
        if equal not in equals:
            continue
        if len(task.learning_rates) > 1:
            for rate in task.learning_rates:
                for variant in variants:
                    make(Run(equal, variant, rate, TUNING_SEED))
        for seed in range(seeds):
            for variant in variants:
                make(Run(equal, variant, best_rate(task, equal, variant, done), seed))


def _newest(task: Task) -> dict[Run, dict[str, Any]]:
    """The results of the newest row of each run, among rows with the corpus of the last row."""
    rows = [row["results"] for row in _rows(task)]
    return {_key(task, x): x for x in rows if x.get("corpus") == rows[-1].get("corpus")}


def main(study: Study) -> None:
    """Run what is missing, then print the tables and draw the figures."""
    for name in study.tasks:
        task = TASKS[name]()
        known = variants_of(task)
        unknown = sorted(set(study.variants) - set(known))
        if unknown:
            raise ValueError(f"`variants` must be among {', '.join(known)}; got {unknown}.")
        if not study.summary:
            seeds = _SEEDS[name] if study.seeds is None else study.seeds
            _run_all(task, seeds, study.variants or known, study.equal)
        summaries = summarize(task, known, _newest(task))
        if not all(found[0].variant.startswith("fixed") for found in summaries.values()):
            raise SystemExit(f"A run of a fixed batch on {name} is missing: nothing is compared.")
        for equal, found in summaries.items():
            Console(width=150).print(table(task, equal, found))
        if summaries:
            draw(task, summaries, RESULTS / f"{_NAME}_{task.name}.png")


if __name__ == "__main__":
    main(tyro.cli(Study))
