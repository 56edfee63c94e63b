"""The real search of the planner, answered by rows of `plan_table` in place of a compiler."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jaxzero as jz
from benchmarks.shared._rows import read_rows
from jaxzero._hlo import Rates, Timeline
from jaxzero._planner import Bounds, Candidate, Compiled, Search, Work, ranked

from .plan_table import PERTURBED, Name, candidates, cluster_of, job_of, settings_of_rates


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What is known of all plans of a model.

    Attributes:
        model: which.
        works: what bounds are computed from, by plan.
        full: rows of full compiles, by plan.
        proxies: rows of proxies, by plan.
    """

    model: Name
    works: Mapping[Candidate, Work]
    full: Mapping[Candidate, Mapping[str, Any]]
    proxies: Mapping[Candidate, Mapping[str, Any]]

    @classmethod
    def read(cls, model: Name) -> Table:
        """From the newest rows.

        Raises:
            ValueError: a plan has no row in full, or its program none as a proxy.
        """
        named = {each.name: each for each in candidates()}
        rows = [row["results"] for row in read_rows("plan_table")]
        rows = [row for row in rows if row["model"] == model]
        full = {named[row["plan"]]: row for row in rows if not row["is_proxy"]}
        programs = {row["program"]: row for row in rows if row["is_proxy"]}
        works = {}
        for row in read_rows("plan_work"):
            if row["results"]["model"] == model:
                plans = row["results"]["plans"].items()
                works = {named[name]: Work(**work) for name, work in plans}
        for name, each in named.items():
            if each not in works or each not in full or full[each]["program"] not in programs:
                raise ValueError(f"`{name}` of {model} lacks a row; run `plan_table` first.")
        proxies = {each: programs[row["program"]] for each, row in full.items()}
        return cls(model, works, full, proxies)

    def bounds(self, plan: Candidate, setting: str) -> Bounds:
        return self.works[plan].bounds(settings_of_rates()[setting])

    def step(self, plan: Candidate, setting: str) -> float:
        """Seconds of a step, by the full compile."""
        gradients, waited = self.full[plan]["steps"][setting]
        return self.bounds(plan, setting).predicted(gradients, waited)[0]

    def memory(self, plan: Candidate) -> int:
        """Bytes of a device, by the full compile."""
        return self.works[plan].memory + self.full[plan]["temporary"]

    def fits(self, plan: Candidate, limit: float) -> bool:
        work, row = self.works[plan], self.full[plan]
        in_host = work.host_memory + row["host_temporary"]
        return self.memory(plan) <= limit and in_host <= cluster_of(1e9).host_memory

    def may_fit(self, plan: Candidate, limit: float) -> bool:
        """Whether parameters, gradients and optimizer state fit: it costs no compile to know."""
        work = self.works[plan]
        return work.memory <= limit and work.host_memory <= cluster_of(1e9).host_memory

    def best(self, setting: str, limit: float) -> Candidate:
        """The best plan that fits, which an exhaustive search finds."""
        fitting = [plan for plan in self.full if self.fits(plan, limit)]
        return min(fitting, key=lambda plan: self.step(plan, setting))

    def regret(self, plan: Candidate | None, setting: str, limit: float) -> float:
        """How much longer a step is than the best, as a part of it.

        Infinite if there is no plan, or it does not fit.
        """
        if plan is None or not self.fits(plan, limit):
            return math.inf
        best = self.best(setting, limit)
        return self.step(plan, setting) / self.step(best, setting) - 1


@dataclasses.dataclass(frozen=True)
class Answer(Compiled):
    """A compiled program of which the table has the steps, `speed` times as fast."""

    steps: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    speed: float = 1.0

    def timeline(self, rates: Rates) -> Timeline:
        seconds, waited = self.steps[_names_of_rates()[rates]]
        return Timeline(seconds=seconds / self.speed, exposed_seconds=waited / self.speed)


@functools.cache
def _cluster(rates: Rates) -> jz.Cluster:
    """The cluster of the table, with other rates."""
    mine = dataclasses.replace(
        cluster_of(rates.node).kind,
        flops=rates.flops,
        memory_bandwidth=rates.memory,
        local_link=rates.local,
        host_link=rates.host,
    )
    cluster = dataclasses.replace(cluster_of(rates.node), device=mine)
    assert cluster.rates == rates
    return cluster


@functools.cache
def _names_of_rates() -> dict[Rates, str]:
    return {rates: name for name, rates in settings_of_rates().items()}


@dataclasses.dataclass
class Replay:
    """Answers as `Compiler` would; as Ctrl-C does, it ends the search after `most` programs."""

    table: Table
    most: float = math.inf
    speed: float = 1.0
    asked: int = 0

    def key(self, candidate: Candidate) -> str:
        return self.table.full[candidate]["program"]

    def compile(self, candidate: Candidate, *, is_proxy: bool) -> Compiled:
        self.asked += 1
        if self.asked > self.most:
            raise KeyboardInterrupt
        row = (self.table.proxies if is_proxy else self.table.full)[candidate]
        if "error" in row:
            raise NotImplementedError(row["error"])
        sizes = row["temporary"], row["host_temporary"]
        return Answer("", *sizes, 0.0, row["steps"], self.speed)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search chose, and what it compiled for it."""

    plan: Candidate | None
    proxies: int
    full: int


@functools.cache
def searched(
    table: Table, setting: str, limit: float, most: float = math.inf, speed: float = 1.0
) -> Outcome:
    """The plan that `jz.tune` chooses.

    Args:
        table: of a model.
        setting: of rates, by name.
        limit: bytes of a device.
        most: programs after which the search is stopped, as by Ctrl-C.
        speed: all rates are so many times as high, and collectives start so many times as fast.
    """
    rates = settings_of_rates()[setting]
    faster = dataclasses.replace(rates, **{x: speed * getattr(rates, x) for x in PERTURBED})
    search = Search(
        job=job_of(table.model),
        cluster=_cluster(rates),
        limit=limit,
        objective="step_time",
        compiler=Replay(table, most, speed),
        deadline=math.inf,
        progress=lambda line: None,
    )
    for plan, work in table.works.items():
        search.add(plan, work.bounds(faster))
    search.run([])
    first = next((row for row in ranked(search) if not row.discarded), None)
    return Outcome(first and first.candidate, search.proxies, search.full)
