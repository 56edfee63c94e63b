"""Count the bytes that a `reshard` will send over each kind of link, and hold (`ReshardReport`).

The bytes that enter each device are compared with the least bytes that any method would send.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._collectives import readable_bytes
from .._report import TextTable
from .._sharding import LeafSpec
from .move import Move, pairs
from .resharding import Resharding, held_bytes, known, plain_spec, spec_without_padding
from .steps import MoveStep, groups

Boxes = Sequence[tuple[slice, ...]]


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """The move of one array of the tree: its collectives and its bytes.

    Attributes:
        path: the array's place in the tree.
        shape: the array's shape.
        how: the collectives that move the array to its new sharding, in words and in order.
        into_node: bytes of the array that enter a node from other nodes, over all of its devices.
        into_device: bytes of the array that enter a device from other devices.
        device_bytes: bytes of one device's part of the result.
    """

    path: str
    shape: tuple[int, ...]
    how: str
    into_node: int
    into_device: int
    device_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardReport:
    """The bytes that a `reshard` sends and holds; `print` it.

    Bytes that enter a node, or a device, are those of the node or device that gets most. Arrays
    that `jax.device_put` moves, and arrays without elements, are not counted (`num_uncounted`).

    Attributes:
        leaves: one row for each array.
        into_node: bytes that enter a node from other nodes.
        least_into_node: a lower bound of `into_node` for any method with the same encoding: the
            bytes that the node's devices need and none of them has.
        into_device: bytes that enter a device from other devices of any node.
        least_into_device: a lower bound of `into_device` for any method with the same encoding: the
            bytes that the device needs and does not have.
        source_bytes: bytes of the arrays to move, on one device.
        result_bytes: bytes of the result, on one device.
        program_bytes: the most bytes that a program holds on a device besides its arguments and
            results.
        windows: the number of programs.
        largest_leaf_bytes: bytes of the largest array of the result, if a device had it in full.
        num_uncounted: the number of arrays that `jax.device_put` moves.
    """

    leaves: tuple[LeafReport, ...]
    into_node: int
    least_into_node: int
    into_device: int
    least_into_device: int
    source_bytes: int
    result_bytes: int
    program_bytes: int
    windows: int
    largest_leaf_bytes: int
    num_uncounted: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds at once, including the arrays to move."""
        return self.source_bytes + self.result_bytes + self.program_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers that JSON can hold."""
        return {**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        counted = len(self.leaves) - self.num_uncounted
        sent = TextTable(
            title=f"Reshard: {len(self.leaves)} arrays by {self.windows} programs",
            headings=("Bytes", "each device", "lower bound"),
            rows=[
                *(
                    _compared(name, sent, least) if counted else (name, "not counted", "")
                    for name, sent, least in (
                        ("into a node, from other nodes", self.into_node, self.least_into_node),
                        ("into a device", self.into_device, self.least_into_device),
                    )
                ),
                ("held: source", readable_bytes(self.source_bytes), ""),
                ("held: result", readable_bytes(self.result_bytes), ""),
                ("held: by a program, at most", readable_bytes(self.program_bytes), ""),
                ("held: in all, at most", readable_bytes(self.peak_bytes), ""),
            ],
            footer=(
                f"`jax.device_put` moves {self.num_uncounted} of these arrays: the bytes that it "
                "sends are not counted.",
            )
            if self.num_uncounted
            else (),
        )
        leaves = TextTable(
            headings=("Array", "Shape", "How", "into node", "into device"),
            rows=[
                (
                    x.path,
                    str(list(x.shape)),
                    x.how,
                    readable_bytes(x.into_node),
                    readable_bytes(x.into_device),
                )
                for x in self.leaves
            ],
        )
        return "\n".join([*sent.lines(100), "", *leaves.lines(100)])


def _compared(name: str, sent: int, least: int) -> tuple[str, str, str]:
    part = f" ({least / sent:.0%})" if sent else ""
    return name, readable_bytes(sent), readable_bytes(least) + part


def make_report(resharding: Resharding) -> ReshardReport:
    """Count the bytes that a resharding sends and holds."""
    mesh, nodes = resharding.digits.mesh, resharding.nodes
    sent, least = np.zeros((2, mesh.size)), (np.zeros(mesh.size), np.zeros(nodes.max() + 1))
    rows, copies = [], [0]  # bytes of arrays without their padding, before `jax.device_put`
    for leaf, source, target, move in zip(
        resharding.leaves, resharding.sources, resharding.targets, resharding.moves, strict=True
    ):
        result = math.prod(target.shard_shape(leaf.shape))
        if move is None:
            size = result * leaf.dtype.itemsize
            rows.append(LeafReport(leaf.path, leaf.shape, "jax.device_put", 0, 0, size))
            own = NamedSharding(source.mesh, spec_without_padding(leaf, source))
            copies.append(math.prod(own.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
            continue
        others, outside = sent_by(move, mesh, nodes)
        sent += np.stack([others, outside])
        for total, more in zip(least, _least(leaf, source, target, move, resharding), strict=True):
            total += more
        size = result * move.dtype.itemsize
        most = _most(others, outside, nodes)
        rows.append(LeafReport(leaf.path, leaf.shape, how(move), *most, size))
    into_node, into_device = _most(sent[0], sent[1], nodes)
    return ReshardReport(
        leaves=tuple(rows),
        into_node=into_node,
        least_into_node=int(least[1].max()),
        into_device=into_device,
        least_into_device=int(least[0].max()),
        source_bytes=sum(
            _held(x, y) for x, y in zip(resharding.leaves, resharding.sources, strict=True)
        ),
        result_bytes=sum(x.device_bytes for x in rows),
        program_bytes=max(
            [
                *copies,
                *(sum(held_bytes(move, mesh) for move in moves) for moves in resharding.programs),
            ]
        ),
        windows=len(resharding.windows),
        largest_leaf_bytes=max(
            (
                math.prod(leaf.shape) * (move.dtype if move else leaf.dtype).itemsize
                for leaf, move in zip(resharding.leaves, resharding.moves, strict=True)
            ),
            default=0,
        ),
        num_uncounted=sum(move is None for move in resharding.moves),
    )


def _held(leaf: LeafSpec, source: NamedSharding) -> int:
    return math.prod(source.shard_shape(leaf.stored_shape)) * leaf.stored.dtype.itemsize


def _least(
    leaf: LeafSpec,
    source: NamedSharding,
    target: NamedSharding,
    move: Move,
    resharding: Resharding,
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each device and for each node, the least bytes that must enter to move an array.

    Elements are counted in the encoding in which the move sends them.

    Args:
        leaf: the layout of the stored array.
        source: the sharding of the stored array.
        target: the sharding of the result.
        move: the array's move.
        resharding: has the devices and their nodes.
    """
    devices = list(resharding.digits.mesh.devices.flat)
    plain = NamedSharding(source.mesh, plain_spec(leaf, source))
    had, asked = (
        [known(indices[device]) for device in devices]
        for indices in (
            plain.devices_indices_map(leaf.padded_shape),
            target.devices_indices_map(leaf.shape),
        )
    )
    into_devices, into_nodes = least_elements(leaf.shape, had, asked, resharding.nodes)
    message = move.message
    bytes_per_element = message.size * message.dtype.itemsize / max(1, math.prod(move.inner))
    return into_devices * bytes_per_element, into_nodes * bytes_per_element


