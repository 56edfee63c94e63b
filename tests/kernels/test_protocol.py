"""The protocol of the one-kernel collectives, against schedulers that look for trouble.

`exchange` is recorded as steps, which run in a model of loosely ordered memory. Each ordering
that the protocol asks for is then taken out, and a scheduler must be found for which it breaks:
so the model sees what the ordering is there for.
"""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import hypothesis.errors
import hypothesis.strategies as st
import pytest

from jaxzero.pallas_kernels._protocol import Party, exchange

from ._remote_memory import Broken, Read, Scheduler, Signal, Wait, World, Write, explore


class Recorder(Party):
    """A party that writes down what it is told."""

    def __init__(self, device, num_devices, block):
        self.device, self.num_devices, self.block = device, num_devices, block
        self.steps = []

    def repeat(self, num, body):
        for i in range(num):
            body(i)

    def when(self, condition, body):
        if condition:
            body()

    def signal(self, semaphore, peer):
        index = self.device if semaphore == "arrived" else 0
        self.steps.append(Signal((self.block, semaphore, index), peer))

    def wait(self, semaphore, count, peer=0):
        self.steps.append(Wait((self.block, semaphore, peer), count))

    def write(self, tile, slot):
        first = self.device + 1
        for peer in (*range(first, self.num_devices), *range(first)):
            self.steps.append(Write(peer, slot, tile))

    def read(self, peer, tile, slot, so_far):
        self.steps.append(Read(peer, slot, tile))
        return (so_far or 0) + 1

    def store(self, tile, total):
        assert total == self.num_devices


@dataclasses.dataclass(frozen=True)
class Size:
    devices: int
    tiles: tuple[int, ...]  # of each block
    slots: int
    calls: int = 2


def programs(size, change=lambda steps: steps):
    """The steps of each block of each device."""

    def steps(device, block, tiles):
        recorder = Recorder(device, size.devices, block)
        exchange(recorder, num_tiles=tiles, most_tiles=max(size.tiles), slots=size.slots)
        return change(recorder.steps)

    return [[steps(d, b, n) for b, n in enumerate(size.tiles)] for d in range(size.devices)]


schedulers = st.builds(
    Scheduler,
    st.lists(st.integers(0, 255), min_size=16, max_size=16).map(tuple),
    st.lists(st.integers(0, 400), max_size=8).map(tuple),
)

