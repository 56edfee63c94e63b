"""The traffic of one optimizer step: bytes for each axis and purpose, and number of collectives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from .._collectives import Transfer
from .._mesh import AXES, LOCAL, AnyMesh
from .._plan import Plan


@dataclasses.dataclass(frozen=True)
class Amount:
    """Number and bytes of some of a step's collectives, such as those over one mesh axis.

    Attributes:
        collectives: number of collectives that run in one optimizer step.
        device_bytes: bytes that enter one device in one optimizer step.
        microbatch_bytes: bytes that enter one device in each micro-batch; with hpZ in each but the
            first, in which the node slices are gathered. 0 if there is only one micro-batch.
    """

    collectives: int
    device_bytes: int
    microbatch_bytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Everything that one optimizer step sends.

    Attributes:
        transfers: every collective of the program, in the order it was issued.
        num_local: devices of a node.
        slice_bytes: bytes of the node slices that one device keeps for the step (hpZ).
    """

    transfers: tuple[Transfer, ...]
    num_local: int
    slice_bytes: int

    @classmethod
    def of(cls, plan: Plan, mesh: AnyMesh) -> Traffic:
        """The traffic of a plan for `mesh`."""
        return cls(plan.transfers, mesh.shape[LOCAL], plan.slice_bytes)

    def amount(self, wanted: Callable[[Transfer], bool] = lambda _: True) -> Amount:
        """Number and bytes of the collectives for which `wanted` is true; by default of all."""
        return _sum([transfer for transfer in self.transfers if wanted(transfer)])

    @property
    def node_bytes(self) -> int:
        """Bytes that enter one node in one optimizer step, over all of its devices."""
        return self.num_local * sum(t.node_bytes * t.trips for t in self.transfers)

    def node_bytes_for(self, purpose: str) -> int:
        """The part of `node_bytes` that is for "weights", "gradients", "tangents" or "other"."""
        some = (t for t in self.transfers if t.purpose == purpose)
        return self.num_local * sum(t.node_bytes * t.trips for t in some)

    @property
    def kinds(self) -> tuple[tuple[str, str, str, str], ...]:
        """The distinct `(purpose, axis, collective, dtype on the wire)` of all transfers."""
        return tuple(
            dict.fromkeys((t.purpose, t.axis, t.collective, t.dtype) for t in self.transfers)
        )

    def of_kind(self, kind: tuple[str, str, str, str]) -> Amount:
        """The amount of all transfers of one of `kinds`."""
        return self.amount(lambda t: (t.purpose, t.axis, t.collective, t.dtype) == kind)

    @property
    def groups(self) -> tuple[str, ...]:
        """The parts of the model that leaves belong to: where their paths begin to differ."""
        return tuple(dict.fromkeys(self._group(t) for t in self._by_leaf if t.purpose != "other"))

    def of_group(self, group: str, axis: str) -> Amount:
        """The amount of the weights and gradients of one of `groups`, on one axis.

        A collective for leaves of several groups counts in each of them.
        """

        def belongs(t: Transfer) -> bool:
            return t.purpose != "other" and t.axis == axis and self._group(t) == group

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
        paths = [_components(t) for t in self._by_leaf if t.purpose != "other" and t.name]
        columns = zip(*(path[:-1] for path in paths), strict=False)
        return next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)

    def as_dict(self) -> dict[str, Any]:
        """The traffic as plain data: in total, by kind, by part of the model, and by leaf."""
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
                for axis in AXES
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
