"""Check, before anything is compiled, that arrays can be put into host memory and fit there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import Mesh

from .._host_memory import available_bytes
from .._mesh import HOST, STAGE, TOKENS, AnyMesh, SimulatedMesh, physical
from .._sharding import LeafSpec, Offload, TreeLayout, axes_of

_GIB = 2**30


def check_platform(mesh: AnyMesh, asked_by: str = "`offload`") -> None:
    """Raise `NotImplementedError` if the devices of `mesh` have no pinned host memory."""
    if isinstance(mesh, SimulatedMesh):
        raise NotImplementedError(
            f"{asked_by} needs real devices, and `mesh` simulates them on one. Leave it out: "
            "losses and gradients are the same without."
        )
    device = physical(mesh).local_devices[0] if physical(mesh).local_devices else None
    # The devices of a topology, for which programs are compiled ahead of time, list no memories.
    memories = [] if device is None else device.addressable_memories()
    if memories and HOST not in (memory.kind for memory in memories):
        raise NotImplementedError(
            f"{asked_by} needs devices with the memory kind {HOST!r}; {device} has "
            f"{', '.join(repr(memory.kind) for memory in memories)}."
        )


def check_offloaded(offload: Offload, layout: TreeLayout, matched: set[str]) -> None:
    """Check that a tree can be offloaded, and that each pattern has matched a leaf so far.

    Args:
        offload: has the patterns.
        layout: the layout of a parameter tree.
        matched: the patterns that matched a leaf of an earlier tree. The patterns that match a leaf
            of this tree are added. So adapters (LoRA) may be sharded after the weights that the
            patterns are for.

    Raises:
        ValueError: a pattern has matched no leaf of this tree or an earlier one.
        NotImplementedError: `specs` splits a leaf over further mesh axes.
    """
    paths = [leaf.path for leaf in layout.leaves]
    for role in ("weights", "gradients", "optimizer"):
        for pattern in offload.patterns(role):
            if any(offload.matches(pattern, path) for path in paths):
                matched.add(pattern)
            elif pattern not in matched:
                known = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
                raise ValueError(
                    f"`{role}` of `Offload` has the pattern {pattern!r}, which matches no leaf of "
                    f"this tree; its leaves are {known}. If it is for another tree, shard that one "
                    "first."
                )
    if any({*axes_of(leaf.other_axes)} - {STAGE, TOKENS} for leaf in layout.leaves):
        raise NotImplementedError(
            "`specs` splits leaves over further mesh axes, which `offload` cannot do yet. Leave "
            "out one of the two."
        )


def host_bytes(leaves: Sequence[LeafSpec], mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Return how many bytes of host memory the offloaded leaves take in this process."""
    held = sum(leaf.shard_bytes(mesh, axes) for leaf in leaves if leaf.memory_kind == HOST)
    return held * len(mesh.local_devices)


def check_room(what: str, leaves: Sequence[LeafSpec], mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Raise `MemoryError` if the host has not enough memory left for the offloaded leaves.

    Args:
        what: the name of the tree, for the error.
        leaves: the layouts of the tree's leaves.
        mesh: the mesh that the leaves are on.
        axes: the mesh axes that split the leaves.
    """
    check_host_bytes(what, host_bytes(leaves, mesh, axes))


def check_host_bytes(what: str, needed: int) -> None:
    """Raise `MemoryError` if the host has fewer than `needed` bytes of memory left for `what`."""
    free = available_bytes()
    if free is not None and needed > free:
        raise MemoryError(
            f"The offloaded {what} would take {needed / _GIB:.1f} GiB of this host's memory, which "
            f"has {free / _GIB:.1f} GiB left. Offload fewer leaves, or take more hosts."
        )


def in_parts(leaves: Sequence[LeafSpec], mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Group the leaves of a tree that is to be made on devices: one program makes one group.

    Returns the indices of the leaves in each group.

    The first group is all leaves in device memory. Offloaded leaves are on the device while they
    are made, so their groups are small: at most 1 GiB on a device, or a single larger leaf.
    """
    groups: list[list[int]] = [[i for i, x in enumerate(leaves) if x.memory_kind != HOST]]
    filled = math.inf
    for i, leaf in enumerate(leaves):
        if leaf.memory_kind == HOST:
            size = host_bytes([leaf], mesh, axes) // max(1, len(mesh.local_devices))
            if filled + size > _GIB:
                groups.append([])
                filled = 0
            groups[-1].append(i)
            filled += size
    return [group for group in groups if group]
