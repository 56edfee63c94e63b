"""Find the cheapest choice of what a program keeps for backward, if kept bytes have a price.

The cost is in seconds. It is the predicted time to repeat operations in backward and to copy kept
values into stacks and out again, plus the price of each kept byte.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from .._program import (
    Atom,
    Barrier,
    Block,
    Loop,
    Operation,
    Value,
    calls_python,
    exchanged_or_effect,
    fixed_of,
    operations_for,
    without_dead_code,
)
from .._xla_of_jax import COUNTERS_INDEX_HOST
from . import inner_loops, loops, unrolled
from .costs import RATES, bytes_of, flops_of, is_host_copy, seconds_of
from .min_cut import Choice, Cost, Part, cheapest
from .residuals import Residual, kept_bytes, residuals_of

_MIN_HOST = 2**20  # bytes of one layer: smaller values are not worth a copy to host memory


class Point(NamedTuple):
    """The figures of one choice, for one device and one micro-batch.

    Attributes:
        num_bytes: bytes kept from forward to backward.
        seconds: the predicted time in which backward repeats operations of forward.
        working: bytes of all values that backward reads of one layer or segment, kept or
            recomputed: the most of all parts of forward.
    """

    num_bytes: int
    seconds: float
    working: int


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A choice of what a program keeps from forward to backward, and the rewritten program.

    Attributes:
        emit: returns the program in which forward and backward do as chosen.
        choices: each part of forward with its choice: the values that it keeps, and the operations
            that backward repeats.
        in_host: the kept values that are in host memory between forward and backward.
        frontier: returns the figures of choices for several budgets, fewest bytes first.
    """

    emit: Callable[[], Block]
    choices: list[tuple[Part, Choice]]
    in_host: frozenset[Value] = frozenset()
    frontier: Callable[[], tuple[Point, ...]] = tuple

    @functools.cached_property
    def block(self) -> Block:
        """The program that `emit` returns; `emit` is called once only."""
        return self.emit()

    @functools.cached_property
    def num_bytes(self) -> int:
        """The bytes that a device keeps in its memory from forward to backward."""
        return kept_bytes(self.residuals)

    @property
    def seconds(self) -> float:
        """The predicted seconds to repeat operations in backward."""
        seconds = (part.seconds_of(x) for part, choice in self.choices for x in choice.repeated)
        return sum(seconds, 0.0)

    @property
    def seconds_in_all(self) -> float:
        """The predicted seconds to repeat operations in backward and to copy kept values."""
        kept = (part.seconds_to_keep(x) for part, choice in self.choices for x in choice.kept)
        return self.seconds + sum(kept)

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """All values that are kept on the device or in host memory, or are recomputed."""
        return tuple(
            x for part, choice in self.choices for x in residuals_of(part, choice, self.in_host)
        )

    @property
    def point(self) -> Point:
        """The figures of this choice: its kept bytes, seconds and working bytes."""
        working = max((part.working_bytes for part, _ in self.choices), default=0)
        return Point(self.num_bytes, self.seconds, working)


