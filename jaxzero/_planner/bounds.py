"""Compute lower bounds of a plan's memory and step time by arithmetic, without compiling it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._activations import Point
from .._hlo import Rates
from .._report import Report
from .cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Lower bounds of the time and memory of a step on one device.

    Attributes:
        memory: bytes of parameters, gradients, optimizer state and wire state in device memory.
        host_memory: bytes of parameters, gradients and optimizer state in host memory.
        compute: seconds of the matrix products.
        node: seconds that the links into a node take for the step's bytes.
        local: seconds that the links into a device take for the step's bytes.
        update: seconds of the optimizer's update. It reads gradients, and reads and writes
            parameters and optimizer state. In stages 1 and 2 it also gathers the parameters.
        node_bytes: bytes that enter a node, in gradients and update together.
        host_bytes: bytes between device and host, both ways.
        full_gradients: bytes of the gradients of all parameters, as if they were not split.
        activations: under a budget of activations, the bytes that are kept, the seconds in which
            all micro-batches repeat the operations whose results are dropped, and the bytes that
            backward of one layer reads; None: no budget.
    """

    memory: int
    host_memory: int
    compute: float
    node: float
    local: float
    update: float
    node_bytes: int
    host_bytes: int
    full_gradients: int
    activations: Point | None = None

    @property
    def gradients(self) -> float:
        """Seconds of computing gradients, if computation and both kinds of links overlap fully."""
        return max(self.compute, self.node, self.local)

    @property
    def seconds(self) -> float:
        """Seconds of a step: of `gradients`, and then of the update."""
        return self.gradients + self.update

    def predicted(self, gradients: Any, waited: float) -> tuple[Any, Any]:
        """Predict a step from the program of its gradients.

        Args:
            gradients: seconds of that program: a number, or an array of draws.
            waited: seconds of these in which a device waits for links.

        Returns:
            Seconds of the step, as a number or an array like `gradients`; and the seconds of the
            step in which a device waits for links.
        """
        return gradients + self.update, waited

    def with_temporaries(self, num_bytes: Any) -> Any:
        """Return the bytes that a device holds, if computing gradients takes `num_bytes` more.

        `num_bytes` is an int or an array, and so is the result.
        """
        return self.memory + num_bytes


@dataclasses.dataclass(frozen=True)
class Work:
    """The operations and bytes of a step on one device; `bounds` divides them by rates.

    Attributes:
        memory: bytes of parameters, gradients, optimizer state and wire state in device memory.
        host_memory: bytes of these arrays in host memory.
        flops: operations of the device's matrix products.
        node_bytes: bytes that enter the device's node to compute gradients.
        received: bytes that the device receives to compute gradients.
        updated: bytes of device memory that the optimizer's update reads and writes.
        host_read: bytes of host memory that the update reads.
        host_written: bytes of host memory that the update writes.
        host_bytes: bytes between device and host in a step, both ways.
        full_gradients: bytes of the gradients of all parameters, as if they were not split.
        gathered_between: bytes of parameters that enter the node after the update.
        gathered_inside: bytes of parameters that the device receives from its node after the
            update.
    """

    memory: int
    host_memory: int
    flops: float
    node_bytes: int
    received: int | float
    updated: int
    host_read: int
    host_written: int
    host_bytes: int
    full_gradients: int
    gathered_between: float = 0.0
    gathered_inside: float = 0.0

    @classmethod
    def of(
        cls, report: Report, wire_state: Any, flops: float, cluster: Cluster, stage: int
    ) -> Work:
        """Return the work of a candidate plan, from the report of its arrays and messages.

        Args:
            report: the report of the candidate's arrays and of its plan.
            wire_state: the candidate's wire state, as structs; None if it needs none.
            flops: operations of all matrix products of a step, over all devices.
            cluster: the devices.
            stage: the ZeRO stage of the candidate's config.
        """
        traffic, host = report.traffic, report.host_traffic
        assert traffic is not None
        held = sum(report.device_bytes(kind) for kind in report.kinds)
        if wire_state is not None:  # node slices are split in a node, residuals over all devices
            held += _num_bytes(wire_state.slices) // cluster.local
            held += _num_bytes(wire_state.errors) // cluster.num_devices
        # Gradients are read; parameters and state are read and written.
        updated = sum(report.device_bytes(kind) for kind in ("parameters", "optimizer state")) * 2
        read, written = (host.update if host else None) or (0, 0)
        gathered = report.device_bytes("parameters") if stage in (1, 2) else 0
        return cls(
            memory=held,
            host_memory=sum(report.host_bytes(kind) for kind in report.kinds),
            flops=flops / cluster.num_devices,
            node_bytes=traffic.node_bytes,
            received=traffic.amount().device_bytes,
            updated=updated + report.device_bytes("gradients"),
            host_read=read,
            host_written=written,
            host_bytes=host.num_bytes("device") + host.num_bytes("host") if host else 0,
            full_gradients=sum(x.total_bytes for x in report.rows if x.kind == "gradients"),
            gathered_between=gathered * (cluster.nodes - 1) / cluster.nodes,
            gathered_inside=gathered * (cluster.local - 1) / cluster.local,
        )

    def bounds(self, rates: Rates) -> Bounds:
        """Return the lower bounds of a step with this work, on devices and links of given rates."""
        return Bounds(
            memory=self.memory,
            host_memory=self.host_memory,
            compute=self.flops / rates.flops,
            node=self.node_bytes / rates.node,
            local=self.received / rates.local,
            update=max(
                self.updated / rates.memory,
                max(self.host_read, self.host_written) / rates.host,
            )
            + max(self.gathered_between / rates.node, self.gathered_inside / rates.local),
            node_bytes=self.node_bytes + round(self.gathered_between),
            host_bytes=self.host_bytes,
            full_gradients=self.full_gradients,
        )


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
