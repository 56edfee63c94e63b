"""Bytes that a move sends and holds, device by device, and the least that any method would send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from .digits import groups
from .move import Move, pairs
from .steps import Step
from .windowed import WindowedMove

AnyMove = Move | WindowedMove
Boxes = Sequence[tuple[slice, ...]]


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that enter devices, by where they come from; the largest over nodes and devices.

    Attributes:
        into_node: bytes from other nodes into the devices of one node.
        into_device: bytes from other devices, of whichever node, into one device.
    """

    into_node: int
    into_device: int

    @classmethod
    def of(cls, from_others: np.ndarray, from_nodes: np.ndarray, nodes: np.ndarray) -> Sent:
        """The largest sums, of bytes for each device from other devices, and from other nodes."""
        each = np.bincount(nodes, weights=from_nodes)
        return cls(int(round(each.max())), int(round(from_others.max())))


def sent_by(move: AnyMove, mesh: Mesh, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each device, the bytes that it gets from other devices, and those from other nodes.

    Args:
        move: the move.
        mesh: the digits of the devices.
        nodes: the node of each device, in the order of `mesh`.
    """
    others, outside = np.zeros(mesh.size), np.zeros(mesh.size)
    message_bytes = move.message.size * move.message.dtype.itemsize
    if isinstance(move, WindowedMove):
        held = message_bytes * move.num_windows
        for hop in move.hops:
            _add_group(others, outside, held, hop, mesh, nodes)
            held *= math.prod(mesh.shape[digit] for digit in hop)
        return others, outside
    held = message_bytes * math.prod(move.grid(move.route.source))
    for step in move.steps:
        num = math.prod(mesh.shape[digit] for digit in step.digits)
        if step.kind == "slice":
            held //= num
        elif step.kind == "permute":
            _add_pairs(others, outside, held, step, mesh, nodes)
        else:
            part = held if step.kind == "gather" else held // num
            _add_group(others, outside, part, step.digits, mesh, nodes)
            held *= num if step.kind == "gather" else 1
    return others, outside


def _add_group(
    others: np.ndarray,
    outside: np.ndarray,
    part: int,
    digits: tuple[str, ...],
    mesh: Mesh,
    nodes: np.ndarray,
) -> None:
    """Add that each device of a group gets `part` bytes from each of the others."""
    for group in groups(digits, mesh):
        differ = nodes[group][:, None] != nodes[group][None]
        others[group] += part * (len(group) - 1)
        outside[group] += part * differ.sum(axis=1)


def _add_pairs(
    others: np.ndarray,
    outside: np.ndarray,
    part: int,
    step: Step,
    mesh: Mesh,
    nodes: np.ndarray,
) -> None:
    for group in groups(step.digits, mesh):
        for source, target in pairs(step, mesh):
            others[group[target]] += part * (source != target)
            outside[group[target]] += part * (nodes[group[source]] != nodes[group[target]])


def least_elements(
    shape: tuple[int, ...], before: Boxes, after: Boxes, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Elements that must enter each device from others, and each node from other nodes.

    Args:
        shape: of the array.
        before: the part of the array that each device has, padding cut off.
        after: the part that each device is to have.
        nodes: the node of each device.
    """
    cuts = [
        sorted({0, size} | {int(x) for box in [*before, *after] for x in _ends(box[dim], size)})
        for dim, size in enumerate(shape)
    ]
    weight = np.ones((), np.int64)
    for edges in cuts:
        weight = weight[..., None] * np.diff(edges)
    had = [_cells(box, cuts, shape) for box in before]
    asked = [_cells(box, cuts, shape) for box in after]
    into_devices = [(weight * (x & ~y)).sum() for x, y in zip(asked, had, strict=True)]
    into_nodes = []
    for node in range(int(nodes.max()) + 1):
        members = np.flatnonzero(nodes == node)
        need = np.logical_or.reduce([asked[i] for i in members])
        own = np.logical_or.reduce([had[i] for i in members])
        into_nodes.append((weight * (need & ~own)).sum())
    return np.array(into_devices), np.array(into_nodes)


def _ends(s: slice, size: int) -> tuple[int, int]:
    start, stop, _ = s.indices(size)
    return start, max(start, stop)


def _cells(box: tuple[slice, ...], cuts: list[list[int]], shape: tuple[int, ...]) -> np.ndarray:
    cells = np.ones((), bool)
    for s, edges, size in zip(box, cuts, shape, strict=True):
        start, stop = _ends(s, size)
        low = np.array(edges[:-1])
        cells = cells[..., None] & ((low >= start) & (low < stop))
    return cells


def held_bytes(move: AnyMove, mesh: Mesh) -> int:
    """A bound on what the program of a move holds at once, besides its argument and its result."""
    result = math.prod(move.target_block) * np.dtype(move.dtype).itemsize
    if isinstance(move, WindowedMove):
        num = math.prod(mesh.shape[digit] for hop in move.hops for digit in hop)
        window = num * move.height * move.row_size * np.dtype(move.dtype).itemsize
        return 2 * result + 3 * window + _decoded_shard(move)
    if not move.steps:
        return _decoded_shard(move)
    piece = move.message.size * move.message.dtype.itemsize
    first = held = piece * math.prod(move.grid(move.route.source))
    most = 0
    for step in move.steps:
        num = math.prod(mesh.shape[digit] for digit in step.digits)
        before = held
        held = {"slice": held // num, "gather": held * num}.get(step.kind, held)
        most = max(most, before + held)
    return max(most, first + result) + _decoded_shard(move)


def _decoded_shard(move: AnyMove) -> int:
    """Bytes of a shard in the type that is sent, where it is not sent as it is stored."""
    if move.leaf.codec is None and move.codec is None and move.dtype == move.leaf.dtype:
        return 0
    num = math.prod(move.leaf.padded_shape)
    parts = move.leaf.layout.num_shards if move.leaf.layout else 1
    return num // parts * np.dtype(move.dtype).itemsize
