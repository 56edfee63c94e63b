"""What the rows of `plan_regret` say together: one table, and regret over compiled programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

_MOST = 100.0  # percent: a search without a plan that fits counts as this, and so does worse
_METHODS = {"curve": "jz.tune", "tpe": "TPE", "random": "random"}

Row = dict[str, Any]


def percent(regret: float | None) -> float:
    """None, which is no plan that fits, becomes infinite."""
    return math.inf if regret is None else 100 * regret


def regrets(row: Row) -> dict[str, list[float]]:
    """Percent, of the search and the baselines at the link rates after all programs."""
    links = row["links"].values()
    return {
        "search": [percent(each["regret"]) for each in links],
        "others": [percent(each["regret"]) for each in row["other_rates"].values()],
        "wrong": [percent(each["regret"]) for each in row["wrong_rates"].values()],
        "exhaustive": [percent(each["exhaustive"]) for each in row["wrong_rates"].values()],
        "every": [percent(each["regret"]) for each in row["every_rate"].values()],
        **{
            name: [percent(x) for each in links for x in each[name][-1]]
            for name in ("tpe", "random")
        },
    }


def table(rows: Sequence[Row]) -> Table:
    """Regret for each model and limit."""
    result = Table(title="regret, percent")
    columns = ("fit", "4 links: each", "10 other rates: median, most")
    columns += ("one rate off by 2: most, exhaustive", "every rate: most")
    for column in ("model", "limit", *columns, "TPE", "random", "proxies", "full"):
        result.add_column(column, no_wrap=True)
    for row in rows:
        found, links = regrets(row), row["links"].values()
        result.add_row(
            row["model"],
            f"{row['limit']}, {row['limit_bytes'] / 1e9:.1f} GB",
            f"{row['fitting']}/{row['plans']}",
            " ".join(f"{x:.1f}" for x in found["search"]),
            f"{statistics.median(found['others']):.1f} {max(found['others']):.1f}",
            f"{max(found['wrong']):.1f} {max(found['exhaustive']):.1f}",
            f"{max(found['every']):.1f}",
            *(f"{_quantiles(found[name])}" for name in ("tpe", "random")),
            " ".join(str(each["proxies"]) for each in links),
            " ".join(str(each["full"]) for each in links),
        )
    return result


def _quantiles(values: Sequence[float]) -> str:
    """Median and 95th percentile."""
    ordered = sorted(values)
    return f"{statistics.median_low(ordered):.1f} {ordered[math.ceil(0.95 * len(ordered)) - 1]:.1f}"


def mean_curve(rows: Sequence[Row], method: str) -> list[float]:
    """Mean percent over link rates, and seeds, after 1, 2, ... programs; each at most `_MOST`."""
    cases = [each[method] for row in rows for each in row["links"].values()]
    if method == "curve":
        cases = [[[x] for x in each] for each in cases]
    return [
        statistics.mean(min(_MOST, percent(x)) for each in cases for x in each[number])
        for number in range(len(cases[0]))
    ]


def figure(rows: Sequence[Row]) -> Figure:
    """Mean regret over programs, one panel for each limit, all models."""
    limits = list(dict.fromkeys(row["limit"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    drawn = Figure(figsize=(3.2 * len(limits), 2.4 * len(models)), layout="constrained")
    panels = drawn.subplots(len(models), len(limits), sharex=True, sharey=True, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axes, limit in zip(line, limits, strict=True):
            chosen = [row for row in rows if (row["model"], row["limit"]) == (model, limit)]
            for method, label in _METHODS.items():
                means = mean_curve(chosen, method)
                axes.plot(range(1, len(means) + 1), means, marker=".", label=label)
            fits = f"{chosen[0]['fitting']} of {chosen[0]['plans']} fit"
            axes.set_title(f"{model}, {limit}: {fits}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("programs compiled")
    for line in panels:
        line[0].set_ylabel("mean regret, %")
    panels[0][0].legend()
    return drawn
