"""Steps between devices of one process of CPUs, which read each other's memory.

Each takes the pieces of devices, by their number in the mesh, and gives those after the step. Where
a step is a collective, the devices must hold all of its groups that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from .digits import groups
from .move import from_all, from_parts, pairs, parts_of, row_of
from .steps import Step

Pieces = dict[int, Shaped[Array, "..."]]


def take(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    """The pieces of devices after a step."""
    return _TAKE[step.kind](step, pieces, mesh)


def needed(devices: Iterable[int], steps: tuple[Step, ...], mesh: Mesh) -> set[int]:
    """The devices whose pieces decide what `devices` have after the steps."""
    found = set(devices)
    for step in reversed(steps):
        if step.kind != "slice":
            found = {i for group in _groups_of(step, found, mesh) for i in group}
    return found


def _groups_of(step: Step, devices: Iterable[int], mesh: Mesh) -> list[list[int]]:
    found = set(devices)
    return [group for group in groups(step.digits, mesh).tolist() if found.intersection(group)]


def _slice(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    made = {}
    for number, x in pieces.items():
        place = np.unravel_index(number, tuple(mesh.shape.values()))
        for digit, factor in zip(step.digits, step.after, strict=True):
            assert factor is not None
            index = int(place[mesh.axis_names.index(digit)])
            x = lax.slice_in_dim(x, index, index + 1, axis=factor)
        made[number] = x
    return made


def _exchange(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    made = {}
    for group in _groups_of(step, pieces, mesh):
        parts = [parts_of(pieces[i], step) for i in group]
        for place, number in enumerate(group):
            received = jnp.stack([part[place] for part in parts])
            made[number] = from_parts(received, step, mesh)
    return made


def _gather(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    made = {}
    for group in _groups_of(step, pieces, mesh):
        full = from_all(jnp.stack([row_of(pieces[i], step) for i in group]), step, mesh)
        made |= dict.fromkeys(group, full)
    return made


def _permute(step: Step, pieces: Pieces, mesh: Mesh) -> Pieces:
    made = {}
    for group in _groups_of(step, pieces, mesh):
        made |= {group[to]: pieces[group[source]] for source, to in pairs(step, mesh)}
    return made


_TAKE: dict[str, Callable[[Step, Pieces, Mesh], Pieces]] = {
    "slice": _slice,
    "exchange": _exchange,
    "gather": _gather,
    "permute": _permute,
}
