"""Describe what is to be trained, and trace a candidate's program for it by shapes alone."""

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
    """What is to be trained: a loss, its parameters and batch, and an optimizer.

    Attributes:
        losses: the forms of the loss by name, as functions `loss(params, batch)` that
            `zero.value_and_grad` takes with `options`.
        init_fn: returns the parameters.
        batch: a tree of structs `[rows, ...]`, with the rows of all devices.
        tx: the optimizer.
        options: further arguments of `zero.value_and_grad`, such as `has_aux`.
    """

    losses: Mapping[str, Callable]
    init_fn: Callable[[], Any]
    batch: Any
    tx: optax.GradientTransformation
    options: Mapping[str, Any]

    def of_one_node(self, nodes: int) -> Job:
        """Return the job of a single node among `nodes`, with its part of the rows."""

        def rows(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0] // nodes, *x.shape[1:]) if x.shape else ()
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return dataclasses.replace(self, batch=jax.tree.map(rows, self.batch))


def placed(job: Job, cluster: Cluster, candidate: Candidate) -> tuple[Job, Cluster]:
    """Return the job and the cluster for which a candidate's program is traced.

    With local steps each node trains by itself, so these are of one node.

    Args:
        job: the job of all nodes.
        cluster: the cluster with all nodes.
        candidate: the candidate.
    """
    if candidate.local_steps is None:
        return job, cluster
    return job.of_one_node(cluster.nodes), cluster.one_node


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of a candidate's arrays on a mesh, and the function of its gradients.

    Attributes:
        zero: the `Zero` of the mesh and the candidate's config.
        params: the parameters, as structs.
        opt_state: the optimizer state, as structs.
        arguments: keyword arguments of `step`, as structs: the wire state, if there is one.
        step: the function from `zero.value_and_grad`, called `step(params, batch, **arguments)`.
    """

    zero: Zero
    params: Any
    opt_state: Any
    arguments: dict[str, Any]
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
        """Trace `step`; return the bytes that a device holds and sends, and the step's plan."""
        options = {**job.options, "microbatches": candidate.microbatches, **self.arguments}
        loss = job.losses[candidate.loss]
        plan = self.zero.plan(loss, self.params, job.batch, **options)
        return self.zero.report(self.params, self.opt_state, plan), plan
