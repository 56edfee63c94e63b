"""Update all leaves: first reduce over windows, level by level, then write the new arrays.

A stack of layers can also be updated layer by layer, in the loop that makes its gradient
(`LayerUpdate`). An iteration of the loop has the mean gradient of a layer, and fetches this layer
of every array that the update reads. The scalars of the update (schedules, counters) must then be
known before forward and backward. So they cannot depend on a gradient, nor on a reduction over a
leaf in host memory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Shaped

from .._mesh import HOST, in_host
from .._program import Atom, Constant, Operation, Value, operations_for
from .._sharding import LeafSpec, StoredArray, arrays_of, data_of
from .analysis import Analysis, WindowProgram, check_outputs
from .passes import Passes, WindowedLeaf, in_window
from .program import FullValues, UpdateLayouts, trace_update
from .windows import Windows, where_valid

WINDOW_BYTES = 2**26  # a copy of 1 ms at 64 GB/s, which hides the launch of the next
_REMEDY = (
    "Take two steps: `zero.value_and_grad(f)` and `zero.apply_gradients(tx, grads, opt_state, "
    "params)`."
)


def windowed_update(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    *,
    layouts: UpdateLayouts,
    extra_args: Mapping[str, Any],
    window_bytes: int = WINDOW_BYTES,
) -> tuple[Any, Any]:
    """Run `tx.update` and `optax.apply_updates`, with about two windows of a leaf on the device.

    A leaf is updated by windows if its gradient, its parameter, or any of its state is in host
    memory. All other leaves are updated as without offload, by any optimizer.

    Args:
        tx: the optimizer, which gets leaves in their true shapes.
        grads: the gradients. The arrays of this tree and the next two are traced.
        state: the optimizer state.
        params: the trained parameters.
        layouts: the layouts of these trees.
        extra_args: further arguments of `tx.update`.
        window_bytes: the bytes of a leaf's arrays that one window holds.

    Returns:
        The new parameters and the new state, each array in the memory of the array that it
        replaces. They equal those of `tx.update` bit for bit if the optimizer reduces nothing over
        a leaf. Otherwise sums are added in another order.

    Raises:
        NotImplementedError: on a leaf in host memory, the optimizer does more than elementwise
            operations and reductions of all elements to a scalar.
        ValueError: the trees do not fit each other.
    """
    update = TracedUpdate(tx, state, params, layouts, extra_args, window_bytes)
    return update.apply(arrays_of(grads))


class TracedUpdate:
    """The update of all leaves, traced and analysed before the gradients are known.

    Arguments and errors are those of `windowed_update`.

    Attributes:
        analysis: how each value of the update is computed.
        layouts: the layouts of the update's trees.
        gradients: for each parameter, the input of the traced program that is its gradient.
        owners: for each input of the program, the leaf updated by windows that it belongs to, or
            None.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        state: Any,
        params: Any,
        layouts: UpdateLayouts,
        extra_args: Mapping[str, Any],
        window_bytes: int = WINDOW_BYTES,
    ):
        known = layouts.owners()
        program, extras = trace_update(tx, layouts, extra_args)
        owners = _windowed_owners(known, layouts, extras)
        self.analysis = Analysis(program, owners, layouts.params.leaves)
        self.layouts = layouts
        check_outputs(self.analysis, layouts, owners)
        inputs, num = program.block.inputs, len(layouts.gradients.leaves)
        self.gradients = inputs[:num]
        self.owners = dict(zip(inputs, owners, strict=True))
        forms = [x.leaf() if isinstance(x, StoredArray) else None for x in extras]
        self._leaves = dict(zip(inputs, [*layouts.leaves, *forms], strict=True))
        arrays = [x for tree in (state, params, extras) for x in arrays_of(tree)]
        self._arrays = dict(zip(inputs[num:], arrays, strict=True))
        self._new = dict(zip(inputs[num:], program.block.outputs, strict=False))
        self._window_bytes = window_bytes

    def scalars(self, atoms: Sequence[Atom]) -> list[Array]:
        """Compute scalars that depend on no gradient and on no leaf that is updated by windows."""
        return self._full(self._arrays).scalars(atoms)

    def spec(self, value: Value) -> LeafSpec:
        """Return the layout of an input of the traced program."""
        leaf = self._leaves[value]
        assert leaf is not None
        return leaf

    def leaf(self, number: int, arrays: Mapping[Value, Any] | None = None) -> WindowedLeaf:
        """Return a leaf that is updated by windows, with its known arrays.

        Args:
            number: the index of the parameter.
            arrays: the known arrays by input of the program; None: all but the gradients.
        """
        arrays = self._arrays if arrays is None else arrays
        mine = {value: x for value, x in arrays.items() if self.owners[value] == number}
        new = self._new
        updates = {v: new[v] for v in mine if v in new and new[v] is not v}
        return WindowedLeaf(number, self.layouts.params.leaves[number], mine, updates)

    @property
    def windowed(self) -> list[int]:
        """The indices of the parameters whose leaves are updated by windows."""
        return sorted({owner for owner in self.owners.values() if owner is not None})

    def host_bytes(self, numbers: Iterable[int]) -> int:
        """Return the bytes of leaves' parameters and state in host memory, over all devices."""
        arrays = (x for number in numbers for x in self.leaf(number).arrays.values())
        return sum(x.size * x.dtype.itemsize for x in arrays if in_host(x))

    def apply(
        self,
        grads: Sequence[Array | None],
        done: Mapping[Value, Array] | None = None,
        *,
        at_once: bool = False,
    ) -> tuple[Any, Any]:
        """Update all leaves that have not been updated yet.

        Args:
            grads: the gradients; None for leaves that have been updated.
            done: the new arrays of these leaves, by the input of the program that they replace.
            at_once: update each leaf in one window, as soon as its gradient is known and
                independently of the others. Otherwise one leaf follows the other, which bounds the
                bytes on the device.

        Returns:
            The new parameters and the new state.
        """
        results = dict(done or {})
        pairs = zip(self.gradients, grads, strict=True)
        arrays = {**{value: x for value, x in pairs if x is not None}, **self._arrays}
        full, new = self._full(arrays), self._new

        given = {i for i, x in enumerate(grads) if x is not None}
        windowed = {i: self.leaf(i, arrays) for i in self.windowed if i in given}
        window_bytes = sys.maxsize if at_once else self._window_bytes
        passes = Passes(self.analysis, self.layouts, window_bytes, full.scalars)
        for operations in self.analysis.reductions:
            for value, x in passes.reduce(windowed, operations).items():
                full.add(value, x)
        changing = [x for x in windowed.values() if x.updates]
        for leaves in [[x] for x in changing] if at_once else [changing]:
            results |= passes.update(leaves)
        rest = [value for value in new if self.owners[value] is None]
        computed = full.compute([new[x] for x in rest], [self._leaves[x] for x in rest])
        results |= dict(zip(rest, computed, strict=True))
        outputs = [results.get(value, self._arrays[value]) for value in new]
        layouts, num_state = self.layouts, len(self.layouts.state.leaves)
        return layouts.params.stored(outputs[num_state:]), layouts.state.stored(outputs[:num_state])

    def _full(self, arrays: Mapping[Value, Array]) -> FullValues:
        full = FullValues(self.analysis.program, self.layouts)
        for value, x in arrays.items():
            if self.owners[value] is None:
                full.add(value, x, self._leaves[value])
        return full


