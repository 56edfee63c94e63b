"""Run an optimizer that multiplies whole matrices (Muon) on stacks of them, split by layer.

A stack `[layers, rows, cols]` is stored split along a dim of its matrices. An update that
multiplies the matrices would gather all of them on every device. Here each device gets the whole
matrices of some layers:

    stored, split along rows --all-to-all--> split along layers: update --all-to-all--> stored

Two kinds of arrays are sent: those that a matrix product reads, in their dtype, and results of
products that other operations read. Operations before the products (momentum) and after them
(weight decay) are computed in the stored layout. State that products both read and replace, such as
the statistics of Shampoo, is stored split by layer and never moves.

Matrices may be separate leaves, one for each layer. They are stacked where they are first
multiplied, with as many leaves in a stack as there are devices (`stack_alike_leaves`). The update
is traced and then runs with sharding constraints, so no value changes, except by the order in which
sums are added. If the number of devices does not divide the layers, a device gets `ceil(layers /
devices)` or fewer.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    branch_blocks,
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
from .matrix_layouts import (
    Forms,
    Layouts,
    forms_of_layers,
    forms_of_stack,
    may_be_split_matrix,
    may_be_split_stack,
)


class MatrixUpdate:
    """`tx.update`, traced on arrays of true shapes and rewritten to multiply stacks by layer.

    Args:
        tx: the optimizer.
        trees: gradients, state, parameters (or None) and extra arguments, with arrays or structs of
            true shapes.
        params: the layouts of the parameters.
    """

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        trees: tuple[Any, Any, Any, Any],
        params: TreeLayout,
    ):
        flat = [flatten(tree) for tree in trees]
        given = [[(p, x) for p, x in zip(*tree[:2], strict=True) if is_array(x)] for tree in flat]
        self._outputs: dict[str, Any] = {}  # structure, and leaves that are no arrays
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # not one that the user has set
            arrays = (x for pairs in given for _, x in pairs)
            block = trace(functools.partial(self._update, tx, flat), *arrays)[0]
        num_grads, num_state, num_params, _ = map(len, given)
        self._num_updates = num_grads
        self._state = block.inputs[num_grads : num_grads + num_state]
        numbers = range(len(params.leaves))
        paths = collections.Counter(leaf.path for leaf in params.leaves)
        by_path = {leaf.path: i for i, leaf in enumerate(params.leaves) if paths[leaf.path] == 1}
        roles = [
            *(LeafOf(i, "gradient") for i in numbers),
            *(_role(path, by_path) for path, _ in given[1]),
            *(LeafOf(i, "parameter") for i in numbers if num_params == num_grads),
        ]
        if num_grads != len(numbers) or any(x.has_effects for x in block.operations):
            # It is not known to which parameter a gradient belongs; or effects (prints) have to
            # stay in order, and stacks would change the order.
            roles = []
        self._program = _Program(block, roles, params.leaves)

    @property
    def moves(self) -> bool:
        """Whether any array is split by layer."""
        return self._program.moves

    @property
    def state_by_layer(self) -> list[int | None]:
        """For each array of the optimizer state, the parameter whose layers split it, or None.

        An index names a stack of matrices whose products read the array and make its new value. The
        array is then split by the layers of that stack.
        """
        new = self._program.block.outputs[self._num_updates :]
        return list(map(self._program.replaced_by_products, self._state, new))

    def _update(
        self, tx: optax.GradientTransformationExtraArgs, flat: Sequence[Any], *arrays: Any
    ) -> list[Any]:
        """Run `tx.update` on the trees `flat`, filled with `arrays`; return its arrays."""
        remaining = iter(arrays)
        grads, state, params, extras = (
            jax.tree.unflatten(treedef, [next(remaining) if is_array(x) else x for x in leaves])
            for _, leaves, treedef in flat
        )
        _, leaves, treedef = flatten(tx.update(grads, state, params, **extras))
        self._outputs.update(treedef=treedef, statics=statics_of(leaves))
        return [x for x in leaves if is_array(x)]

    def run(
        self, arrays: Sequence[Any], state: Sequence[LeafSpec], mesh: Mesh, axes: tuple[str, ...]
    ) -> Any:
        """Run the update; return `(updates, state)`, both with arrays of true shapes.

        Args:
            arrays: the arrays of the four trees that the update was traced for, in order.
            state: the layouts of the state.
            mesh: the mesh of the layouts.
            axes: the axes that split the state.
        """
        program = self._program
        by_layer = {
            i: (x, leaf)
            for i, (x, leaf, owner) in enumerate(
                zip(self._state, state, self.state_by_layer, strict=True), self._num_updates
            )
            if owner is not None and leaf.layout is not None and leaf.layout.dim == 0
        }
        layouts: list[dict[tuple[int, ...], LeafSpec]] = [{} for _ in program.params]
        for x, leaf in zip(self._state, state, strict=True):
            if x in program.roles:
                layouts[program.roles[x].leaf][leaf.shape] = leaf
        for leaf, by_shape in zip(program.params, layouts, strict=True):
            by_shape[leaf.shape] = leaf
        run = _Run(layouts, mesh, axes)
        outputs = program.run(arrays, run, {x for x, _ in by_layer.values()}, by_layer.keys())
        constrained = Layouts({}, mesh, axes).constrained
        for i, (_, leaf) in by_layer.items():
            outputs[i] = constrained(outputs[i], leaf)
        return rebuild(self._outputs["treedef"], self._outputs["statics"], outputs)


def _role(path: tuple[Any, ...], by_path: Mapping[str, int]) -> LeafOf | None:
    """Find the parameter whose path ends the path of an array of the state.

    Returns:
        The index of the parameter, and the rest of the path as the array's role; None if there is
        no such parameter.
    """
    for i, name in enumerate(path_endings(path)):
        if name in by_path:
            return LeafOf(by_path[name], ("state", *map(str, path[:i])))
    return None


class _Run(NamedTuple):
    """The layouts and the mesh of one run of an update.

    Attributes:
        layouts: for each parameter, maps the shapes of the parameter and of its state arrays to
            their layouts.
        mesh: the mesh of the layouts.
        axes: the mesh axes that split the arrays.
    """

    layouts: Sequence[Mapping[tuple[int, ...], LeafSpec]]
    mesh: Mesh
    axes: tuple[str, ...]


class _Program:
    """A traced update, or one branch of a `cond` in it, with its stacks of matrices.

    Args:
        block: the traced program.
        roles: for each of the first inputs the parameter that it belongs to, or None.
        params: the layouts of the parameters.

    Attributes:
        block: the traced program.
        roles: has an entry for each input whose parameter may be split by layer: that parameter,
            with the input's role and layout.
        params: the layouts of the parameters.
    """

    def __init__(self, block: Block, roles: Sequence[LeafOf | None], params: Sequence[LeafSpec]):
        self.block, self.params = block, params
        self.roles = {
            x: LeafOf(
                role.leaf, (role.role, params[role.leaf].layout, params[role.leaf].other_axes)
            )
            for x, role in zip(block.inputs, roles, strict=False)
            if role is not None and may_be_split_matrix(params[role.leaf])
        }
        self._values = LeafValues(block, self.roles)
        self._layers = {
            i: stack_of_leaf(self._values, i)
            for i in dict.fromkeys(role.leaf for role in self.roles.values())
            if self._has_layers(i)
        }

    def _has_layers(self, leaf: int) -> bool:
        """Return whether a leaf is read by matrix products, and always as a stack of its layers."""
        if not may_be_split_stack(self.params[leaf]):
            return False
        products = [x for x in self._values.products_of(leaf) if multiplies_matrices(x)]
        num_layers = self.params[leaf].shape[0]
        read = [x.shape for product in products for x in product.values if x in self._values.leaf]
        return bool(products) and all(
            len(x) > 2 and x[0] % num_layers == 0 for x in read if len(x) > 1
        )

    def _is_stack(self, x: Value) -> bool:
        """Return whether dim 0 of a value, which comes from a stack, is the stack's layers."""
        layers = self.params[self._values.leaf[x]].shape[0]
        return len(x.shape) > 1 and x.shape[0] == layers

    def replaced_by_products(self, x: Value, new: Atom) -> int | None:
        """Return the stack whose products read input `x` and make `new`; None if there is none.

        `new` is the next value of `x`.
        """
        leaf = self._values.leaf.get(x)
        stack = None if leaf is None else self._layers.get(leaf)
        if stack is None or x not in stack.given or not self._is_stack(x):
            return None
        if leaf is not None and self.params[leaf].stages is not None:
            return None  # its layers are divided between stages, like those of the parameter
        return leaf if new is x or new in stack.made else None

    @property
    def moves(self) -> bool:
        """Whether any array is split by layer."""
        return bool(self._stacked[1] or self._branches)

    @functools.cached_property
    def _stacked(self) -> tuple[Block, list[MatrixStack]]:
        """The program, rewritten to multiply alike leaves as stacks; and all its stacks."""
        leaves = {
            role.leaf: None
            for role in self.roles.values()
            if role.leaf not in self._layers and self.params[role.leaf].stages is None
        }
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            block, stacks = stack_alike_leaves(self._values, leaves, self._num_shards)
        return block, [*self._layers.values(), *stacks]

    @functools.cached_property
    def _branches(self) -> dict[Operation, list[_Program]]:
        """The branches of each `cond` over several leaves, if a branch splits arrays by layer."""
        of_conds = {}
        for operation in self.block.operations:
            if operation.name != "cond" or operation.has_effects:
                continue
            if not self._values.leaf.keys().isdisjoint(operation.outputs):
                continue  # it computes values of one leaf, and is among the leaf's products
            roles = [self._values.role(x) for x in operation.inputs[1:]]
            branches = [_Program(x, roles, self.params) for x in branch_blocks(operation)]
            if any(branch.moves for branch in branches):
                of_conds[operation] = branches
        return of_conds

    def _num_shards(self, leaf: int) -> int:
        layout = self.params[leaf].layout
        assert layout is not None
        return layout.num_shards

    def run(
        self,
        arrays: Sequence[Any],
        run: _Run,
        inputs_by_layer: Collection[Value] = (),
        outputs_by_layer: Collection[int] = (),
    ) -> list[Any]:
        """Run the program; return its outputs.

        Args:
            arrays: the inputs of the program.
            run: the layouts of this run.
            inputs_by_layer: the inputs that are split by layer.
            outputs_by_layer: indices of the outputs that are to be split by layer.
        """
        block, stacks = self._stacked
        forms = {x: y for stack in stacks for x, y in self._forms(stack, run).items()}
        env = Layouts(forms, run.mesh, run.axes)
        places = _places(stacks)
        for x, array in zip(block.inputs, arrays, strict=True):
            env.set(x, array, x in inputs_by_layer)
        results: dict[int, Any] = {}
        before: int | None = None
        for group in self._groups():
            wanted = [block.outputs[i] for i in group]
            for operation in operations_for(block, wanted, env.arrays):
                is_whole = full_reduction(operation) is not None
                reads_by_layer, makes_by_layer = places.get(
                    operation, (None if is_whole else False, False)
                )
                inputs = [env.get(x, reads_by_layer) for x in operation.inputs]
                new = self._bind(operation, inputs, run)
                for x, array in zip(operation.outputs, new, strict=True):
                    env.set(x, array, makes_by_layer)
            for i in group:
                results[i] = env.get(block.outputs[i], i in outputs_by_layer)
            # The next stack is split by layer only once this one has a result, so that one stack at
            # a time is held in both layouts.
            if before is not None:
                results[before] = env.finished
            before, env.finished = group[0], results[group[0]]
        return [results[i] for i in range(len(results))]

    def _bind(self, operation: Operation, inputs: Sequence[Any], run: _Run) -> Sequence[Any]:
        if operation not in self._branches:
            return operation.bind(inputs)

        def outputs_of(branch: _Program, *operands: Any) -> list[Any]:
            outputs = zip(operation.outputs, branch.run(operands, run), strict=True)
            return [jnp.asarray(x, out.dtype) if out.is_array else x for out, x in outputs]

        branches = [functools.partial(outputs_of, x) for x in self._branches[operation]]
        return jax.lax.switch(inputs[0], branches, *inputs[1:])

    def _forms(self, stack: MatrixStack, run: _Run) -> dict[Value, Forms]:
        """Return the two layouts of each value that the products of a stack read or make."""
        first = stack.leaves[0]
        leaf, num_shards = self.params[first], self._num_shards(first)
        by_shape = run.layouts[first]
        forms = {}
        for x in (*stack.given, *stack.made):
            if first not in self._layers:
                whole = LeafSpec(leaf.path, x.shape[1:], x.dtype, None)
                whole = by_shape.get(whole.shape, whole)
                forms[x] = forms_of_stack(whole, len(stack.leaves), num_shards)
            elif x.shape in by_shape and self._is_stack(x):
                stored = by_shape[x.shape]
                forms[x] = forms_of_layers(stored, num_shards, run.axes)
        return forms

    def _groups(self) -> list[list[int]]:
        """Group the outputs by the stack that they belong to; return the indices in each group.

        The largest stack comes first, and outputs of no stack last. Stacks are updated one after
        the other, so that only one of them is held in both layouts.
        """
        block, stacks = self._stacked
        number = {leaf: i for i, stack in enumerate(stacks) for leaf in stack.leaves}
        groups: dict[int | None, list[int]] = {i: [] for i in (*range(len(stacks)), None)}
        for i, x in enumerate(block.outputs):
            leaf = None if isinstance(x, Constant) else self._values.leaf.get(x)
            groups[None if leaf is None else number.get(leaf)].append(i)
        num_bytes = [sum(x.num_bytes for x in stack.given) for stack in stacks]
        order = sorted(range(len(stacks)), key=lambda i: -num_bytes[i])
        return [groups[i] for i in (*order, None) if groups[i]]


def _places(stacks: Sequence[MatrixStack]) -> dict[Operation, tuple[bool | None, bool]]:
    """Return for each operation on stacks whether its inputs, and its outputs, are split by layer.

    None in place of the first means that the operation reads arrays of any layout.
    """
    places: dict[Operation, tuple[bool | None, bool]] = {}
    for stack in stacks:
        places.update(dict.fromkeys(stack.stacking, (None, False)))
        places.update(dict.fromkeys(stack.products, (True, True)))
        places.update(dict.fromkeys(stack.rows, (False, False)))
    return places
