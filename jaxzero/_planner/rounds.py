"""Bound the memory and time that local steps add to the steps of one node.

With local steps, each node trains by itself by a plan for one node, and nodes exchange parameters.
In a round of H steps, each of F fragments of the parameters is sent once, and the mean over nodes
is used tau steps later. If a step takes t seconds and a message m, then on average

    a step of the round takes  t + merge / H + F / H * max(0, m - tau * t)

since nodes wait for the part of a message that takes longer than the tau steps. `merge` is the time
to encode, decode and merge all fragments, which is bound by memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._activations import Point
from .._hlo import Rates
from .._local_steps import LocalSteps
from .._mesh import SimulatedMesh
from .._report import LocalReport
from .._zero import LocalRounds, Zero
from .bounds import Bounds
from .candidates import Candidate
from .job import Job


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """The memory and time that rounds of local steps add to one node's steps, on one device.

    Attributes:
        method: how nodes exchange parameters.
        held: bytes of outer parameters, outer optimizer state and residuals.
        travelling: further bytes that are held while a fragment is sent.
        node_bytes: bytes that enter a node in a step, on average.
        message: seconds for which the links between nodes carry a fragment.
        merge: seconds of a round to encode, decode and merge all fragments.
    """

    method: LocalSteps
    held: int
    travelling: int
    node_bytes: float
    message: float
    merge: float

    @classmethod
    def of(cls, method: LocalSteps, report: LocalReport, rates: Rates) -> RoundCost:
        """Return the cost of rounds by `method`, whose bytes are in `report`."""
        held, fragments = report.device_bytes, method.fragments
        outer = sum(held[name] for name in ("outer_params", "outer_state", "residuals"))
        merged = 2 * (outer + held["params"] + fragments * report.message_bytes)  # read and written
        return cls(
            method,
            outer,
            report.travelling_bytes,
            report.bytes_per_step,
            rates.launch + report.bytes_between_nodes / fragments / rates.node,
            merged / rates.memory,
        )

    def step_seconds(self, step: Any) -> Any:
        """Return the mean seconds of a step of a round, if one node's step takes `step` seconds.

        `step` is a number or an array, and so is the result.
        """
        return step + self.merge / self.method.every + self.waited(step)

    def waited(self, step: Any) -> Any:
        """Return how many seconds nodes wait for fragments in a step, on average.

        `step` is the seconds of one node's step: a number or an array, and so is the result.
        """
        exposed = np.maximum(0.0, self.message - self.method.delay * step)
        return exposed * self.method.fragments / self.method.every


@dataclasses.dataclass(frozen=True)
class RoundBounds:
    """Lower bounds of a step in a round of local steps, on one device.

    Its properties and methods mean the same as those of `Bounds` with the same names.

    Attributes:
        step: the bounds of a step of one node by itself.
        gradient_bytes: bytes of the gradients, which are part of `step.memory`.
        cost: the memory and time that the rounds add.
    """

    step: Bounds
    gradient_bytes: int
    cost: RoundCost

    @property
    def gradients(self) -> float:
        """Seconds of computing gradients on a node, if computation and links overlap in full."""
        return self.step.gradients

    @property
    def memory(self) -> int:
        """Bytes of parameters, gradients, optimizer state and the arrays of the exchange."""
        return self.with_temporaries(0)

    @property
    def host_memory(self) -> int:
        """Bytes of a node's parameters, gradients and optimizer state in host memory."""
        return self.step.host_memory

    @property
    def seconds(self) -> float:
        """Mean seconds of a step of the round, in which gradients take `gradients` seconds."""
        return self.cost.step_seconds(self.step.seconds)

    @property
    def node_bytes(self) -> int:
        """Bytes that enter a node in a step, on average."""
        return round(self.cost.node_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes between device and host in a step, both ways."""
        return self.step.host_bytes

    @property
    def activations(self) -> Point | None:
        """The activations kept under a budget, as in `Bounds.activations`; None: no budget."""
        return self.step.activations

    @property
    def full_gradients(self) -> int:
        """Bytes of the gradients of all parameters, as if they were not split."""
        return self.step.full_gradients

    def predicted(self, gradients: Any, waited: float) -> tuple[Any, Any]:
        """Predict a step of the round from its gradients; see `Bounds.predicted`."""
        step, waited = self.step.predicted(gradients, waited)
        return self.cost.step_seconds(step), waited + self.cost.waited(step)

    def with_temporaries(self, num_bytes: Any) -> Any:
        """Return the bytes that a device holds, if computing gradients takes `num_bytes` more.

        `num_bytes` is an int or an array, and so is the result. If parameters are exchanged with a
        delay, fragments are sent while gradients are computed, and the bytes of both add up.
        Without a delay, fragments are sent between steps, and only the larger number counts.
        """
        between = self.cost.travelling
        during = self.gradient_bytes + num_bytes
        most = np.maximum(during, between) if self.cost.method.delay == 0 else during + between
        total = self.step.memory - self.gradient_bytes + self.cost.held + most
        return int(total) if isinstance(num_bytes, int) else total


def round_cost(
    job: Job, candidate: Candidate, mesh: Mesh | SimulatedMesh, rates: Rates
) -> RoundCost:
    """Return the memory and time that a candidate's local steps add, on a mesh of all nodes."""
    assert candidate.local_steps is not None
    rounds, _ = _rounds(job, candidate, mesh, candidate.local_steps)
    return RoundCost.of(candidate.local_steps, rounds.report(), rates)


def check_rounds(job: Job, candidate: Candidate, mesh: Mesh | SimulatedMesh) -> None:
    """Raise the error of `Zero.local_steps` if it refuses the candidate's loss.

    It refuses a loss with collectives over `node`, for instance. A round of one step is traced.
    """
    rounds, state = _rounds(job, candidate, mesh, LocalSteps(every=1))
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), job.batch)
    jax.eval_shape(rounds, state, stacked)


def _rounds(
    job: Job, candidate: Candidate, mesh: Mesh | SimulatedMesh, method: LocalSteps
) -> tuple[LocalRounds, Any]:
    """Return a candidate's rounds of local steps by `method`, and their state as structs.

    The steps of these rounds compute gradients and update nothing.
    """
    zero = Zero(mesh, candidate.config)
    params = zero.abstract(job.init_fn)
    options = {**job.options, "microbatches": candidate.microbatches}
    value_and_grad = zero.value_and_grad(job.losses[candidate.loss], **options)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
        value_and_grad(params, batch)
        return params, opt_state, {}

    rounds = zero.local_steps(step, method)
    return rounds, rounds.abstract(params, zero.init_optimizer(job.tx, params))
