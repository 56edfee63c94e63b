"""Update parameters and optimizer state. Some of their leaves may be in host memory.

`apply_gradients` updates all leaves at the end of a step. `ProgramUpdates` are the updates that the
program of a step may run in its loops, layer by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from .._execute import LeafUpdate
from .._mesh import in_host, is_traced
from .._sharding import TreeLayout, arrays_of, flatten, overwritten_leaves
from .._windowed_update import (
    LayerUpdate,
    TracedUpdate,
    UpdateLayouts,
    layer_updates,
    windowed_update,
)
from .optimizer_state import TrueShapes, check_is_optimizer, trained_part, trained_tree
from .placement import constrain
from .programs import Programs, numbers_as_arrays
from .user_function import explaining_values


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts of an update's trees, and the mesh axes that split them.

    Attributes:
        gradients: the layout of the gradients.
        state: the layout of the optimizer state.
        params: the layout of the parameters, including leaves that are not trained.
        mesh: the mesh.
        state_axes: the axes that split the state.
        weight_axes: the axes that split the parameters: `state_axes`, or none.
    """

    gradients: TreeLayout
    state: TreeLayout
    params: TreeLayout
    mesh: Mesh
    state_axes: tuple[str, ...]
    weight_axes: tuple[str, ...]


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    layouts: Layouts,
    extra_args: Mapping[str, Any],
    programs: Programs,
) -> tuple[Any, Any]:
    """Return the new parameters and the new state; see `Zero.apply_gradients`."""
    check_is_optimizer(tx)
    _check_same_leaves(layouts.gradients, layouts.params)
    trees = (grads, state, params)
    known = (layouts.gradients, layouts.state, layouts.params)
    tree_layouts = [layout.with_statics_of(tree) for layout, tree in zip(known, trees, strict=True)]
    arrays = [arrays_of(tree) for tree in trees]
    if all(is_traced(x) for xs in arrays for x in xs):
        return _apply(tx, trees, tree_layouts, layouts, extra_args)

    def update(arrays: list[list[Any]]) -> list[list[Any]]:
        trees = [layout.stored(x) for layout, x in zip(tree_layouts, arrays, strict=True)]
        return [arrays_of(x) for x in _apply(tx, trees, tree_layouts, layouts, extra_args)]

    new_params, new_state = programs.run(update, arrays)
    return tree_layouts[2].stored(new_params), tree_layouts[1].stored(new_state)


def _check_same_leaves(gradients: TreeLayout, params: TreeLayout) -> None:
    shapes = {leaf.path: leaf.shape for leaf in params.leaves}
    for leaf in gradients.leaves:
        if shapes.get(leaf.path) != leaf.shape:
            there = f"shape {shapes[leaf.path]}" if leaf.path in shapes else "no such leaf"
            raise ValueError(
                f"`grads` has a leaf {leaf.path!r} of shape {leaf.shape}; `params` has {there}. "
                "Give gradients of these parameters, in the order of optax: "
                "`zero.apply_gradients(tx, grads, opt_state, params)`."
            )


