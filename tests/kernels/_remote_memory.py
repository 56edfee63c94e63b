"""Devices that write into each other's memory, as loosely ordered as GPUs may: a model.

A block runs its steps in order, but what a step does to memory is *performed* later, and in
any order: a store reaches a peer's memory long after the next ones were issued, or before. Only
these put things in order:

- a signal that releases is performed when all that its block issued before it has been;
- a wait that acquires makes its block see all that has been performed; without it, a load may
  return what memory held at any time since the block last looked;
- stores and loads of one block to one place keep their order;
- a kernel starts, as a whole, after what its device did before, and ends when all that its blocks
  issued has been performed.

A block issues all that it can at once. That leaves nothing out: what it issued may be performed
as late as if it had been issued then, and a load may return what it would have then.

What comes next is decided by a `Scheduler`, which hypothesis draws, or by `explore`, which tries
everything. Nothing here knows the protocol. A world raises `Broken` when something goes wrong.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

WORDS = 2  # of a tile, each of which is stored and loaded on its own: codes and scales


class Broken(Exception):
    """What no protocol may do."""


@dataclasses.dataclass(frozen=True)
class Write:
    """Store a tile into a place of a peer's inbox."""

    peer: int
    slot: int
    tile: int


@dataclasses.dataclass(frozen=True)
class Signal:
    """Add to a semaphore of a peer."""

    semaphore: Any
    peer: int
    release: bool = True


@dataclasses.dataclass(frozen=True)
class Wait:
    """Wait until one's own semaphore has `count`, and subtract it."""

    semaphore: Any
    count: int
    acquire: bool = True


