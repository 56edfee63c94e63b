"""How far what `jz.tune` chooses is from the best of all plans, by the rows of `plan_table`.

    python -m benchmarks.compiled.plan_regret                 # and draws plan_regret.png
    python -m benchmarks.compiled.plan_regret --models moe

Nothing is compiled: the search of `jz.tune` runs as it is, and the compiler's answers come from the
table, those of proxies from rows of proxies. Regret is how much longer the step of the chosen plan
is than that of the best plan that fits, both by full compiles. So this judges the search alone: the
rates, and the walk that predicts steps from them, are taken to be true. Beside it is random search,
which compiles as many programs in full as the search compiles at most in all.

Rates that are wrong by a factor of 2: one of them, or all at once, the time to start a collective
included. With one wrong even an exhaustive search chooses another plan than the best, so its regret
is beside that of the search.

Limits of memory are the device's, and those in which a half, a quarter and a tenth of all plans
fit. Expectations of the search were set on 1b and 7b; moe is held out.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.compiled._plan_replay import Table, searched
from benchmarks.compiled.plan_table import LINKS, PERTURBED, Name, cluster_of
from benchmarks.shared._rows import RESULTS, append_row, read_rows, rounded
from jaxzero._planner import Candidate

LIMITS = {"device": 1, "half": 2, "quarter": 4, "tenth": 10}  # a part of the plans fits
BUDGET = 16  # programs: 12 proxies and 4 in full
SEEDS = 200
MIDDLE = "5e+10"
CHANGED = tuple(f"{field} x {factor:g}" for field in PERTURBED for factor in (0.5, 2.0))
_MOST = 100.0  # percent: a search without a plan that fits counts as this, and so does worse
_METHODS = {"curve": "jz.tune", "random": "random"}
Row = dict[str, Any]


def limit_of(found: Table, name: str) -> float:
    """Bytes of a device that a plan may take."""
    if name == "device":
        return 0.95 * cluster_of(LINKS[0]).kind.memory
    sizes = sorted(found.memory(plan) for plan in found.full)
    last = math.ceil(len(sizes) / LIMITS[name])
    return (sizes[last - 1] + sizes[last]) / 2


def curve(found: Table, setting: str, limit: float) -> list[float | None]:
    """Regret of the search if it is stopped after 1, 2, ... programs; None: no plan that fits."""
    used = searched(found, setting, limit)
    last = used.proxies + used.full
    plans = [searched(found, setting, limit, most).plan for most in range(1, last)]
    plans += [used.plan] * (BUDGET + 1 - last)
    return [rounded(found.regret(plan, setting, limit)) for plan in plans]


def best_so_far(
    found: Table, plans: Iterable[Candidate], setting: str, limit: float
) -> list[float]:
    """Regret of the best of the first 1, 2, ... plans, all compiled in full."""
    regrets, best = [], math.inf
    for plan in plans:
        best = min(best, found.regret(plan, setting, limit))
        regrets.append(best)
    return regrets + [best] * (BUDGET - len(regrets))


def baseline(found: Table, setting: str, limit: float) -> list[list[float | None]]:
    """For each number of programs, the regret of random search at each tenth of the seeds."""
    drawn = [random_search(found, limit, BUDGET, random.Random(seed)) for seed in range(SEEDS)]
    regrets = np.array([best_so_far(found, plans, setting, limit) for plans in drawn])
    deciles = np.linspace(0.05, 0.95, 10)
    return [
        [rounded(x) for x in np.quantile(column, deciles, method="nearest")] for column in regrets.T
    ]


def judged(
    found: Table, believed: str, true: str, limit: float, speed: float = 1.0
) -> dict[str, Any]:
    """What the search chooses with some rates, judged with others."""
    outcome = searched(found, believed, limit, speed=speed)
    return {
        "plan": outcome.plan and outcome.plan.name,
        "regret": rounded(found.regret(outcome.plan, true, limit)),
        "proxies": outcome.proxies,
        "full": outcome.full,
    }


def misled(found: Table, believed: str, true: str, limit: float) -> dict[str, Any]:
    """As `judged`, with the regret of the plan that an exhaustive search chooses, equally wrong."""
    best = found.best(believed, limit)
    exhaustive = rounded(found.regret(best, true, limit))
    return {**judged(found, believed, true, limit), "exhaustive": exhaustive}


def record(found: Table, name: str) -> dict[str, Any]:
    """Search with a limit of memory, at all rates; append a row."""
    limit = limit_of(found, name)
    at_links = {}
    for setting in (f"{link:g}" for link in LINKS):
        at_links[setting] = {
            **judged(found, setting, setting, limit),
            "curve": curve(found, setting, limit),
            "random": baseline(found, setting, limit),
        }
    wrong = [pair for x in CHANGED for pair in ((x, MIDDLE), (MIDDLE, x))]
    results = {
        "model": found.model,
        "limit": name,
        "limit_bytes": round(limit),
        "plans": len(found.full),
        "fitting": sum(found.fits(plan, limit) for plan in found.full),
        "links": at_links,
        "other_rates": {x: judged(found, x, x, limit) for x in CHANGED},
        "wrong_rates": {f"{x} for {true}": misled(found, x, true, limit) for x, true in wrong},
        "every_rate": {
            f"every rate x {speed:g}": judged(found, MIDDLE, MIDDLE, limit, speed)
            for speed in (0.5, 2.0)
        },
    }
    return append_row("plan_regret", results)


def main(models: Sequence[Name] = ("1b", "7b", "moe")) -> None:
    """Replay all searches, append a row for each model and limit, print a table and draw.

    Args:
        models: which.
    """
    for model in models:
        found = Table.read(model)
        for name in LIMITS:
            record(found, name)
    rows = [row["results"] for row in read_rows("plan_regret")]
    newest = {(row["model"], row["limit"]): row for row in rows}
    Console().print(table(list(newest.values())))
    figure(list(newest.values())).savefig(RESULTS / "plan_regret.png", dpi=150)


def random_search(
    table: Table, limit: float, budget: int, generator: random.Random
) -> Iterator[Candidate]:
    """Plans to compile in full, in random order."""
    known: dict[str, Candidate] = {}
    for plan in table.full:
        if table.may_fit(plan, limit):
            known.setdefault(table.full[plan]["program"], plan)
    plans = list(known.values())
    yield from generator.sample(plans, min(budget, len(plans)))


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
        "random": [percent(x) for each in links for x in each["random"][-1]],
    }


def table(rows: Sequence[Row]) -> RichTable:
    """Regret for each model and limit."""
    result = RichTable(title="regret, percent")
    columns = ("fit", "4 links: each", "10 other rates: median, most")
    columns += ("one rate off by 2: most, exhaustive", "every rate: most")
    for column in ("model", "limit", *columns, "random", "proxies", "full"):
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
            _quantiles(found["random"]),
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


if __name__ == "__main__":
    tyro.cli(main)