def _apply(
    tx: optax.GradientTransformation,
    trees: Sequence[Any],
    tree_layouts: Sequence[TreeLayout],
    layouts: Layouts,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Apply `tx` inside a program; return the new `(parameters, state)`, like `apply_gradients`.

    `trees` are the traced gradients, state and parameters, and `tree_layouts` their layouts.
    """
    (grads, state, params), (of_grads, of_state, of_params) = trees, tree_layouts
    trained, layout = trained_part(params, of_params)
    if any(in_host(x) for tree in trees for x in arrays_of(tree)):
        for_trained, of_grads = trained_part(grads, of_grads)
        mesh, axes = layouts.mesh, layouts.state_axes
        new, new_state = windowed_update(
            tx.inner if isinstance(tx, TrueShapes) else tx,
            split(of_grads, for_trained, mesh, axes),
            state,
            split(layout, trained, mesh, axes),
            layouts=UpdateLayouts(of_grads, of_state, layout, mesh, axes),
            extra_args=extra_args,
        )
        new = split(layout, new, mesh, layouts.weight_axes)
        if isinstance(tx, TrueShapes):  # some of the state may be split by layer
            new_state = split(of_state, new_state, mesh, axes)
    else:
        run = optax.with_extra_args_support(tx).update
        grads_of_trained = trained_tree(grads)
        names = ("`grads`", "`opt_state`", "`params`", *(f"`{key}`" for key in extra_args))
        with explaining_values(run, (grads_of_trained, state, trained), extra_args, names):
            updates, new_state = run(grads_of_trained, state, trained, **extra_args)
        new = optax.apply_updates(trained, updates)
    return with_untrained(params, trained, new, grads), numbers_as_arrays(new_state)


def split(layout: TreeLayout, tree: Any, mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """Split the arrays of a tree over `axes`; leave arrays in host memory as they are."""
    return layout.stored(split_arrays(layout, arrays_of(tree), mesh, axes))


def split_arrays(
    layout: TreeLayout, arrays: Sequence[Any], mesh: Mesh, axes: tuple[str, ...]
) -> list[Any]:
    """Split an array for each leaf of `layout` over `axes`, like `split`. Some may be None."""
    pairs = zip(layout.leaves, arrays, strict=True)
    return [
        x if x is None or in_host(x) else constrain(x, mesh, leaf.spec(axes)) for leaf, x in pairs
    ]


def with_untrained(params: Any, trained: Any, new: Any, grads: Any) -> Any:
    """Return `new` with the leaves that the optimizer did not update filled in.

    Args:
        params: all parameters.
        trained: the tree that the optimizer got, with None for each leaf that it does not update.
        new: the updated tree, like `trained`.
        grads: the gradients. If gradients overwrite a leaf, its gradient is its new value; any
            other leaf that is not updated stays as in `params`.
    """
    _, old, treedef = flatten(params)
    given = zip(overwritten_leaves(params), treedef.flatten_up_to(grads), strict=True)
    others = [
        grad if is_overwritten and grad is not None else x
        for x, (is_overwritten, grad) in zip(old, given, strict=True)
    ]
    kept = treedef.flatten_up_to(trained)
    updated = treedef.flatten_up_to(new)
    leaves = [
        x if before is None else after
        for x, before, after in zip(others, kept, updated, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


class ProgramUpdates:
    """The updates that the program of a step can run layer by layer, in its loops.

    Args:
        update: the update of all leaves, traced with the program; None: nothing is updated.
        positions: for each leaf of `update`, the index of its gradient among the gradients that the
            program returns.

    Raises:
        NotImplementedError: as `layer_updates`.
    """

    def __init__(self, update: TracedUpdate | None, positions: Sequence[int] = ()):
        self._positions = positions
        self.leaves: dict[int, LayerUpdate] = {} if update is None else layer_updates(update)
        self._atoms = list(dict.fromkeys(x for leaf in self.leaves.values() for x in leaf.scalars))
        self._scalars = update.scalars(self._atoms) if update is not None else []

    @property
    def arguments(self) -> list[list[Array]]:
        """Global arrays that the program takes for its updates.

        They are a list of state arrays for each leaf, and last a list of the scalars that the
        updates read.
        """
        return [*(leaf.arrays[1:] for leaf in self.leaves.values()), self._scalars]

    @property
    def in_specs(self) -> list[PartitionSpec]:
        """The `PartitionSpec` of each list in `arguments`."""
        return [*self.out_specs, PartitionSpec()]

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """For each leaf, the `PartitionSpec` of its updated parameter and state arrays."""
        return [x.update.layouts.spec(x.leaf.spec) for x in self.leaves.values()]

    def on_device(
        self,
        stored: Sequence[Array],
        arguments: Sequence[Sequence[Array]],
        differentiated: Sequence[int],
    ) -> dict[int, LeafUpdate]:
        """Return the updates that a device runs, by index of the updated leaf in `stored`.

        Args:
            stored: this device's shards of the sharded arguments. The first one, the parameters, is
                updated.
            arguments: this device's shards of the property `arguments`.
            differentiated: indices in `stored` of the leaves that get gradients.
        """
        scalars = dict(zip(self._atoms, arguments[-1], strict=True))
        by_argument = {}
        for (number, leaf), state in zip(self.leaves.items(), arguments[:-1], strict=True):
            i = differentiated[self._positions[number]]
            by_argument[i] = LeafUpdate(
                [stored[i], *state],
                leaf.names,
                leaf.reads,
                lambda gradient, layers, leaf=leaf: leaf.new_layers(gradient, layers, scalars),
            )
        return by_argument
