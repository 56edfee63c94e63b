"""Run an optimizer that multiplies whole matrices (Muon) on stacks of them, split by layer.

A stack `[layers, rows, cols]` is stored split along a dim of its matrices, and an update that
multiplies these would gather all of them on every device. Here each device gets all of some layers:

    stored, split along rows --all-to-all--> split along layers: update --all-to-all--> stored

A value *of a leaf* is computed, element by element, from the leaf's gradient, parameter and state.
Those that a mixing operation needs are split by layer, the state among them, which is stored so and
never moves. All others, such as weight decay after the products, are computed as the leaf is
stored. The traced update is run with sharding constraints, so that no value changes, up to the
order in which sums are added. Layers that the devices do not divide are split into parts of
`ceil(layers / devices)`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._mesh import LOCAL, axes_of_dims, is_one_node, without_node
from .._program import (
    Atom,
    Constant,
    Operation,
    Value,
    full_reduction,
    is_elementwise,
    multiplies_matrices,
    operations_for,
    trace,
)
from .._sharding import (
    DimSharding,
    LeafSpec,
    TreeLayout,
    flatten,
    is_array,
    path_endings,
    rebuild,
    statics_of,
)
from .placement import constrain


def may_move(leaf: LeafSpec) -> bool:
    """Whether a parameter may be a stack of matrices, stored split along a dim of them."""
    if leaf.layout is None or leaf.layout.num_shards == 1 or leaf.memory_kind is not None:
        return False
    of_layers = axes_of_dims(PartitionSpec(*leaf.other_axes, *[None] * len(leaf.shape)))[0]
    if LOCAL in leaf.other_axes:  # an exchange of layers would gather its experts
        return False
    return len(leaf.shape) >= 3 and leaf.layout.dim != 0 and not of_layers


def by_layer_of(leaf: LeafSpec) -> LeafSpec:
    """The layout by layer of a stack that is stored split on another dim."""
    assert leaf.layout is not None
    layout = DimSharding(0, leaf.shape[0], leaf.layout.num_shards)
    return dataclasses.replace(leaf, layout=layout)


class MatrixUpdate:
    """`tx.update`, traced on arrays of true shapes, and its values that are split by layer.

    Args:
        tx: the optimizer.
        trees: gradients, state, parameters (or None) and extra arguments, with arrays or structs of
            true shapes.
        params: the layouts of the parameters.

    Attributes:
        state_by_layer: for each array of the state the parameter that it belongs to, if it is to be
            stored split by layer; otherwise None.
        moves: whether anything is split by layer.
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
        stacks = [i if may_move(leaf) else None for i, leaf in enumerate(self._params)]
        of_state = [self._owner(path, x) for path, x in given[1]]
        self._owners = [*stacks, *of_state, *(stacks if num_params == num_grads else [])]
        self._of_leaf: dict[Value, int] = {}  # computed element by element
        self._mixed: dict[Value, frozenset[int]] = {}  # other values of leaves
        mixing = self._follow()
        self._leaves = mixing.keys()
        self._by_layer = self._needed(mixing)
        self.moves = bool(self._by_layer)
        pairs = zip(self._state, of_state, strict=True)
        self.state_by_layer = [i if x in self._by_layer else None for x, i in pairs]

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

    def _owner(self, path: tuple[Any, ...], x: Any) -> int | None:
        """The stack whose path ends that of an array of the state, if both have its layers."""
        by_path = {leaf.path: i for i, leaf in enumerate(self._params) if may_move(leaf)}
        for name in path_endings(path):
            owner = by_path.get(name)
            if owner is not None and len(x.shape) > 1:
                return owner if x.shape[0] == self._params[owner].shape[0] else None
        return None

    def _follow(self) -> dict[int, list[Operation]]:
        """For each stack whose matrices are multiplied, what mixes its elements."""
        mixing: dict[int, list[Operation]] = collections.defaultdict(list)
        has_layers: dict[int, bool] = {}
        for x, owner in zip(self._block.inputs, self._owners, strict=False):
            if owner is not None and x.shape == self._params[owner].shape:
                self._of_leaf[x] = owner
            elif owner is not None:
                self._mixed[x] = frozenset([owner])
        for operation in self._block.operations:
            leaves = frozenset().union(*map(self._leaves_of, operation.values))
            if not leaves or full_reduction(operation) is not None:
                continue
            is_mixed = any(x in self._mixed for x in operation.values)
            if len(leaves) == 1 and not is_mixed and is_elementwise(operation):
                self._of_leaf.update(dict.fromkeys(operation.outputs, *leaves))
                continue
            self._mixed.update(dict.fromkeys(operation.outputs, leaves))
            if is_elementwise(operation):
                continue
            multiplies = multiplies_matrices(operation)
            for leaf in leaves:
                mixing[leaf].append(operation)
                if multiplies:
                    kept = self._keeps_layers(operation, leaf)
                    has_layers[leaf] = has_layers.get(leaf, True) and kept
        return {leaf: mixing[leaf] for leaf, is_stack in has_layers.items() if is_stack}

    def _leaves_of(self, x: Value) -> frozenset[int]:
        return self._mixed.get(x, frozenset([self._of_leaf[x]] if x in self._of_leaf else []))

    def _keeps_layers(self, operation: Operation, leaf: int) -> bool:
        """Whether all matrices of a leaf that an operation reads are in stacks of its layers."""
        read = [x.shape for x in operation.values if leaf in self._leaves_of(x)]
        num_layers = self._params[leaf].shape[0]
        return all(len(x) > 2 and x[0] % num_layers == 0 for x in read if len(x) > 1)

    def _needed(self, mixing: Mapping[int, list[Operation]]) -> set[Value]:
        """The values of stacks that mixing operations need, and what these keep as state."""
        needed = {x for x in self._state if self._mixed.get(x, frozenset()) & mixing.keys()}
        left = [
            x
            for leaf, operations in mixing.items()
            for operation in operations
            for x in operation.values
            if self._of_leaf.get(x) == leaf
        ]
        while left:
            x = left.pop()
            if x in needed:
                continue
            needed.add(x)
            maker = self._block.makers.get(x)
            if maker is not None:
                left += [y for y in maker.values if y in self._of_leaf]
        return needed

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
        env = _Layouts(self._leaf_of, mesh, axes)
        for i, (x, array) in enumerate(zip(self._block.inputs, arrays, strict=True)):
            j = i - self._num_updates
            env.set(x, array, 0 <= j < len(state) and _is_by_layer(state[j], self._leaf_of(x)))
        results: dict[int, Any] = {}
        before: int | None = None
        for group in self._groups():
            wanted = [self._block.outputs[i] for i in group]
            for operation in operations_for(self._block, wanted, env.arrays):
                self._apply(operation, env)
            for i in group:
                j, x = i - self._num_updates, self._block.outputs[i]
                leaf = None if isinstance(x, Constant) else self._leaf_of(x)
                of_state = state[j] if 0 <= j < len(state) else None
                results[i] = env.get(x, of_state is not None and _is_by_layer(of_state, leaf))
                if leaf is None and of_state is not None and self.state_by_layer[j] is not None:
                    results[i] = env.constrained(results[i], of_state)
            if before is not None:
                results[before] = env.finished
            before, env.finished = group[0], results[group[0]]
        outputs = [results[i] for i in range(len(results))]
        return rebuild(self._outputs["treedef"], self._outputs["statics"], outputs)

    def _groups(self) -> list[list[int]]:
        """The outputs of each stack that moves, and then the others.

        Stacks are updated one after the other: only one of them is held a second time.
        """
        groups: dict[int | None, list[int]] = {leaf: [] for leaf in (*sorted(self._leaves), None)}
        for i, x in enumerate(self._block.outputs):
            leaves = frozenset() if isinstance(x, Constant) else self._leaves_of(x) & self._leaves
            groups[next(iter(leaves)) if len(leaves) == 1 else None].append(i)
        return [group for group in groups.values() if group]

    def _apply(self, operation: Operation, env: _Layouts) -> None:
        values = [x for x in operation.values if self._leaf_of(x) is not None]
        if full_reduction(operation) is not None:
            moved = None
        elif is_elementwise(operation) and self._by_layer.isdisjoint(operation.outputs):
            moved = all(map(env.is_by_layer, values))
        else:
            moved = True
        inputs = [env.get(x, moved) for x in operation.inputs]
        for x, array in zip(operation.outputs, operation.bind(inputs), strict=True):
            env.set(x, array, moved is not False)

    def _leaf_of(self, x: Value) -> LeafSpec | None:
        """The moved stack that a value is made of alone, and has the shape of; None without one."""
        leaves = self._leaves_of(x)
        if len(leaves) != 1 or not leaves <= self._leaves:
            return None
        leaf = self._params[next(iter(leaves))]
        return leaf if x.shape == leaf.shape else None


