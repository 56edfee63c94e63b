"""The result of a search: a row for each candidate plan, and the best of them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rich.console import Console

from .._local_steps import LocalSteps
from .._report import TextTable
from .._sharding import ZeroConfig
from .bounds import Bounds
from .candidates import Candidate
from .cluster import Cluster
from .rounds import RoundBounds

_LOCAL_STEPS_NOTE = (
    "Local steps are another training algorithm: compare losses on a short run, too. Steps and "
    "bytes are means over a round."
)
Stage = Literal["bound", "proxy", "compiled"]
_HEADINGS = ("Plan", "Step", "Waits", "Memory", "On the host", "Into a node", "Known by")
_HOST_COPIES = "Host copies"  # of a step, both ways
_GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The predicted time and memory of one candidate plan, and the reason if it is not taken.

    Attributes:
        candidate: the plan.
        stage: what the numbers come from: "bound", arithmetic alone; "proxy", a program compiled
            without fused kernels for softmax and RMS norm; "compiled", one compiled in full.
        seconds: predicted for a step with the optimizer's update; a lower bound for "bound". With
            local steps it is the mean over the steps of a round.
        waited: the part of `seconds` in which a device waits for links; None for "bound".
        memory: bytes of one device; a lower bound for "bound", otherwise with the temporaries that
            the compiler reports.
        host_memory: bytes of host memory for one device.
        node_bytes: bytes that enter a node in a step.
        host_bytes: bytes between device and host in a step, both ways.
        discarded: why the plan is not taken; "" for the best, and for other plans that fit.
        undecided: whether the plan is not taken although it may fit, since it was not compiled, or
            not in full.
    """

    candidate: Candidate
    stage: Stage
    seconds: float
    waited: float | None
    memory: int
    host_memory: int
    node_bytes: int
    host_bytes: int
    discarded: str = ""
    undecided: bool = False

    @classmethod
    def of_bounds(
        cls, candidate: Candidate, bounds: Bounds | RoundBounds, discarded: str = ""
    ) -> PlanRow:
        """Return the row of a candidate of which only bounds are known."""
        return cls(
            candidate,
            "bound",
            bounds.seconds,
            None,
            bounds.memory,
            bounds.host_memory,
            bounds.node_bytes,
            bounds.host_bytes,
            discarded,
        )


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans for a job on a cluster, best first.

    Attributes:
        cluster: the cluster that the plans are for.
        limit: bytes of a device that a plan may take.
        rows: a row for each candidate that can be traced, the best first.
        num_tokens: tokens of the batch: elements of its largest integer array; 0 if it has none.
        notes: what limits this answer, such as that there is no compiler, that the time was spent,
            or that the best plan was not compiled in full.
        proxies: how many programs were compiled as proxies, or failed to.
        full: how many programs were compiled in full, or failed to.
    """

    cluster: Cluster
    limit: float
    rows: tuple[PlanRow, ...]
    num_tokens: int
    notes: tuple[str, ...]
    proxies: int
    full: int

    @property
    def best(self) -> PlanRow:
        """The best plan that fits.

        It was compiled in full, or as a proxy only, as `notes` then say. Without a compiler for
        these devices, it is the best by lower bounds.

        Raises:
            ValueError: no plan fits, or none is known to fit.
        """
        if self._first is None:
            raise ValueError(self._why_none())
        return self._first

    @property
    def _first(self) -> PlanRow | None:
        return next((row for row in self.rows if not row.discarded), None)

    def _why_none(self) -> str:
        notes = "; ".join(self.notes)
        if not self.rows:
            return "There are no plans: the search was interrupted before its first bound."
        undecided = [row for row in self.rows if row.undecided]
        if undecided:
            why = notes or "a search compiles no more"
            outcome = "no compile has ended"
            if any(row.stage != "bound" for row in self.rows):
                outcome = (
                    f"{self.proxies} programs were compiled as proxies, {self.full} in full, and "
                    "none of them fits"
                )
            return (
                f"No plan is known to fit: {outcome}; {why}. Next is "
                f"`{undecided[0].candidate.name}`. Give a larger `budget`, a larger `memory`, "
                "or more devices."
            )
        least = min(self.rows, key=lambda row: row.memory)
        offload = "" if self.cluster.host_memory else "`host_memory` for offload, "
        return (
            f"No plan fits in {gigabytes(self.limit)} of a device. `{least.candidate.name}`, whose "
            f"state is smallest, {least.discarded}. Take more devices, {offload}or a form of the "
            "loss that keeps less."
        )

    @property
    def config(self) -> ZeroConfig:
        """The best plan's config, for `jz.Zero`."""
        return self.best.candidate.config

    @property
    def microbatches(self) -> int:
        """The best plan's number of micro-batches, for `zero.value_and_grad`."""
        return self.best.candidate.microbatches

    @property
    def local_steps(self) -> LocalSteps | None:
        """The best plan's local steps, for `zero.local_steps`; None: the plan has none.

        With local steps, `config` and `microbatches` are those of each node's step.
        """
        return self.best.candidate.local_steps

    @property
    def stages(self) -> int | None:
        """The best plan's pipeline stages, for `make_mesh(nodes, stages=)`; None: no stages."""
        stages = self.best.candidate.stages
        return stages if stages > 1 else None

    @property
    def tokens(self) -> int | None:
        """How many devices share a row, for `make_mesh(nodes, tokens=)`; None: rows are whole."""
        tokens = self.best.candidate.tokens
        return tokens if tokens > 1 else None

    @property
    def code(self) -> str:
        """The best plan's mesh, config and micro-batches as Python code, where `jz` is `jaxzero`.

        With local steps, config and micro-batches are those of each node's step. The code does not
        set up the local steps: give `local_steps` to `zero.local_steps`.
        """
        best = self.best.candidate
        sizes = {"nodes": self.cluster.nodes, **best.axes}
        mesh = ", ".join(f"{name}={size}" for name, size in sizes.items())
        several = f", microbatches={best.microbatches}" if best.microbatches > 1 else ""
        return (
            f"zero = jz.Zero(jz.make_mesh({mesh}), {best.code})\n"
            f"loss_and_grads = zero.value_and_grad(loss_fn{several})"
        )

    @property
    def loss(self) -> str:
        """The best plan's form of the loss, by name."""
        return self.best.candidate.loss

    def as_dict(self) -> dict[str, Any]:
        """Return the plans as a dict of plain data that JSON can hold.

        Its keys are "cluster", "notes", "proxies", "full", and "plans": a list with a dict for each
        of `rows`, whose keys are "name" and the fields of `PlanRow` but `candidate`.
        """
        return {
            "cluster": str(self.cluster),
            "notes": list(self.notes),
            "proxies": self.proxies,
            "full": self.full,
            "plans": [
                {
                    **{
                        field.name: getattr(row, field.name)
                        for field in dataclasses.fields(row)
                        if field.name != "candidate"
                    },
                    "name": row.candidate.name,
                }
                for row in self.rows
            ],
        }

    def print(self, console: Console | None = None, limit: int = 10) -> None:
        """Print a table of the best plans, with the reason why a plan is not taken.

        Args:
            console: where to print; the table is no wider.
            limit: the number of plans shown; 0: all.
        """
        console = console or Console()
        shown = self.rows[: limit or None]
        left = len(self.rows) - len(shown)
        copies = any(row.host_bytes for row in shown)
        table = TextTable(
            title=f"Plans for {self.cluster}",
            headings=(*_HEADINGS[:-1], *([_HOST_COPIES] if copies else []), _HEADINGS[-1]),
            rows=[_cells(row, copies) for row in shown],
            notes=[row.discarded and f"not taken: {row.discarded}" for row in shown],
            footer=(
                *([f"{left} more plans are worse, or were discarded."] if left else []),
                *self._throughput(),
                *([_LOCAL_STEPS_NOTE] if any(row.candidate.local_steps for row in shown) else []),
                *(f"Note: {note}." for note in self.notes),
            ),
        )
        for line in table.lines(console.width):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _throughput(self) -> list[str]:
        row = self._first
        if row is None or not self.num_tokens:
            return []
        most = "at most " if row.stage == "bound" else ""
        return [f"The best: {most}{self.num_tokens / row.seconds:,.0f} tokens a second."]


def _cells(row: PlanRow, copies: bool) -> tuple[str, ...]:
    """Return a plan's cells in the table; with `copies`, also its bytes between device and host."""
    least = ">" if row.stage == "bound" else ""
    return (
        row.candidate.name,
        f"{least}{row.seconds:.3f} s",
        "" if row.waited is None else f"{row.waited:.3f} s",
        f"{least}{gigabytes(row.memory)}",
        gigabytes(row.host_memory) if row.host_memory else "",
        gigabytes(row.node_bytes),
        *([gigabytes(row.host_bytes) if row.host_bytes else ""] if copies else []),
        {"bound": "arithmetic", "proxy": "proxy", "compiled": "compiler"}[row.stage],
    )


def gigabytes(num_bytes: int | float) -> str:
    """Format a number of bytes in GB of 1e9 bytes, as data sheets and settings count."""
    size = num_bytes / _GIGA
    return f"{size:.1f} GB" if size >= 1 else f"{size:.2g} GB"
