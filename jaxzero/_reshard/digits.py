"""Coordinates of devices as digits of prime size, in which two meshes over the same devices agree.

A mesh axis of `p * q` devices is written as two axes of `p` and of `q`. A mesh of 2 nodes x 8
becomes `node.0, local.0, local.1, local.2`, all of size 2. Any other mesh whose device array is a
reshaped and transposed one of these, such as `("data": 4, "model": 4)`, has axes that are runs of
the same digits. So a collective over a part of an axis is one over some of the digits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from .._mesh import NODE


@dataclasses.dataclass(frozen=True)
class Digits:
    """The devices of a mesh, with coordinates of prime size.

    Attributes:
        mesh: all devices; one axis of prime size for each digit, of type `Auto`.
        axes: for each axis of the mesh that the digits were made of, its digits, major first.
    """

    mesh: Mesh
    axes: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, mesh: Mesh) -> Digits:
        """The digits of a mesh, each axis by itself."""
        axes, sizes = {}, {}
        for axis, size in mesh.shape.items():
            factors = {f"{axis}.{i}": prime for i, prime in enumerate(_primes(size))}
            axes[axis], sizes = tuple(factors), sizes | factors
        grid = mesh.devices.reshape(tuple(sizes.values()) or (1,))
        names = tuple(sizes) or ("one",)
        return cls(Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names)), axes)

    def over(self, other: Mesh) -> Digits | None:
        """Digits of `other`, a mesh of the same devices, on the mesh of these digits.

        Returns:
            None if the coordinates of `other` are no digits of these, as in a shuffled order.
        """
        place = {device: i for i, device in enumerate(self.mesh.devices.flat)}
        found = np.array([place[device] for device in other.devices.flat])
        axes = self._runs(found.reshape(other.devices.shape), other.axis_names)
        if axes is None:
            return None
        order = [name for axis in other.axis_names for name in axes[axis]]
        numbers = np.arange(found.size).reshape(tuple(self.mesh.shape.values()))
        perm = [self.mesh.axis_names.index(name) for name in order]
        perm += [i for i in range(numbers.ndim) if i not in perm]  # an axis of one device
        if not np.array_equal(numbers.transpose(perm).ravel(), found):
            return None
        return Digits(self.mesh, axes)

    def _runs(self, place: np.ndarray, names: tuple[str, ...]) -> dict[str, tuple[str, ...]] | None:
        """For each axis of an array of places, the digits whose strides it has."""
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
        """For each dim of an array, the digits that a spec splits it over, major first."""
        entries = [*spec, *[None] * (ndim - len(spec))]
        named = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
        return tuple(tuple(d for axis in axes for d in self.axes[axis]) for axes in named)

    def is_between_nodes(self, digit: str) -> bool:
        """Whether the digit is one of the axis `node`."""
        return digit in self.axes.get(NODE, ())


def groups(digits: tuple[str, ...], mesh: Mesh) -> np.ndarray:
    """The devices that run a collective together, one group in each row, by index over `digits`."""
    numbers = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    dims = [mesh.axis_names.index(digit) for digit in digits]
    moved = np.moveaxis(numbers, dims, range(-len(dims), 0))
    return moved.reshape(-1, math.prod(mesh.shape[digit] for digit in digits))


@functools.cache
def _primes(size: int) -> tuple[int, ...]:
    found, prime = [], 2
    while size > 1:
        while size % prime == 0:
            found.append(prime)
            size //= prime
        prime += 1
    return tuple(found)
