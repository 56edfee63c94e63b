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
import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from jaxzero import pallas_kernels
from jaxzero.pallas_kernels import _collectives
from jaxzero.pallas_kernels._protocol import Party, exchange
from jaxzero.pallas_kernels._remote import Tiling

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


SLOW = [hypothesis.HealthCheck.too_slow]


def unchanged(steps):
    return steps


def kernel(size, change=unchanged, first=0):
    """The steps of each block of each device; the number of the first block is `first`."""

    def steps(device, block, tiles):
        recorder = Recorder(device, size.devices, block)
        exchange(recorder, num_tiles=tiles, most_tiles=max(size.tiles), slots=size.slots)
        return change(recorder.steps)

    blocks = list(enumerate(size.tiles, first))
    return [[steps(d, b, n) for b, n in blocks] for d in range(size.devices)]


def kernels(size, change=unchanged):
    """One kernel, in each of the calls."""
    return [kernel(size, change)] * size.calls


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
@pytest.mark.one_in(2)
def test_every_tile_arrives_whole_and_in_time(size):
    arrives(kernels(size), [size] * size.calls, examples=60)


def arrives(found, sizes, *, examples):
    """Every tile of kernels of these sizes is read, whatever happens when."""

    @hypothesis.settings(max_examples=examples, suppress_health_check=SLOW)
    @hypothesis.given(schedulers)
    def check(scheduler):
        world = World(found)
        world.run(scheduler)
        assert world.reads == sum(2 * sum(s.tiles) * s.devices**2 for s in sizes)  # of two words

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


def breaks(how, found, **options):
    """Whether a scheduler is found for which it goes wrong in this way."""

    def goes_wrong(scheduler):
        try:
            World(found, **options).run(scheduler)
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
    changed = kernels(size, change)
    assert changed != kernels(size)
    assert breaks(how, changed)


def test_it_breaks_if_not_all_blocks_run_at_once():
    assert breaks("deadlock", kernels(MANY), resident=1)


def test_it_breaks_if_semaphores_are_zeroed_late():
    """What JAX's barrier of devices before a kernel is needed for."""
    assert breaks("deadlock", kernels(ONE), device_barrier=False)


def test_nothing_can_go_wrong_in_a_small_case():
    """Two tiles in one place, twice: not some schedules, but all."""
    assert explore(World(kernels(ONE))) > 10000


LAYERS = LlamaSize(layers=2, width=750, hidden=1000, heads=6, vocabulary=2003)


@functools.cache
def tilings_of_a_step():
    """The exchanges of a step on 8 devices, in the order in which they are traced.

    Nothing is divisible by tiles, and weights of a layer share a kernel; forward and backward.
    """
    found, of = [], Tiling.of.__func__
    weights, gradients = (
        jz.PerAxis(local=dataclasses.replace(codec, implementation="nvlink"))
        for codec in (jz.Int8(), jz.Int4(rounding="stochastic"))
    )
    zero = jz.Zero(jz.make_mesh(1), jz.zero3(weights=weights, gradients=gradients))
    params = zero.abstract(functools.partial(_llama.init, LAYERS), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, 32), jnp.int32)

    def noting(cls, *args):
        found.append(of(cls, *args))
        return found[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        patch.setattr(_collectives, "_wants_kernel", lambda *_: False)
        patch.setattr(pallas_kernels, "remote_gap", lambda platform: None)
        patch.setattr(Tiling, "of", classmethod(noting))
        zero.plan(functools.partial(_llama.loss, LAYERS), params, batch)
    return found


def kernels_of_a_step(devices):
    """Their sizes, with one block for each number of tiles that a block has."""

    def size(tiling):
        fewest = tiling.tiles // tiling.blocks
        return Size(devices, tuple(sorted({fewest, tiling.most_tiles})), tiling.slots)

    return [size(tiling) for tiling in tilings_of_a_step()]


def test_kernels_of_a_step_follow_each_other():
    """In one memory: gathers and sums of layers and of the embedding, in the order of the step."""
    sizes = kernels_of_a_step(2)
    assert len({size.tiles for size in sizes}) == 2
    assert any(max(size.tiles) > size.slots for size in sizes)  # places are used again
    parts = [tiling.parts for tiling in tilings_of_a_step()]
    assert max(map(len, parts)) > 1  # a kernel of several weights
    assert any(part % tiling.tile for tiling in tilings_of_a_step() for part in tiling.parts)
    arrives([kernel(size) for size in sizes], sizes, examples=3)


def embedding_and_layer(devices):
    """The gather of the embedding and a kernel of a layer: other tiles, other places."""
    sizes = kernels_of_a_step(devices)
    first, last = sizes[0], max(sizes, key=lambda size: sum(size.tiles))
    assert first != last
    return first, last


def test_two_kernels_of_a_step_may_run_at_once():
    first, last = embedding_and_layer(3)
    at_once = together(kernel(first), kernel(last, first=len(first.tiles)))
    arrives([at_once], [first, last], examples=3)
    assert breaks("deadlock", [at_once], resident=len(first.tiles))
    shared = together(kernel(first), kernel(last))
    assert any(breaks(how, [shared]) for how in (TILE, LEFT))


def together(*found):
    """The blocks of several kernels, on each device."""
    return [sum(blocks, []) for blocks in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "name",
    [
        "tiles are not announced",
        "no place is given back",
        "nobody waits at the entry",
        "no acquire after a tile's flag",
        "the flag comes before the tile",
        "a place is used again unasked",
        "no release before a place is given back",
        "one peer has not given its place back",
        "blocks share semaphores",
    ],
)
def test_kernels_of_a_step_break_without(name):
    """A lost signal or a race in either of two kernels that follow each other."""
    how, _, change = MUTATIONS[name]
    first, last = embedding_and_layer(2)
    assert breaks(how, [kernel(last, change), kernel(first)])
    assert breaks(how, [kernel(first), kernel(last, change)])
