"""What is cheapest to keep of a program if a byte that is kept has a price."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection
from typing import NamedTuple

from .._program import (
    Atom,
    Barrier,
    Block,
    Operation,
    Value,
    calls_python,
    exchanged_or_effect,
    operations_for,
    without_dead_code,
)
from .._xla_of_jax import COUNTERS_INDEX_HOST
from . import loops, unrolled
from .costs import RATES, bytes_of, flops_of, goes_to_host, seconds_of
from .min_cut import Choice, Cost, Part, cheapest
from .residuals import Residual, kept_bytes, residuals_of

_MIN_HOST = 2**20  # bytes of a layer below which a value is not worth a copy


class Point(NamedTuple):
    """One choice: the bytes that it keeps, and the time that backward takes for the rest.

    Attributes:
        num_bytes: kept by a device from forward to backward, of one micro-batch.
        seconds: to repeat operations for one micro-batch, by the cost model.
        working: bytes of all that backward reads of one layer, kept or not.
    """

    num_bytes: int
    seconds: float
    working: int


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A program, and what it keeps.

    Attributes:
        emit: makes the program.
        choices: the parts of forward, and what was chosen for each.
        in_host: the kept values that are in host memory between forward and backward.
        frontier: computes what other budgets give, the least first.
    """

    emit: Callable[[], Block]
    choices: list[tuple[Part, Choice]]
    in_host: frozenset[Value] = frozenset()
    frontier: Callable[[], tuple[Point, ...]] = tuple

    @functools.cached_property
    def block(self) -> Block:
        """The program."""
        return self.emit()

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes that a device keeps from forward to backward."""
        return kept_bytes(self.residuals)

    @property
    def seconds(self) -> float:
        """How long it takes to repeat operations, by the cost model."""
        seconds = (part.seconds_of(x) for part, choice in self.choices for x in choice.repeated)
        return sum(seconds, 0.0)

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """What is kept, and what was and is recomputed, in program order."""
        return tuple(
            x for part, choice in self.choices for x in residuals_of(part, choice, self.in_host)
        )

    @property
    def point(self) -> Point:
        """Its bytes and seconds, which compare it with other choices."""
        working = max((part.working_bytes for part, _ in self.choices), default=0)
        return Point(self.num_bytes, self.seconds, working)


class PricedProgram:
    """A program, for which prices of a byte give choices."""

    def __init__(
        self,
        block: Block,
        weights: Collection[Value],
        results: Collection[Atom],
        layer_sets: float | None,
        token_parts: int,
    ):
        self.block = block
        self.token_parts = token_parts
        self.layer_sets = 1.0 if layer_sets is None else layer_sets
        self.outside_loops = layer_sets is None
        self.weights = {*weights}
        self.results = results
        self.inputs = {*block.inputs}
        self._unrolled: tuple[unrolled.Forward, Part] | None = None
        self._is_bound: dict[Operation, bool] = {}
        self.outside: dict[Value, Cost] = {}
        for operation in block.operations:
            # What a view is of is kept in its place.
            sources = sum(self.outside[x].bytes for x in operation.values if x in self.outside)
            is_view = seconds_of(operation) == 0
            for x in operation.outputs:
                num = bytes_of(x)
                self.outside[x] = Cost(min(num, sources) if is_view else num)
        self.outside |= {x: Cost(0, bytes_of(x) / RATES.local) for x in self.weights}

    def at(self, price: float, link: float = 0.0, keep: Collection[Value] = ()) -> Chosen:
        """What is cheapest if a byte that is kept costs `price` seconds.

        Args:
            price: the price of a byte, in seconds.
            link: the share of the time of forward that may be spent on copies to host memory.
            keep: values that are kept at no price.
        """
        block, choices, done, in_host = self.block, [], set(), set()
        while pair := self._next_pair(block, done):
            done.add(pair.forward.outputs[0])
            never = self._bound(pair.forward.body)
            part = self._split(loops.part_of(pair, self.outside, never, self.layer_sets))
            choices.append((part, cheapest(part, price, keep)))
            hosted = _in_host(pair, choices[-1][1], link)
            in_host.update(hosted)
            block = loops.repeating(block, pair, choices[-1][1], hosted)
        block = without_dead_code(block) if choices else block
        if not self.outside_loops:
            return Chosen(lambda: block, choices, frozenset(in_host))
        forward, part = self._outside_of_loops(block)
        choice = cheapest(part, price, keep)

        def emit() -> Block:
            return without_dead_code(unrolled.repeating(forward, choice))

        return Chosen(emit, [*choices, (part, choice)], frozenset(in_host))

    def _outside_of_loops(self, block: Block) -> tuple[unrolled.Forward, Part]:
        """What is not in loops; it is the same for all prices if there are none."""
        if block is self.block and self._unrolled is not None:
            return self._unrolled
        forward = unrolled.Forward(block, self.weights, self._end(block))
        outside = forward, self._split(forward.part(self.outside, self._bound(block)))
        if block is self.block:
            self._unrolled = outside
        return outside

    def _split(self, part: Part) -> Part:
        return dataclasses.replace(part, token_parts=self.token_parts)

    def _bound(self, block: Block) -> list[Operation]:
        """The operations of a block that are never repeated."""
        for x in block.operations:
            if x not in self._is_bound:
                self._is_bound[x] = _is_bound(x)
        return [x for x in block.operations if self._is_bound[x]]

    @functools.cached_property
    def _pairs(self) -> list[loops.Pair]:
        """The loops of the program as it is, which are the same for all prices."""
        return loops.find_pairs(self.block, self._end(self.block))

    def _next_pair(self, block: Block, done: Collection[Value]) -> loops.Pair | None:
        is_first = block is self.block
        pairs = self._pairs if is_first else loops.find_pairs(block, self._end(block))
        return next((x for x in pairs if x.forward.outputs[0] not in done), None)

    def _end(self, block: Block) -> int:
        """The number of operations in forward, which ends with the last result to be made."""
        needed = operations_for(block, self.results, self.inputs)
        return block.operations.index(needed[-1]) + 1 if needed else 0


def _in_host(pair: loops.Pair, choice: Choice, link: float) -> list[Value]:
    """The values of a pair that go to host memory: the largest, as far as the link is idle.

    A copy begins when its value is made, and is waited for at the end of the layer: it is hidden
    behind the products in between.
    """
    loop = pair.forward
    if loop.is_reversed and not COUNTERS_INDEX_HOST:
        return []
    idle, left = 0.0, {}  # bytes that can be copied from when a value is made to the end
    for operation in reversed(loop.body.operations):
        left |= dict.fromkeys(operation.outputs, idle)
        idle += link * flops_of(operation) / RATES.flops * RATES.host
    hosted: list[Value] = []
    for value in sorted(choice.kept, key=bytes_of, reverse=True):
        if not value.is_array or bytes_of(value) < _MIN_HOST:
            continue
        copied = sorted((*hosted, value), key=lambda x: left.get(x, idle))  # the last made first
        waiting = itertools.accumulate(map(bytes_of, copied))
        if all(x <= left.get(y, idle) for x, y in zip(waiting, copied, strict=True)):
            hosted.append(value)
    return hosted


def _is_bound(operation: Operation) -> bool:
    """Whether an operation is never repeated, for its side effects or its unknown cost.

    It has an effect, calls Python, is a collective, copies to host memory, makes no data, or runs
    for a time that cannot be told.
    """
    if isinstance(operation, Barrier) or operation.name == "while" or goes_to_host(operation):
        return True
    is_kernel = operation.name == "pallas_call"
    return (
        (is_kernel and operation.equation.params.get("cost_estimate") is None)
        or any(x.dtype is None for x in operation.outputs)
        or exchanged_or_effect(operation) is not None
        or calls_python(operation)
    )
