"""Search for the best plan: discard by bounds, rank by proxies, check memory by full compiles.

A plan is a candidate that can be traced. Bounds are lower bounds of its step time and memory. Its
proxy is its program compiled without fused kernels for softmax and RMS norm, which is faster. The
programs compiled so far let the search predict the time and memory of all plans (`Estimates`). The
program with the largest expected improvement over the plans compiled so far is compiled next, until
the gain expected of all plans together is too small (`Promise`). A plan that does not fit improves
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import numpy as np

from .._text import escaped
from .bounder import Bounder, UnsplitTokens, left_out
from .bounds import Bounds
from .candidates import Candidate, tells_more
from .cluster import Cluster
from .compiles import AT_ONCE, Compiled, Compiles
from .estimates import Estimates
from .job import Job
from .plans import PlanRow, Stage, gigabytes
from .promise import Promise
from .rounds import RoundBounds

Objective = Literal["step_time", "tokens_per_second", "memory"]
MAX_PROXIES, MAX_FULL = 8, 3
_LEAST_GAIN = 0.005  # the least gain, of all plans together, that is worth a compile
_PROXY_ERROR = 1.1  # the memory of proxies may be off by up to a tenth
_FAILURES = (jax.errors.JaxRuntimeError, NotImplementedError, ValueError)


@dataclasses.dataclass
class Search:
    """A search for the best plan; its `rows` can be read at any time, also after Ctrl-C.

    Attributes:
        job: what is trained.
        cluster: the cluster that plans are for.
        limit: bytes of a device that a plan may take.
        objective: what is minimised: seconds of a step, or bytes of memory.
        compiler: compiles candidates; None: the devices have no compiler here.
        deadline: the `time.monotonic` after which no compile is started.
        progress: called with a line of text for each candidate that is bounded or compiled.
        tries_budgets: whether to try each candidate with budgets of activations too.
        rows: what is known of each plan, a candidate that can be traced.
        bounds: lower bounds of the step time and memory of each plan.
    """

    job: Job
    cluster: Cluster
    limit: float
    objective: Objective
    compiler: Compiles | None
    deadline: float
    progress: Callable[[str], None]
    tries_budgets: bool = False
    rows: dict[Candidate, PlanRow] = dataclasses.field(default_factory=dict)
    bounds: dict[Candidate, Bounds | RoundBounds] = dataclasses.field(default_factory=dict)
    temporaries: dict[Candidate, int] = dataclasses.field(default_factory=dict)  # bytes, by plan
    programs: dict[str, str] = dataclasses.field(default_factory=dict)  # names of plans, by key
    failures: list[tuple[str, Exception]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    proxies: int = 0
    full: int = 0

    @functools.cached_property
    def estimates(self) -> Estimates:
        """The model of all plans' step times and memory, which learns from compiled programs."""
        return Estimates(self.bounds, self.cluster, self.limit)

    def run(self, candidates: Iterable[Candidate]) -> None:
        """Compute the bounds of all candidates, then compile plans while enough gain is expected.

        Ctrl-C ends the search, without an error.

        Raises:
            ValueError: no candidate can be traced, or all compiles fail.
            NotImplementedError: no candidate can be traced.
        """
        try:
            self._bound(list(candidates))
            if self.compiler is not None:
                while self._rank() or self._check():
                    pass
                self._raise_if_none_compiles()
        except KeyboardInterrupt:
            self.notes.append("it was interrupted: these are the best so far")

    # Bounds.

    def _bound(self, candidates: list[Candidate]) -> None:
        bounder = Bounder(self.job, self.cluster, is_absent=self.compiler is not None)
        untraced: list[tuple[Candidate, Exception]] = []
        for number, candidate in enumerate(candidates):
            self.progress(f"bounds {number + 1}/{len(candidates)}: {candidate.name}")
            same = self._with_same_plan(candidate)
            try:
                bounds = self.bounds[same] if same else bounder.bounds(candidate)
            except _FAILURES as error:
                untraced.append((candidate, error))
                continue
            self.add(candidate, bounds)
            budgeted = bounder.with_budgets(candidate, bounds) if self.tries_budgets else ()
            for plan, bounds_of_plan in budgeted:
                self.add(plan, bounds_of_plan)
        if untraced and not self.rows:
            raise untraced[0][1]
        # Most losses do not split their tokens: that is noted only for a loss without any plan.
        compared = {candidate.loss for candidate in self.rows}
        self.notes += left_out(
            [
                (candidate.name, _first_line(error))
                for candidate, error in untraced
                if not isinstance(error, UnsplitTokens) or candidate.loss not in compared
            ]
        )

    def add(self, candidate: Candidate, bounds: Bounds | RoundBounds) -> None:
        """Add a candidate to the search; it is discarded at once if its bounds are too large."""
        self.bounds[candidate] = bounds
        self.rows[candidate] = PlanRow.of_bounds(candidate, bounds, self._too_large(bounds))

    def _with_same_plan(self, candidate: Candidate) -> Candidate | None:
        """Return a candidate whose bounds are known and equal to those of `candidate`.

        It differs in prefetch only, which bounds do not depend on. None: there is none.
        """
        schedule = candidate.config.schedule
        for prefetch in (0, 1):
            other = dataclasses.replace(schedule, prefetch=prefetch)
            config = dataclasses.replace(candidate.config, schedule=other)
            same = dataclasses.replace(candidate, config=config)
            if same in self.bounds:
                return same
        return None

    def _too_large(self, bounds: Bounds | RoundBounds) -> str:
        if bounds.memory > self.limit:
            return f"{self.needs(bounds.memory)} without any activation"
        if bounds.host_memory > self.cluster.host_memory:
            return f"needs {gigabytes(bounds.host_memory)} of host memory for each device"
        return ""

    # Proxies.

    def value(self, row: PlanRow) -> tuple[float, float]:
        """Return the seconds and bytes of a row as a key to compare rows, the least being best.

        The objective comes first; the other one decides between rows with an equal objective.
        """
        if self.objective == "memory":
            return float(row.memory), row.seconds
        return row.seconds, float(row.memory)

    def _rank(self) -> bool:
        """Compile the plans of largest expected gain as proxies; return False if none is chosen."""
        rows = self._promising(("bound",), MAX_PROXIES - self.proxies, self.compiled_rows())
        for row in rows:
            self.proxies += 1
            self.progress(f"proxy {self.proxies}: {row.candidate.name}")
        for row, result in self._compile(rows, is_proxy=True):
            self._take_proxy(row, result)
        return bool(rows)

    def _check(self) -> bool:
        """Compile the plans of largest expected gain in full; return False if none is chosen.

        They are chosen from the plans that have a proxy; and after `MAX_PROXIES` proxies, of which
        one compiled, also from the plans of which only bounds are known.
        """
        compiled = [row for row in self.compiled_rows() if row.stage == "compiled"]
        has_program = any(row.stage != "bound" for row in self.rows.values())
        is_spent = self.proxies == MAX_PROXIES and has_program
        stages: tuple[Stage, ...] = ("proxy", "bound") if is_spent else ("proxy",)
        rows = self._promising(stages, MAX_FULL - self.full, compiled)
        for row in rows:
            self.full += 1
            self.progress(f"full compile {self.full}: {row.candidate.name}")
        for row, result in self._compile(rows, is_proxy=False):
            self._take_full(row, result)
        return bool(rows)

    def _promising(
        self, stages: Sequence[Stage], most: int, known: Sequence[PlanRow]
    ) -> list[PlanRow]:
        """Choose the plans to compile next, at the same time: those of largest expected gain.

        There is none if all gains are too small, if `most` is 0, or after the deadline.

        Args:
            stages: the values of `PlanRow.stage` of the plans to choose from. If "proxy" is one,
                the chosen plans will be compiled in full, otherwise as proxies.
            most: the largest number of plans to choose.
            known: the rows of the plans over which the gain is counted.
        """
        sure = [self.value(row)[0] for row in known if row.stage == "compiled"]
        least = min(sure, default=math.inf)
        rows = [
            row
            for row in self.rows.values()
            if row.stage in stages and not row.discarded and self._may_improve(row, least)
        ]
        if not rows or not most:
            return []
        values, memory = self._draws([*rows, *known])
        end = len(rows)
        promise = Promise(values[:, :end], values[:, end:], memory[:, :end])
        in_full = "proxy" in stages
        if in_full and most == 1 and not known:  # the last compile is for a sure plan
            promise.keep_sure()
        chosen: list[PlanRow] = []
        losses = {row.candidate.loss for row in rows}
        while len(chosen) < min(AT_ONCE, most, len(rows)) and not self._is_late():
            number = promise.next(_LEAST_GAIN)
            if number is None:
                break
            row, beside = rows[number], [x.candidate for x in chosen]
            is_new = tells_more(row.candidate, beside, self.temporaries, losses)
            if not is_new or (row.stage != "proxy" and not self._is_new(row)):
                promise.drop(number)
                continue
            chosen.append(row)
            promise.take(number)
            if in_full and not promise.is_sure(number):
                break
        return chosen

    def _may_improve(self, row: PlanRow, least: float) -> bool:
        """Return True if a plan has a proxy, or may fit and its lower bound is below `least`."""
        if row.stage != "bound":
            return True
        return bool(self.value(row)[0] < least) and not self.why_too_large(row)

    def _draws(self, rows: Sequence[PlanRow]) -> tuple[np.ndarray, np.ndarray]:
        """Draw samples of the values and bytes of plans compiled in full, both `[draws, plans]`.

        A value is the logarithm of what is minimised, or infinite where the plan does not fit.
        """
        memory, seconds = self.estimates.draws([row.candidate for row in rows])
        for number, row in enumerate(rows):
            if row.stage == "compiled":
                memory[:, number], seconds[:, number] = row.memory, row.seconds
        values = memory if self.objective == "memory" else seconds
        return np.where(memory <= self.limit, np.log(values), math.inf), memory

    def _compile(
        self, rows: Sequence[PlanRow], *, is_proxy: bool
    ) -> Iterator[tuple[PlanRow, Callable[[], Compiled]]]:
        """Compile plans at the same time; yield each row, with a function to get its result.

        The function returns the compiled program, or raises the compile's error. Plans are compiled
        as proxies if `is_proxy`, otherwise in full.

        XLA uses one core for most of a compile, and does not hold Python's lock. If a program has
        arrays in host memory, plans are compiled one by one when their functions are called: such a
        program is traced again, which must happen in this thread.
        """
        assert self.compiler is not None
        compile_one = functools.partial(self.compiler.compile, is_proxy=is_proxy)
        if any(row.candidate.has_host_arrays for row in rows):
            yield from ((row, functools.partial(compile_one, row.candidate)) for row in rows)
            return
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            futures = [pool.submit(compile_one, row.candidate) for row in rows]
            yield from ((row, x.result) for row, x in zip(rows, futures, strict=True))
        finally:  # after Ctrl-C the answer does not wait for compiles that still run
            pool.shutdown(wait=False, cancel_futures=True)

    def compiled_rows(self) -> list[PlanRow]:
        """Return the rows of plans that have a compiled program and are not discarded."""
        return [row for row in self.rows.values() if row.stage != "bound" and not row.discarded]

    def _is_new(self, row: PlanRow) -> bool:
        """Return whether a plan's program can be lowered and is new; if not, discard the plan."""
        assert self.compiler is not None
        try:
            key = self.compiler.key(row.candidate)
        except _FAILURES as error:
            self._fail(row, error)
            return False
        if key in self.programs:
            self._discard(row, f"its program is that of `{self.programs[key]}`")
            return False
        self.programs[key] = row.candidate.name
        return True

    def _take_proxy(self, row: PlanRow, result: Callable[[], Compiled]) -> None:
        try:
            compiled = result()
        except _FAILURES as error:
            self._fail(row, error)
            return
        for new in self._predicted(row, compiled, "proxy"):
            self.rows[new.candidate] = new
            if new.memory > _PROXY_ERROR * self.limit:
                self._discard(new, self.needs(new.memory))

    def _with_program_of(self, row: PlanRow) -> list[PlanRow]:
        """Return the rows, `row` included, of all plans that run the program of `row`."""
        program = row.candidate.program
        return [
            other
            for other in self.rows.values()
            if other.candidate.program == program and not other.discarded
        ]

    def why_too_large(self, row: PlanRow) -> str:
        """Return why a plan cannot fit; "" if it may.

        Compiled plans of the same `Candidate.family` bound its temporaries from below: with k times
        as many micro-batches, at least a k-th of the temporaries remains.
        """
        for plan in (x.candidate for x in self.rows.values() if x.stage != "bound"):
            same = plan.family == row.candidate.family
            if same and plan.has_host_arrays == row.candidate.has_host_arrays:
                share = min(1.0, plan.microbatches / row.candidate.microbatches)
                temporary = math.ceil(share * self.temporaries[plan])
                needed = self.bounds[row.candidate].with_temporaries(temporary)
                if needed > _PROXY_ERROR * self.limit:
                    return f"{self.needs(needed)}, by the temporaries of `{plan.name}`"
        return ""

    def _discard(self, row: PlanRow, why: str) -> None:
        self.rows[row.candidate] = dataclasses.replace(row, discarded=why)

    def _fail(self, row: PlanRow, error: Exception) -> None:
        self.failures.append((row.candidate.name, error))
        for alike in self._with_program_of(row):
            self._discard(alike, f"does not compile: {_first_line(error)}")

    def _raise_if_none_compiles(self) -> None:
        if self.failures and all(row.stage == "bound" for row in self.rows.values()):
            name, error = self.failures[0]
            raise ValueError(
                f"None of the {len(self.failures)} programs that were tried compiles. The first, "
                f"`{name}`: {_first_line(error)}"
            ) from error

    def _predicted(self, row: PlanRow, compiled: Compiled, stage: Stage) -> Iterator[PlanRow]:
        """Yield new rows, with predicted time and memory, for all plans that run one program.

        `compiled` is that program, compiled for the plan of `row`; `estimates` learns from it.
        """
        line = compiled.timeline(self.cluster.rates)
        self.estimates.observe(
            row.candidate, compiled.temporary, line.seconds, is_proxy=stage == "proxy"
        )
        waited = line.exposed_seconds + line.host_exposed_seconds
        for alike in self._with_program_of(row):
            bounds = self.bounds[alike.candidate]
            self.temporaries[alike.candidate] = compiled.temporary
            yield PlanRow(
                alike.candidate,
                stage,
                *bounds.predicted(line.seconds, waited),
                int(bounds.with_temporaries(compiled.temporary)),
                bounds.host_memory + compiled.host_temporary,
                bounds.node_bytes,
                bounds.host_bytes,
            )

    def needs(self, num_bytes: int | float) -> str:
        """Return the words "needs ... GB of ... GB", with the bytes of a plan and the limit."""
        return f"needs {gigabytes(num_bytes)} of {gigabytes(self.limit)}"

    # Full compiles.

    def _take_full(self, row: PlanRow, result: Callable[[], Compiled]) -> None:
        try:
            compiled = result()
        except _FAILURES as error:
            self._fail(row, error)
            return
        for new in self._predicted(row, compiled, "compiled"):
            self.rows[new.candidate] = new
            if new.memory > self.limit:
                self._discard(new, self.needs(new.memory))

    def _is_late(self) -> bool:
        is_late = time.monotonic() > self.deadline
        if is_late and not any(note.startswith("the budget") for note in self.notes):
            self.notes.append("the budget was spent: further plans were not compiled")
        return is_late


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return escaped(lines[0] if lines else type(error).__name__)
