"""What the runs of `simigrad` say together: a table with standard errors, and a figure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ._adaptive_tasks import Equal, Task
from ._step_costs import LINKS

TUNING_SEED = 100  # none of those that count


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a task.

    Attributes:
        equal: what it has in common with the runs that it is compared with.
        variant: its name.
        learning_rate: the highest, for the smallest batch.
        seed: of the initial parameters and of the data.
    """

    equal: Equal
    variant: str
    learning_rate: float
    seed: int


def trials(
    task: Task, equal: Equal, variant: str, done: dict[Run, dict[str, Any]]
) -> dict[float, float]:
    """The loss of each learning rate that was tried; infinite if training diverged."""
    runs = {rate: done.get(Run(equal, variant, rate, TUNING_SEED)) for rate in task.learning_rates}
    return {rate: _loss(run) for rate, run in runs.items() if run is not None}


def best_rate(task: Task, equal: Equal, variant: str, done: dict[Run, dict[str, Any]]) -> float:
    """The learning rate of the lowest loss among the trials that are there; else the first."""
    tried = trials(task, equal, variant, done)
    return min(tried, key=lambda rate: tried[rate]) if tried else task.learning_rates[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """One variant.

    Attributes:
        equal: what the variants have in common.
        variant: its name.
        learning_rate: the best of the trials that are there.
        trials: how many there are.
        runs: of the seeds that count, by seed, with that learning rate and a finite loss.
        tuned: the best trial; None: there is none, or it diverged.
    """

    equal: Equal
    variant: str
    learning_rate: float
    trials: int
    runs: dict[int, dict[str, Any]]
    tuned: dict[str, Any] | None

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The runs that count; where there is none, the best trial."""
        return list(self.runs.values()) or ([] if self.tuned is None else [self.tuned])

    def mean_and_error(self, key: str = "held_out_loss") -> tuple[float, float]:
        """Over the runs that are shown; the standard error of one run is NaN."""
        return _mean_and_error([run[key] for run in self.shown])

    def mean(self, key: str) -> float:
        return statistics.mean(run[key] for run in self.shown)

    def minutes(self, link: str) -> float:
        """Predicted, the mean."""
        return statistics.mean(run["predicted_seconds"][link] / 60 for run in self.shown)

    def over(self, other: Summary) -> tuple[float, float]:
        """Loss over that of `other` with the same seed: mean and standard error; NaN: unknown."""
        common = sorted(set(self.runs) & set(other.runs))
        return _mean_and_error([_loss(self.runs[s]) - _loss(other.runs[s]) for s in common])


def summarize(
    task: Task, variants: Sequence[str], done: dict[Run, dict[str, Any]]
) -> dict[Equal, list[Summary]]:
    """Those variants that have a run whose loss is finite, in their order."""
    summaries: dict[Equal, list[Summary]] = {}
    for equal in task.budgets:
        for variant in variants:
            rate = best_rate(task, equal, variant, done)
            runs = {
                of.seed: run
                for of, run in sorted(done.items(), key=lambda item: item[0].seed)
                if of == Run(equal, variant, rate, of.seed) and math.isfinite(_loss(run))
            }
            summary = Summary(
                equal=equal,
                variant=variant,
                learning_rate=rate,
                trials=len(trials(task, equal, variant, done)),
                tuned=runs.pop(TUNING_SEED, None),
                runs=runs,
            )
            if summary.shown:
                summaries.setdefault(equal, []).append(summary)
    return summaries


def table(task: Task, equal: Equal, summaries: Sequence[Summary]) -> Table:
    """Losses with standard errors over seeds; in parentheses where no seed but a trial is there."""
    title = f"{task.name}, {task.budgets[equal]} {equal} each: {task.metric}"
    result = Table(title=title)
    has_accuracy = any("held_out_accuracy" in run for x in summaries for run in x.shown)
    is_tuned, smallest = len(task.learning_rates) > 1, summaries[0]
    columns = ["loss", f"over {smallest.variant}", *["accuracy"] * has_accuracy, "batch", "updates"]
    columns += [f"minutes at {link}" for link in LINKS] * task.has_predicted_time
    columns += ["learning rate", "trials"] * is_tuned
    result.add_column("variant", no_wrap=True)
    for column in (*columns, "seeds"):
        result.add_column(column, justify="right")
    for summary in summaries:
        loss = _shown(*summary.mean_and_error())
        cells = [loss if summary.runs else f"({loss})"]
        over = summary.over(smallest)
        cells.append("" if math.isnan(over[0]) or summary is smallest else _shown(*over, sign="+"))
        if has_accuracy:
            cells.append(_shown(*summary.mean_and_error("held_out_accuracy")))
        cells += [f"{summary.mean('mean_batch_examples'):.1f}", f"{summary.mean('updates'):.0f}"]
        if task.has_predicted_time:
            cells += [f"{summary.minutes(link):.1f}" for link in LINKS]
        if is_tuned:
            cells += [f"{summary.learning_rate:g}", f"{summary.trials}"]
        result.add_row(summary.variant, *cells, str(len(summary.runs)))
    return result


def draw(task: Task, summaries: dict[Equal, list[Summary]], file: Path) -> None:
    """The final loss over the predicted time, or else the mean batch; the batch over examples.

    A variant without a seed that counts is a circle: its best trial.
    """
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    figure = Figure(figsize=(5 * len(summaries) + 5, 4.6), layout="constrained")
    *fronts, sizes = figure.subplots(1, len(summaries) + 1)
    for axes, (equal, found) in zip(fronts, summaries.items(), strict=True):
        _draw_front(task, axes, found)
        axes.set(title=f"{task.budgets[equal]:,} {equal}", ylabel=task.metric)
    first = next(iter(summaries.values()))
    for i, summary in enumerate(x for x in first if not _is_fixed(x)):
        label: str | None = summary.variant.replace("_", " ")
        for run in summary.shown:
            track = run["loss_batch_similarity_noise_scale"]
            seen = np.arange(1, 1 + len(track)) * task.rows * task.per_call
            batches = [size for _, size, *_ in track]
            sizes.step(seen, batches, color=f"C{i}", alpha=0.6, label=label)
            label = None  # once for all seeds
    sizes.set(xlabel="examples seen", ylabel="examples in a batch")
    sizes.set_yscale("log", base=2)
    for axes in (*fronts, sizes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(file, dpi=150)


def _draw_front(task: Task, axes: Any, summaries: Sequence[Summary]) -> None:
    points, color = [], 0
    for summary in summaries:
        loss, error = summary.mean_and_error()
        timed = task.has_predicted_time
        x = summary.minutes(LINKS[0]) if timed else summary.mean("mean_batch_examples")
        look: dict[str, Any] = {"fmt": "o", "capsize": 3}
        look |= {} if summary.runs else {"markerfacecolor": "none"}  # a trial alone
        if _is_fixed(summary):
            points.append((x, loss))
            look |= {"color": "gray"}
            axes.annotate(f"{int(summary.mean('mean_batch_examples'))}", (x, loss))
        else:
            look |= {"color": f"C{color}", "label": summary.variant.replace("_", " ")}
            color += 1
        axes.errorbar(x, loss, yerr=None if math.isnan(error) else error, **look)
    axes.plot(*zip(*sorted(points), strict=True), "--", color="gray", label="fixed")
    if task.has_predicted_time:
        axes.set_xlabel(f"predicted minutes, Llama-7B on 2 x 8 H200, {LINKS[0]} into a node")
    else:
        axes.set_xlabel("examples in a batch, mean")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")


def _is_fixed(summary: Summary) -> bool:
    return summary.variant.startswith("fixed")


def _loss(run: dict[str, Any]) -> float:
    return math.inf if run["held_out_loss"] is None else run["held_out_loss"]


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


def _shown(mean: float, error: float, sign: str = "") -> str:
    return f"{mean:{sign}.4f}" if math.isnan(error) else f"{mean:{sign}.4f} ± {error:.4f}"