class PricedProgram:
    """A program, for which `at` finds the cheapest choice at any price of a kept byte.

    Args:
        block: the joint program of forward and backward.
        weights: the inputs that are weights.
        results: the outputs that are not gradients. The last operation that one of them needs is
            the last of forward.
        layer_sets: the factor of `choose_activations` with pipeline stages; then only loops have
            choices. None without stages; then operations outside of loops have choices too.
        token_parts: the number of devices that share each row, as in `Part`.
    """

    def __init__(
        self,
        block: Block,
        weights: Collection[Value],
        results: Collection[Atom],
        layer_sets: float | None,
        token_parts: int,
    ):
        self.results, self.inputs = [*results], {*block.inputs}
        self.block, instead = loops.stacked_once(block, self._end(block))
        self.token_parts = token_parts
        self.layer_sets = 1.0 if layer_sets is None else layer_sets
        self.outside_loops = layer_sets is None
        self.weights = {*weights}
        self.views = fixed_of(self.block, weights).views
        self.results = [instead.get(x, x) for x in results]
        self._unrolled: tuple[unrolled.Forward, Part] | None = None
        self._is_bound: dict[Operation, bool] = {}
        # Stacks are the same values for all prices, so that choices can be compared by them.
        self._stack_of: dict[Value, Value] = {}
        self.outside = _costs_to_keep(self.block.operations)
        self.outside |= {x: Cost(0, bytes_of(x) / RATES.local) for x in self.weights}

    def at(self, price: float, link: float = 0.0, keep: Collection[Value] = ()) -> Chosen:
        """Return the cheapest choice if a byte that is kept costs `price` seconds.

        Args:
            price: the price of a byte, in seconds.
            link: the share of the time of forward's matrix products during which the link to host
                memory may carry copies, from 0 to 1.
            keep: values that cost nothing to keep.
        """
        end = self._end(self.block)
        block, choices, in_host = self._of_loops(
            self.block,
            end,
            self.outside,
            price,
            keep,
            self.block.outputs,
            weights=self.views,
            link=link,
        )
        block = without_dead_code(block) if choices else block
        if not self.outside_loops:
            return Chosen(lambda: block, choices, frozenset(in_host))
        counted = {x for part, of_loop in choices for x in (*of_loop.kept, *part.views)}
        forward, part = self._outside_of_loops(block, counted)
        choice = cheapest(part, price, keep)

        def emit() -> Block:
            return without_dead_code(unrolled.repeating(forward, choice))

        return Chosen(emit, [*choices, (part, choice)], frozenset(in_host))

    def _of_loops(
        self,
        block: Block,
        end: int,
        outside: dict[Value, Cost],
        price: float,
        keep: Collection[Value],
        results: Collection[Atom],
        *,
        weights: Collection[Value],
        times: int = 1,
        link: float = 0.0,
    ) -> tuple[Block, list[tuple[Part, Choice]], set[Value]]:
        """Choose for each forward loop of a block what it keeps, and rewrite the block accordingly.

        Args:
            block: the program; or a layer's forward and backward, which `inner_loops.joined` has
                joined, to choose for the loops inside of the layer.
            end: the number of the block's first operations that are forward.
            outside: for each value of the block outside of its loops, the cost to keep the value,
                or to make it again, for a backward loop that would not read it otherwise.
            price: seconds that a kept byte costs.
            keep: values that cost nothing to keep.
            results: outputs of the block that are kept whatever is chosen.
            weights: values of the block that are weights, or views of weights.
            times: how often the block runs.
            link: as for `at`.

        Returns:
            The new block; each part of forward with its choice; and the kept values in host memory.
        """
        choices, done, in_host = [], set(), set()
        while pair := self._next_pair(block, end, results, done):
            done.add(pair.forward.outputs[0])
            changed, of_pair = self._cheapest(pair, outside, price, keep, weights, times)
            hosted = _in_host(changed, *of_pair[-1], link)
            block = loops.replaced(block, pair, changed)
            block = loops.repeating(block, changed, of_pair[-1][1], self._stack_of, hosted)
            choices += of_pair
            in_host.update(hosted)
        return block, choices, in_host

    def _cheapest(
        self,
        pair: loops.Pair,
        outside: dict[Value, Cost],
        price: float,
        keep: Collection[Value],
        weights: Collection[Value],
        times: int,
    ) -> tuple[loops.Pair, list[tuple[Part, Choice]]]:
        """Choose what a forward loop and the loops inside of it keep for their backward loops.

        Two choices are compared, and the cheaper one is returned. In the first, the stacks of an
        inner loop are kept, or backward repeats the inner loop as a whole. In the second, inner
        loops have choices of their own, by which their backward loops repeat parts of them.

        Returns:
            The pair, with its inner loops rewritten; and each part with its choice, the last of
            which is for the body of the pair's forward loop.
        """
        stacks = {*loops.stacked_values(pair.forward), *self._stack_of.items()}
        keep = {*keep, *(x for x, stack in stacks if stack in keep)}
        part = self._part(pair, outside, weights, times)
        alone = pair, [(part, cheapest(part, price, keep))]
        if len(pair.readers) > 1 or not any(isinstance(x, Loop) for x in part.operations):
            return alone
        trip, trips = inner_loops.joined(pair), times * pair.forward.length
        costs = {**part.inputs, **_costs_to_keep(trip.block.operations[: trip.end], trips)}
        costs |= {x: Cost(trips * bytes_of(x)) for x in part.carried}
        layers = loops.layers_of(pair.forward, weights)
        block, inside, _ = self._of_loops(
            trip.block, trip.end, costs, price, keep, part.stored, weights=layers, times=trips
        )
        if not any(choice.repeated for _, choice in inside):
            return alone
        changed = inner_loops.divided(pair, trip._replace(block=block))
        part = self._part(changed, outside, weights, times)
        choices = [_repeated_alone(*x) for x in inside]
        choices.append((part, cheapest(part, price, keep)))
        return min(alone, (changed, choices), key=lambda x: _cost(x[1], price, keep))

    def _part(
        self, pair: loops.Pair, outside: dict[Value, Cost], weights: Collection[Value], times: int
    ) -> Part:
        part = loops.part_of(pair, outside, self._bound(pair.forward.body), weights, times)
        return dataclasses.replace(part, layer_sets=self.layer_sets, token_parts=self.token_parts)

    def _outside_of_loops(
        self, block: Block, counted: Collection[Value]
    ) -> tuple[unrolled.Forward, Part]:
        """Return the operations of forward outside of loops, as `Forward` and as a `Part`.

        The result for the traced program is computed once, for all prices. `counted` is that of
        `Forward`.
        """
        if block is self.block and self._unrolled is not None:
            return self._unrolled
        forward = unrolled.Forward(block, self.weights, self._end(block), counted)
        part = forward.part(self.outside, self._bound(block))
        outside = forward, dataclasses.replace(part, token_parts=self.token_parts)
        if block is self.block:
            self._unrolled = outside
        return outside

    def _bound(self, block: Block) -> list[Operation]:
        """Return the operations of a block that are never repeated."""
        for x in block.operations:
            if x not in self._is_bound:
                self._is_bound[x] = _is_bound(x)
        return [x for x in block.operations if self._is_bound[x]]

    @functools.cached_property
    def pairs(self) -> list[loops.Pair]:
        """The pairs of forward and backward loops in the traced program."""
        return loops.find_pairs(self.block, self._end(self.block), self.block.outputs)

    def _next_pair(
        self, block: Block, end: int, results: Collection[Atom], done: Collection[Value]
    ) -> loops.Pair | None:
        is_whole = block is self.block
        pairs = self.pairs if is_whole else loops.find_pairs(block, end, results)
        return next((x for x in pairs if x.forward.outputs[0] not in done), None)

    def _end(self, block: Block) -> int:
        """Return the number of operations of forward: up to the last that the results need."""
        needed = operations_for(block, self.results, self.inputs)
        return block.operations.index(needed[-1]) + 1 if needed else 0


