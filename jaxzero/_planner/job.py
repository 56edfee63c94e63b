"""What is to be trained, and one candidate's programs for it: shapes only, nothing is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from .._mesh import SimulatedMesh
from .._plan import Plan
from .._report import Report
from .._zero import Zero
from .candidates import Candidate
from .cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        losses: the forms of the loss, by name: `loss(params, batch)`, or what it returns with
            `has_aux`.
        init_fn: returns the parameters.
        batch: a tree of structs `[rows, ...]`, of all devices together.
        tx: the optimizer.
        options: further arguments of `zero.value_and_grad`, such as `has_aux`.
    """

    losses: Mapping[str, Callable]
    init_fn: Callable[[], Any]
    batch: Any
    tx: optax.GradientTransformation
    options: Mapping[str, Any]

    def of_one_node(self, nodes: int) -> Job:
        """The job of one of `nodes` nodes, with its rows of the batch."""

        def rows(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] // nodes, *x.shape[1:]) if x.shape else ()
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return dataclasses.replace(self, batch=jax.tree.map(rows, self.batch))


def placed(job: Job, cluster: Cluster, candidate: Candidate) -> tuple[Job, Cluster]:
    """The job and cluster of a candidate's program: those of one node if nodes train by themselves.

    Args:
        job: the job of all nodes.
        cluster: the cluster with all nodes.
        candidate: the candidate, whose `local_steps` decide.
    """
    if candidate.local_steps is None:
        return job, cluster
    return job.of_one_node(cluster.nodes), cluster.one_node


@dataclasses.dataclass(frozen=True)
class Shapes:
    """One candidate's arrays and gradient function, on a mesh."""

    zero: Zero
    params: Any
    opt_state: Any
    arguments: dict[str, Any]  # further arguments of the step, by name
    step: Callable

    @classmethod
    def of(cls, job: Job, candidate: Candidate, mesh: Mesh | SimulatedMesh) -> Shapes:
        zero = Zero(mesh, candidate.config)
        params = zero.abstract(job.init_fn)
        opt_state = zero.init_optimizer(job.tx, params)
        arguments = {}
        if candidate.config.needs_wire_state:
            arguments["wire_state"] = jax.eval_shape(zero.init_wire_state, params)
        options = {**job.options, "microbatches": candidate.microbatches}
        step = zero.value_and_grad(job.losses[candidate.loss], **options)
        return cls(zero, params, opt_state, arguments, step)

    def report(self, job: Job, candidate: Candidate) -> tuple[Report, Plan]:
        """The bytes that a device holds and a step sends, and its plan; traces the step."""
        options = {**job.options, "microbatches": candidate.microbatches, **self.arguments}
        loss = job.losses[candidate.loss]
        plan = self.zero.plan(loss, self.params, job.batch, **options)
        return self.zero.report(self.params, self.opt_state, plan), plan