def _is_by_layer(leaf: LeafSpec, parameter: LeafSpec | None) -> bool:
    return parameter is not None and leaf.layout is not None and leaf.layout.dim == 0


class _Layouts:
    """Arrays of values in one or both layouts, converted where they are first needed.

    Args:
        leaf_of: the stack whose layouts a value has; None: it is left to the compiler.
        mesh: the mesh of the layouts.
        axes: the axes that split them.

    Attributes:
        arrays: for each value its arrays, by whether they are split by layer.
        finished: an array that must be known before another is split by layer; None: none.
    """

    def __init__(self, leaf_of: Callable, mesh: Mesh, axes: tuple[str, ...]):
        self._leaf_of, self._mesh, self._axes = leaf_of, mesh, axes
        self.arrays: dict[Value, dict[bool, Any]] = {}
        self.finished: Any = None

    def set(self, x: Value, array: Any, by_layer: bool) -> None:
        self.arrays[x] = {by_layer: array}

    def is_by_layer(self, x: Value) -> bool:
        return True in self.arrays[x]

    def get(self, x: Atom, by_layer: bool | None) -> Any:
        """The array, by layer or as its leaf is stored; None: in any layout."""
        if isinstance(x, Constant):
            return x.value
        by_form = self.arrays[x]
        leaf = self._leaf_of(x)
        if leaf is None or by_layer is None:
            return next(iter(by_form.values()))
        if by_layer not in by_form:
            # Both layouts are given, so that the compiler converts here and not around it.
            source = by_form[not by_layer]
            if by_layer and self.finished is not None:
                # XLA drops a barrier of which a result is not used.
                source, self.finished = jax.lax.optimization_barrier((source, self.finished))
            moved = by_layer_of(leaf)
            source_form, form = (leaf, moved) if by_layer else (moved, leaf)
            by_form[by_layer] = self.constrained(self.constrained(source, source_form), form)
        return by_form[by_layer]

    def constrained(self, x: Any, leaf: LeafSpec) -> Any:
        """An array of true shape, in the layout of `leaf`."""
        spec, mesh = leaf.spec(self._axes), self._mesh
        if AxisType.Explicit not in mesh.axis_types:
            return constrain(x, mesh, spec)
        context = jax.sharding.get_abstract_mesh()  # with automatic axes
        spec = without_node(spec) if is_one_node() else spec
        return jax.lax.with_sharding_constraint(x, NamedSharding(context, spec))
