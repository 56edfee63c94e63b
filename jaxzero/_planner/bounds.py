"""Lower bounds of a candidate's memory and time, by arithmetic: nothing is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .._report import Report
from .cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a step takes at least, on one device.

    Attributes:
        memory: bytes of parameters, gradients, optimizer state and wire state.
        host_memory: bytes of them in host memory.
        compute: seconds of its matrix products.
        node: seconds of what enters its node.
        local: seconds of what it receives.
        update: seconds of the optimizer's update, which reads and writes all of these.
        node_bytes: bytes that enter a node.
        host_bytes: bytes between device and host, both ways.
    """

    memory: int
    host_memory: int
    compute: float
    node: float
    local: float
    update: float
    node_bytes: int
    host_bytes: int

    @property
    def seconds(self) -> float:
        """Of a step, if everything but the update overlapped."""
        return max(self.compute, self.node, self.local) + self.update

    def predicted(self, gradients: float, waited: float) -> tuple[float, float]:
        """Seconds of a step, and those of it that a device waits for links.

        Args:
            gradients: seconds of the program of the gradients.
            waited: seconds of it.
        """
        return gradients + self.update, waited

    def with_temporaries(self, num_bytes: int) -> int:
        """Bytes of one device, if the program of the gradients has such temporaries."""
        return self.memory + num_bytes


def bounds_of(report: Report, wire_state: Any, flops: float, cluster: Cluster) -> Bounds:
    """The bounds of a candidate.

    Args:
        report: of the candidate's arrays and plan.
        wire_state: its wire state, as structs; None if it needs none.
        flops: operations of all matrix products of a step, over all devices.
        cluster: gives the rates.
    """
    rates, traffic = cluster.rates, report.traffic
    assert traffic is not None
    held = sum(report.device_bytes(kind) for kind in report.kinds)
    if wire_state is not None:  # node slices are split inside a node, residuals over all devices
        held += _num_bytes(wire_state.slices) // cluster.local
        held += _num_bytes(wire_state.errors) // cluster.num_devices
    in_host = sum(report.host_bytes(kind) for kind in report.kinds)
    moved = sum(report.device_bytes(kind) for kind in ("parameters", "optimizer state")) * 2
    moved += report.device_bytes("gradients")
    host = report.host_traffic
    update, host_bytes = moved / rates.memory, 0
    if host is not None:
        read, written = host.update or (0, 0)
        update = max(update, read / rates.host, written / rates.host)
        host_bytes = host.num_bytes("device") + host.num_bytes("host")
    received = traffic.amount().device_bytes
    return Bounds(
        memory=held,
        host_memory=in_host,
        compute=flops / cluster.num_devices / rates.flops,
        node=traffic.node_bytes / rates.node,
        local=received / rates.local,
        update=update,
        node_bytes=traffic.node_bytes,
        host_bytes=host_bytes,
    )


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
