"""Read a `PartitionSpec`: its axes, and the dim that is split over the mesh axes of ZeRO."""

from __future__ import annotations

from jax.sharding import PartitionSpec

from .._mesh import AXES


def axes_of(spec: PartitionSpec) -> list[str]:
    """The mesh axes that a spec names."""
    entries = [(entry,) if isinstance(entry, str) else entry for entry in spec if entry]
    return [axis for entry in entries for axis in entry]


def split_dim(spec: PartitionSpec) -> int | None:
    """The dim that a spec splits over `node` or `local`; None if it splits none."""
    for dim, entry in enumerate(spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        if any(name in AXES for name in names):
            return dim
    return None
