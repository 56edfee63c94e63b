"""Compute full values: scalars, and everything of leaves that are not in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from .._mesh import with_automatic_axes
from .._program import Atom, Value
from .._sharding import LeafSpec, pad, unpad
from .layouts import UpdateLayouts
from .program import UpdateProgram


class FullValues:
    """The full values of an update, computed on global arrays as without offload.

    Every call computes from the inputs and from the reductions that `add` has made known; XLA
    merges what several calls have in common.
    """

    def __init__(self, program: UpdateProgram, layouts: UpdateLayouts):
        self._program = program
        self._layouts = layouts
        self._known: dict[Value, tuple[Array, LeafSpec | None]] = {}

    def add(self, value: Value, x: Array, leaf: LeafSpec | None = None) -> None:
        """Make a value known: an input in the stored form of `leaf`, or a scalar."""
        self._known[value] = (x, leaf)

    def compute(self, wanted: Sequence[Atom], leaves: Sequence[LeafSpec | None]) -> list[Array]:
        """Compute values, in the stored form of `leaves` (None: replicated on every device)."""
        if not wanted:
            return []
        values = list(self._known)
        specs = [leaf for _, leaf in self._known.values()]

        def run(arrays: list[Array]) -> list[Any]:
            pairs = zip(values, map(_unpadded, arrays, specs), strict=True)
            return list(map(_padded, self._program.run(wanted, dict(pairs)), leaves))

        mesh = self._layouts.mesh
        if AxisType.Explicit in mesh.axis_types:
            axes = self._layouts.axes
            shardings = [
                NamedSharding(mesh, PartitionSpec() if leaf is None else leaf.spec(axes))
                for leaf in leaves
            ]
            run = with_automatic_axes(run, shardings, mesh)
        return run([x for x, _ in self._known.values()])


def _unpadded(x: Array, leaf: LeafSpec | None) -> Array:
    return unpad(x, leaf.layout) if leaf is not None and leaf.layout else x


def _padded(x: Array, leaf: LeafSpec | None) -> Array:
    return pad(jax.numpy.asarray(x), leaf.layout) if leaf is not None and leaf.layout else x
