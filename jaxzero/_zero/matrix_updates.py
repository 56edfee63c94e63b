"""Run an optimizer that multiplies whole matrices (Muon) on stacks of them, split by layer.

A stack `[layers, rows, cols]` is stored split along a dim of its matrices, and an update that
multiplies these would gather all of them on every device. Here each device gets all of some layers:

    stored, split along rows --all-to-all--> split along layers: update --all-to-all--> stored

Only what products read is sent, in its dtype, and what others read of their results. All else, such
as a momentum before the products and weight decay after them, is computed as its leaf is stored.
State that products read, as the statistics of Shampoo, is stored by layer and never moves.

Matrices that are leaves of their own, one for each layer, are made such stacks where they are first
multiplied, of as many leaves as there are devices (`stack_alike_leaves`). The traced update is run
with sharding constraints, so that no value changes, up to the order in which sums are added. Layers
that the devices do not divide are split into parts of `ceil(layers / devices)`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from .._program import (
    Atom,
    Block,
    Constant,
    LeafOf,
    LeafValues,
    MatrixStack,
    Operation,
    Value,
    full_reduction,
    multiplies_matrices,
    operations_for,
    stack_alike_leaves,
    stack_of_leaf,
    trace,
)
from .._sharding import (
    LeafSpec,
    TreeLayout,
    flatten,
    is_array,
    path_endings,
    rebuild,
    statics_of,
)
from .matrix_layouts import Forms, Layouts, by_layer_of, forms_of_stack, may_be_matrix, may_move


class MatrixUpdate:
    """`tx.update`, traced on arrays of true shapes, and the stacks of matrices that it multiplies.

    Args:
        tx: the optimizer.
        trees: gradients, state, parameters (or None) and extra arguments, with arrays or structs of
            true shapes.
        params: the layouts of the parameters.

    Attributes:
        state_by_layer: for each array of the state the parameter that it belongs to, if it is to be
            stored split by layer; otherwise None.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        trees: tuple[Any, Any, Any, Any],
        params: TreeLayout,
    ):
        self._params = params.leaves
        flat = [flatten(tree) for tree in trees]
        given = [[(p, x) for p, x in zip(*tree[:2], strict=True) if is_array(x)] for tree in flat]
        self._outputs: dict[str, Any] = {}  # structure, and leaves that are no arrays
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # not one that the user has set
            arrays = (x for pairs in given for _, x in pairs)
            self._block = trace(functools.partial(self._update, tx, flat), *arrays)[0]
        num_grads, num_state, num_params, _ = map(len, given)
        self._num_updates = num_grads
        self._state = self._block.inputs[num_grads : num_grads + num_state]
        self._new_state = self._block.outputs[num_grads:]
        numbers = range(len(self._params))
        roles = [
            *(LeafOf(i, "gradient") for i in numbers),
            *(self._role(path) for path, _ in given[1]),
            *(LeafOf(i, "parameter") for i in numbers if num_params == num_grads),
        ]
        pairs = zip(self._block.inputs, roles, strict=False)
        self._roles = {x: role for x, role in pairs if role is not None}
        self._values = LeafValues(self._block, self._roles)
        self._layers = {i: stack_of_leaf(self._values, i) for i in numbers if self._has_layers(i)}
        self.state_by_layer = list(map(self._replaced_by_layer, self._state, self._new_state))

    def _update(
        self, tx: optax.GradientTransformationExtraArgs, flat: Sequence[Any], *arrays: Any
    ) -> list[Any]:
        """The arrays of `(updates, state)`, of flattened trees with these arrays."""
        remaining = iter(arrays)
        grads, state, params, extras = (
            jax.tree.unflatten(treedef, [next(remaining) if is_array(x) else x for x in leaves])
            for _, leaves, treedef in flat
        )
        _, leaves, treedef = flatten(tx.update(grads, state, params, **extras))
        self._outputs.update(treedef=treedef, statics=statics_of(leaves))
        return [x for x in leaves if is_array(x)]

    def _role(self, path: tuple[Any, ...]) -> LeafOf | None:
        """The parameter whose path ends that of an array of the state, and the array's role."""
        for i, name in enumerate(path_endings(path)):
            if name in self._by_path and may_be_matrix(self._params[self._by_path[name]]):
                return LeafOf(self._by_path[name], ("state", *map(str, path[:i])))
        return None

    @functools.cached_property
    def _by_path(self) -> dict[str, int]:
        return {leaf.path: i for i, leaf in enumerate(self._params)}

    def _has_layers(self, leaf: int) -> bool:
        """Whether a leaf is multiplied, and only as a stack of its layers."""
        if not may_move(self._params[leaf]):
            return False
        products = [x for x in self._values.products_of(leaf) if multiplies_matrices(x)]
        num_layers = self._params[leaf].shape[0]
        read = [x.shape for each in products for x in each.values if x in self._values.leaf]
        return bool(products) and all(
            len(x) > 2 and x[0] % num_layers == 0 for x in read if len(x) > 1
        )

    def _replaced_by_layer(self, x: Value, new: Atom) -> int | None:
        """The stack whose products read an array of the state, and make the new one."""
        leaf = self._values.leaf.get(x)
        stack = None if leaf is None else self._layers.get(leaf)
        if stack is None or x not in stack.given or not self._is_stack(x):
            return None
        return leaf if new is x or new in stack.made else None

    def _is_stack(self, x: Value) -> bool:
        """Whether a value of a stack has its layers."""
        layers = self._params[self._values.leaf[x]].shape[0]
        return len(x.shape) > 1 and x.shape[0] == layers

    @property
    def moves(self) -> bool:
        """Whether anything is split by layer."""
        return bool(self._stacked[1])

    @functools.cached_property
    def _stacked(self) -> tuple[Block, list[MatrixStack]]:
        """The program with products of alike leaves on stacks of these, and all stacks."""
        leaves = [
            i
            for i, leaf in enumerate(self._params)
            if i not in self._layers and may_be_matrix(leaf)
        ]
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            block, stacks = stack_alike_leaves(self._values, leaves, self._num_shards)
        return block, [*self._layers.values(), *stacks]

    def _num_shards(self, leaf: int) -> int:
        layout = self._params[leaf].layout
        assert layout is not None
        return layout.num_shards

    def run(
        self, arrays: Sequence[Any], state: Sequence[LeafSpec], mesh: Mesh, axes: tuple[str, ...]
    ) -> Any:
        """`(updates, state)` in true shapes.

        Args:
            arrays: those of the trees that it was traced for.
            state: the layouts of the state.
            mesh: the mesh of the layouts.
            axes: the axes that split the state.
        """
        block, stacks = self._stacked
        forms = {x: y for stack in stacks for x, y in self._forms(stack, state).items()}
        places = _places(stacks)
        by_layer = {
            x
            for x, leaf, i in zip(self._state, state, self.state_by_layer, strict=True)
            if i is not None and leaf.layout is not None and leaf.layout.dim == 0
        }
        env = Layouts(forms, mesh, axes)
        for x, array in zip(block.inputs, arrays, strict=True):
            env.set(x, array, x in by_layer)
        results: dict[int, Any] = {}
        before: int | None = None
        for group in self._groups():
            wanted = [block.outputs[i] for i in group]
            for operation in operations_for(block, wanted, env.arrays):
                _apply(operation, env, places)
            for i in group:
                j = i - self._num_updates
                is_by_layer = 0 <= j < len(state) and self._state[j] in by_layer
                results[i] = env.get(block.outputs[i], is_by_layer)
                if is_by_layer:
                    results[i] = env.constrained(results[i], state[j])
            if before is not None:
                results[before] = env.finished
            before, env.finished = group[0], results[group[0]]
        outputs = [results[i] for i in range(len(results))]
        return rebuild(self._outputs["treedef"], self._outputs["statics"], outputs)

    def _forms(self, stack: MatrixStack, state: Sequence[LeafSpec]) -> dict[Value, Forms]:
        """The layouts of what products of a stack read, and of what they make."""
        first = stack.leaves[0]
        leaf, num_shards = self._params[first], self._num_shards(first)
        pairs = zip(self._state, state, strict=True)
        mine = [x for value, x in pairs if (y := self._roles.get(value)) and y.leaf == first]
        by_shape = {x.shape: x for x in (*mine, leaf)}
        forms = {}
        for x in (*stack.given, *stack.made):
            if first not in self._layers:
                whole = LeafSpec(leaf.path, x.shape[1:], x.dtype, None)
                whole = by_shape.get(whole.shape, whole)
                forms[x] = forms_of_stack(whole, len(stack.leaves), num_shards)
            elif x.shape in by_shape and self._is_stack(x):
                stored = by_shape[x.shape]
                forms[x] = Forms(stored, by_layer_of(stored, num_shards))
        return forms

    def _groups(self) -> list[list[int]]:
        """The outputs of each stack that moves, and then the others.

        Stacks are updated one after the other: only one of them is held a second time.
        """
        block, stacks = self._stacked
        number = {leaf: i for i, stack in enumerate(stacks) for leaf in stack.leaves}
        groups: dict[int | None, list[int]] = {i: [] for i in (*range(len(stacks)), None)}
        for i, x in enumerate(block.outputs):
            leaf = None if isinstance(x, Constant) else self._values.leaf.get(x)
            groups[None if leaf is None else number.get(leaf)].append(i)
        return [group for group in groups.values() if group]


def _apply(operation: Operation, env: Layouts, places: Mapping[Operation, Any]) -> None:
    is_whole = full_reduction(operation) is not None
    given, made = places.get(operation, (None if is_whole else False, False))
    inputs = [env.get(x, given) for x in operation.inputs]
    for x, array in zip(operation.outputs, operation.bind(inputs), strict=True):
        env.set(x, array, made)


def _places(stacks: Sequence[MatrixStack]) -> dict[Operation, tuple[bool | None, bool]]:
    """For what runs on stacks, whether it reads and makes arrays that are split by layer."""
    places: dict[Operation, tuple[bool | None, bool]] = {}
    for stack in stacks:
        places.update(dict.fromkeys(stack.stacking, (None, False)))
        places.update(dict.fromkeys(stack.products, (True, True)))
        places.update(dict.fromkeys(stack.rows, (False, False)))
    return places
