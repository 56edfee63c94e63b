"""The steps of every move between splits of two dims over 2 x 2 x 2 devices, played with sets.

Each device has a set of cells of the array, and a step says which sets it gets. Nothing of the
programs that move arrays is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from jaxzero._reshard.steps import MoveStep, route

DIGITS = ("node", "first", "second")
SIZES = dict.fromkeys(DIGITS, 2)
DEVICES = list(itertools.product(range(2), repeat=3))
Split = tuple[tuple[str, ...], tuple[str, ...]]  # for each of two dims, the digits that split it
Cells = dict[tuple[int, ...], set[tuple[int, ...]]]  # what each device has


def splits() -> list[Split]:
    """Every way to give some digits, in some order, to two dims."""
    found = {
        (order[:i], order[i:j])
        for order in itertools.permutations(DIGITS)
        for i, j in itertools.combinations_with_replacement(range(4), 2)
    }
    return sorted(found)


def held(split: Split, factors: tuple[tuple[int, ...], ...]) -> Cells:
    """The cells of each device; a cell is an index into each factor."""
    names = [name for dim, own in enumerate(split) for name in padded(own, len(factors[dim]))]
    cells = set(itertools.product(*map(range, itertools.chain(*factors))))

    def is_of(cell: tuple[int, ...], device: tuple[int, ...]) -> bool:
        return all(
            name is None or index == device[DIGITS.index(name)]
            for name, index in zip(names, cell, strict=True)
        )

    return {device: {cell for cell in cells if is_of(cell, device)} for device in DEVICES}


def padded(names: tuple[str, ...], num: int) -> tuple[str | None, ...]:
    return (*names, *[None] * (num - len(names)))


def senders(step: MoveStep, device: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The devices that send to this one, itself included."""
    dims = [DIGITS.index(x) for x in step.digits]
    if step.kind == "slice":
        yield device
    elif step.kind == "permute":
        source = list(device)
        for dim, factor in zip(dims, step.before, strict=True):
            source[dim] = device[dims[step.after.index(factor)]]
        yield tuple(source)
    else:
        same = [i for i in range(3) if i not in dims]
        yield from (x for x in DEVICES if all(x[i] == device[i] for i in same))


def played(step: MoveStep, cells: Cells) -> tuple[Cells, list[int]]:
    """What each device has after a step, and how many cells entered each node."""
    result, entered = {}, [0, 0]
    for device in DEVICES:
        result[device] = set()
        for sender in senders(step, device):
            got = cells[sender]
            if step.kind in ("slice", "exchange"):
                for digit, factor in zip(step.digits, step.after, strict=True):
                    got = {x for x in got if x[factor] == device[DIGITS.index(digit)]}
            result[device] |= got
            entered[device[0]] += len(got) * (sender[0] != device[0])
    return result, entered


@pytest.mark.parametrize("source", splits(), ids=str)
def test_steps_end_at_the_target_and_each_cell_enters_a_node_once(source):
    num_refused = 0
    for target in splits():
        found = route(source, target, SIZES, lambda digit: digit == "node")
        if found is None:
            num_refused += 1
            continue
        cells = first = held(source, found.factors)
        entered = [0, 0]
        for step in found.steps:
            cells, more = played(step, cells)
            entered = [x + y for x, y in zip(entered, more, strict=True)]
        wanted = held(target, found.factors)
        assert cells == wanted, (target, found.steps)
        if sum(map(len, source)) == 3:  # no two devices have the same, as in ZeRO
            for node in range(2):
                mine = [x for x in DEVICES if x[0] == node]
                need = set.union(*(wanted[x] for x in mine)) - set.union(*(first[x] for x in mine))
                assert entered[node] == len(need), (target, found.steps)
    assert num_refused == 0 or sum(map(len, source)) < 3
