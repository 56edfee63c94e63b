"""Search for the best plan: discard by bounds, rank by proxies, check memory by full compiles."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Literal, Protocol, runtime_checkable

import jax

from .._mesh import make_mesh
from .bounds import Bounds, bounds_of
from .candidates import Candidate
from .cluster import Cluster
from .compiles import Compiled
from .flops import matrix_flops
from .job import Job, Shapes
from .plans import PlanRow, Stage
from .target import absent_mesh

Objective = Literal["step_time", "tokens_per_second", "memory"]
MAX_PROXIES, MAX_FULL = 8, 3
_PROXY_ERROR = 1.1  # the memory of proxies is off by up to a tenth


@runtime_checkable
class Compiles(Protocol):
    """What the search asks of a compiler; see `Compiler`."""

    def key(self, candidate: Candidate) -> str: ...

    def compile(self, candidate: Candidate, *, is_proxy: bool) -> Compiled: ...


@dataclasses.dataclass
class Search:
    """A search in progress; every step leaves `rows` in a state that can be returned.

    Attributes:
        job: what is trained.
        cluster: what for.
        limit: bytes of a device that a plan may take.
        objective: what is minimised: seconds, or bytes of memory.
        compiler: compiles candidates; None: there is none for these devices.
        deadline: when to start no further compile, as `time.monotonic`.
        progress: called with a line for each thing that begins.
    """

    job: Job
    cluster: Cluster
    limit: float
    objective: Objective
    compiler: Compiles | None
    deadline: float
    progress: Callable[[str], None]
    rows: dict[Candidate, PlanRow] = dataclasses.field(default_factory=dict)
    bounds: dict[Candidate, Bounds] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    proxies: int = 0
    full: int = 0

    def run(self, candidates: Iterable[Candidate]) -> None:
        """Find the best; on Ctrl-C, the best so far."""
        try:
            self._bound(list(candidates))
            if self.compiler is not None:
                self._rank()
                self._check()
        except KeyboardInterrupt:
            self.notes.append("it was interrupted: these are the best so far")

    # Bounds.

    def _bound(self, candidates: list[Candidate]) -> None:
        flops: dict[str, float] = {}
        for number, candidate in enumerate(candidates):
            self.progress(f"bounds {number + 1}/{len(candidates)}: {candidate.name}")
            if candidate.loss not in flops:
                flops[candidate.loss] = self._flops(candidate.loss)
            same = self._with_same_plan(candidate)
            bounds = self.bounds[same] if same else self._bounds(candidate, flops[candidate.loss])
            self.bounds[candidate] = bounds
            self.rows[candidate] = PlanRow.of_bounds(candidate, bounds, self._too_large(bounds))

    def _flops(self, loss: str) -> float:
        return matrix_flops(
            lambda params, batch: jax.value_and_grad(
                self.job.losses[loss], has_aux=bool(self.job.options.get("has_aux"))
            )(params, batch),
            self.job.params,
            self.job.batch,
        )

    def _with_same_plan(self, candidate: Candidate) -> Candidate | None:
        """A candidate that differs in prefetch only, which sends the same bytes."""
        schedule = candidate.config.schedule
        for prefetch in (0, 1):
            other = dataclasses.replace(schedule, prefetch=prefetch)
            config = dataclasses.replace(candidate.config, schedule=other)
            same = dataclasses.replace(candidate, config=config)
            if same in self.bounds:
                return same
        return None

    def _bounds(self, candidate: Candidate, flops: float) -> Bounds:
        cluster = self.cluster
        if self.compiler is None:
            mesh = make_mesh(cluster.nodes, simulate=cluster.num_devices)
        else:
            mesh = absent_mesh(cluster)
        shapes = Shapes.of(self.job, candidate, mesh)
        report = shapes.report(self.job, candidate)
        state = shapes.arguments.get("wire_state")
        return bounds_of(candidate, report, state, flops, cluster)

    def _too_large(self, bounds: Bounds) -> str:
        if bounds.memory > self.limit:
            return f"needs {_gib(bounds.memory)} of {_gib(self.limit)} without any activation"
        if bounds.host_memory > self.cluster.host_memory:
            return f"needs {_gib(bounds.host_memory)} of host memory for each device"
        return ""

    # Proxies.

    def value(self, row: PlanRow) -> tuple[float, float]:
        """What is minimised, and what decides between equals."""
        if self.objective == "memory":
            return float(row.memory), row.seconds
        return row.seconds, float(row.memory)

    def _rank(self) -> None:
        """Compile proxies in the order of their bounds, until no bound is below the best."""
        assert self.compiler is not None
        seen: dict[str, str] = {}
        best = math.inf
        while self.proxies < MAX_PROXIES and not self._is_late():
            row = self._next()
            if row is None:
                return
            if self.value(row)[0] >= best:
                self._discard(row, "its bound is above the best plan")
                continue
            key = self.compiler.key(row.candidate)
            if key in seen:
                self._discard(row, f"its program is that of `{seen[key]}`")
                continue
            seen[key] = row.candidate.name
            self.progress(f"proxy {self.proxies + 1}: {row.candidate.name}")
            compiled = self.compiler.compile(row.candidate, is_proxy=True)
            self.proxies += 1
            new = self._predicted(row.candidate, compiled, "proxy")
            if new.memory > _PROXY_ERROR * self.limit:
                new = dataclasses.replace(new, discarded=self._over(new))
            else:
                best = min(best, self.value(new)[0])
            self.rows[row.candidate] = new

    def _next(self) -> PlanRow | None:
        """The plan to compile next: of each family the first that is not known to be too large.

        What only saves memory (micro-batches, no prefetch, offload) is not compiled if less of it
        fits, unless memory is the objective.
        """
        waiting: dict[tuple[str, str], PlanRow] = {}
        every: list[PlanRow] = []
        fitting = {
            row.candidate.family
            for row in self.rows.values()
            if row.stage != "bound" and not row.discarded
        }
        for row in sorted(self.rows.values(), key=lambda row: row.candidate.saving):
            if row.stage != "bound" or row.discarded:
                continue
            every.append(row)
            family = row.candidate.family
            if family not in fitting and self._may_fit(row):
                waiting.setdefault(family, row)
        chosen = every if self.objective == "memory" else list(waiting.values())
        return min(chosen, key=self.value, default=None)

    def _may_fit(self, row: PlanRow) -> bool:
        """Whether a plan may fit, by the temporaries of others of its family.

        With k micro-batches at least a k-th of them remains.
        """
        for other in self.rows.values():
            if other.candidate.family == row.candidate.family and other.stage != "bound":
                temporary = other.memory - self.bounds[other.candidate].memory
                share = other.candidate.microbatches / row.candidate.microbatches
                if row.memory + min(1.0, share) * temporary > _PROXY_ERROR * self.limit:
                    return False
        return True

    def _discard(self, row: PlanRow, why: str) -> None:
        self.rows[row.candidate] = dataclasses.replace(row, discarded=why)

    def _predicted(self, candidate: Candidate, compiled: Compiled, stage: Stage) -> PlanRow:
        """What a compiled program of the gradients, and bounds of the update, say."""
        bounds, rates = self.bounds[candidate], self.cluster.rates
        line = compiled.timeline(rates)
        return PlanRow(
            candidate,
            stage,
            line.seconds + bounds.update,
            line.exposed_seconds + line.host_exposed_seconds,
            bounds.memory + compiled.temporary,  # the state lies beside the program's arrays
            bounds.host_memory + compiled.host_temporary,
            bounds.node_bytes,
            bounds.host_bytes,
        )

    def _over(self, row: PlanRow) -> str:
        return f"needs {_gib(row.memory)} of {_gib(self.limit)}"

    # Full compiles.

    def _check(self) -> None:
        """Compile the best in full; memory is a hard limit."""
        assert self.compiler is not None
        while self.full < MAX_FULL and not self._is_late():
            ranked = sorted(
                (x for x in self.rows.values() if x.stage != "bound" and not x.discarded),
                key=self.value,
            )
            waiting = [row for row in ranked[:2] if row.stage == "proxy"]
            if not waiting:
                return
            row = waiting[0]
            self.progress(f"full compile {self.full + 1}: {row.candidate.name}")
            compiled = self.compiler.compile(row.candidate, is_proxy=False)
            self.full += 1
            new = self._predicted(row.candidate, compiled, "compiled")
            if new.memory > self.limit:
                new = dataclasses.replace(new, discarded=self._over(new))
            self.rows[row.candidate] = new

    def _is_late(self) -> bool:
        is_late = time.monotonic() > self.deadline
        if is_late and not any(note.startswith("the budget") for note in self.notes):
            self.notes.append("the budget was spent: further plans were not compiled")
        return is_late


def ranked(search: Search) -> tuple[PlanRow, ...]:
    """All rows, the best first: those that fit, by how much is known of them, then by value."""
    stages = ("compiled", "proxy", "bound")
    return tuple(
        sorted(
            search.rows.values(),
            key=lambda row: (bool(row.discarded), stages.index(row.stage), search.value(row)),
        )
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
