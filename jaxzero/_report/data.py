"""The data of a report: the layout of each leaf, the traffic and the plan of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._plan import Plan
from .host_traffic import HostTraffic
from .timeline import spans
from .traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf: how it is split, and its bytes."""

    kind: str  # "parameters", "gradients" or "optimizer state"
    path: str
    shape: tuple[int, ...]  # true shape
    dtype: str  # or the codec, if the leaf is stored encoded
    dim: int | None  # the split dim; None if replicated
    padding: int  # number of elements by which `dim` is padded
    total_bytes: int  # of the true shape
    device_bytes: int  # in the memory of one device, padding included; 0 if offloaded
    host_bytes: int = 0  # in host memory, for one device, padding included


@dataclasses.dataclass(frozen=True)
class ReportData:
    """The layout of a training job's state, and what a step of it sends, as numbers."""

    num_devices: int
    rows: tuple[Row, ...]
    traffic: Traffic | None = None  # of one optimizer step, if a plan was given
    plan: Plan | None = None
    host_traffic: HostTraffic | None = None  # None if nothing is in host memory
    has_state: bool = False  # whether the optimizer state was given, which may have no arrays

    def device_bytes(self, kind: str) -> int:
        """Bytes of `kind` in the memory of one device."""
        return sum(row.device_bytes for row in self.rows if row.kind == kind)

    def host_bytes(self, kind: str) -> int:
        """Bytes of `kind` in host memory for one device; a host has those of all its devices."""
        return sum(row.host_bytes for row in self.rows if row.kind == kind)

    def total_bytes(self, kind: str) -> int:
        """Bytes of `kind` if one device held it all, without padding."""
        return sum(row.total_bytes for row in self.rows if row.kind == kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.kind for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """The full report as dicts, lists, numbers and strings, such as for JSON."""
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
