"""One line of a plan: what happens to one array, and when."""

from __future__ import annotations

import dataclasses

from .._program import Value
from .block_plan import BlockPlan


@dataclasses.dataclass(frozen=True)
class Hop:
    """A bucket's way over one mesh axis.

    Attributes:
        axis: the mesh axis.
        at: the operation of the block, by index, before which the bucket is sent over it; the
            number of operations at the end.
        before: its name; "" at the end.
        lag: in a loop, how many iterations after that of its layer; negative: before.
    """

    axis: str
    at: int
    before: str
    lag: int = 0


@dataclasses.dataclass(frozen=True)
class PlanStep:
    """The collective, or the copy from or to host memory, of one array, alone or with others.

    Attributes:
        region: "forward", "backward", or the loop it is in; of a copy of a full leaf also
            "before forward" or "the end".
        action: "gather" (all-gather), "reduce" (reduce-scatter, or all-reduce), "fetch" (copy of a
            shard from host memory to the device) or "offload" (copy of a gradient to host memory).
        group: number of the bucket in its region; arrays with the same number share a message.
        name: name of the leaf.
        shape, dtype: of the full array; for a copy, of what one device copies: its shard, or its
            message if the leaf is stored encoded.
        num_bytes: bytes of that array, for one of its `trips`.
        sent: the operation before which a weight is sent or copied, or "the iteration before".
        at: the operation that first needs a weight, or that makes a gradient; for a fetch, the
            operation before which the weight is sent; "" for an offload; "the update" for copies
            of an update in a loop.
        until: the operation after which a full weight is dropped; for a gradient "", or
            "the iteration after" if it is sent then.
        tied: the operation whose result the gather or copy of a weight waits for; "" if there is
            none.
        trips: how often this happens in one execution of the program. What is sent or copied before
            the first iteration of a loop, for its first layers, is not counted.
        start, needed, stop: indices in the block; for a weight of `sent`, `at` and `until`; for a
            gradient of `at`, of `at`, and of the operation that completes its bucket.
        path: indices of the loops that this step is in, the outermost first.
        ahead: for a fetch in a loop, how many layers before it is sent a layer is copied.
        held: for a fetch in a loop, how many layers of the leaf are on the device at once.
        windowed: whether a copy is of one layer; otherwise of the full leaf, all layers at once.
        hops: of the bucket of a gather or a reduction, in the order in which it is sent.
    """

    region: str
    action: str
    group: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    sent: str
    at: str
    until: str
    tied: str
    trips: int
    start: int
    needed: int
    stop: int
    path: tuple[int, ...]
    ahead: int = 0
    held: int = 1
    windowed: bool = True
    hops: tuple[Hop, ...] = ()


def region_name(path: tuple[int, ...]) -> str:
    """Name the loops of `path`, innermost first ("loop 3 in loop 1"); "" at the top level."""
    return " in ".join(f"loop {index}" for index in reversed(path))


def operation_names(plan: BlockPlan) -> list[str]:
    """The names of a block's operations, and one for its end."""
    return [*(operation.name for operation in plan.block.operations), "the end"]


def tied_to(plan: BlockPlan, tie: Value | None) -> str:
    """The operation that makes the value that a gather or copy waits for; "" if there is none."""
    makers = {value: op.name for op in plan.block.operations for value in op.outputs}
    return makers.get(tie, "an argument") if tie else ""