def _windowed_owners(
    known: Sequence[int | None], layouts: UpdateLayouts, extras: Sequence[Any]
) -> list[int | None]:
    """Return, for each input of the program, the windowed leaf that it belongs to, or None.

    Args:
        known: for each leaf of `layouts`, the parameter that it belongs to, or None.
        layouts: the layouts of the update's trees.
        extras: the arrays among the extra arguments, which belong to no leaf.

    Raises:
        ValueError: an array in host memory belongs to no parameter.
    """
    are_in_host = [leaf.memory_kind == HOST for leaf in layouts.leaves]
    are_in_host += [in_host(data_of(x)) for x in extras]
    names = [*(leaf.path for leaf in layouts.leaves), *["extra_args"] * len(extras)]
    owners = [*known, *[None] * len(extras)]
    for is_in_host, owner, name in zip(are_in_host, owners, names, strict=True):
        if is_in_host and owner is None:
            raise ValueError(
                f"`{name}` is an array in host memory that does not belong to a parameter of its "
                "shape, so it cannot be used window by window. Keep it in device memory: "
                "`jax.device_put(x, jax.memory.Space.Device)`."
            )
    windowed = {owner for x, owner in zip(are_in_host, owners, strict=True) if x}
    return [owner if owner in windowed else None for owner in owners]


