"""Find the collectives that take an array from one split to another; nothing runs here.

Coordinates of devices are written as digits of prime size, so that two meshes over the same devices
have digits in common: a mesh axis of `p * q` devices is written as two axes, of `p` and of `q`. A
mesh of 2 nodes x 8 becomes `node.0, local.0, local.1, local.2`, all of size 2. In another mesh,
such as `("data": 4, "model": 4)`, each axis is a run of the same digits, if its device array is a
reshaped and transposed form of the first. So a collective over a part of an axis is one over some
of the digits.

Each dim of an array is written as factors of prime size and a rest. A digit splits one factor, or
none: then the devices along it hold the same. The old split says which factor each digit splits,
and the new split which factor it is to split. The operations are:

    none -> factor     slice:       each device keeps its part; nothing is sent
    factor -> other    exchange:    one all-to-all over all such digits; shards keep their size
    factor -> none     gather:      an all-gather, last, because shards grow; between nodes first
    factor <-> factor  permutation: digits that take each other's factors; devices exchange shards

So a byte that several devices of a node need enters the node once, and is then sent on inside it.
This is the decomposition of https://arxiv.org/abs/2112.01075, in an order for two levels of links.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from .._mesh import NODE, STAGE

Place = int | None  # index of a factor that a digit splits; None: it splits none


@dataclasses.dataclass(frozen=True)
class MoveStep:
    """One operation of a route, which all devices run.

    Attributes:
        kind: the operation, as in the table at the top of this file.
        digits: the digits that the operation runs over.
        before: for each digit, the index of the factor that it splits before the step, or None.
        after: for each digit, the index of the factor that it splits after the step, or None.
    """

    kind: Literal["slice", "exchange", "permute", "gather"]
    digits: tuple[str, ...]
    before: tuple[Place, ...]
    after: tuple[Place, ...]

    def held_after(self, held: int, mesh: Mesh) -> int:
        """Return the bytes that a device holds after the step, given the bytes `held` before."""
        num = math.prod(mesh.shape[digit] for digit in self.digits)
        return {"slice": held // num, "gather": held * num}.get(self.kind, held)


@dataclasses.dataclass(frozen=True)
class Route:
    """The operations that move one array, and the factors of its dims.

    Attributes:
        factors: for each dim, the sizes of its factors, major first, without the rest of the dim.
        steps: the operations, in order.
        source: for each factor, whether it is split before the first step.
        target: for each factor, whether it is split after the last step.
    """

    factors: tuple[tuple[int, ...], ...]
    steps: tuple[MoveStep, ...]
    source: tuple[bool, ...]
    target: tuple[bool, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all factors, dim by dim."""
        return tuple(itertools.chain(*self.factors))


def route(
    source: Sequence[tuple[str, ...]],
    target: Sequence[tuple[str, ...]],
    sizes: dict[str, int],
    is_between_nodes: Callable[[str], bool],
) -> Route | None:
    """Find the steps that take an array from one split to another.

    Args:
        source: for each dim, the digits that split it, major first.
        target: for each dim, the digits that are to split it, major first.
        sizes: the size of each digit, by name.
        is_between_nodes: whether a digit counts nodes.

    Returns:
        The route. None if there is none: digits of different sizes split a dim before and after, or
        a digit that splits nothing is to split a factor that another digit keeps.
    """
    factors, where, goal, number = [], dict.fromkeys(sizes), dict.fromkeys(sizes), 0
    for before, after in zip(source, target, strict=True):
        of_dim = []
        for old, new in itertools.zip_longest(before, after):
            size = sizes[old if old is not None else new]
            if new is not None and sizes[new] != size:
                return None
            if old is not None:
                where[old] = number
            if new is not None:
                goal[new] = number
            of_dim.append(size)
            number += 1
        factors.append(tuple(of_dim))
    first = _split(where, number)
    steps = _steps(where, goal, is_between_nodes)
    if steps is None:
        return None
    return Route(tuple(factors), tuple(steps), first, _split(goal, number))


def _split(where: dict[str, Place], num: int) -> tuple[bool, ...]:
    return tuple(i in where.values() for i in range(num))


def _steps(
    where: dict[str, Place], goal: dict[str, Place], is_between_nodes: Callable[[str], bool]
) -> list[MoveStep] | None:
    where, steps = dict(where), []
    while where != goal:
        wrong = [x for x in where if where[x] != goal[x]]
        asked = [x for x in wrong if goal[x] is not None]
        free = [x for x in asked if goal[x] not in where.values()]
        if local := [x for x in free if where[x] is None]:
            step = _step("slice", local, where, goal)
        elif free:
            step = _step("exchange", free, where, goal)
        elif between := _waited_for(asked, where, goal, is_between_nodes):
            step = _step("gather", between, where, goal)
        elif asked:
            after = _passed_on(asked[0], where, goal)
            if after is None:
                return None
            # In the order of the mesh, in which `lax.ppermute` counts devices.
            step = _step("permute", [x for x in where if x in after], where, after)
        else:
            between = [x for x in wrong if is_between_nodes(x)]
            step = _step("gather", between or wrong, where, goal)
        where |= dict(zip(step.digits, step.after, strict=True))
        steps.append(step)
    return steps


def _waited_for(
    asked: list[str],
    where: dict[str, Place],
    goal: dict[str, Place],
    is_between_nodes: Callable[[str], bool],
) -> list[str]:
    """Return digits that count nodes and hold factors that digits of `asked` wait for.

    Each of them is to split nothing after the move, and now splits a factor that a digit of `asked`
    is to split. Gathering over them now frees these factors. If a permutation came first, shards
    would be sent between nodes twice.

    Args:
        asked: digits that are to split another factor than they do now.
        where: for each digit, the factor that it splits now.
        goal: for each digit, the factor that it is to split.
        is_between_nodes: whether a digit counts nodes.
    """
    factors = {goal[x] for x in asked}
    return [x for x in where if goal[x] is None and where[x] in factors and is_between_nodes(x)]


