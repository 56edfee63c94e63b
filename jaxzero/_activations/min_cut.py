"""Choose which values of a part of forward are kept for backward, by a minimum cut.

A value that backward reads is either kept, or made again by repeating operations in backward. Let
`price` be the seconds that a kept byte is worth. Keeping a value costs its bytes times `price`.
Repeating an operation costs its seconds, and needs its inputs. The cheapest choice is a minimum cut
of this graph, from the source to the sink:

    source -> operation     its seconds: cut if it is repeated
    operation -> output     the output's bytes times `price`, and the seconds of the copies that
                            keep it: cut if it is kept
    input -> operation      infinite: what is repeated needs its inputs
    wanted value -> sink    infinite

Each price gives a point of the lower convex hull of seconds over bytes. Checkmate
(https://arxiv.org/abs/1910.02653) has the same graph, and in addition the time at which each value
is held. The partitioner of torch.compile has the same graph too.
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
_LARGEST = 2**30  # the sum of all finite capacities, so that no sum overflows 32 bits
_SOURCE, _SINK = 0, 1


class Cost(NamedTuple):
    """The cost of letting backward read an input of a part, which it would not read otherwise.

    Attributes:
        bytes: the bytes of the input, if it has to be held until backward reads it.
        seconds: the time to make the input again, such as to gather a weight.
    """

    bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of forward for which one cut is chosen: a loop's body, or all outside of loops.

    Attributes:
        operations: the operations of the part, in program order.
        wanted: the outputs of `operations`, and the values of `carried`, that backward reads.
        carried: inputs of the part that can be kept for each trip: the carry of a loop.
        inputs: the cost of each other input if a repeated operation reads it in backward. An input
            without an entry costs nothing.
        stored: values that are held whatever is chosen, and so cost nothing to keep.
        never: operations that are not repeated.
        trips: how often the part runs.
        layer_sets: a factor of the bytes that all trips keep, as for `choose_activations`.
        segments: the number of segments of the part, which backward repeats one by one.
        token_parts: the number of devices that share each row, and so hold a part of each value.
        is_stacked: whether a loop stacks up the values that are kept.
        views: views of weights, such as cast weights, which do not count as activations.
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
        """Pointwise operations that XLA fuses with every operation that reads their results.

        Such results are not written to memory.
        """
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
        """Return the seconds in a step to compute an operation again, in all iterations."""
        seconds = 0.0 if operation in self._fused else seconds_of(operation)
        return self.trips * seconds / self.token_parts

    @property
    def working_bytes(self) -> int:
        """The bytes on a device of all values that backward reads in an iteration or segment."""
        return sum(map(bytes_of, self.wanted)) // (self.segments * self.token_parts)

    def kept_bytes(self, value: Value) -> int:
        """Return the bytes on a device to keep a value of all iterations; 0 if held anyway."""
        num = 0 if value in self.stored else bytes_of(value)
        return round(num * self.trips * self.layer_sets / self.token_parts)

    def seconds_to_keep(self, value: Value) -> float:
        """Return the seconds to copy a kept value into a stack and out again, in all trips.

        The result is 0 if no loop stacks up the value, or if it is held anyway.
        """
        num = 0 if value in self.stored or not self.is_stacked else bytes_of(value)
        return STACKED * num * self.trips / self.token_parts


@dataclasses.dataclass(frozen=True)
class Choice:
    """The values that a part of forward keeps, and its operations that backward repeats.

    Both lists are in program order.
    """

    kept: list[Value]
    repeated: list[Operation]


def cheapest(part: Part, price: float, keep: Collection[Value] = ()) -> Choice:
    """Return the cheapest choice for a part; of equally cheap choices the one that repeats least.

    Args:
        part: a part of forward.
        price: seconds for each byte that is kept.
        keep: values that can be kept at no cost.
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
    """A flow graph from a source to a sink through values and operations.

    The capacity of an edge is its cost in seconds.
    """

    def __init__(self):
        self.nodes: dict[Value | Operation, int] = {}
        self.edges: dict[tuple[int, int], float] = {}

    def node(self, x: Value | Operation) -> int:
        return self.nodes.setdefault(x, len(self.nodes) + 2)

    def cut(self) -> set[Value | Operation]:
        """Return the values and operations on the sink's side of a minimum cut.

        Of several minimum cuts, the one with the fewest nodes on that side is taken. The solver
        needs integer capacities. So seconds are rounded up to multiples of the sum of all finite
        capacities, divided by 2^30.
        """
        from scipy.sparse import csr_array  # slow to import, and needed here alone
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        if not self.edges:
            return set()
        pairs = np.array([*self.edges], np.int32)
        seconds = np.array([*self.edges.values()])
        finite = seconds[np.isfinite(seconds)]
        scale = _LARGEST / max(finite.sum(), 1e-30)  # no edge may be finite
        sizes = np.where(np.isfinite(seconds), np.ceil(seconds * scale), _INFINITE)
        num = len(self.nodes) + 2
        graph = csr_array((sizes.astype(np.int32), (pairs[:, 0], pairs[:, 1])), shape=(num, num))
        left = (graph - maximum_flow(graph, _SOURCE, _SINK).flow).T.tocsr()
        left.eliminate_zeros()
        reach, _ = breadth_first_order(left, _SINK, return_predecessors=True)
        numbers = {*reach.tolist()}
        return {x for x, i in self.nodes.items() if i in numbers}
