"""Choose what forward keeps for backward, under a budget."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection

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
from .._sharding import Activations
from .._xla_of_jax import COUNTERS_INDEX_HOST
from . import loops, unrolled
from .costs import RATES, bytes_of, goes_to_host, seconds_of
from .min_cut import Choice, Cost, Part, cheapest
from .residuals import Residual, by_kind, described, kept_bytes, residuals_of

# Seconds for a byte: what it takes to write and to read it, and as much as to keep nothing.
_PRICES = 2 / RATES.memory, 1e-7
_STEPS = 12  # of the search for a price
_NEAR = 0.98  # of the budget: near enough
_MIN_HOST = 2**20  # bytes of a layer below which a value is not worth a copy
_TRIED = 8  # values that are kept one by one, where the next price keeps too much


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A program, and what it keeps.

    Attributes:
        emit: makes the program.
        choices: the parts of forward, and what was chosen for each.
        in_host: the kept values that are in host memory between forward and backward.
    """

    emit: Callable[[], Block]
    choices: list[tuple[Part, Choice]]
    in_host: frozenset[Value] = frozenset()

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
        return sum(
            part.trips * seconds_of(x) for part, choice in self.choices for x in choice.repeated
        )

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """What is kept, and what was and is recomputed, in program order."""
        return tuple(
            x for part, choice in self.choices for x in residuals_of(part, choice, self.in_host)
        )


def choose_activations(
    block: Block,
    weights: Collection[Value],
    results: Collection[Atom],
    activations: Activations | None,
    times: float | None = None,
) -> Chosen:
    """Choose what forward keeps and what backward computes again.

    Args:
        block: a program of loss and gradients.
        weights: its inputs that are gathered where they are used.
        results: its outputs that are no gradients.
        activations: the budget; None leaves the program as it is.
        times: how many times the residuals of all layers are on a device, if it runs only loops
            over layers; None: it runs all of the program once.

    Raises:
        ValueError: the program cannot keep as little as the budget allows.
    """
    budget = activations.budget_bytes if activations else None
    if activations is None or budget is None:
        return Chosen(lambda: block, [])
    program = _Program(block, weights, results, times)
    low, high = _PRICES
    most = program.at(low)
    if most.num_bytes <= budget:
        return most
    link = 1.0 if activations.host else 0.0
    if link:
        over, most = most, program.at(low, link)
        if most.num_bytes <= budget:
            return _search(lambda x: program.at(low, x), 0.0, link, over, most, budget)[1]
    least = program.at(high, link)
    if least.num_bytes > budget > 0:
        raise ValueError(_too_little(budget, least))
    if budget == 0:
        return least
    logarithms = math.log(low), math.log(high)
    price, fits, over = _search(
        lambda x: program.at(math.exp(x), link), *logarithms, most, least, budget
    )
    kept = {x for _, choice in fits.choices for x in choice.kept}
    more = [x for _, choice in over.choices for x in choice.kept if x not in kept]
    keep: list[Value] = []
    for value in sorted(more, key=bytes_of, reverse=True)[:_TRIED]:
        chosen = program.at(math.exp(price), link, [*keep, value])
        if chosen.num_bytes <= budget and chosen.seconds < fits.seconds:
            fits = chosen
            keep.append(value)
    return fits


def _search(
    at: Callable[[float], Chosen],
    over_at: float,
    fits_at: float,
    over: Chosen,
    fits: Chosen,
    budget: int,
) -> tuple[float, Chosen, Chosen]:
    """Where what is chosen fits just so: the place, what is chosen there, and what does not fit."""
    for _ in range(_STEPS):
        if budget * _NEAR <= fits.num_bytes:
            break
        middle = (over_at + fits_at) / 2
        chosen = at(middle)
        if chosen.num_bytes > budget:
            over_at, over = middle, chosen
        else:
            fits_at, fits = middle, chosen
    return fits_at, fits, over


class _Program:
    """A program, for which prices of a byte give choices."""

    def __init__(
        self,
        block: Block,
        weights: Collection[Value],
        results: Collection[Atom],
        times: float | None,
    ):
        self.block = block
        self.times = 1.0 if times is None else times
        self.outside_loops = times is None
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
            price: of a byte, in seconds.
            link: the share of the time of forward that may be spent on copies to host memory.
            keep: values that are kept at no price.
        """
        block, choices, done, in_host = self.block, [], set(), set()
        while pair := self._next_pair(block, done):
            done.add(pair.forward.outputs[0])
            part = loops.part_of(pair, self.outside, self._bound(pair.forward.body), self.times)
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
        if block is not self.block:
            forward = unrolled.Forward(block, self.weights, self._end(block))
            return forward, forward.part(self.outside, self._bound(block))
        if self._unrolled is None:
            forward = unrolled.Forward(block, self.weights, self._end(block))
            self._unrolled = forward, forward.part(self.outside, self._bound(block))
        return self._unrolled

    def _bound(self, block: Block) -> list[Operation]:
        """The operations of a block that are never repeated."""
        for x in block.operations:
            if x not in self._is_bound:
                self._is_bound[x] = _is_bound(x)
        return [x for x in block.operations if self._is_bound[x]]

    def _next_pair(self, block: Block, done: Collection[Value]) -> loops.Pair | None:
        pairs = loops.find_pairs(block, self._end(block))
        return next((x for x in pairs if x.forward.outputs[0] not in done), None)

    def _end(self, block: Block) -> int:
        """The number of operations in forward, which ends with the last result to be made."""
        needed = operations_for(block, self.results, self.inputs)
        return block.operations.index(needed[-1]) + 1 if needed else 0


def _in_host(pair: loops.Pair, choice: Choice, link: float) -> list[Value]:
    """The values of a pair that go to host memory: the largest, as far as the link is idle."""
    loop = pair.forward
    if loop.is_reversed and not COUNTERS_INDEX_HOST:
        return []
    idle = link * 2 * loop.products / RATES.flops * RATES.host / loop.length
    hosted = []
    for value in sorted(choice.kept, key=bytes_of, reverse=True):
        if value.is_array and _MIN_HOST <= bytes_of(value) <= idle:
            idle -= bytes_of(value)
            hosted.append(value)
    return hosted


def _is_bound(operation: Operation) -> bool:
    """Whether an operation is never repeated: for what it does beside, or as its cost is unknown.

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


def _too_little(budget: int, least: Chosen) -> str:
    kept = [x for x in least.residuals if x.action == "keep"]
    largest = sorted(by_kind(kept), key=kept_bytes, reverse=True)[:3]
    lines = "".join("\n  " + " ".join(filter(None, line)) for line in map(described, largest))
    return (
        f"`budget_bytes={budget}` of `jz.Activations` is less than the {least.num_bytes} bytes "
        "that a device keeps if backward computes all again that it can. Give at least that, or 0 "
        "for the least; or fewer rows for each device, more `microbatches`, or more devices. Most "
        f"of it:{lines}"
    )
