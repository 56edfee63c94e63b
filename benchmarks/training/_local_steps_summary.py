"""What the runs of `local_steps` say together: one table, and a figure over H and the delay."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

BASELINE = "synchronous"
_TARGET_PERCENT = 0.5
_TICKS = (0, 0.5, 1, 2, 5, 10, 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """One method on one number of nodes; seeds are those that the baseline has too.

    Attributes:
        method: its name.
        nodes: their number.
        losses: held-out, in nats per byte; one for each seed.
        percent: how much more than synchronous training with the same seed; by seed.
        over_best: how much more than the best synchronous run with the same tokens, whatever its
            optimizer and learning rate; by seed.
    """

    method: str
    nodes: int
    losses: list[float]
    percent: dict[int, float]
    over_best: dict[int, float]


def summarize(
    rows: Sequence[dict[str, Any]], seeds: Sequence[int], alike: Sequence[dict[str, Any]] = ()
) -> list[Summary]:
    """The newest row of each run, in the order in which methods first appear.

    A run whose loss is not finite (JSON has None) counts as infinite.

    Args:
        rows: those of the study.
        seeds: those that count.
        alike: rows of all studies with the same tokens, for the best synchronous run.
    """
    best: dict[int, float] = {}
    for run in (row["results"] for row in (*rows, *alike)):
        if run["method"] == BASELINE and run["held_out_loss"] is not None:
            best[run["seed"]] = min(best.get(run["seed"], float("inf")), run["held_out_loss"])
    newest = {}
    for row in rows:
        run = row["results"]
        if run["seed"] in seeds:
            loss = run["held_out_loss"]
            found = newest.setdefault((run["method"], run["nodes"]), {})
            found[run["seed"]] = float("inf") if loss is None else loss
    # On whatever number of nodes: the losses of 2 and of 8 differ by rounding only.
    baseline: dict[int, float] = {}
    for (method, _), found in newest.items():
        if method == BASELINE:
            baseline |= found
    summaries = []
    for (method, nodes), found in newest.items():
        common = [seed for seed in sorted(found) if seed in baseline]
        if common:
            summaries.append(
                Summary(
                    method=method,
                    nodes=nodes,
                    losses=[found[seed] for seed in common],
                    percent={seed: 100 * (found[seed] / baseline[seed] - 1) for seed in common},
                    over_best={
                        seed: 100 * (found[seed] / best[seed] - 1)
                        for seed in common
                        if seed in best
                    },
                )
            )
    return summaries


def table(summaries: Sequence[Summary]) -> Table:
    """Held-out losses over those of synchronous training: the same way, and the best way found."""
    result = Table(title="held-out loss, nats per byte")
    result.add_column("method", no_wrap=True)
    columns = "nodes", "mean", "over synchronous", "least .. most", "over the best", "seeds"
    for column in columns:
        result.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        percent = summary.percent.values()
        result.add_row(
            summary.method,
            str(summary.nodes),
            f"{statistics.mean(summary.losses):.4f}",
            f"{statistics.mean(percent):+.2f}%",
            f"{min(percent):+.2f} .. {max(percent):+.2f}",
            f"{statistics.mean(summary.over_best.values()):+.2f}%" if summary.over_best else "",
            str(len(percent)),
        )
    return result


def draw(
    summaries: Sequence[Summary],
    curves: Sequence[dict[str, dict[float, str]]],
    titles: Sequence[str],
    file: Path,
) -> None:
    """Draw losses over synchronous training; a point is one seed.

    A line goes through the means over those seeds that all of its points have.

    Args:
        summaries: of all runs.
        curves: for each panel the methods of each curve, by their place on the axis.
        titles: of the panels' axes.
        file: the image.
    """
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    percent = {(summary.method, summary.nodes): summary.percent for summary in summaries}
    node_counts = sorted({summary.nodes for summary in summaries})
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True)
    for axes, methods, title in zip(panels, curves, titles, strict=True):
        for i, (name, places) in enumerate(methods.items()):
            for nodes, style in zip(node_counts, ("-", "--", ":", "-."), strict=False):
                runs = {x: percent.get((method, nodes), {}) for x, method in places.items()}
                _draw_curve(axes, runs, f"{name}, {nodes} nodes", color=f"C{i}", linestyle=style)
        axes.axhspan(-_TARGET_PERCENT, _TARGET_PERCENT, color="black", alpha=0.08)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel(title)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="lower left")
    panels[0].set_ylabel("held-out loss over synchronous, %")
    panels[0].set_xscale("log")
    panels[0].set_yscale("symlog", linthresh=1)  # rounds of one step are far worse than others
    panels[0].set_yticks(_TICKS, [str(tick) for tick in _TICKS])
    figure.savefig(file, dpi=150)


def _draw_curve(axes: Any, runs: dict[float, dict[int, float]], label: str, **look: Any) -> None:
    """Draw the runs of all seeds at each place."""
    runs = {x: values for x, values in runs.items() if values}
    for x, values in runs.items():
        axes.plot([x] * len(values), values.values(), ".", color=look["color"], alpha=0.4)
    if not runs:
        return
    common = set.intersection(*(set(values) for values in runs.values()))
    if common:
        means = [statistics.mean(values[seed] for seed in common) for values in runs.values()]
        axes.plot(list(runs), means, marker="_", label=label, **look)
