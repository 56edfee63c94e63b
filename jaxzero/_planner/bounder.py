"""Trace candidate plans, and compute lower bounds of their memory and time.

A form of the loss is one of the functions among which `tune` chooses (`Job.losses`). Candidates
whose local steps differ only in how nodes exchange parameters share one trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from .._activations import Point
from .._hlo import Rates
from .._mesh import TOKENS, SimulatedMesh, make_mesh
from .._plan import Plan
from .._program import asks_to_split_over, matrix_flops
from .bounds import Bounds, Work
from .candidates import Candidate, with_budgets
from .cluster import Cluster
from .job import Job, Shapes, placed
from .rounds import RoundBounds, RoundCost, check_rounds, round_cost
from .target import absent_mesh

FAILURES = (NotImplementedError, ValueError)  # raised if a candidate cannot be traced


class UnsplitTokens(NotImplementedError):
    """The error for a form of the loss that splits no tokens: devices cannot share its rows."""


def left_out(untraced: Sequence[tuple[str, str]]) -> list[str]:
    """Return notes for the user: one for each reason why plans cannot be traced.

    Args:
        untraced: `(name of the plan, reason)` for each plan that cannot be traced.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in untraced:
        by_reason.setdefault(reason.removesuffix("."), []).append(name)
    return [
        f"`{names[0]}` was left out, for it cannot be traced: {reason}"
        if len(names) == 1
        else f"{len(names)} plans, `{names[0]}` the first, were left out, for they cannot be "
        f"traced: {reason}"
        for reason, names in by_reason.items()
    ]


def _traced_alike(candidate: Candidate) -> Any:
    """Return a key that is equal for candidates that have the same activations to keep or drop."""
    stage = candidate.config.stage
    is_of_node = candidate.local_steps is not None
    split = candidate.stages, candidate.tokens
    return candidate.loss, candidate.microbatches, split, stage, is_of_node


def _runs(candidate: Candidate) -> float:
    """Return how many layers a device runs in a step, divided by the layers of the model.

    Without stages, it runs all layers for each of `m` micro-batches. With `S` stages, it runs an
    `S`-th of the layers in each of `m + S - 1` ticks.
    """
    return (candidate.microbatches + candidate.stages - 1) / candidate.stages