def _most(others: np.ndarray, outside: np.ndarray, nodes: np.ndarray) -> tuple[int, int]:
    """Return the most bytes that enter a node, and the most bytes that enter a device.

    Args:
        others: for each device, bytes from other devices of any node.
        outside: for each device, bytes from devices of other nodes.
        nodes: the node of each device.
    """
    return round(np.bincount(nodes, weights=outside).max()), round(others.max())


def sent_by(move: Move, mesh: Mesh, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each device, the bytes that it gets from other devices, and from other nodes.

    Args:
        move: the move.
        mesh: the devices, with an axis for each digit of their coordinates (`Digits.mesh`).
        nodes: the node of each device, in the order of `mesh`.
    """
    others, outside = np.zeros(mesh.size), np.zeros(mesh.size)
    held = move.message.size * move.message.dtype.itemsize * move.num_windows
    held *= math.prod(move.grid(move.route.source))
    for step in move.route.steps:
        senders = _senders(step, mesh)
        part = held // senders.shape[1] if step.kind == "exchange" else held
        others += part * (senders != np.arange(mesh.size)[:, None]).sum(axis=1)
        outside += part * (nodes[senders] != nodes[:, None]).sum(axis=1)
        held = step.held_after(held, mesh)
    return others, outside


def _senders(step: MoveStep, mesh: Mesh) -> np.ndarray:
    """Return, for each device, the numbers of the K devices that send to it in a step.

    The result is `[devices, K]`. A device may be among its own senders.
    """
    if step.kind == "slice":
        return np.arange(mesh.size)[:, None]
    members = groups(step.digits, mesh)
    if step.kind == "permute":
        senders = np.empty((mesh.size, 1), int)
        for source, target in pairs(step, mesh):
            senders[members[:, target], 0] = members[:, source]
        return senders
    senders = np.empty((mesh.size, members.shape[1]), int)
    senders[members] = members[:, None]
    return senders


def least_elements(
    shape: tuple[int, ...], before: Boxes, after: Boxes, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return how many elements each device, and each node, needs and does not have before a move.

    Args:
        shape: the shape of the array.
        before: the part of the array that each device has. Indices beyond `shape` are padding.
        after: the part of the array that each device is to have.
        nodes: the node of each device.
    """
    dims = list(enumerate(shape))
    ends = [[box[dim].indices(size)[:2] for box in (*before, *after)] for dim, size in dims]
    edges = [np.unique([0, size, *itertools.chain(*ends[dim])]) for dim, size in dims]
    # The edges of all parts cut the array into cells, each of which a device has in full or not.
    elements = functools.reduce(np.multiply.outer, map(np.diff, edges), np.array(1))

    def cells(number: int) -> np.ndarray:
        """Return which cells lie in box `number` of `before` and `after`, as a grid of booleans."""
        parts = zip(edges, (x[number] for x in ends), strict=True)
        inside = [(low[:-1] >= start) & (low[:-1] < stop) for low, (start, stop) in parts]
        return functools.reduce(np.logical_and.outer, inside, np.array(True))

    had = np.stack([cells(i) for i in range(len(before))])
    asked = np.stack([cells(len(before) + i) for i in range(len(after))])
    into_devices = [(elements * missing).sum() for missing in asked & ~had]
    into_nodes = []
    for node in range(int(nodes.max()) + 1):
        missing = asked[nodes == node].any(axis=0) & ~had[nodes == node].any(axis=0)
        into_nodes.append((elements * missing).sum())
    return np.array(into_devices), np.array(into_nodes)


_NAMES = {
    "slice": "slice",
    "exchange": "all-to-all",
    "gather": "all-gather",
    "permute": "permute",
}


def how(move: Move) -> str:
    """Say in words how a move is done, such as "all-to-all over local, all-gather over node"."""
    if move.windows is not None:
        return f"all-gather of all rows, in {move.num_windows} windows"
    words = [f"{_NAMES[step.kind]} over {_axes(step.digits)}" for step in move.route.steps]
    return ", ".join(words) or "copy"


def _axes(digits: tuple[str, ...]) -> str:
    """Name the mesh axes that digits belong to: `local` for `local.0` and `local.1`."""
    return "+".join(dict.fromkeys(digit.rpartition(".")[0] for digit in digits))
