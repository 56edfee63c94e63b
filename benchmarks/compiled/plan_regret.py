"""How far what `jz.tune` chooses is from the best of all plans, by the rows of `plan_table`.

    python -m benchmarks.compiled.plan_regret
    python -m benchmarks.compiled.plan_regret --plot

Needs optuna. Nothing is compiled: the search of `jz.tune` runs as it is, and the compiler's answers
come from the table, those of proxies from rows of proxies. Regret is how much longer the step of
the chosen plan is than that of the best plan that fits, both by full compiles. So this judges the
search alone: the rates, and the walk that predicts steps from them, are taken to be true.

Limits of memory are the device's, and those in which a half and a tenth of all plans fit.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import tyro

from benchmarks.shared._rows import RESULTS, append_row, read_rows, rounded
from jaxzero._planner import Candidate

from ._plan_baselines import random_search, tpe
from ._plan_regret_summary import figure, table
from ._plan_replay import Table, searched
from .plan_table import LINKS, PERTURBED, Name, cluster_of

Limit = Literal["device", "half", "tenth"]
BUDGET = 11  # programs: 8 proxies and 3 in full
SEEDS = {"random": 500, "tpe": 30}
MIDDLE = "5e+10"


def limit_of(found: Table, name: Limit) -> float:
    """Bytes of a device that a plan may take."""
    if name == "device":
        return 0.95 * cluster_of(LINKS[0]).kind.memory
    sizes = sorted(found.memory(plan) for plan in found.full)
    last = math.ceil(len(sizes) / {"half": 2, "tenth": 10}[name])
    return (sizes[last - 1] + sizes[last]) / 2


def curve(found: Table, setting: str, limit: float) -> list[float | None]:
    """Regret of the search if it is stopped after 1, 2, ... programs; None: no plan yet."""
    plans = [searched(found, setting, limit, most).plan for most in range(1, BUDGET + 1)]
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
    """For each method and seed, regret over programs."""
    drawn = {
        "random": [
            random_search(found, limit, BUDGET, random.Random(seed))
            for seed in range(SEEDS["random"])
        ],
        "tpe": [tpe(found, setting, limit, BUDGET, seed) for seed in range(SEEDS["tpe"])],
    }
    return {
        method: [[rounded(x) for x in best_so_far(found, each, setting, limit)] for each in plans]
        for method, plans in drawn.items()
    }


def judged(found: Table, believed: str, true: str, limit: float) -> dict[str, Any]:
    """What the search chooses with some rates, judged with others."""
    outcome = searched(found, believed, limit)
    return {
        "plan": outcome.plan and outcome.plan.name,
        "regret": rounded(found.regret(outcome.plan, true, limit)),
        "proxies": outcome.proxies,
        "full": outcome.full,
    }


def wrong_rates() -> list[tuple[str, str]]:
    """Settings that the search believes, and true ones: each rate off by 2, either way."""
    links = {"5e+10"}
    changed = [f"{field} x {factor:g}" for field in PERTURBED for factor in (0.5, 2.0)]
    return [pair for x in changed for middle in links for pair in ((x, middle), (middle, x))]


def record(found: Table, name: Limit) -> dict[str, Any]:
    """Search with a limit of memory, at all rates; append a row."""
    limit = limit_of(found, name)
    links = [f"{link:g}" for link in LINKS]
    changed = [f"{field} x {factor:g}" for field in PERTURBED for factor in (0.5, 2.0)]
    at_links = {x: judged(found, x, x, limit) for x in links}
    for x in links:
        at_links[x]["curve"] = curve(found, x, limit)
        at_links[x] |= {
            method: [_mean(each) for each in zip(*regrets, strict=True)]
            for method, regrets in baselines(found, x, limit).items()
        }
    results = {
        "model": found.model,
        "limit": name,
        "limit_bytes": round(limit),
        "plans": len(found.full),
        "fitting": sum(found.fits(plan, limit) for plan in found.full),
        "links": at_links,
        "other_rates": {x: judged(found, x, x, limit) for x in changed},
        "wrong_rates": {
            f"{x} for {true}": judged(found, x, true, limit) for x, true in wrong_rates()
        },
    }
    return append_row("plan_regret", results)
