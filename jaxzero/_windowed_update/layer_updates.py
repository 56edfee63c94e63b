"""Update one leaf layer by layer outside of the sweeps: in the loop that makes its gradient.

The loop has the mean gradient of a layer, and fetches the layer of every array that the update
reads. Scalars (schedules, counters) are computed before the program, so they cannot depend on a
gradient, nor on a reduction over a leaf in host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .._mesh import in_host
from .._program import Atom, Constant, Operation, Value
from .leaf_sweeps import WindowedLeaf
from .update import TracedUpdate
from .window_values import in_window
from .windows import Windows, where_valid

_REMEDY = (
    "Take two steps: `zero.value_and_grad(f)` and `zero.apply_gradients(tx, grads, opt_state, "
    "params)`."
)


@dataclasses.dataclass(frozen=True)
class LayerUpdate:
    """The update of a leaf, of which parameter and state are stacks of layers in host memory.

    Attributes:
        update: the update of all leaves.
        leaf: the leaf.
        values: the inputs of the traced program that are its parameter, first, and its state.
        scalars: full values that the update reads.
    """

    update: TracedUpdate
    leaf: WindowedLeaf
    values: tuple[Value, ...]
    scalars: tuple[Atom, ...]

    @property
    def arrays(self) -> list[Array]:
        """The parameter and its state: global arrays in host memory."""
        return [self.leaf.arrays[value] for value in self.values]

    @property
    def names(self) -> list[str]:
        """The tree paths of these arrays; those of the state begin at the optimizer state."""
        return [self.update.spec(value).path for value in self.values]

    @property
    def reads(self) -> list[bool]:
        """Which of these arrays the update reads."""
        wanted = list(self.leaf.updates.values())
        operations, _ = self.update.analysis.window_operations(wanted)
        used = {*wanted, *(atom for operation in operations for atom in operation.inputs)}
        return [value in used for value in self.values]

    def new_layers(
        self,
        gradient: Shaped[Array, ...],
        layers: Sequence[Shaped[Array, ...] | None],
        scalars: Mapping[Atom, Array],
    ) -> list[Shaped[Array, ...] | None]:
        """Compute one device's shards of the new layer of each of `arrays`.

        Args:
            gradient: this device's shard of the mean gradient of the layer.
            layers: the shards of the layer that the update reads, None for others.
            scalars: those of `scalars`.

        Returns:
            The new shards; None for an array that does not change.
        """
        known = {self.update.gradients[self.leaf.number]: gradient}
        pairs = zip(self.values, layers, strict=True)
        known |= {value: x for value, x in pairs if x is not None}
        new, shape = self.leaf.updates, gradient.shape
        made = in_window(self.update.analysis, list(new.values()), known, scalars, shape)
        inside = [self._is_inside(shape)]
        masked = (where_valid(inside, x, jnp.zeros((), x.dtype)) for x in made)
        found = dict(zip(new, masked, strict=True))
        return [found.get(value) for value in self.values]

    def _is_inside(self, shape: tuple[int, ...]) -> Array | None:
        """Which elements of a layer are not padding; None: all of them."""
        layout = self.leaf.spec.layout
        assert layout is not None
        of_layer = Windows(shape, 0, shape[0])
        return of_layer.is_inside(0, layout.moved(layout.dim - 1), self.update.layouts.axes)


def layer_updates(update: TracedUpdate) -> dict[int, LayerUpdate]:
    """The leaves that can be updated layer by layer, by their index among the parameters.

    These are stacks that are not split along their first dim, with the parameter and all of its
    state in host memory.

    Raises:
        NotImplementedError: the update of such a leaf needs a value that is not known before the
            last gradient, as a norm.
    """
    found = {}
    for number in update.windowed:
        leaf = update.leaf(number)
        layout = leaf.spec.layout
        is_stack = len(leaf.spec.shape) > 1 and layout is not None and layout.dim > 0
        if not is_stack or not leaf.updates or not all(map(in_host, leaf.arrays.values())):
            continue
        _, scalars = update.analysis.window_operations(list(leaf.updates.values()))
        *state, param = leaf.arrays  # the program's inputs are the state, then the parameters
        found[number] = LayerUpdate(update, leaf, (param, *state), tuple(scalars))
    _check_reductions(update, found)
    for each in found.values():
        _check_scalars(update, each)
    return found


def _check_reductions(update: TracedUpdate, found: Mapping[int, LayerUpdate]) -> None:
    for level in update.analysis.reductions:
        for number in level.keys() & found.keys():
            path = update.layouts.params.leaves[number].path
            _refuse(path, level[number][0], f"needs all of `{path}`")


def _check_scalars(update: TracedUpdate, each: LayerUpdate) -> None:
    """Raise if a scalar of the update depends on a gradient, or on a leaf in host memory."""
    late = {*update.gradients, *(v for v, owner in update.owners.items() if owner is not None)}
    program = update.analysis.program
    for operation in program.operations_for(each.scalars, update.owners):
        for atom in operation.inputs:
            if not isinstance(atom, Constant) and atom in late:
                what = f"needs `{update.spec(atom).path}`"
                _refuse(each.leaf.spec.path, operation, what)


def _refuse(path: str, operation: Operation, what: str) -> None:
    raise NotImplementedError(
        f"`tx` cannot update the leaf `{path}` in the backward pass: `{operation.name}` at "
        f"{operation.where} {what}, before all gradients are known (a norm, clipping by a global "
        f"norm, LAMB). {_REMEDY}"
    )
