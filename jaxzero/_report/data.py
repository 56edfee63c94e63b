"""Hold the data of a report: the layout of each leaf, the traffic and the plan of a step.

Traffic is the number and bytes of the collectives of one optimizer step, for each axis and purpose,
and the bytes that one device copies from and to host memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from .._collectives import HostTransfer, Transfer
from .._mesh import AXES, LOCAL, TOKENS, AnyMesh
from .._plan import Plan
from .timeline import spans

PARTS = ("forward", "backward", "update")
OF_LEAVES = ("weights", "gradients", "fragments", "tangents")  # purposes of transfers
_REGIONS = {"before forward": "forward", "the end": "backward"}  # others are parts themselves


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of the parameters, gradients or optimizer state: its layout and its bytes."""

    kind: str  # "parameters", "gradients" or "optimizer state"
    path: str
    shape: tuple[int, ...]  # true shape
    dtype: str  # or the codec, if the leaf is stored encoded
    dim: int | None  # the split dim; None if replicated
    padding: int  # number of elements by which `dim` is padded
    total_bytes: int  # of the true shape
    device_bytes: int  # in the memory of one device, padding included; 0 if offloaded
    host_bytes: int = 0  # in host memory, for one device, padding included
    padding_layers: int = 0  # number of layers that pipeline stages pad a stack by