@dataclasses.dataclass
class Bounder:
    """Computes lower bounds of candidates, and keeps traces that several candidates share.

    Attributes:
        job: what is trained.
        cluster: the devices and links.
        is_absent: whether candidates are traced on a mesh of absent devices, for which XLA can
            compile; otherwise on a mesh of simulated devices.
    """

    job: Job
    cluster: Cluster
    is_absent: bool
    _flops: dict[Any, float] = dataclasses.field(default_factory=dict)  # of a device, by loss
    # For each program of one node's step, its bounds and the bytes of its gradients.
    _nodes: dict[Candidate, tuple[Bounds, int]] = dataclasses.field(default_factory=dict)
    _costs: dict[Any, RoundCost] = dataclasses.field(default_factory=dict)
    _refused: dict[Any, Exception | None] = dataclasses.field(default_factory=dict)  # by loss
    _plans: dict[Any, Plan] = dataclasses.field(default_factory=dict)
    _frontiers: dict[Any, tuple[Point, ...]] = dataclasses.field(default_factory=dict)

    def bounds(self, candidate: Candidate) -> Bounds | RoundBounds:
        """Return lower bounds of a candidate's step; with local steps, of a step in a round.

        Raises:
            NotImplementedError, ValueError: the candidate cannot be traced.
        """
        if candidate.axes:
            return self._with_axes(candidate)
        if candidate.local_steps is None:
            return self._of_step(candidate)[0]
        self._check_rounds(candidate)
        step, _ = candidate.program
        if step not in self._nodes:
            self._nodes[step] = self._of_step(candidate)
        of_round = candidate.config.stage, candidate.local_steps  # the costs depend on these alone
        if of_round not in self._costs:
            mesh, rates = self._mesh(self.cluster), self.cluster.rates
            self._costs[of_round] = round_cost(self.job, candidate, mesh, rates)
        return RoundBounds(*self._nodes[step], self._costs[of_round])

    def with_budgets(
        self, candidate: Candidate, bounds: Bounds | RoundBounds
    ) -> Iterator[tuple[Candidate, Bounds | RoundBounds]]:
        """Yield, for each budget of activations, a copy of a candidate with it, and its bounds.

        Args:
            candidate: the candidate, without a budget.
            bounds: what `bounds` returned for `candidate`.
        """
        key = _traced_alike(candidate)
        if key not in self._frontiers:
            chosen = self._plans.pop(key).activations
            self._frontiers[key] = chosen.frontier() if chosen else ()
        # `Point.seconds` is for one micro-batch, at the default rates.
        runs = _runs(candidate) * Rates().flops / self.cluster.rates.flops
        for budgeted, point in with_budgets(candidate, self._frontiers[key]):
            of_step = point._replace(seconds=point.seconds * runs)
            if isinstance(bounds, RoundBounds):
                step = dataclasses.replace(bounds.step, activations=of_step)
                yield budgeted, dataclasses.replace(bounds, step=step)
            else:
                yield budgeted, dataclasses.replace(bounds, activations=of_step)

    def _with_axes(self, candidate: Candidate) -> Bounds:
        """Return the bounds of a candidate with stages, or with tokens split over devices.

        If a form of the loss cannot be traced with these axes, the error is kept, and raised again
        for other candidates of this form and axes.
        """
        key = (*candidate.axes, candidate.loss)
        if (error := self._refused.get(key)) is not None:
            raise error
        try:
            return self._of_step(candidate)[0]
        except NotImplementedError as error:
            if candidate.stages > 1 or isinstance(error, UnsplitTokens):
                self._refused[key] = error
            raise

    def _of_step(self, candidate: Candidate) -> tuple[Bounds, int]:
        """Return lower bounds of a candidate's step, and the bytes of a device's gradients."""
        work, gradients = self.work(candidate)
        return work.bounds(placed(self.job, self.cluster, candidate)[1].rates), gradients

    def work(self, candidate: Candidate) -> tuple[Work, int]:
        """Return the operations and bytes of a candidate's step, and the bytes of its gradients."""
        job, cluster = placed(self.job, self.cluster, candidate)
        shapes = Shapes.of(job, candidate, self._mesh(cluster, **candidate.axes))
        report, plan = shapes.report(job, candidate)
        if candidate.tokens > 1 and not asks_to_split_over(plan.top.block, TOKENS):
            raise UnsplitTokens(
                f"Plans with the mesh axis `{TOKENS}` need a loss that splits its tokens over it, "
                "by `jz.split_tokens` in each layer. Without it give a `batch` and `microbatches` "
                f"that divide into whole rows of {cluster.num_devices} devices."
            )
        if (key := _traced_alike(candidate)) not in self._frontiers:
            self._plans.setdefault(key, plan)
        # A stage computes in each tick, also where it has no micro-batch.
        ticks = (candidate.stages, candidate.microbatches) if candidate.stages > 1 else ()
        form = candidate.loss, *ticks
        if form not in self._flops:  # of one device: the same for one node as for all nodes
            arguments = (shapes.params, job.batch)
            flops = matrix_flops(shapes.step, *arguments, **shapes.arguments)
            self._flops[form] = flops / cluster.num_devices
        flops = self._flops[form] * cluster.num_devices
        state = shapes.arguments.get("wire_state")
        work = Work.of(report, state, flops, cluster, candidate.config.stage)
        return work, report.device_bytes("gradients")

    def _check_rounds(self, candidate: Candidate) -> None:
        """Raise the error with which local steps refuse the candidate's loss, if they do.

        Each form of the loss is traced once, for all candidates.
        """
        key = "rounds", candidate.loss
        if key not in self._refused:
            self._refused[key] = None
            try:
                check_rounds(self.job, candidate, self._mesh(self.cluster))
            except FAILURES as error:
                self._refused[key] = error
        error = self._refused[key]
        if error is not None:
            raise error

    def _mesh(self, cluster: Cluster, **axes: int) -> Mesh | SimulatedMesh:
        if self.is_absent:
            return absent_mesh(cluster, **axes)
        return make_mesh(cluster.nodes, simulate=cluster.num_devices, stages=axes.get("stages"))
