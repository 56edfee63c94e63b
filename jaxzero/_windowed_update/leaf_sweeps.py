"""The two kinds of passes over the windows of leaves: reduce values, and update arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._mesh import in_host, map_devices
from .._program import Atom, Operation, Value
from .._sharding import LeafSpec
from .analysis import Analysis
from .layouts import UpdateLayouts
from .reductions import Reduction
from .sweep import LeafSweep, sweep
from .window_values import in_window
from .windows import Index, Windows, where_valid


@dataclasses.dataclass(frozen=True)
class WindowedLeaf:
    """A leaf that is updated window by window.

    Attributes:
        number: its index among the parameters.
        spec: the layout of the parameter, which gradient and state share.
        arrays: the stored array of each input of the program that belongs to the leaf.
        updates: the new value of each of these inputs that changes.
    """

    number: int
    spec: LeafSpec
    arrays: Mapping[Value, Array]
    updates: Mapping[Value, Atom]


@dataclasses.dataclass(frozen=True)
class Passes:
    """What the passes over the windows of an update have in common."""

    analysis: Analysis
    layouts: UpdateLayouts
    window_bytes: int

    def reduce(
        self,
        leaves: Mapping[int, WindowedLeaf],
        operations: Mapping[int, Sequence[Operation]],
        full: Callable[[Sequence[Atom]], list[Array]],
    ) -> dict[Value, Array]:
        """Run reductions, which are given for each leaf; return their results.

        `full` computes scalars that are full values.
        """
        wanted = {k: [x for op in operations[k] for x in op.inputs] for k in operations}
        parts = [_Part(self, leaves[k], wanted[k], []) for k in operations]

        def run(shards: list[list[Array]], scalars: Mapping[Atom, Array]) -> list[Any]:
            pairs = zip(parts, shards, strict=True)
            swept = sweep([p.reducing(x, operations[p.leaf.number], scalars) for p, x in pairs])
            return [
                [
                    Reduction.of(op).over_devices(x, part.split_axes)
                    for op, x in zip(operations[part.leaf.number], results, strict=True)
                ]
                for part, (_, results) in zip(parts, swept, strict=True)
            ]

        specs = [[PartitionSpec()] * len(operations[k]) for k in operations]
        results = self._on_devices(run, parts, full, specs)
        return {
            op.outputs[0]: x
            for k, values in zip(operations, results, strict=True)
            for op, x in zip(operations[k], values, strict=True)
        }

    def update(
        self, leaves: Sequence[WindowedLeaf], full: Callable[[Sequence[Atom]], list[Array]]
    ) -> dict[Value, Array]:
        """Update all leaves; return the new array of each input that changes."""
        parts = [
            _Part(self, leaf, list(leaf.updates.values()), list(leaf.updates)) for leaf in leaves
        ]

        def run(shards: list[list[Array]], scalars: Mapping[Atom, Array]) -> list[Any]:
            pairs = zip(parts, shards, strict=True)
            swept = sweep([part.updating(x, scalars) for part, x in pairs])
            return [
                [arrays[part.inputs.index(value)] for value in part.written]
                for part, (arrays, _) in zip(parts, swept, strict=True)
            ]

        specs = [self._specs(part.written) for part in parts]
        results = self._on_devices(run, parts, full, specs)
        return {
            value: x
            for part, arrays in zip(parts, results, strict=True)
            for value, x in zip(part.written, arrays, strict=True)
        }

    @functools.cached_property
    def _leaves(self) -> dict[Value, LeafSpec]:
        """The leaf of each input of the program; extra arguments have none."""
        inputs = self.analysis.program.block.inputs
        return dict(zip(inputs, self.layouts.leaves, strict=False))

    def _specs(self, values: Sequence[Value]) -> list[PartitionSpec]:
        """The spec of each array: on one device those of a leaf differ (`in_memory`)."""
        return [self.layouts.spec(self._leaves[value]) for value in values]

    def _on_devices(
        self,
        run: Callable[[list[list[Array]], Mapping[Atom, Array]], list[Any]],
        parts: Sequence[_Part],
        full: Callable[[Sequence[Atom]], list[Array]],
        out_specs: list[Any],
    ) -> list[Any]:
        """Run a function of shards and scalars on every device."""
        atoms = list(dict.fromkeys(atom for part in parts for atom in part.scalars))
        specs = [self._specs(part.inputs) for part in parts]

        def on_device(shards: list[list[Array]], scalars: list[Array]) -> list[Any]:
            return run(shards, dict(zip(atoms, scalars, strict=True)))

        in_specs = (specs, [PartitionSpec()] * len(atoms))
        arrays = [[part.leaf.arrays[value] for value in part.inputs] for part in parts]
        mapped = map_devices(on_device, self.layouts.mesh, in_specs, out_specs)
        return mapped(arrays, full(atoms))


class _Part:
    """One leaf's part in a pass: the values that are wanted of it, and the arrays to write."""

    def __init__(
        self, passes: Passes, leaf: WindowedLeaf, wanted: list[Atom], written: list[Value]
    ):
        self.passes = passes
        self.leaf = leaf
        self.wanted = wanted
        self.written = written
        operations, self.scalars = passes.analysis.window_operations(wanted)
        used = {*wanted, *(atom for op in operations for atom in op.inputs)}
        self.read = [value for value in leaf.arrays if value in used]
        self.inputs = [*self.read, *(value for value in written if value not in used)]
        self.split_axes = passes.layouts.axes if leaf.spec.layout else ()

    def reducing(
        self, shards: list[Array], operations: Sequence[Operation], scalars: Mapping[Atom, Array]
    ) -> LeafSweep:
        """The pass that reduces the wanted values, which are the inputs of `operations`."""
        reductions = [Reduction.of(op) for op in operations]
        windows = Windows.of(shards, self.passes.window_bytes)

        def visit(results, window, index):
            values = iter(self._values(window, windows, scalars))
            masks = [self._is_inside(windows, index), windows.is_new(index)]
            results = [
                reduction.add_window(so_far, [next(values) for _ in op.inputs], masks)
                for op, reduction, so_far in zip(operations, reductions, results, strict=True)
            ]
            return results, {}

        start = [reduction.start for reduction in reductions]
        return LeafSweep(shards, len(self.read), windows, start, visit)

    def updating(self, shards: list[Array], scalars: Mapping[Atom, Array]) -> LeafSweep:
        """The pass that writes the wanted values into the arrays to be written."""
        windows = Windows.of(shards, self.passes.window_bytes)

        def visit(result, window, index):
            inside = [self._is_inside(windows, index)]
            values = self._values(window, windows, scalars)
            new = [where_valid(inside, x, jnp.zeros((), x.dtype)) for x in values]
            numbers = map(self.inputs.index, self.written)
            return result, dict(zip(numbers, new, strict=True))

        return LeafSweep(shards, len(self.read), windows, (), visit, self._late(shards))

    def _late(self, shards: list[Array]) -> int | None:
        """The array to write a window late; see [Note: late writes]."""
        read = [i for i in range(len(self.read)) if in_host(shards[i])]
        both = [i for i in read if self.inputs[i] in self.written]
        return both[-1] if read == both and len(both) > 1 else None

    def _values(
        self, window: list[Array], windows: Windows, scalars: Mapping[Atom, Array]
    ) -> list[Array]:
        known = dict(zip(self.read, window, strict=True))
        shape = windows.window_shape
        return in_window(self.passes.analysis, self.wanted, known, scalars, shape)

    def _is_inside(self, windows: Windows, index: Index) -> Array | None:
        return windows.is_inside(index, self.leaf.spec.layout, self.passes.layouts.axes)
