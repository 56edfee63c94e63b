"""Update parameters and optimizer state, of which some leaves may be in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from .._mesh import in_host, is_traced
from .._sharding import TreePlan, arrays_of, flatten
from .._windowed_update import UpdateLayouts, windowed_update
from .optimizer_state import TrueShapes, trained_part
from .placement import constrain


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts of an update's trees, and the mesh axes that split them.

    Attributes:
        gradients: the layout of the gradients.
        state: the layout of the optimizer state.
        params: the layout of the parameters, with leaves that are not trained.
        mesh: the mesh.
        state_axes: the axes that split the state.
        weight_axes: the axes that split the parameters: the same, or none.
    """

    gradients: TreePlan
    state: TreePlan
    params: TreePlan
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
) -> tuple[Any, Any]:
    """The new parameters and the new state; see `Zero.apply_gradients`."""
    arrays = [x for tree in (grads, state, params) for x in arrays_of(tree)]
    if not all(is_traced(x) for x in arrays):

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return apply_gradients(tx, grads, state, params, layouts, extra_args)

        return jax.jit(update)(grads, state, params)
    trained, plan = trained_part(params, layouts.params)
    if any(in_host(x) for x in arrays):
        new, new_state = _by_windows(tx, grads, state, trained, layouts, plan, extra_args)
    else:
        run = optax.with_extra_args_support(tx).update
        updates, new_state = run(grads, state, trained, **extra_args)
        new = optax.apply_updates(trained, updates)
    return _with_untrained(params, trained, new), new_state


def _by_windows(
    tx: optax.GradientTransformation,
    grads: Any,
    state: Any,
    trained: Any,
    layouts: Layouts,
    plan: TreePlan,
    extra_args: Mapping[str, Any],
) -> tuple[Any, Any]:
    mesh, axes = layouts.mesh, layouts.state_axes

    def split(plan: TreePlan, tree: Any, axes: tuple[str, ...]) -> Any:
        """The tree, with arrays in device memory split over `axes`."""
        pairs = zip(plan.leaves, arrays_of(tree), strict=True)
        return plan.stored(
            [x if in_host(x) else constrain(x, mesh, leaf.spec(axes)) for leaf, x in pairs]
        )

    inner = tx.inner if isinstance(tx, TrueShapes) else tx
    new, new_state = windowed_update(
        inner,
        split(layouts.gradients, grads, axes),
        state,
        split(plan, trained, axes),
        layouts=UpdateLayouts(layouts.gradients, layouts.state, plan, mesh, axes),
        extra_args=extra_args,
    )
    return split(plan, new, layouts.weight_axes), new_state


def _with_untrained(params: Any, trained: Any, new: Any) -> Any:
    """The tree `new`, with the leaves of `params` where `trained` has None."""
    _, old, treedef = flatten(params)
    kept = treedef.flatten_up_to(trained)
    updated = treedef.flatten_up_to(new)
    leaves = [
        x if before is None else after
        for x, before, after in zip(old, kept, updated, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)
