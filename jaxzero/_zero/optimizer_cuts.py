"""Cut an optimizer's state like the parameters that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterable

import optax

from .._mesh import AnyMesh
from .._sharding import TreePlan, ZeroConfig
from .optimizer_state import plan_state, trained_part
from .tree_cuts import Rows, TreeCut, make_cut


def cut_of_state(
    tx: optax.GradientTransformation,
    params: TreeCut,
    num_layers: int,
    mesh: AnyMesh,
    config: ZeroConfig,
) -> TreeCut:
    """The cut of the state of `tx`, such that its active part is a state for active parameters.

    Args:
        tx: the optimizer.
        params: the cut of the parameters.
        num_layers: the number of rows of a stack.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.

    Raises:
        NotImplementedError: an array of the state belongs to a stack that is cut, and has no rows
            for its layers.
    """
    whole = _plan_state(tx, params.whole, mesh, config)
    active = _plan_state(tx, params.active, mesh, config)
    shapes = {leaf.path: leaf.shape for leaf in active.leaves}
    frozen_rows = {x.path: n for x, n in zip(params.whole.leaves, params.rows, strict=True)}
    rows: list[Rows] = []
    for leaf in whole.leaves:
        shape = shapes.pop(leaf.path, None)
        parameter = _parameter_of(leaf.path, frozen_rows)
        is_of_stack = parameter is not None and bool(frozen_rows[parameter])
        num_frozen = num_layers - shape[0] if shape and leaf.shape[:1] == (num_layers,) else 0
        if shape is None:
            rows.append(None)
        elif shape == leaf.shape and (not is_of_stack or math.prod(shape) <= 1):
            rows.append(0)
        elif num_frozen > 0 and shape[1:] == leaf.shape[1:]:
            rows.append(num_frozen)
        else:
            raise NotImplementedError(
                f"`tx` keeps `{leaf.path}` of shape {leaf.shape} for a stack of {num_layers} "
                f"layers that is frozen in part, and {shape} for its active layers: it cannot be "
                "cut by layers. Start the optimizer anew: `zero.init_optimizer(tx, active)`."
            )
    if shapes:
        raise NotImplementedError(
            f"`tx` keeps `{next(iter(shapes))}` for the active parameters, and nothing like it for "
            "the whole. Start the optimizer anew: `zero.init_optimizer(tx, active)`."
        )
    cut = make_cut(whole, rows, mesh, config)
    return TreeCut(whole, cut.rows, active, cut.frozen)


def _parameter_of(path: str, parameters: Iterable[str]) -> str | None:
    """The longest path of a parameter that ends `path`: `a.w` for `0.mu.a.w`, not `w`."""
    found = (name for name in parameters if f".{path}".endswith(f".{name}"))
    return max(found, key=len, default=None)


def _plan_state(
    tx: optax.GradientTransformation, params: TreePlan, mesh: AnyMesh, config: ZeroConfig
) -> TreePlan:
    _, trained = trained_part(params.stored([leaf.stored for leaf in params.leaves]), params)
    return plan_state(tx, trained, mesh, config)
