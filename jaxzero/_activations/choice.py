"""Choose what forward keeps for backward, under a budget."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection

from .._program import Atom, Block, Value
from .._sharding import Activations
from .costs import RATES, bytes_of
from .priced import Chosen, Point, PricedProgram
from .residuals import by_kind, described, kept_bytes

# Seconds for a byte: what it takes to write and to read it, and so much that of a layer only what
# is tiny beside the work to make it again is kept, such as a sum.
_PRICES = 2 / RATES.memory, 1e-8
# Tried before a budget is refused, and for the least: then not even such values are kept.
_LAST_PRICE = 1e-7
_STEPS = 12  # of the search for a price
_NEAR = 0.98  # of the budget: near enough
_TRIED = 8  # values that are kept one by one, where the next price keeps too much
_POINTS = 5  # of a frontier
_APART = 1.1  # times the bytes of the next point


def choose_activations(
    block: Block,
    weights: Collection[Value],
    results: Collection[Atom],
    activations: Activations | None,
    layer_sets: float | None = None,
    token_parts: int = 1,
) -> Chosen:
    """Choose what forward keeps and what backward computes again.

    Args:
        block: a program of loss and gradients.
        weights: its inputs that are gathered where they are used.
        results: its outputs that are no gradients.
        activations: the budget; None leaves the program as it is.
        layer_sets: how many times the residuals of all layers are on a device, if it runs only
            loops over layers; None: it runs all of the program once.
        token_parts: devices that share each row.

    Raises:
        ValueError: the program cannot keep as little as the budget allows.
        NotImplementedError: `host=True`, the budget is less than what the program keeps, and no
            loop stacks up values for backward.
    """
    program = functools.cache(
        lambda: PricedProgram(block, weights, results, layer_sets, token_parts)
    )
    budget = activations.budget_bytes if activations else None
    if activations is None or budget is None:
        return Chosen(lambda: block, [], frontier=lambda: _frontier(program()))
    if activations.host and not program().pairs and program().at(_PRICES[0]).num_bytes > budget:
        raise NotImplementedError(
            "`host=True` of `jz.Activations` copies what a loop over layers stacks up for "
            "backward, and no loop of the loss does. Write equal layers as one `jax.lax.scan` "
            "(`nn.scan`, `nnx.scan`), or leave `host` out and give `budget_bytes` alone."
        )
    chosen = _choose(program(), budget, 1.0 if activations.host else 0.0)
    return dataclasses.replace(chosen, frontier=lambda: _frontier(program()))


def _frontier(program: PricedProgram) -> tuple[Point, ...]:
    """Points of the lower convex hull of seconds over bytes, the least first.

    The price at which two points are equally good gives the one farthest below their line.
    """
    low, high = _PRICES
    found = [program.at(high), program.at(low)]
    closed: set[tuple[int, int]] = set()
    while len(found) < _POINTS:
        gaps = [
            (less, more)
            for less, more in itertools.pairwise(found)
            if more.num_bytes > _APART * less.num_bytes
            and (less.num_bytes, more.num_bytes) not in closed
        ]
        if not gaps:
            break
        less, more = max(gaps, key=lambda x: x[1].num_bytes - x[0].num_bytes)
        gained = less.seconds_in_all - more.seconds_in_all
        between = program.at(max(gained / (more.num_bytes - less.num_bytes), low))
        if less.num_bytes < between.num_bytes < more.num_bytes:
            found = sorted([*found, between], key=lambda x: x.num_bytes)
        else:
            closed.add((less.num_bytes, more.num_bytes))
    return tuple(dict.fromkeys(x.point for x in found))


def _choose(program: PricedProgram, budget: int, link: float) -> Chosen:
    """The choice that takes the least time under a budget; `link`: see `PricedProgram.at`."""
    low, high = _PRICES
    most = program.at(low)
    if most.num_bytes <= budget:
        return most
    if link:
        over, most = most, program.at(low, link)
        if most.num_bytes <= budget:
            return _search(lambda x: program.at(low, x), 0.0, link, over, most, budget)[0]
    least = program.at(high, link)
    if budget == 0:
        last = program.at(_LAST_PRICE, link)
        return last if last.num_bytes < _NEAR * least.num_bytes else least
    if least.num_bytes > budget:
        high, least = _LAST_PRICE, program.at(_LAST_PRICE, link)
    if least.num_bytes > budget:
        raise ValueError(_too_little(budget, least))
    logarithms = math.log(low), math.log(high)
    fits, at, over = _search(
        lambda x: program.at(math.exp(x), link), *logarithms, most, least, budget
    )
    price = math.exp(at)
    kept = {x for _, choice in fits.choices for x in choice.kept}
    more = [x for _, choice in over.choices for x in choice.kept if x not in kept]
    keep: list[Value] = []
    for value in sorted(more, key=bytes_of, reverse=True)[:_TRIED]:
        chosen = program.at(price, link, [*keep, value])
        to_write_and_read = low * (chosen.num_bytes - fits.num_bytes)
        seconds = chosen.seconds_in_all + to_write_and_read
        if chosen.num_bytes <= budget and seconds < fits.seconds_in_all:
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
) -> tuple[Chosen, float, Chosen]:
    """Bisect prices: the costliest choice that fits, its price, and the cheapest that does not."""
    for _ in range(_STEPS):
        if budget * _NEAR <= fits.num_bytes:
            break
        middle = (over_at + fits_at) / 2
        chosen = at(middle)
        if chosen.num_bytes > budget:
            over_at, over = middle, chosen
        else:
            fits_at, fits = middle, chosen
    return fits, fits_at, over


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
