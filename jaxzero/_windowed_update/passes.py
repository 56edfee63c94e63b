"""Pass over the windows of leaves, to reduce values to scalars or to update arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Shaped

from .._mesh import in_host, map_devices
from .._program import (
    Atom,
    Constant,
    Operation,
    Value,
    full_reduction,
    is_elementwise,
    shape_of,
)
from .._sharding import LeafSpec
from .analysis import Analysis, WindowProgram
from .program import UpdateLayouts
from .windows import LeafSweep, Windows, sweep, where_valid

Scalars = Mapping[Atom, Array]


@dataclasses.dataclass(frozen=True)
class WindowedLeaf:
    """A leaf that is updated window by window.

    Attributes:
        number: the leaf's index among the parameters.
        spec: the layout of the parameter, which its gradient and state share.
        arrays: the stored array of each input of the program that belongs to the leaf.
        updates: for each of these inputs that the update changes, its new value in the program.
    """

    number: int
    spec: LeafSpec
    arrays: Mapping[Value, Array]
    updates: Mapping[Value, Atom]


@dataclasses.dataclass(frozen=True)
class Passes:
    """Runs passes over the windows of leaves on all devices.

    Attributes:
        analysis: the analysis of the update.
        layouts: the layouts of the update's trees.
        window_bytes: the bytes of a leaf's arrays that one window holds.
        full: a function that computes full values of one element, replicated on all devices.
    """

    analysis: Analysis
    layouts: UpdateLayouts
    window_bytes: int
    full: Callable[[Sequence[Atom]], list[Array]]

    def reduce(
        self, leaves: Mapping[int, WindowedLeaf], operations: Mapping[int, Sequence[Operation]]
    ) -> dict[Value, Array]:
        """Reduce values of leaves to scalars, over all windows and devices.

        Args:
            leaves: the leaves, by number.
            operations: the reductions of each leaf, by the leaf's number.

        Returns:
            For each output of a reduction, its result.
        """
        return self._run([_Part(self, leaves[k], operations[k], {}) for k in operations])

    def update(self, leaves: Sequence[WindowedLeaf]) -> dict[Value, Array]:
        """Update leaves; return the new array of each input that the update changes."""
        return self._run([_Part(self, leaf, [], leaf.updates) for leaf in leaves])

    def _run(self, parts: Sequence[_Part]) -> dict[Value, Array]:
        """Run one pass over all parts on every device; return the arrays of their `outputs`."""
        atoms = list(dict.fromkeys(x for part in parts for x in part.program.scalars))

        def on_device(shards: list[list[Array]], scalars: list[Array]) -> list[list[Array]]:
            known = dict(zip(atoms, scalars, strict=True))
            pairs = zip(parts, shards, strict=True)
            swept = sweep([part.sweep(mine, known) for part, mine in pairs])
            return [part.results(*each) for part, each in zip(parts, swept, strict=True)]

        specs = [self.specs(part.inputs) for part in parts]
        mapped = map_devices(
            on_device,
            self.layouts.mesh,
            (specs, [PartitionSpec()] * len(atoms)),
            [part.out_specs for part in parts],
        )
        arrays = [[part.leaf.arrays[value] for value in part.inputs] for part in parts]
        results = mapped(arrays, self.full(atoms))
        outputs = [value for part in parts for value in part.outputs]
        return dict(zip(outputs, (x for mine in results for x in mine), strict=True))

    @functools.cached_property
    def _leaves(self) -> dict[Value, LeafSpec]:
        """The layout of each input of the program, but for extra arguments of the update."""
        inputs = self.analysis.program.block.inputs
        return dict(zip(inputs, self.layouts.leaves, strict=False))

    def specs(self, values: Sequence[Value]) -> list[PartitionSpec]:
        """Return the spec of the array of each of `values`, which are inputs of the program."""
        return [self.layouts.spec(self._leaves[value]) for value in values]


class _Part:
    """One leaf's part in a pass: its values to reduce, or its arrays to write.

    Attributes:
        leaf: the leaf.
        program: the operations that compute, from a window, the inputs of the reductions and the
            new values of arrays.
        inputs: the inputs of the update whose arrays the pass reads, then those it only writes.
        outputs: the results of the reductions, then the inputs whose arrays are written.
        out_specs: the specs of `outputs`.
    """

    def __init__(
        self,
        passes: Passes,
        leaf: WindowedLeaf,
        operations: Sequence[Operation],
        updates: Mapping[Value, Atom],
    ):
        self.leaf, self._passes, self._written = leaf, passes, list(updates)
        self._num_operands = [len(op.inputs) for op in operations]
        self._reductions = [Reduction.of(op) for op in operations]
        wanted = [*(x for op in operations for x in op.inputs), *updates.values()]
        self.program = passes.analysis.window_program(wanted)
        reads = self.program.reads
        self._read = [value for value in leaf.arrays if value in reads]
        self.inputs = [*self._read, *(value for value in updates if value not in reads)]
        self.outputs = [*(op.outputs[0] for op in operations), *updates]
        self.out_specs = [PartitionSpec()] * len(operations) + passes.specs(self._written)

    def sweep(self, shards: list[Array], scalars: Scalars) -> LeafSweep:
        """Return the pass over this device's shards of `inputs`, as data for `sweep`.

        Args:
            shards: this device's shard of each of `inputs`.
            scalars: the full values of one element that the program reads.
        """
        passes, layout = self._passes, self.leaf.spec.layout
        windows = Windows.of(shards, passes.window_bytes)
        shape, numbers = windows.window_shape, list(map(self.inputs.index, self._written))

        def visit(results, window, index):
            known = dict(zip(self._read, window, strict=True))
            values = iter(in_window(passes.analysis, self.program, known, scalars, shape))
            inside = windows.is_inside(index, layout, passes.layouts.axes)
            masks = [inside, windows.is_new(index) if results else None]
            results = [
                reduction.add_window(so_far, [next(values) for _ in range(num)], masks)
                for reduction, num, so_far in zip(
                    self._reductions, self._num_operands, results, strict=True
                )
            ]
            # Padding stays zero: an update such as `+ eps` would change it.
            new = [where_valid([inside], x, jnp.zeros((), x.dtype)) for x in values]
            return results, dict(zip(numbers, new, strict=True))

        start = [reduction.start for reduction in self._reductions]
        return LeafSweep(shards, len(self._read), windows, start, visit, self._late(shards))

    def _late(self, shards: list[Array]) -> int | None:
        """Return which of `shards` to write a window late, or None; see [Note: late writes]."""
        read = [i for i in range(len(self._read)) if in_host(shards[i])]
        both = [i for i in read if self.inputs[i] in self._written]
        return both[-1] if read == both and len(both) > 1 else None

    def results(self, arrays: list[Array], reduced: list[Array]) -> list[Array]:
        """Return the arrays of `outputs`.

        Args:
            arrays: this device's shards of `inputs` after the pass.
            reduced: the results of the reductions on this device.
        """
        axes = self._passes.layouts.axes if self.leaf.spec.layout else ()
        pairs = zip(self._reductions, reduced, strict=True)
        written = [arrays[self.inputs.index(value)] for value in self._written]
        return [*(reduction.over_devices(x, axes) for reduction, x in pairs), *written]


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of all elements of a leaf to a scalar.

    Attributes:
        name: "sum", "max", "min", or "dot" for the sum of products of two inputs.
        dtype: the dtype of the result.
    """

    name: str
    dtype: Any

    @classmethod
    def of(cls, operation: Operation) -> Reduction:
        name = full_reduction(operation)
        assert name is not None
        return cls(name, operation.outputs[0].dtype)

    @property
    def _running_dtype(self) -> Any:
        return (
            jnp.int32 if self.dtype == jnp.bool_ else self.dtype
        )  # collectives reduce no booleans

    @property
    def start(self) -> Shaped[Array, ""]:
        """The result of reducing no elements, such as 0 for a sum."""
        dtype = self._running_dtype
        if self.name in ("sum", "dot"):
            return jnp.zeros((), dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(-jnp.inf if self.name == "max" else jnp.inf, dtype)
        limits = jnp.iinfo(dtype)
        return jnp.asarray(limits.min if self.name == "max" else limits.max, dtype)

    def add_window(
        self,
        so_far: Shaped[Array, ""],
        windows: Sequence[Shaped[Array, ...]],
        masks: Sequence[Bool[Array, ...] | None],
    ) -> Shaped[Array, ""]:
        """Add a window to the result so far, and return the new result.

        Args:
            so_far: the result of the windows before.
            windows: the window of each input of the reduction.
            masks: elements count only where all masks are true; a mask None is true everywhere.
        """
        values = [x.astype(self._running_dtype) for x in windows]
        value = values[0] if len(values) == 1 else values[0] * values[1]
        value = where_valid(masks, value, self.start)
        match self.name:
            case "max":
                return jnp.maximum(so_far, jnp.max(value))
            case "min":
                return jnp.minimum(so_far, jnp.min(value))
        # In the dtype of the traced sum: `jnp.sum` widens small integers.
        return so_far + jnp.sum(value, dtype=value.dtype)

    def over_devices(self, x: Shaped[Array, ""], axes: tuple[str, ...]) -> Shaped[Array, ""]:
        """Combine the results of all devices along `axes`, the mesh axes that split the leaf."""
        if axes:
            reduce = {"max": lax.pmax, "min": lax.pmin}.get(self.name, lax.psum)
            x = reduce(x, axes)
        return x.astype(self.dtype)


def in_window(
    analysis: Analysis,
    program: WindowProgram,
    windows: Mapping[Value, Shaped[Array, ...]],
    scalars: Mapping[Atom, Array],
    shape: tuple[int, ...],
) -> list[Shaped[Array, ...]]:
    """Compute the values that a program wants on a window.

    Args:
        analysis: the analysis of the update.
        program: the operations for values of one leaf, or for arrays that repeat one scalar.
        windows: windows of the leaf's arrays, in device memory.
        scalars: the values of `program.scalars`.
        shape: the shape of a window.

    Returns:
        The values of `program.wanted`, each of the shape of a window.
    """
    env: dict[Atom, Any] = {**windows, **{x: y.reshape(()) for x, y in scalars.items()}}
    for operation in program.operations:
        env[operation.outputs[0]] = _compute(analysis, operation, env, shape)
    return [jnp.broadcast_to(_read(atom, env), shape) for atom in program.wanted]


def _compute(
    analysis: Analysis, operation: Operation, env: Mapping[Atom, Any], shape: tuple[int, ...]
) -> Any:
    """Compute the output of an operation on a window; a scalar if all its elements are equal.

    Args:
        analysis: the analysis of the update.
        operation: the operation.
        env: the windows and scalars computed so far.
        shape: the shape of a window.
    """
    inputs = [_read(atom, env) for atom in operation.inputs]
    if not is_elementwise(operation):
        return inputs[0]  # a reshape or a broadcast: the same elements, or the same scalar
    if analysis.leaf_of(operation.outputs[0]) is not None:
        inputs = [
            x if shape_of(atom) == () else jnp.broadcast_to(x, shape)
            for atom, x in zip(operation.inputs, inputs, strict=True)
        ]
    return operation.bind(inputs)[0]


def _read(atom: Atom, env: Mapping[Atom, Any]) -> Any:
    if atom in env:
        return env[atom]
    assert isinstance(atom, Constant)
    return atom.value if shape_of(atom) == () else jnp.reshape(atom.value, ())
