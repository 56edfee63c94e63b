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
    exchanged_or_effect,
    operations_for,
    without_dead_code,
)
from .._sharding import Activations
from . import loops, unrolled
from .costs import RATES, bytes_of, seconds_of
from .min_cut import Choice, Cost, Part, cheapest
from .residuals import Residual, by_kind, described, kept_bytes, residuals_of

# Seconds for a byte: what it takes to write and to read it, and as much as to keep nothing.
_PRICES = 2 / RATES.memory, 1e-7
_STEPS = 24  # of the search for a price
_NEAR = 0.98  # of the budget: near enough
_MIN_HOST = 2**20  # bytes of a layer below which a value is not worth a copy
_TRIED = 16  # values that are kept one by one, where the next price keeps too much


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A program, and what it keeps.

    Attributes:
        block: the program.
        choices: the parts of forward, and what was chosen for each.
        in_host: the kept values that are in host memory between forward and backward.
    """

    block: Block
    choices: list[tuple[Part, Choice]]
    in_host: frozenset[Value] = frozenset()

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
        return Chosen(block, [])
    program = _Program(block, weights, results, times)
    low, high = _PRICES
    most = program.at(low)
    if most.num_bytes <= budget:
        return most
    link = 1.0 if activations.host else 0.0
    if link and program.at(low, link).num_bytes <= budget:
        _, fits, _ = _search(lambda link: program.at(low, link), 0.0, link, budget)
        return fits
    least = program.at(high, link)
    if least.num_bytes > budget > 0:
        raise ValueError(_too_little(budget, least))
    if budget == 0:
        return least
    logarithms = math.log(low), math.log(high)
    price, fits, over = _search(lambda x: program.at(math.exp(x), link), *logarithms, budget)
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
    at: Callable[[float], Chosen], over_at: float, fits_at: float, budget: int
) -> tuple[float, Chosen, Chosen]:
    """Where what is chosen fits just so: the place, what is chosen there, and what does not fit."""
    over, fits = at(over_at), at(fits_at)
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
        self.outside: dict[Value, Cost] = {}
        for operation in block.operations:
            # What a view is of is kept in its place.
            sources = sum(self.outside[x].bytes for x in operation.values if x in self.outside)
            most = sources if seconds_of(operation) == 0 else math.inf
            self.outside |= {x: Cost(min(bytes_of(x), most)) for x in operation.outputs}
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
            part = loops.part_of(pair, self.outside, _not_repeated(pair.forward.body), self.times)
            choices.append((part, cheapest(part, price, keep)))
            hosted = _in_host(pair, choices[-1][1], link)
            in_host.update(hosted)
            block = loops.repeating(block, pair, choices[-1][1], hosted)
        block = without_dead_code(block)
        if not self.outside_loops:
            return Chosen(block, choices, frozenset(in_host))
        forward = unrolled.Forward(block, self.weights, self._end(block))
        part = forward.part(self.outside, _not_repeated(block))
        choices.append((part, cheapest(part, price, keep)))
        block = without_dead_code(unrolled.repeating(forward, choices[-1][1]))
        return Chosen(block, choices, frozenset(in_host))

    def _next_pair(self, block: Block, done: Collection[Value]) -> loops.Pair | None:
        pairs = loops.find_pairs(block, self._end(block))
        return next((x for x in pairs if x.forward.outputs[0] not in done), None)

    def _end(self, block: Block) -> int:
        """How many operations are forward: up to the last that makes a result."""
        needed = operations_for(block, self.results, self.inputs)
        return block.operations.index(needed[-1]) + 1 if needed else 0


def _in_host(pair: loops.Pair, choice: Choice, link: float) -> list[Value]:
    """The values of a pair that go to host memory: the largest, as far as the link is idle."""
    loop = pair.forward
    idle = link * 2 * loop.products / RATES.flops * RATES.host / loop.length
    hosted = []
    for value in sorted(choice.kept, key=bytes_of, reverse=True):
        if value.is_array and _MIN_HOST <= bytes_of(value) <= idle:
            idle -= bytes_of(value)
            hosted.append(value)
    return hosted


def _not_repeated(block: Block) -> list[Operation]:
    """Operations with an effect or a collective, and those that no copy can take the place of."""
    return [
        x
        for x in block.operations
        if isinstance(x, Barrier) or exchanged_or_effect(x) or not all(map(_is_data, x.outputs))
    ]


def _is_data(value: Value) -> bool:
    return value.dtype is not None


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