def _costs_to_keep(operations: Sequence[Operation], times: int = 1) -> dict[Value, Cost]:
    """Return the cost of keeping each value that operations make, if they run `times` times."""
    costs: dict[Value, Cost] = {}
    for operation in operations:
        # To keep a view is to keep what it is a view of, where that has fewer bytes.
        sources = sum(costs[x].bytes for x in operation.values if x in costs)
        is_view = seconds_of(operation) == 0
        for x in operation.outputs:
            num = times * bytes_of(x)
            costs[x] = Cost(min(num, sources) if is_view else num)
    return costs


def _cost(choices: Sequence[tuple[Part, Choice]], price: float, keep: Collection[Value]) -> float:
    """Return the cost in seconds of the choices for the loops inside of a loop, and of its own.

    The choice of the outer loop is the last one. The cost is the time of all repeated operations,
    plus that of the values that the outer loop keeps, but for those of `keep`, plus `price` for
    each byte that `_held_by_loops` returns.
    """
    part, choice = choices[-1]
    kept = [x for x in choice.kept if x not in keep]
    of_kept = sum(price * part.kept_bytes(x) + part.seconds_to_keep(x) for x in kept)
    seconds = (part.seconds_of(x) for part, choice in choices for x in choice.repeated)
    return of_kept + price * _held_by_loops(choices) + sum(seconds)


def _held_by_loops(choices: Sequence[tuple[Part, Choice]]) -> int:
    """Return the bytes of the stacks that inner loops make again in backward, for one layer.

    Only an inner loop that backward repeats as a whole makes its stacks again.
    """
    return sum(
        bytes_of(x) // part.token_parts
        for part, choice in choices
        for operation in choice.repeated
        if isinstance(operation, Loop)
        for x in operation.outputs[operation.num_carry :]
        if x in part.wanted
    )


def _repeated_alone(part: Part, choice: Choice) -> tuple[Part, Choice]:
    """Return an inner loop's part and choice without the values that the loop keeps.

    The part of the loop around it counts the stacks of these values.
    """
    repeated = {x for operation in choice.repeated for x in operation.outputs}
    wanted = [x for x in part.wanted if x in repeated]
    return dataclasses.replace(part, wanted=wanted), Choice([], choice.repeated)


def _in_host(pair: loops.Pair, part: Part, choice: Choice, link: float) -> list[Value]:
    """Return the kept values of a pair that go to host memory: the largest whose copies are hidden.

    A copy begins when its value is made, and is waited for at the end of the layer. It is hidden if
    the matrix products in between take longer than all copies by then. `link` is the share of that
    time that may be used, as for `PricedProgram.at`.
    """
    loop = pair.forward
    if loop.is_reversed and not COUNTERS_INDEX_HOST:  # XLA would write the stack in wrong order
        return []
    idle, left = 0.0, {}  # bytes that can be copied from when a value is made to the layer's end
    for operation in reversed(loop.body.operations):
        left |= dict.fromkeys(operation.outputs, idle)
        idle += link * flops_of(operation) / RATES.flops * RATES.host
    hosted: list[Value] = []
    for value in sorted(choice.kept, key=bytes_of, reverse=True):
        if not value.is_array or bytes_of(value) < _MIN_HOST or value in part.stored:
            continue
        copied = sorted((*hosted, value), key=lambda x: left.get(x, idle))  # the last made first
        waiting = itertools.accumulate(map(bytes_of, copied))
        if all(x <= left.get(y, idle) for x, y in zip(waiting, copied, strict=True)):
            hosted.append(value)
    return hosted


def _is_bound(operation: Operation) -> bool:
    """Return whether an operation is never repeated, for its side effects or its unknown cost.

    This is true of effects, calls of Python, collectives, barriers, copies between device and host,
    operations that make tokens or references, kernels of unknown cost, and `while` loops.
    """
    if isinstance(operation, Barrier) or operation.name == "while" or is_host_copy(operation):
        return True
    is_kernel = operation.name == "pallas_call"
    return (
        (is_kernel and operation.equation.params.get("cost_estimate") is None)
        or any(x.dtype is None for x in operation.outputs)
        or exchanged_or_effect(operation) is not None
        or calls_python(operation)
    )