@dataclasses.dataclass(frozen=True)
class Read:
    """Load a tile from a place of one's own inbox: it should be this tile of this peer."""

    peer: int
    slot: int
    tile: int


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Says what happens next: of all that can, what has the highest priority.

    Attributes:
        priorities: a thing's is found by its hash, so that one store may be late for long.
        changes: after how many events priorities are dealt anew.
    """

    priorities: tuple[int, ...]
    changes: tuple[int, ...]

    def choose(self, now: int, actions: list[tuple]) -> tuple:
        salt = sum(now >= change for change in self.changes)
        return max(actions, key=lambda action: self._priority(action, salt))

    def _priority(self, action: tuple, salt: int) -> int:
        h = salt
        for part in action:
            h = (h * 31 + (part if isinstance(part, int) else sum(map(ord, part)))) % 1000003
        return self.priorities[h % len(self.priorities)]


@dataclasses.dataclass
class _Pending:
    """Something issued and not yet performed."""

    step: Write | Signal | Read
    word: int  # of a tile
    number: int  # of all that its block issued
    floor: int = 0  # the oldest version that a load may return


class _Block:
    def __init__(self, steps: list[Any]):
        self.steps, self.next, self.issued = steps, 0, 0
        self.pending: list[_Pending] = []
        self.floors: dict[tuple, int] = {}

    def state(self) -> tuple:
        pending = tuple((op.number, op.floor) for op in self.pending)
        return (self.next, pending, frozenset(self.floors.items()))

    def __deepcopy__(self, _: dict) -> _Block:
        other = copy.copy(self)
        other.pending, other.floors = list(self.pending), dict(self.floors)
        return other

    @property
    def is_done(self) -> bool:
        return self.next == len(self.steps) and not self.pending


class _Device:
    def __init__(self):
        self.phase = 0  # of `_PHASES`
        self.call = 0
        self.inside = False  # whether its kernel runs, and peers may write
        self.semaphores: collections.Counter = collections.Counter()
        self.is_zeroed = -1  # the last call that semaphores were zeroed for
        self.memory: dict[tuple, list[Any]] = {}  # all that a place ever held
        self.waiting: list[int] = []  # blocks that do not run yet
        self.running: dict[int, _Block] = {}

    def held(self, b: int, op: _Pending) -> list[Any]:
        """What the place that is loaded ever held."""
        assert isinstance(op.step, Read)
        return self.memory.get((b, op.step.peer, op.step.slot, op.word), [None])

    def __deepcopy__(self, memo: dict) -> _Device:
        other = copy.copy(self)
        other.semaphores = self.semaphores.copy()
        other.memory = {place: list(held) for place, held in self.memory.items()}
        other.waiting = list(self.waiting)
        other.running = {b: copy.deepcopy(block, memo) for b, block in self.running.items()}
        return other


_PHASES = ("zero", "meet", "enter", "run")


class World:
    """Devices that run one kernel after the other, in the same memory.

    Args:
        kernels: of each the steps of each block of each device.
        resident: how many blocks of a device run at once; None: all.
        device_barrier: whether devices wait for each other once semaphores are zero.
    """

    def __init__(
        self,
        kernels: list[list[list[list[Any]]]],
        *,
        resident: int | None = None,
        device_barrier: bool = True,
    ):
        self.kernels, self.calls = kernels, len(kernels)
        self.resident = resident or max(len(blocks) for blocks, *_ in kernels)
        self.device_barrier = device_barrier
        self.devices = [_Device() for _ in kernels[0]]
        self.reads = 0

    def __deepcopy__(self, memo: dict) -> World:
        other = copy.copy(self)
        other.devices = [copy.deepcopy(device, memo) for device in self.devices]
        return other

    def run(self, scheduler: Scheduler) -> None:
        """Run to the end; raises `Broken` if it is not reached, or reached wrongly."""
        now = 0
        while actions := self.actions():
            self.do(scheduler.choose(now, actions))
            now += 1

    def actions(self) -> list[tuple]:
        """All that may happen next; nothing at the end."""
        actions: list[tuple] = []
        for d, device in enumerate(self.devices):
            if device.call == self.calls:
                continue
            if self._can_advance(device):
                actions.append(("advance", d))
            if len(device.running) < self.resident:
                actions += [("start", d, b) for b in device.waiting]
            for b, block in device.running.items():
                for i, op in enumerate(block.pending):
                    if _may_perform(block, i):
                        ways = 1 + self._may_be_stale(device, b, op)
                        actions += [("perform", d, b, op.number, way) for way in range(ways)]
        if not actions and any(device.call < self.calls for device in self.devices):
            raise Broken("deadlock")
        return actions

    def _may_be_stale(self, device: _Device, b: int, op: _Pending) -> bool:
        return isinstance(op.step, Read) and op.floor < len(device.held(b, op)) - 1

    def _can_advance(self, device: _Device) -> bool:
        phase = _PHASES[device.phase]
        if phase == "meet" and self.device_barrier:
            return all(other.is_zeroed >= device.call for other in self.devices)
        return phase != "run" or not (device.waiting or device.running)

    def _can_issue(self, device: _Device, block: _Block) -> bool:
        if block.next == len(block.steps):
            return False
        step = block.steps[block.next]
        return not isinstance(step, Wait) or device.semaphores[step.semaphore] >= step.count

    def do(self, action: tuple) -> None:
        """One of `actions`, and what blocks issue then."""
        kind, d, *rest = action
        device = self.devices[d]
        if kind == "advance":
            self._advance(d, device)
        elif kind == "start":
            (b,) = rest
            device.waiting.remove(b)
            block = device.running[b] = _Block(self.kernels[device.call][d][b])
            self._see_all(device, block)
        else:
            b, number, way = rest
            self._perform(d, device, b, device.running[b], number, is_stale=way == 1)
        for device in self.devices:
            for b, block in list(device.running.items()):
                while self._can_issue(device, block):
                    self._issue(device, b, block)
                if block.is_done:
                    del device.running[b]

    def _advance(self, d: int, device: _Device) -> None:
        phase = _PHASES[device.phase]
        if phase == "zero":
            device.semaphores.clear()
            device.is_zeroed = device.call
        elif phase == "enter":
            device.inside = True
            device.waiting = list(range(len(self.kernels[device.call][d])))
        elif phase == "run":
            device.inside = False
            if left := +device.semaphores:
                raise Broken(f"semaphores are not zero at the end: {dict(left)}")
            device.call += 1
        device.phase = (device.phase + 1) % len(_PHASES)

    def _issue(self, device: _Device, b: int, block: _Block) -> None:
        step = block.steps[block.next]
        block.next += 1
        if isinstance(step, Wait):
            device.semaphores[step.semaphore] -= step.count
            if step.acquire:
                self._see_all(device, block)
            return
        for word in range(1 if isinstance(step, Signal) else WORDS):
            op = _Pending(step, word, block.issued)
            if isinstance(step, Read):
                op.floor = block.floors.get((b, step.peer, step.slot, word), 0)
            block.pending.append(op)
            block.issued += 1

    def _see_all(self, device: _Device, block: _Block) -> None:
        block.floors = {place: len(held) - 1 for place, held in device.memory.items()}

    def _perform(
        self, d: int, device: _Device, b: int, block: _Block, number: int, is_stale: bool
    ) -> None:
        (op,) = [op for op in block.pending if op.number == number]
        block.pending.remove(op)
        step = op.step
        if isinstance(step, Read):
            self._load(device, b, op, step, is_stale)
            return
        target = self.devices[step.peer]
        if isinstance(step, Signal):
            if target.call != device.call:
                raise Broken("a signal to a device in another call")
            target.semaphores[step.semaphore] += 1
            return
        if not target.inside or target.call != device.call:
            raise Broken("a store into memory whose owner is not in this call")
        held = target.memory.setdefault((b, d, step.slot, op.word), [None])
        held.append((device.call, d, step.tile))

    def _load(self, device: _Device, b: int, op: _Pending, step: Read, is_stale: bool) -> None:
        found = device.held(b, op)[op.floor if is_stale else -1]
        if found != (device.call, step.peer, step.tile):
            raise Broken(f"wanted tile {step.tile} of {step.peer}, call {device.call}: {found}")
        self.reads += 1

    def state(self) -> tuple:
        """All that what may happen next depends on."""
        return tuple(
            (
                device.phase,
                device.call,
                device.is_zeroed,
                tuple(device.waiting),
                frozenset(device.semaphores.items()),
                frozenset((place, tuple(held)) for place, held in device.memory.items()),
                tuple((b, block.state()) for b, block in sorted(device.running.items())),
            )
            for device in self.devices
        )


def explore(world: World) -> int:
    """Try everything that may happen; raises `Broken` if anything goes wrong.

    Returns:
        How many states there are.
    """
    seen, found = {world.state()}, [world]
    while found:
        world = found.pop()
        for action in world.actions():
            other = copy.deepcopy(world)
            other.do(action)
            if (state := other.state()) not in seen:
                seen.add(state)
                found.append(other)
    return len(seen)


def _may_perform(block: _Block, i: int) -> bool:
    op, earlier = block.pending[i], block.pending[:i]
    if isinstance(op.step, Signal):
        return not (op.step.release and earlier)
    place = _place(op)
    return all(_place(other) != place for other in earlier)


def _place(op: _Pending) -> tuple | None:
    """Where it stores or loads; a signal is nowhere."""
    if isinstance(op.step, Signal):
        return None
    return (type(op.step).__name__, op.step.peer, op.step.slot, op.word)
