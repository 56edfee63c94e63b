"""The copies between host memory and device memory in one optimizer step, on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._collectives import HostTransfer

PARTS = ("forward", "backward", "update")
_REGIONS = {"before forward": "forward", "the end": "backward"}  # others are parts themselves


def _part_of(x: HostTransfer) -> str:
    return "update" if x.purpose == "update" else _REGIONS.get(x.region, x.region)


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """What one device copies from and to host memory in one optimizer step.

    Attributes:
        transfers: every copy of forward and backward, in the order it was issued; None without a
            plan of the step.
        update: bytes that the optimizer's update copies to the device, and to the host: each
            offloaded gradient, parameter and leaf of the optimizer state to the device once, and
            the last two back. An optimizer that first takes a norm over all gradients reads them
            once more. Leaves that the plan updates in backward are left out. None without
            optimizer state.
    """

    transfers: tuple[HostTransfer, ...] | None
    update: tuple[int, int] | None

    @property
    def parts(self) -> tuple[str, ...]:
        """Of "forward", "backward" and "update" those that are known."""
        known = () if self.transfers is None else PARTS[:2]
        return known if self.update is None else (*known, PARTS[2])

    def num_bytes(self, to: str, part: str | None = None) -> int:
        """Bytes that one device copies in one step.

        Args:
            to: "device", from host memory; or "host", to it.
            part: one of `parts`, by when a copy is issued; by default all of them.
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
        """The copies of a full leaf at once, which therefore lies in device memory in full."""
        return tuple(x for x in self.transfers or () if not x.windowed)

    def as_dict(self) -> dict[str, Any]:
        """The bytes of each part, and every copy of forward and backward, as plain data."""
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
