"""Random search and TPE over the plans of a table, with a budget of programs compiled in full.

Both know for free which plans have a state that fits, and that equal programs need one compile.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from jaxzero._planner import Candidate

from ._plan_replay import Table
from .plan_table import MICROBATCHES


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


def tpe(table: Table, setting: str, limit: float, budget: int, seed: int) -> Iterator[Candidate]:
    """Plans to compile in full, in the order of optuna's tree-structured Parzen estimator.

    A third of the budget is drawn at random, as TPE needs before its first model. A plan that does
    not fit is worth its excess of memory, added to the longest step.

    References:
        Optuna (https://arxiv.org/abs/1907.10902).
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=budget // 3)
    study = optuna.create_study(sampler=sampler)
    longest = max(table.step(plan, setting) for plan in table.full)
    compiled: set[str] = set()
    for _ in range(10 * budget):  # repeated programs and plans without a chance cost no compile
        trial = study.ask()
        plan = _suggested(trial, list(table.full))
        if table.fits(plan, limit):
            study.tell(trial, table.step(plan, setting))
        else:
            study.tell(trial, longest * (1 + table.memory(plan) / limit))
        program = table.full[plan]["program"]
        if program not in compiled and table.may_fit(plan, limit):
            compiled.add(program)
            yield plan
        if len(compiled) == budget:
            return


def _suggested(trial: Any, plans: list[Candidate]) -> Candidate:
    preset = trial.suggest_categorical("preset", list(dict.fromkeys(x.preset for x in plans)))
    k = trial.suggest_categorical("micro-batches", MICROBATCHES)
    chosen = [x for x in plans if (x.preset, x.microbatches) == (preset, k)]
    if len(chosen) == 1:  # stages below 3 have neither prefetch nor offload
        return chosen[0]
    offload = trial.suggest_categorical("offload", ("", "optimizer", "all"))
    prefetch = trial.suggest_categorical("prefetch", (0, 1))
    return next(x for x in chosen if (x.offload, x.config.schedule.prefetch) == (offload, prefetch))
