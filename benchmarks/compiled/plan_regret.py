"""How far what `jz.tune` chooses is from the best of all plans, by the rows of `plan_table`.

    python -m benchmarks.compiled.plan_regret                 # and draws plan_regret.png
    python -m benchmarks.compiled.plan_regret --models moe

Needs optuna. Nothing is compiled: the search of `jz.tune` runs as it is, and the compiler's answers
come from the table, those of proxies from rows of proxies. Regret is how much longer the step of
the chosen plan is than that of the best plan that fits, both by full compiles. So this judges the
search alone: the rates, and the walk that predicts steps from them, are taken to be true.

Rates that are wrong by a factor of 2: one of them, or all at once, the time to start a collective
included. With one wrong even an exhaustive search chooses another plan than the best, so its regret
is beside that of the search.

Limits of memory are the device's, and those in which a half, a quarter and a tenth of all plans
fit. Expectations of the search were set on 1b and 7b; moe is held out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from benchmarks.shared._rows import RESULTS, append_row, read_rows, rounded
from jaxzero._planner import Candidate

from ._plan_baselines import random_search, tpe
from ._plan_regret_summary import figure, table
from ._plan_replay import Table, searched
from .plan_table import LINKS, PERTURBED, Name, cluster_of

LIMITS = {"device": 1, "half": 2, "quarter": 4, "tenth": 10}  # a part of the plans fits
BUDGET = 11  # programs: 8 proxies and 3 in full
SEEDS = {"random": 200, "tpe": 10}
MIDDLE = "5e+10"
CHANGED = tuple(f"{field} x {factor:g}" for field in PERTURBED for factor in (0.5, 2.0))


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


def baselines(found: Table, setting: str, limit: float) -> dict[str, list[list[float | None]]]:
    """For each method, and each number of programs, the regret of each tenth of the seeds."""
    drawn = {
        "random": [
            random_search(found, limit, BUDGET, random.Random(seed))
            for seed in range(SEEDS["random"])
        ],
        "tpe": [tpe(found, setting, limit, BUDGET, seed) for seed in range(SEEDS["tpe"])],
    }
    regrets = {
        method: np.array([best_so_far(found, each, setting, limit) for each in plans])
        for method, plans in drawn.items()
    }
    deciles = np.linspace(0.05, 0.95, 10)
    return {
        method: [
            [rounded(x) for x in np.quantile(column, deciles, method="nearest")]
            for column in each.T
        ]
        for method, each in regrets.items()
    }


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
            **baselines(found, setting, limit),
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


if __name__ == "__main__":
    tyro.cli(main)