SIZES = [
    Size(2, (2,), 1),
    Size(2, (3,), 2),
    Size(2, (2, 1), 2),
    Size(3, (2, 2), 1),
    Size(3, (3,), 2),
    Size(2, (1, 1, 0), 4, calls=3),
    Size(4, (2,), 2, calls=1),
    Size(1, (2,), 1),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_tile_arrives_whole_and_in_time(size):
    found = programs(size)

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(schedulers)
    def check(scheduler):
        world = World(found, calls=size.calls)
        world.run(scheduler)
        tiles = sum(size.tiles) * size.devices**2 * size.calls
        assert world.reads == 2 * tiles  # of two words

    check()


def dropping(kind, semaphore):
    return lambda steps: [s for s in steps if not (isinstance(s, kind) and _is(s, semaphore))]


def changing(kind, semaphore, **fields):
    def change(step):
        fits = isinstance(step, kind) and _is(step, semaphore)
        return dataclasses.replace(step, **fields) if fits else step

    return lambda steps: [change(s) for s in steps]


def _is(step, semaphore):
    return step.semaphore[1] == semaphore


def both(*changes):
    return lambda steps: functools.reduce(lambda found, change: change(found), changes, steps)


def one_counter(semaphore):
    """One semaphore for all peers in place of one for each."""
    return renaming(lambda block, name, peer: (block, name, 0 if name == semaphore else peer))


def renaming(rename):
    """Other semaphores, of which each has three parts: block, name, peer."""

    def change(step):
        is_one = isinstance(step, Signal | Wait)
        return dataclasses.replace(step, semaphore=rename(*step.semaphore)) if is_one else step

    return lambda steps: [change(s) for s in steps]


def fewer(semaphore):
    """A wait for one signal less."""

    def change(step):
        is_one = isinstance(step, Wait) and _is(step, semaphore)
        return dataclasses.replace(step, count=step.count - 1) if is_one else step

    return lambda steps: [change(s) for s in steps]


def last(kind, semaphore, times):
    """The last step of a kind, that often instead of once."""

    def change(steps):
        i = max(i for i, s in enumerate(steps) if isinstance(s, kind) and _is(s, semaphore))
        return [*steps[:i], *[steps[i]] * times, *steps[i + 1 :]]

    return change


def without_the_last_tile(steps):
    """Neither is it waited for, nor read."""
    i = max(i for i, s in enumerate(steps) if isinstance(s, Read))
    assert isinstance(steps[i - 1], Wait)
    return [*steps[: i - 1], *steps[i + 1 :]]


def reads_last(steps):
    """All tiles are sent before the first is read."""

    def is_late(step):
        own = isinstance(step, Wait) and _is(step, "arrived")
        return own or isinstance(step, Read) or (isinstance(step, Signal) and _is(step, "free"))

    return sorted(steps, key=is_late)


def signal_before(kind):
    """Signals move in front of the stores or loads that they announce the end of."""

    def change(steps):
        result: list = []
        for step in steps:
            at = len(result)
            if isinstance(step, Signal) and not _is(step, "entered"):
                while at and isinstance(result[at - 1], kind):
                    at -= 1
            result.insert(at, step)
        return result

    return change


ONE, TWO, MANY = Size(2, (2,), 1), Size(2, (3,), 2), Size(2, (2, 2), 1)

# How it breaks.
OUTSIDE = "a store into memory whose owner is not in this call"
TILE = "wanted tile"
LEFT = "semaphores are not zero"

MUTATIONS = {
    "no entry barrier": (
        OUTSIDE,
        ONE,
        both(dropping(Signal, "entered"), dropping(Wait, "entered")),
    ),
    "the entry barrier lets one be late": (OUTSIDE, Size(3, (1,), 1), fewer("entered")),
    "nobody waits at the entry": (OUTSIDE, ONE, dropping(Wait, "entered")),
    "no release before a tile's flag": (TILE, ONE, changing(Signal, "arrived", release=False)),
    "no acquire after a tile's flag": (TILE, ONE, changing(Wait, "arrived", acquire=False)),
    "the flag comes before the tile": (TILE, ONE, signal_before(Write)),
    "nobody waits for tiles": (TILE, ONE, dropping(Wait, "arrived")),
    "tiles are not announced": ("deadlock", ONE, dropping(Signal, "arrived")),
    "one tile is announced twice": (LEFT, ONE, last(Signal, "arrived", 2)),
    "leave before the last tile": (OUTSIDE, ONE, without_the_last_tile),
    "one counter for the tiles of all": (TILE, TWO, one_counter("arrived")),
    "a place is used again unasked": (TILE, ONE, dropping(Wait, "free")),
    "a place is given back before it is read": (TILE, ONE, signal_before(Read)),
    "no release before a place is given back": (
        TILE,
        ONE,
        changing(Signal, "free", release=False),
    ),
    "nothing is read in time": ("deadlock", ONE, reads_last),
    "no place is given back": ("deadlock", ONE, dropping(Signal, "free")),
    "a place too many is given back": (LEFT, ONE, last(Signal, "free", 2)),
    "one peer has not given its place back": (TILE, ONE, fewer("free")),
    "blocks share semaphores": (TILE, MANY, renaming(lambda block, name, peer: (0, name, peer))),
}


def breaks(how, found, size, **options):
    """Whether a scheduler is found for which it goes wrong in this way."""

    def goes_wrong(scheduler):
        try:
            World(found, calls=size.calls, **options).run(scheduler)
        except Broken as error:
            return how in str(error)
        return False

    settings = hypothesis.settings(
        max_examples=2000, derandomize=True, database=None, phases=[hypothesis.Phase.generate]
    )
    try:
        hypothesis.find(schedulers, goes_wrong, settings=settings)
    except hypothesis.errors.NoSuchExample:
        return False
    return True


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_breaks_without(name):
    how, size, change = MUTATIONS[name]
    changed = programs(size, change)
    assert changed != programs(size)
    assert breaks(how, changed, size)


def test_it_breaks_if_not_all_blocks_run_at_once():
    assert breaks("deadlock", programs(MANY), MANY, resident=1)


def test_it_breaks_if_semaphores_are_zeroed_late():
    """What JAX's barrier of devices before a kernel is needed for."""
    assert breaks("deadlock", programs(ONE), ONE, device_barrier=False)


def test_nothing_can_go_wrong_in_a_small_case():
    """Two tiles in one place, twice: not some schedules, but all."""
    assert explore(World(programs(ONE), calls=ONE.calls)) > 10000