@dataclasses.dataclass(frozen=True)
class Amount:
    """The number and the bytes of some collectives of a step, such as those over one mesh axis.

    Attributes:
        collectives: number of collectives that run in one optimizer step.
        device_bytes: bytes that enter one device in one optimizer step.
        microbatch_bytes: bytes that enter one device in each micro-batch; with hpZ in each but the
            first, which gathers the node slices. 0 if there is only one micro-batch.
    """

    collectives: int
    device_bytes: int
    microbatch_bytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """All collectives of one optimizer step, with their bytes.

    Attributes:
        transfers: every collective of the program, in the order in which they are issued.
        num_local: devices of a node, including those along the axis `tokens`.
        axes: the mesh axes over which weights and gradients travel.
        slice_bytes: bytes of the node slices that one device keeps for the step (hpZ).
    """

    transfers: tuple[Transfer, ...]
    num_local: int
    slice_bytes: int
    axes: tuple[str, ...] = AXES

    @classmethod
    def of(cls, plan: Plan, mesh: AnyMesh) -> Traffic:
        """Make the traffic of a plan on a mesh."""
        axes = (*AXES, TOKENS) if TOKENS in mesh.shape else AXES
        num_local = mesh.shape[LOCAL] * mesh.shape.get(TOKENS, 1)
        return cls(plan.transfers, num_local, plan.slice_bytes, axes)

    def amount(self, wanted: Callable[[Transfer], bool] = lambda _: True) -> Amount:
        """Return the number and bytes of the collectives for which `wanted` is true."""
        return _sum([transfer for transfer in self.transfers if wanted(transfer)])

    @property
    def node_bytes(self) -> int:
        """Bytes that enter one node in one optimizer step, over all of its devices."""
        return sum(map(self.node_bytes_for, dict.fromkeys(t.purpose for t in self.transfers)))

    def node_bytes_for(self, purpose: str) -> int:
        """Return the part of `node_bytes` with one `Transfer.purpose`, such as "weights"."""
        some = (t for t in self.transfers if t.purpose == purpose)
        return self.num_local * sum(t.node_bytes * t.trips for t in some)

    @property
    def kinds(self) -> tuple[tuple[str, str, str, str], ...]:
        """The distinct `(purpose, axis, collective, dtype on the wire)` of all transfers."""
        return tuple(
            dict.fromkeys((t.purpose, t.axis, t.collective, t.dtype) for t in self.transfers)
        )

    def of_kind(self, kind: tuple[str, str, str, str]) -> Amount:
        """Return the number and bytes of all transfers of one of `kinds`."""
        return self.amount(lambda t: (t.purpose, t.axis, t.collective, t.dtype) == kind)

    @property
    def groups(self) -> tuple[str, ...]:
        """The parts of the model: paths of leaves, up to the first component that differs."""
        return tuple(dict.fromkeys(self._group(t) for t in self._by_leaf if t.purpose in OF_LEAVES))

    def of_group(self, group: str, axis: str) -> Amount:
        """Return the number and bytes of the collectives for one of `groups` over one mesh axis.

        A collective for leaves of several groups counts once in each group, with its bytes for the
        leaves of that group.
        """

        def belongs(t: Transfer) -> bool:
            return t.purpose in OF_LEAVES and t.axis == axis and self._group(t) == group

        some = [t for t in self._by_leaf if belongs(t)]
        involved = [t for t in self.transfers if any(belongs(part) for part in t.by_leaf())]
        return dataclasses.replace(_sum(some), collectives=_sum(involved).collectives)

    @functools.cached_property
    def _by_leaf(self) -> tuple[Transfer, ...]:
        return tuple(part for transfer in self.transfers for part in transfer.by_leaf())

    def _group(self, transfer: Transfer) -> str:
        shared = self._shared_components
        return ".".join(_components(transfer)[: shared + 1]) or "leaves stored whole"

    @functools.cached_property
    def _shared_components(self) -> int:
        paths = [_components(t) for t in self._by_leaf if t.purpose in OF_LEAVES and t.name]
        columns = zip(*(path[:-1] for path in paths), strict=False)
        return next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the traffic as dicts, lists, numbers and texts.

        It comes in total, by kind ("kinds"), by part of the model ("groups"), and by leaf
        ("leaves").
        """
        leaves: dict[tuple[str, str, str], list[Transfer]] = {}
        for part in self._by_leaf:
            leaves.setdefault((part.purpose, part.name, part.axis), []).append(part)
        return {
            "node_bytes": self.node_bytes,
            "slice_bytes": self.slice_bytes,
            **dataclasses.asdict(self.amount()),
            "kinds": [
                {
                    **dict(zip(("purpose", "axis", "collective", "dtype"), kind, strict=True)),
                    **dataclasses.asdict(self.of_kind(kind)),
                }
                for kind in self.kinds
            ],
            "groups": [
                {"name": group, "axis": axis, **dataclasses.asdict(self.of_group(group, axis))}
                for group in self.groups
                for axis in self.axes
            ],
            "leaves": [
                {
                    **dict(zip(("purpose", "name", "axis"), leaf, strict=True)),
                    **dataclasses.asdict(_sum(parts)),
                }
                for leaf, parts in leaves.items()
            ],
        }


def _sum(transfers: Sequence[Transfer]) -> Amount:
    return Amount(
        sum(t.trips for t in transfers),
        sum(t.entering_bytes * t.trips for t in transfers),
        sum(t.entering_bytes * t.trips // t.microbatches for t in transfers if t.microbatches),
    )


def _components(transfer: Transfer) -> list[str]:
    """Split the path of a leaf at its dots, without the `[i]` that marks a layer of a stack."""
    return transfer.name.replace("[i]", "").split(".")


def _part_of(x: HostTransfer) -> str:
    return "update" if x.purpose == "update" else _REGIONS.get(x.region, x.region)


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """The copies of one device from and to host memory in one optimizer step.

    Attributes:
        transfers: every copy of forward and backward, in the order in which they are issued; None
            without a plan of the step.
        update: bytes that the optimizer's update copies to the device, and bytes that it copies to
            the host. The update copies each offloaded gradient, parameter and leaf of the optimizer
            state to the device once, and parameters and optimizer state back. Not counted are the
            second copies of gradients, if the optimizer first takes a norm over all of them, and
            leaves that the plan updates in backward. None without optimizer state.
    """

    transfers: tuple[HostTransfer, ...] | None
    update: tuple[int, int] | None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a step whose copies are known, of "forward", "backward" and "update"."""
        known = () if self.transfers is None else PARTS[:2]
        return known if self.update is None else (*known, PARTS[2])

    def num_bytes(self, to: str, part: str | None = None) -> int:
        """Return the bytes that one device copies in one step, in one direction.

        Args:
            to: "device" for copies from host memory, "host" for copies to host memory.
            part: one of `parts`, in which the copies are issued; None: all parts.
        """
        if part is None:
            return sum(self.num_bytes(to, part) for part in self.parts)
        copied = sum(
            x.num_bytes * x.trips
            for x in self.transfers or ()
            if x.to == to and part == _part_of(x)
        )
        return copied + self.update[to == "host"] if part == "update" and self.update else copied

    @property
    def whole(self) -> tuple[HostTransfer, ...]:
        """The copies that move a full leaf at once, so that device memory must hold all of it."""
        return tuple(x for x in self.transfers or () if not x.windowed)

    def as_dict(self) -> dict[str, Any]:
        """Return the bytes of each part, and every copy of forward and backward, as plain data."""
        return {
            "parts": {
                part: {f"to_{to}": self.num_bytes(to, part) for to in ("device", "host")}
                for part in self.parts
            },
            "whole": list(dict.fromkeys(x.name for x in self.whole)),
            "copies": None
            if self.transfers is None
            else [{**dataclasses.asdict(x), "path": list(x.path)} for x in self.transfers],
        }


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The layout of a training job's state, and the traffic and plan of its step, as numbers."""

    num_devices: int
    rows: tuple[Row, ...]
    traffic: Traffic | None = None  # of one optimizer step, if a plan was given
    plan: Plan | None = None
    host_traffic: HostTraffic | None = None  # None if nothing is in host memory
    has_state: bool = False  # whether the optimizer state was given, which may have no arrays

    def device_bytes(self, kind: str) -> int:
        """Return the bytes of the rows of one `Row.kind` in the memory of one device."""
        return sum(row.device_bytes for row in self.rows if row.kind == kind)

    def host_bytes(self, kind: str) -> int:
        """Return the bytes of one `Row.kind` in host memory for one device of the host."""
        return sum(row.host_bytes for row in self.rows if row.kind == kind)

    def total_bytes(self, kind: str) -> int:
        """Return the bytes of one `Row.kind` if one device held it all, without padding."""
        return sum(row.total_bytes for row in self.rows if row.kind == kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.kind for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Return the full report as dicts, lists, numbers and strings that JSON can hold."""
        return {
            "num_devices": self.num_devices,
            "bytes": {
                kind: {
                    "total": self.total_bytes(kind),
                    "per_device": self.device_bytes(kind),
                    "host_per_device": self.host_bytes(kind),
                }
                for kind in self.kinds
            },
            "leaves": [dataclasses.asdict(row) for row in self.rows],
            "traffic": None if self.traffic is None else self.traffic.as_dict(),
            "host_traffic": None if self.host_traffic is None else self.host_traffic.as_dict(),
            "timeline": [dataclasses.asdict(x) for x in spans(self.plan)] if self.plan else None,
        }