@dataclasses.dataclass(frozen=True)
class LayerUpdate:
    """The update, layer by layer, of a leaf whose parameter and state are stacks in host memory.

    Attributes:
        update: the update of all leaves.
        leaf: the leaf.
        values: the inputs of the traced program that are the leaf's parameter, first, and state.
        program: the operations that compute the new layers.
    """

    update: TracedUpdate
    leaf: WindowedLeaf
    values: tuple[Value, ...]
    program: WindowProgram

    @property
    def scalars(self) -> list[Atom]:
        """The full values of one element that the update reads."""
        return self.program.scalars

    @property
    def arrays(self) -> list[Array]:
        """The parameter and its state: global arrays in host memory."""
        return [self.leaf.arrays[value] for value in self.values]

    @property
    def names(self) -> list[str]:
        """The tree paths of `arrays`: in the parameters, or in the optimizer state."""
        return [self.update.spec(value).path for value in self.values]

    @property
    def reads(self) -> list[bool]:
        """For each of `arrays`, whether the update reads it."""
        return [value in self.program.reads for value in self.values]

    def new_layers(
        self,
        gradient: Shaped[Array, ...],
        layers: Sequence[Shaped[Array, ...] | None],
        scalars: Mapping[Atom, Array],
    ) -> list[Shaped[Array, ...] | None]:
        """Compute this device's shard of the new layer, for each of `arrays`.

        Args:
            gradient: this device's shard of the mean gradient of the layer.
            layers: this device's shard of the layer, for each of `arrays`; None for those that the
                update does not read.
            scalars: the values of `LayerUpdate.scalars`.

        Returns:
            For each of `arrays` the new shard; None for an array that does not change.
        """
        values = {self.update.gradients[self.leaf.number]: gradient}
        pairs = zip(self.values, layers, strict=True)
        values |= {value: x for value, x in pairs if x is not None}
        new, shape = self.leaf.updates, gradient.shape
        computed = in_window(self.update.analysis, self.program, values, scalars, shape)
        inside = [self._is_inside(shape)]
        masked = (where_valid(inside, x, jnp.zeros((), x.dtype)) for x in computed)
        by_value = dict(zip(new, masked, strict=True))
        return [by_value.get(value) for value in self.values]

    def _is_inside(self, shape: tuple[int, ...]) -> Array | None:
        """Return which elements of this device's shard of a layer are not padding; None: all.

        `shape` is the shape of this shard.
        """
        layout = self.leaf.spec.layout
        assert layout is not None
        of_layer = Windows(shape, 0, shape[0])
        return of_layer.is_inside(0, layout.moved(layout.dim - 1), self.update.layouts.axes)


def layer_updates(update: TracedUpdate) -> dict[int, LayerUpdate]:
    """Return the updates of leaves that can be updated layer by layer, by index of the parameter.

    Such a leaf is a stack that is not split along its first dim, and whose parameter and state are
    all in host memory.

    Raises:
        NotImplementedError: the update of such a leaf needs a value that is known only after the
            last gradient, such as a norm.
    """
    by_leaf = {}
    for number in update.windowed:
        leaf = update.leaf(number)
        layout = leaf.spec.layout
        is_stack = len(leaf.spec.shape) > 1 and layout is not None and layout.dim > 0
        if not is_stack or not leaf.updates or not all(map(in_host, leaf.arrays.values())):
            continue
        program = update.analysis.window_program(list(leaf.updates.values()))
        *state, param = leaf.arrays  # the program's inputs are the state, then the parameters
        by_leaf[number] = LayerUpdate(update, leaf, (param, *state), program)
    _check_reductions(update, by_leaf)
    for layer_update in by_leaf.values():
        _check_scalars(update, layer_update)
    return by_leaf


def _check_reductions(update: TracedUpdate, by_leaf: Mapping[int, LayerUpdate]) -> None:
    """Raise `NotImplementedError` if the optimizer reduces over all elements of a leaf.

    `by_leaf` has the leaves to check, which are to be updated layer by layer. A reduction would
    need all layers before the first layer is updated.
    """
    for level in update.analysis.reductions:
        for number in level.keys() & by_leaf.keys():
            path = update.layouts.params.leaves[number].path
            _refuse(path, level[number][0], f"needs all of `{path}`")


def _check_scalars(update: TracedUpdate, layer_update: LayerUpdate) -> None:
    """Raise `NotImplementedError` if a leaf's update reads a scalar that is not known in time.

    Such a scalar depends on a gradient or on a leaf in host memory.
    """
    late = {*update.gradients, *(v for v, owner in update.owners.items() if owner is not None)}
    program = update.analysis.program
    for operation in operations_for(program.block, layer_update.scalars, update.owners):
        for atom in operation.inputs:
            if not isinstance(atom, Constant) and atom in late:
                what = f"needs `{update.spec(atom).path}`"
                _refuse(layer_update.leaf.spec.path, operation, what)


def _refuse(path: str, operation: Operation, what: str) -> None:
    raise NotImplementedError(
        f"`tx` cannot update the leaf `{path}` in the backward pass: `{operation.name}` at "
        f"{operation.where} {what}, before all gradients are known (a norm, clipping by a global "
        f"norm, LAMB). {_REMEDY}"
    )
