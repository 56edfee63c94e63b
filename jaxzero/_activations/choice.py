"""Choose what forward keeps for backward, under a budget.

A kept byte has a price in seconds. At a low price much is kept, and at a high price much is
recomputed. A bisection finds a price whose cheapest choice keeps nearly as much as the budget.
"""

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

# The lowest and the highest price of a kept byte, in seconds. The lowest is the time to write and
# read it. At the highest only values are kept that are tiny beside the work of recomputing them,
# such as the sums of a reduction.
_PRICES = 2 / RATES.memory, 1e-8
# At this price not even sums are kept. Tried for a budget of 0, and before a budget is refused.
_LAST_PRICE = 1e-7
_STEPS = 12  # most steps of a bisection of prices
_NEAR = 0.98  # share of the budget: a choice that keeps as much ends the bisection
_TRIED = 8  # values that are tried one by one with what the bisection leaves of the budget
_POINTS = 5  # most points of a frontier
_APART = 1.1  # a point between two others is sought if their bytes differ by more than this factor


def choose_activations(
    block: Block,
    weights: Collection[Value],
    results: Collection[Atom],
    activations: Activations | None,
    layer_sets: float | None = None,
    token_parts: int = 1,
) -> Chosen:
    """Choose the values that forward keeps for backward, and those that backward recomputes.

    Args:
        block: a program of loss and gradients.
        weights: inputs of the program that are gathered where they are used.
        results: outputs of the program that are not gradients: the loss and its auxiliary outputs.
        activations: the budget. With None, or a budget of None, the program stays as it is.
        layer_sets: with pipeline stages, the bytes of residuals that a device holds at once,
            divided by those of all layers for one micro-batch: micro-batches in flight times the
            share of the layers that a stage has. None without stages.
        token_parts: the number of devices that share each row, and so hold a part of each value.

    Raises:
        ValueError: the program keeps more than the budget even if backward recomputes all it can.
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
    """Return up to five choices' figures on the lower convex hull of seconds over bytes kept.

    The point of the fewest bytes comes first. To find a point between two neighbours, the program
    is priced so that both neighbours cost the same. If the cheapest choice at this price is one of
    the neighbours, the hull has no point between them.
    """
    low, high = _PRICES
    choices = [program.at(high), program.at(low)]
    closed: set[tuple[int, int]] = set()  # gaps without a point, by the bytes of both ends
    while len(choices) < _POINTS:
        gaps = [
            (less, more)
            for less, more in itertools.pairwise(choices)
            if more.num_bytes > _APART * less.num_bytes
            and (less.num_bytes, more.num_bytes) not in closed
        ]
        if not gaps:
            break
        less, more = max(gaps, key=lambda gap: gap[1].num_bytes - gap[0].num_bytes)
        gained = less.seconds_in_all - more.seconds_in_all
        between = program.at(max(gained / (more.num_bytes - less.num_bytes), low))
        if less.num_bytes < between.num_bytes < more.num_bytes:
            choices = sorted([*choices, between], key=_num_bytes)
        else:
            closed.add((less.num_bytes, more.num_bytes))
    return tuple(dict.fromkeys(choice.point for choice in choices))


def _choose(program: PricedProgram, budget: int, link: float) -> Chosen:
    """Return the choice of the least predicted time that keeps at most `budget` bytes.

    Args:
        program: the program, for which choices are computed at several prices.
        budget: the most bytes to keep; 0 for as few as possible.
        link: 1 if values may wait in host memory, 0 if not; see `PricedProgram.at`.

    Raises:
        ValueError: every choice keeps more bytes than the budget.
    """
    low, high = _PRICES
    most = program.at(low)
    if most.num_bytes <= budget:
        return most
    if link:
        over, most = most, program.at(low, link)
        if most.num_bytes <= budget:
            return _search(lambda x: program.at(low, x), 0.0, link, over, most, budget)[0]
    least = min(most, program.at(high, link), key=_num_bytes)
    if budget == 0:
        last = program.at(_LAST_PRICE, link)
        return last if last.num_bytes < _NEAR * least.num_bytes else least
    if least.num_bytes > budget:
        high, least = _LAST_PRICE, min(least, program.at(_LAST_PRICE, link), key=_num_bytes)
    if least.num_bytes > budget:
        raise ValueError(_too_little(budget, least))
    logarithms = math.log(low), math.log(high)
    fits, logarithm, over = _search(
        lambda x: program.at(math.exp(x), link), *logarithms, most, least, budget
    )
    price = math.exp(logarithm)
    # Prices give only points of a convex hull. Between two of them, keep single values as well.
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


def _num_bytes(chosen: Chosen) -> int:
    return chosen.num_bytes


def _search(
    at: Callable[[float], Chosen],
    over_at: float,
    fits_at: float,
    over: Chosen,
    fits: Chosen,
    budget: int,
) -> tuple[Chosen, float, Chosen]:
    """Bisect an argument for the choice that keeps the most bytes within the budget.

    Args:
        at: returns the choice for an argument: the logarithm of a price, or a share of the link.
        over_at: an argument for which the choice keeps more bytes than the budget.
        fits_at: an argument for which the choice keeps no more bytes than the budget.
        over: the choice for `over_at`.
        fits: the choice for `fits_at`.
        budget: the most bytes to keep.

    Returns:
        Of the choices within the budget the one that keeps most; the argument of this choice; and
        of the choices over the budget the one that keeps least.
    """
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