def _step(
    kind: str, digits: list[str], where: dict[str, Place], after: dict[str, Place]
) -> MoveStep:
    befores, afters = (tuple(places[x] for x in digits) for places in (where, after))
    return MoveStep(kind, tuple(digits), befores, afters)  # pyright: ignore[reportArgumentType]


def _passed_on(
    first: str, where: dict[str, Place], goal: dict[str, Place]
) -> dict[str, Place] | None:
    """Find a permutation: a chain of digits, in which each digit takes the factor of the next.

    Args:
        first: the digit that the chain begins with.
        where: for each digit, the factor that it splits now.
        goal: for each digit, the factor that it is to split.

    Returns:
        For each digit of the chain, its new factor; the last digit gets the factor of the first.
        None if `first` splits no factor.
    """
    if where[first] is None:
        return None
    holder = {place: x for x, place in where.items() if place is not None}
    chain, last = [], first
    while last not in chain:
        chain.append(last)
        wanted = goal[last]
        if wanted is None:
            break
        last = holder[wanted]
    else:  # a ring; digits before it wait for it
        chain = chain[chain.index(last) :]
    return {x: where[y] for x, y in zip(chain, [*chain[1:], chain[0]], strict=True)}


@dataclasses.dataclass(frozen=True)
class Digits:
    """The devices of a mesh, whose axes are written as digits of prime size.

    Attributes:
        mesh: all devices, with one axis for each digit, of prime size and of type `Auto`.
        axes: for each axis of the user's mesh its digits, major first.
    """

    mesh: Mesh
    axes: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, mesh: Mesh) -> Digits:
        """Write the size of each axis of a mesh as digits of prime size."""
        axes, sizes = {}, {}
        for axis, size in mesh.shape.items():
            factors = {f"{axis}.{i}": prime for i, prime in enumerate(_primes(size))}
            axes[axis], sizes = tuple(factors), sizes | factors
        grid = mesh.devices.reshape(tuple(sizes.values()) or (1,))
        names = tuple(sizes) or ("one",)
        return cls(Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names)), axes)

    def over(self, other: Mesh) -> Digits | None:
        """Write the axes of `other`, a mesh of the same devices, as digits of this mesh.

        Returns:
            The digits; None if the axes of `other` are no runs of these digits, as in a shuffled
            order.
        """
        place = {device: i for i, device in enumerate(self.mesh.devices.flat)}
        places = np.array([place[device] for device in other.devices.flat])
        axes = self._runs(places.reshape(other.devices.shape), other.axis_names)
        if axes is None:
            return None
        order = [name for axis in other.axis_names for name in axes[axis]]
        numbers = np.arange(places.size).reshape(tuple(self.mesh.shape.values()))
        perm = [self.mesh.axis_names.index(name) for name in order]
        perm += [i for i in range(numbers.ndim) if i not in perm]  # an axis of one device
        if not np.array_equal(numbers.transpose(perm).ravel(), places):
            return None
        return Digits(self.mesh, axes)

    def _runs(self, place: np.ndarray, names: tuple[str, ...]) -> dict[str, tuple[str, ...]] | None:
        """Return the digits of this mesh that each axis of another mesh runs through.

        Args:
            place: for each device of the other mesh, in its shape, the device's number in this one.
            names: the names of the other mesh's axes.

        Returns:
            For each axis its digits, found by the strides of `place` along the axis. None if a
            stride is that of no digit.
        """
        strides, step = {}, place.size
        for name, size in self.mesh.shape.items():
            step //= size
            if size > 1:
                strides[step] = name
        axes = {}
        for dim, axis in enumerate(names):
            line = np.moveaxis(place, dim, 0).reshape(place.shape[dim], -1)[:, 0]
            digits, index = [], 1
            while index < len(line):
                name = strides.get(int(line[index] - line[0]))
                if name is None:
                    return None
                digits.append(name)
                index *= self.mesh.shape[name]
            axes[axis] = tuple(reversed(digits))
        return axes

    def split(self, spec: PartitionSpec, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return, for each dim of an array, the digits over which a spec splits it, major first."""
        entries = [*spec, *[None] * (ndim - len(spec))]
        named = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
        return tuple(tuple(d for axis in axes for d in self.axes[axis]) for axes in named)

    def is_between_nodes(self, digit: str) -> bool:
        """Return True if a digit belongs to the axis `node` or `stage`."""
        return any(digit in self.axes.get(axis, ()) for axis in (NODE, STAGE))


def groups(digits: tuple[str, ...], mesh: Mesh) -> np.ndarray:
    """Return the groups of devices that run a collective over some digits together.

    The result is `[groups, devices of a group]`, with the devices' numbers in `mesh`. In a group,
    devices are in the order of their coordinates along `digits`.
    """
    numbers = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    dims = [mesh.axis_names.index(digit) for digit in digits]
    moved = np.moveaxis(numbers, dims, range(-len(dims), 0))
    return moved.reshape(-1, math.prod(mesh.shape[digit] for digit in digits))


@functools.cache
def _primes(size: int) -> tuple[int, ...]:
    primes, prime = [], 2
    while size > 1:
        while size % prime == 0:
            primes.append(prime)
            size //= prime
        prime += 1
    return tuple(primes)
