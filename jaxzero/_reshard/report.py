"""`ReshardReport`: what `reshard` will send over each kind of link, and hold, before it runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from .._collectives import readable_bytes
from .._report import TextTable
from .._sharding import LeafSpec
from .counts import AnyMove, Sent, held_bytes, least_elements, sent_by
from .plan import ReshardPlan, known, plain_spec, spec_without_padding
from .windowed import WindowedMove


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One array of the tree.

    Attributes:
        path: its place in the tree.
        shape: its shape.
        how: the operations that take it to its new sharding, in order.
        into_node: bytes from other nodes that enter a node for it, all of its devices together.
        into_device: bytes from other devices that enter a device for it.
        device_bytes: bytes of its part of the result on one device.
    """

    path: str
    shape: tuple[int, ...]
    how: str
    into_node: int
    into_device: int
    device_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardReport:
    """Bytes that a `reshard` sends and holds; `print` it.

    Bytes are those of the node, or of the device, that gets most. Arrays that `jax.device_put`
    takes to other devices, or that have no elements, are not in the bytes that are sent
    (`num_uncounted`).

    Attributes:
        leaves: one row for each array.
        into_node: bytes that enter a node from other nodes.
        least_into_node: the bytes, encoded alike, that its devices need and none of them has.
        into_device: bytes that enter a device from other devices of any node.
        least_into_device: the bytes, encoded alike, that it needs and does not have.
        source_bytes: bytes of the arrays that are moved, on one device.
        result_bytes: bytes of the result, on one device.
        program_bytes: the most that a program holds on a device besides its arguments and results.
        windows: number of programs.
        largest_leaf_bytes: bytes of the largest array of the result, if a device had it in full.
        num_uncounted: number of arrays that `jax.device_put` moves.
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
        """The most that a device holds at once, the arrays that are moved included."""
        return self.source_bytes + self.result_bytes + self.program_bytes

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, such as for JSON."""
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


def make_report(plan: ReshardPlan) -> ReshardReport:
    """Count what a plan sends and holds."""
    mesh, nodes = plan.digits.mesh, plan.nodes
    sent, least = np.zeros((2, mesh.size)), (np.zeros(mesh.size), np.zeros(nodes.max() + 1))
    rows, copies = [], [0]  # bytes of arrays without their padding, before `jax.device_put`
    for leaf, source, target, move in zip(
        plan.leaves, plan.sources, plan.targets, plan.moves, strict=True
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
        for total, more in zip(least, _least(leaf, source, target, move, plan), strict=True):
            total += more
        own = Sent.of(others, outside, nodes)
        size = result * move.dtype.itemsize
        rows.append(
            LeafReport(leaf.path, leaf.shape, how(move), own.into_node, own.into_device, size)
        )
    in_all = Sent.of(sent[0], sent[1], nodes)
    return ReshardReport(
        leaves=tuple(rows),
        into_node=in_all.into_node,
        least_into_node=int(least[1].max()),
        into_device=in_all.into_device,
        least_into_device=int(least[0].max()),
        source_bytes=sum(_held(x, y) for x, y in zip(plan.leaves, plan.sources, strict=True)),
        result_bytes=sum(x.device_bytes for x in rows),
        program_bytes=max(
            [*copies, *(sum(held_bytes(move, mesh) for move in moves) for moves in plan.programs)]
        ),
        windows=len(plan.windows),
        largest_leaf_bytes=max(
            (
                math.prod(leaf.shape) * (move.dtype if move else leaf.dtype).itemsize
                for leaf, move in zip(plan.leaves, plan.moves, strict=True)
            ),
            default=0,
        ),
        num_uncounted=sum(move is None for move in plan.moves),
    )


def _held(leaf: LeafSpec, source: NamedSharding) -> int:
    return math.prod(source.shard_shape(leaf.stored_shape)) * leaf.stored.dtype.itemsize


def _least(
    leaf: LeafSpec,
    source: NamedSharding,
    target: NamedSharding,
    move: AnyMove,
    plan: ReshardPlan,
) -> tuple[np.ndarray, np.ndarray]:
    """Lower bounds in bytes as they are sent, for devices and for nodes."""
    devices = list(plan.digits.mesh.devices.flat)
    plain = NamedSharding(source.mesh, plain_spec(leaf, source))
    had, asked = (
        [known(indices[device]) for device in devices]
        for indices in (
            plain.devices_indices_map(leaf.padded_shape),
            target.devices_indices_map(leaf.shape),
        )
    )
    into_devices, into_nodes = least_elements(leaf.shape, had, asked, plan.nodes)
    message = move.message
    per_message = (
        move.height * move.row_size if isinstance(move, WindowedMove) else math.prod(move.inner)
    )
    each = message.size * message.dtype.itemsize / max(1, per_message)
    return into_devices * each, into_nodes * each


_NAMES = {
    "slice": "slice",
    "exchange": "all-to-all",
    "gather": "all-gather",
    "permute": "permute",
}


def how(move: AnyMove) -> str:
    """The operations of a move in words: "all-to-all over local, all-gather over node"."""
    if isinstance(move, WindowedMove):
        return f"all-gather of all rows, in {move.num_windows} windows"
    words = [f"{_NAMES[step.kind]} over {_axes(step.digits)}" for step in move.steps]
    return ", ".join(words) or "copy"


def _axes(digits: tuple[str, ...]) -> str:
    """The mesh axes that digits belong to: `local.0` and `local.1` to `local`."""
    return "+".join(dict.fromkeys(digit.rpartition(".")[0] for digit in digits))
