"""What to keep of a part of forward: a minimum cut between what is kept and what backward reads.

Let `price` be the seconds that a byte kept is worth. Keeping a value costs its bytes times `price`;
repeating an operation in backward costs its seconds, and needs its inputs. The cheapest choice is a
minimum cut of this graph, from the source to the sink:

    source -> operation     its seconds: cut if it is repeated
    operation -> output     the output's bytes times `price`, and the seconds of the copies that
                            keep it: cut if it is kept
    input -> operation      infinite: what is repeated needs its inputs
    wanted value -> sink    infinite

Each price gives a point of the lower convex hull of seconds over bytes. The graph is that of
Checkmate's integer program without its clock (https://arxiv.org/abs/1910.02653), and of the
partitioner of torch.compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._program import Operation, Value
from .costs import STACKED, bytes_of, is_fused, is_pointwise, seconds_of

_INFINITE = 2**31 - 1
_LARGEST = 2**30  # of all finite capacities together, so that no sum overflows 32 bits
_SOURCE, _SINK = 0, 1


class Cost(NamedTuple):
    """What it costs if backward reads an input of a part.

    Attributes:
        bytes: of the value, if it has to be held until then.
        seconds: to make it again, such as to gather a weight.
    """

    bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of forward for which one cut is chosen: a loop's body, or all outside of loops.

    Attributes:
        operations: in program order.
        wanted: the values that backward reads of those that operations make or that are carried.
        carried: inputs of the part that can be kept for each trip: the carry of a loop.
        inputs: what it costs if backward reads another input; those left out cost nothing.
        stored: values that are held whatever is chosen, and so cost nothing to keep.
        never: operations that are not repeated.
        trips: how often the part runs.
        layer_sets: how many times what all trips keep is on a device: see `choose_activations`.
        segments: into how many segments the part is cut, which backward repeats one by one.
        token_parts: devices that share each row, and so hold a part of each value.
        is_stacked: whether what is kept is stacked up by a loop.
        views: values that are views of weights, such as cast ones, and no activations.
    """

    operations: Sequence[Operation]
    wanted: Collection[Value]
    carried: Collection[Value]
    inputs: Mapping[Value, Cost]
    stored: Collection[Value]
    never: Collection[Operation]
    trips: int = 1
    layer_sets: float = 1.0
    segments: int = 1
    token_parts: int = 1
    is_stacked: bool = False
    views: Collection[Value] = ()

    @functools.cached_property
    def _fused(self) -> set[Operation]:
        """Pointwise operations that XLA fuses with all readers, so that no result is written."""
        readers: dict[Value, list[Operation]] = {}
        for operation in self.operations:
            for x in operation.values:
                readers.setdefault(x, []).append(operation)
        return {
            operation
            for operation in self.operations
            if is_pointwise(operation)
            and all(map(is_fused, (y for x in operation.outputs for y in readers.get(x, ()))))
        }

    def seconds_of(self, operation: Operation) -> float:
        """How long it takes to repeat an operation in all trips."""
        seconds = 0.0 if operation in self._fused else seconds_of(operation)
        return self.trips * seconds / self.token_parts

    @property
    def working_bytes(self) -> int:
        """Bytes on a device of all values that backward reads of one trip, or of one segment."""
        return sum(map(bytes_of, self.wanted)) // (self.segments * self.token_parts)

    def kept_bytes(self, value: Value) -> int:
        """Bytes on a device that it takes to keep a value in all trips; 0 if it is held anyway."""
        num = 0 if value in self.stored else bytes_of(value)
        return round(num * self.trips * self.layer_sets / self.token_parts)

    def seconds_to_keep(self, value: Value) -> float:
        """Seconds, in all trips, of the copies into a stack and out of it if a value is kept."""
        num = 0 if value in self.stored or not self.is_stacked else bytes_of(value)
        return STACKED * num * self.trips / self.token_parts


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is kept of a part, and which operations are repeated, in program order."""

    kept: list[Value]
    repeated: list[Operation]


def cheapest(part: Part, price: float, keep: Collection[Value] = ()) -> Choice:
    """The cheapest choice for a part; of equally cheap choices the one that repeats least.

    Args:
        part: a part of forward.
        price: seconds for each byte that is kept.
        keep: values that are kept at no cost.
    """
    graph = _Graph()
    makers = {x: operation for operation in part.operations for x in operation.outputs}
    waiting: list[Value] = []

    def node(x: Value | Operation) -> int:
        if x not in graph.nodes and isinstance(x, Value):
            waiting.append(x)
        return graph.node(x)

    def kept(x: Value) -> float:
        return 0.0 if x in keep else price * part.kept_bytes(x) + part.seconds_to_keep(x)

    for value in part.wanted:
        graph.edges[node(value), _SINK] = np.inf
    while waiting:
        value = waiting.pop()
        maker = makers.get(value)
        if maker is None:
            cost = part.inputs.get(value, Cost())
            seconds = kept(value) if value in part.carried else price * cost.bytes + cost.seconds
            graph.edges[_SOURCE, node(value)] = seconds
            continue
        if maker not in graph.nodes:
            repeated = np.inf if maker in part.never else part.seconds_of(maker)
            graph.edges[_SOURCE, node(maker)] = repeated
            for x in maker.values:
                graph.edges[node(x), node(maker)] = np.inf
        graph.edges[node(maker), node(value)] = kept(value)
    needed = graph.cut()
    repeated = [x for x in part.operations if x in needed]
    made = {x for operation in repeated for x in operation.outputs}
    candidates = (*part.carried, *makers)
    return Choice([x for x in candidates if x in needed and x not in made], repeated)


class _Graph:
    """A graph of values and operations whose edges have seconds."""

    def __init__(self):
        self.nodes: dict[Value | Operation, int] = {}
        self.edges: dict[tuple[int, int], float] = {}

    def node(self, x: Value | Operation) -> int:
        return self.nodes.setdefault(x, len(self.nodes) + 2)

    def cut(self) -> set[Value | Operation]:
        """The nodes on the sink's side of a minimum cut, as few as possible.

        Seconds are scaled to integers, which the solver needs: each is rounded up to a part in 2^30
        of their sum.
        """
        from scipy.sparse import csr_array  # slow to import, and needed here alone
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not self.edges:
            return set()
        pairs = np.array([*self.edges], np.int32)
        seconds = np.array([*self.edges.values()])
        finite = seconds[np.isfinite(seconds)]
        scale = _LARGEST / max(finite.sum(), 1e-30)
        sizes = np.where(np.isfinite(seconds), np.ceil(seconds * scale), _INFINITE)
        num = len(self.nodes) + 2
        graph = csr_array((sizes.astype(np.int32), (pairs[:, 0], pairs[:, 1])), shape=(num, num))
        left = (graph - maximum_flow(graph, _SOURCE, _SINK).flow).T.tocsr()
        left.eliminate_zeros()
        reach, _ = breadth_first_order(left, _SINK, return_predecessors=True)
        numbers = {*reach.tolist()}
        return {x for x, i in self.nodes.items() if i in numbers}
