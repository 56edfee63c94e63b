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

Matrices that are leaves of their own, one for each layer, are made such stacks where they are first
multiplied, by as many leaves as there are devices (`stack_alike_leaves`). What is computed of them
element by element, as a momentum, is computed as they are stored, and so is their state.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from .._program import (
    Block,
    Constant,
    LeafOf,
    LeafStack,
    Operation,
    Value,
    full_reduction,
    is_elementwise,
    multiplies_matrices,
    operations_for,
    stack_alike_leaves,
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
    """`tx.update`, traced on arrays of true shapes, and its values that are split by layer.

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
        has_params = num_params == num_grads
        numbers = range(len(self._params))
        self._by_path = {leaf.path: i for i, leaf in enumerate(self._params)}
        roles = [
            *(LeafOf(i, "gradient") for i in numbers),
            *(self._role(path) for path, _ in given[1]),
            *(LeafOf(i, "parameter") for i in numbers if has_params),
        ]
        self._roles = dict(zip(self._block.inputs, roles, strict=False))
        stacks = [i if may_move(leaf) else None for i, leaf in enumerate(self._params)]
        of_state = [self._owner(x) for x in self._state]
        self._owners = [*stacks, *of_state, *(stacks if has_params else [])]
        self._of_leaf: dict[Value, int] = {}  # computed element by element
        self._mixed: dict[Value, frozenset[int]] = {}  # other values of leaves
        mixing = self._follow()
        self._leaves = mixing.keys()
        self._by_layer = self._needed(mixing)
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

    def _role(self, path: tuple[Any, ...]) -> LeafOf | None:
        """The parameter whose path ends that of an array of the state, and the array's role."""
        for i, name in enumerate(path_endings(path)):
            if name in self._by_path:
                return LeafOf(self._by_path[name], ("state", *map(str, path[:i])))
        return None

    def _owner(self, x: Value) -> int | None:
        """The stack that an array of the state belongs to, if it has its layers."""
        role = self._roles[x]
        if role is None or len(x.shape) < 2 or not may_move(leaf := self._params[role.leaf]):
            return None
        return role.leaf if x.shape[0] == leaf.shape[0] else None

    @property
    def moves(self) -> bool:
        """Whether anything is split by layer."""
        return bool(self._by_layer or self._stacked[1])

    @functools.cached_property
    def _stacked(self) -> tuple[Block, list[LeafStack]]:
        """The program with products of alike leaves on stacks of these, and the stacks."""
        leaf_of = {}
        for x, role in self._roles.items():
            if role is not None and role.leaf not in self._leaves:
                leaf = self._params[role.leaf]
                if may_be_matrix(leaf):  # alike are those that are stored alike
                    whole = role.role, leaf.layout, leaf.other_axes
                    leaf_of[x] = LeafOf(role.leaf, whole)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return stack_alike_leaves(self._block, leaf_of, self._num_shards)

    def _num_shards(self, leaf: int) -> int:
        layout = self._params[leaf].layout
        assert layout is not None
        return layout.num_shards

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
        block, stacks = self._stacked
        of_stacks = self._forms_of_stacks(stacks, state)
        env = Layouts(lambda x: of_stacks.get(x) or self._forms(x), mesh, axes)
        places = _places(stacks)
        for i, (x, array) in enumerate(zip(block.inputs, arrays, strict=True)):
            j = i - self._num_updates
            env.set(x, array, 0 <= j < len(state) and _is_by_layer(state[j], self._forms(x)))
        results: dict[int, Any] = {}
        before: int | None = None
        for group in self._groups():
            wanted = [block.outputs[i] for i in group]
            for operation in operations_for(block, wanted, env.arrays):
                self._apply(operation, env, places)
            for i in group:
                j, x = i - self._num_updates, block.outputs[i]
                forms = None if isinstance(x, Constant) else self._forms(x)
                of_state = state[j] if 0 <= j < len(state) else None
                results[i] = env.get(x, of_state is not None and _is_by_layer(of_state, forms))
                if forms is None and of_state is not None and self.state_by_layer[j] is not None:
                    results[i] = env.constrained(results[i], of_state)
            if before is not None:
                results[before] = env.finished
            before, env.finished = group[0], results[group[0]]
        outputs = [results[i] for i in range(len(results))]
        return rebuild(self._outputs["treedef"], self._outputs["statics"], outputs)

    def _forms_of_stacks(
        self, stacks: Sequence[LeafStack], state: Sequence[LeafSpec]
    ) -> dict[Value, Forms]:
        """The layouts of what stacks are made of, and of what is made of them."""
        forms = {}
        for stack in stacks:
            first = stack.leaves[0]
            leaf, pairs = self._params[first], zip(self._state, state, strict=True)
            mine = [x for value, x in pairs if (y := self._roles[value]) and y.leaf == first]
            by_shape = {x.shape: x for x in (*mine, leaf)}
            for x in (*stack.stacked, *stack.made):
                whole = LeafSpec(leaf.path, x.shape[1:], x.dtype, None)
                known = by_shape.get(whole.shape, whole)
                num_shards = self._num_shards(first)
                forms[x] = forms_of_stack(known, len(stack.leaves), num_shards)
        return forms

    def _groups(self) -> list[list[int]]:
        """The outputs of each stack that moves, and then the others.

        Stacks are updated one after the other: only one of them is held a second time.
        """
        block, stacks = self._stacked
        first = len(self._params)  # stacks of leaves are numbered from here on
        groups: dict[int | None, list[int]] = {leaf: [] for leaf in sorted(self._leaves)}
        groups |= {first + i: [] for i in range(len(stacks))} | {None: []}
        of_stack = {x: i for i, stack in enumerate(stacks, first) for x in stack.made}
        made_of: dict[Value, set[int]] = {x: {i} for x, i in of_stack.items()}
        for operation in block.operations:
            if full_reduction(operation) is None and made_of.keys().isdisjoint(operation.outputs):
                read = set().union(*(made_of.get(x, ()) for x in operation.values))
                made_of.update(dict.fromkeys(operation.outputs, read))
        for i, x in enumerate(block.outputs):
            is_constant = isinstance(x, Constant)
            leaves = set() if is_constant else made_of.get(x, set()) | self._leaves_of(x)
            leaves &= groups.keys()
            groups[next(iter(leaves)) if len(leaves) == 1 else None].append(i)
        return [group for group in groups.values() if group]

    def _apply(self, operation: Operation, env: Layouts, places: Mapping[Operation, Any]) -> None:
        values = [x for x in operation.values if self._forms(x) is not None]
        if operation in places:
            given, made = places[operation]
        elif full_reduction(operation) is not None:
            given, made = None, True
        elif is_elementwise(operation) and self._by_layer.isdisjoint(operation.outputs):
            given = made = all(map(env.is_by_layer, values))
        else:
            given = made = True
        inputs = [env.get(x, given) for x in operation.inputs]
        for x, array in zip(operation.outputs, operation.bind(inputs), strict=True):
            env.set(x, array, made)

    def _forms(self, x: Value) -> Forms | None:
        """The layouts of a value of a stack that moves, if it has its shape and is made of it."""
        leaves = self._leaves_of(x)
        if len(leaves) != 1 or not leaves <= self._leaves:
            return None
        leaf = self._params[next(iter(leaves))]
        return Forms(leaf, by_layer_of(leaf)) if x.shape == leaf.shape else None


def _places(stacks: Sequence[LeafStack]) -> dict[Operation, tuple[bool | None, bool]]:
    """For what runs on stacks of leaves, whether it reads and makes arrays split by layer."""
    places: dict[Operation, tuple[bool | None, bool]] = {}
    for stack in stacks:
        places.update(dict.fromkeys(stack.stacking, (None, False)))
        places.update(dict.fromkeys(stack.products, (True, True)))
        places.update(dict.fromkeys(stack.rows, (False, False)))
    return places


def _is_by_layer(leaf: LeafSpec, forms: Forms | None) -> bool:
    return forms is not None and leaf.layout is not None and leaf.layout.dim == 0
