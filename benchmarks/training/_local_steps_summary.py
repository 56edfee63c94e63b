"""What the runs of `local_steps` say together: one table, and a figure over H and the delay."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

BASELINE = "synchronous", 2  # method and nodes: the bits of 2 and 8 nodes differ by rounding only
_TARGET_PERCENT = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """One method on one number of nodes; seeds are those that the baseline has too.

    Attributes:
        method: its name.
        nodes: their number.
        losses: held-out, in nats per byte; one for each seed.
        percent: how much more than synchronous training with the same seed.
    """

    method: str
    nodes: int
    losses: list[float]
    percent: list[float]


def summarize(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[Summary]:
    """The newest row of each run, in the order in which methods first appear.

    A run whose loss is not finite (JSON has None) counts as infinite.
    """
    newest = {}
    for row in rows:
        run = row["results"]
        if run["seed"] in seeds:
            loss = run["held_out_loss"]
            found = newest.setdefault((run["method"], run["nodes"]), {})
            found[run["seed"]] = float("inf") if loss is None else loss
    baseline = newest.get(BASELINE, {})
    summaries = []
    for (method, nodes), found in newest.items():
        pairs = [(found[seed], baseline[seed]) for seed in sorted(found) if seed in baseline]
        if pairs:
            summaries.append(
                Summary(
                    method=method,
                    nodes=nodes,
                    losses=[loss for loss, _ in pairs],
                    percent=[100 * (loss / base - 1) for loss, base in pairs],
                )
            )
    return summaries


def table(summaries: Sequence[Summary]) -> Table:
    """Held-out losses over those of synchronous training."""
    result = Table(title="held-out loss, nats per byte")
    result.add_column("method", no_wrap=True)
    for column in ("nodes", "mean", "over synchronous", "least .. most", "seeds"):
        result.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        percent = summary.percent
        result.add_row(
            summary.method,
            str(summary.nodes),
            f"{statistics.mean(summary.losses):.4f}",
            f"{statistics.mean(percent):+.2f}%",
            f"{min(percent):+.2f} .. {max(percent):+.2f}",
            str(len(percent)),
        )
    return result


def draw(
    summaries: Sequence[Summary],
    curves: Sequence[dict[str, dict[float, str]]],
    titles: Sequence[str],
    file: Path,
) -> None:
    """Draw losses over synchronous training; a point is one seed, a line goes through the means.

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
    for panel, axes in enumerate(panels):
        for i, (name, places) in enumerate(curves[panel].items()):
            for nodes, style in zip(node_counts, ("-", "--", ":", "-."), strict=False):
                found = {
                    x: percent[method, nodes]
                    for x, method in places.items()
                    if (method, nodes) in percent
                }
                color = f"C{i}"
                for x, values in found.items():
                    axes.plot([x] * len(values), values, ".", color=color, alpha=0.4)
                if found:
                    means = [statistics.mean(values) for values in found.values()]
                    label = f"{name}, {nodes} nodes"
                    axes.plot(list(found), means, style, color=color, label=label)
        axes.axhspan(-_TARGET_PERCENT, _TARGET_PERCENT, color="black", alpha=0.08)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel(titles[panel])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("held-out loss over synchronous, %")
    panels[0].set_xscale("log")
    figure.savefig(file, dpi=150)
