"""Optimizer state in the layout of ZeRO, and optimizers that see leaves in their own shape.

Any optax chain runs outside the `shard_map`, on global arrays, so norms over the whole
model or over a leaf are right without knowing about devices. Only one thing of `Zero`
shows: on a mesh that divides no dim of a leaf, the leaf is padded with zeros. Adam,
LAMB and clipping do not notice. An optimizer that divides by the number of elements, or
decides by shape (Adafactor, Muon), would: `true_shapes` wraps it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from ._config import ZeroConfig
from ._partition import Layout, Leaf, TreePlan, path_name, plan_tree
from ._placement import auto_mesh, constrain, pad_tree, run_automatic, unpad_tree
from ._program import is_traced
from ._simulate import AnyMesh


class _TrueShapes(optax.GradientTransformationExtraArgs):
    """What `true_shapes` returns; knows the transform inside."""

    inner: optax.GradientTransformationExtraArgs


def warn_of_padding(tx: optax.GradientTransformation, plan: TreePlan) -> None:
    """Warn if `tx` gives other updates because some of its leaves are padded."""
    padded = [leaf.path for leaf in plan.leaves if leaf.layout and leaf.layout.is_padded]
    if padded and not isinstance(tx, _TrueShapes) and _notices_padding(tx, plan):
        warnings.warn(
            f"{len(padded)} leaves are padded with zeros on this mesh, `{padded[0]}` the first, "
            "and this optimizer would not give them the updates of their own shapes. Wrap it: "
            "`tx = zero.optimizer(tx)`.",
            stacklevel=3,
        )


def _notices_padding(tx: optax.GradientTransformation, plan: TreePlan) -> bool:
    """Try `tx` on tiny leaves of the same ranks, with and without a row of zeros."""
    random = np.random.default_rng(0)
    params, grads = [], []
    for leaf in plan.leaves:
        for values in (params, grads):
            values.append(random.normal(size=(2,) * len(leaf.shape)).astype(leaf.dtype))
    layouts = [
        leaf.layout if leaf.layout and leaf.layout.is_padded else None for leaf in plan.leaves
    ]

    def widen(x: np.ndarray, layout: Layout | None) -> np.ndarray:
        return x if layout is None else np.pad(x, [(0, d == layout.dim) for d in range(x.ndim)])

    def update(params: list[Any], grads: list[Any]) -> list[Any]:
        params, grads = (jax.tree.unflatten(plan.treedef, x) for x in (params, grads))
        return jax.tree.leaves(tx.update(grads, tx.init(params), params)[0])

    try:
        small = jax.jit(update)(params, grads)
    except TypeError:  # it needs more than gradients and parameters, and cannot be tried here
        return False
    wide = jax.jit(update)(
        [widen(x, layout) for x, layout in zip(params, layouts, strict=True)],
        [widen(x, layout) for x, layout in zip(grads, layouts, strict=True)],
    )
    return not all(
        np.allclose(np.float32(a), np.float32(b[tuple(slice(n) for n in a.shape)]), rtol=1e-3)
        for a, b in zip(small, wide, strict=True)
    )


def plan_state(
    tx: optax.GradientTransformation, params: TreePlan, mesh: AnyMesh, config: ZeroConfig
) -> TreePlan:
    """Lay out the state of `tx`.

    A leaf whose path ends like a parameter's, and that has its shape, is cut like the
    parameter; others (row and column statistics, counters) by their own shape.
    """
    wrapped = isinstance(tx, _TrueShapes)
    structs = [
        jax.ShapeDtypeStruct(leaf.shape if wrapped else leaf.stored_shape, leaf.dtype)
        for leaf in params.leaves
    ]
    init = tx.inner.init if wrapped else tx.init
    state = jax.eval_shape(init, jax.tree.unflatten(params.treedef, structs))
    by_path = {leaf.path: leaf for leaf in params.leaves}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    plan = plan_tree(state, mesh, config)
    leaves = [
        _like_parameter(leaf, path, by_path, wrapped)
        for path, leaf in zip(paths, plan.leaves, strict=True)
    ]
    return TreePlan(plan.treedef, tuple(leaves))


def _like_parameter(
    leaf: Leaf, path: tuple[Any, ...], parameters: dict[str, Leaf], wrapped: bool
) -> Leaf:
    for i in range(len(path) + 1):
        twin = parameters.get(path_name(path[i:]))
        if twin and leaf.shape == (twin.shape if wrapped else twin.stored_shape):
            return Leaf(leaf.path, twin.shape, leaf.dtype, twin.layout, twin.other_axes)
    if leaf.layout and leaf.layout.is_padded and not wrapped:
        return dataclasses.replace(leaf, layout=None)  # only `true_shapes` can pad it
    return leaf


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    plan: TreePlan,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> Any:
    """`tx.init(params)`, each leaf made on the devices that keep it.

    Args:
        tx: the optimizer.
        params: arrays, traced arrays, or `ShapeDtypeStruct`s (then so is the result).
        plan: of the state.
        mesh: where it goes.
        axes: that split it.
    """
    leaves = jax.tree.leaves(params)
    if any(is_traced(x) for x in leaves):
        pairs = zip(jax.tree.leaves(tx.init(params)), plan.leaves, strict=True)
        placed = [constrain(x, mesh, leaf.spec(axes)) for x, leaf in pairs]
        return jax.tree.unflatten(plan.treedef, placed)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(tx.init, params),
            plan.shardings(mesh, axes),
        )
    return run_automatic(tx.init, plan.shardings(auto_mesh(mesh), axes), mesh, params)


def true_shapes(
    tx: optax.GradientTransformation,
    find_plan: Callable[[Any], TreePlan],
    mesh: AnyMesh,
    config: ZeroConfig,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` so that padding is cut off before it and put back after it.

    A padded dim is stored in pieces of `ceil(size / devices)`, which is also how XLA cuts
    an uneven dim, so the wrapper moves no data.
    """
    inner = optax.with_extra_args_support(tx)

    def true(tree: Any, plan: TreePlan) -> Any:
        return jax.tree.unflatten(plan.treedef, unpad_tree(plan, jax.tree.leaves(tree)))

    def stored(tree: Any, plan: TreePlan) -> Any:
        return jax.tree.unflatten(plan.treedef, pad_tree(plan, jax.tree.leaves(tree)))

    def init(params):
        plan = find_plan(params)
        return stored(inner.init(true(params, plan)), plan_state(result, plan, mesh, config))

    def update(updates, state, params=None, **extra_args):
        plan = find_plan(updates)
        state_plan = plan_state(result, plan, mesh, config)

        def run(updates, state, params):
            new, state = inner.update(
                true(updates, plan),
                true(state, state_plan),
                None if params is None else true(params, plan),
                **extra_args,
            )
            return stored(new, plan), stored(state, state_plan)

        if isinstance(mesh, Mesh) and AxisType.Explicit in mesh.axis_types:
            axes = config.axes if config.stage >= 1 else ()
            out = (plan.shardings(mesh, axes), state_plan.shardings(mesh, axes))
            run = _with_automatic_axes(run, out, mesh)
        return run(updates, state, params)

    result = _TrueShapes(init, update)
    result.inner = inner
    return result


def _with_automatic_axes(function: Callable, out_shardings: Any, mesh: Mesh) -> Callable:
    """Run `function` with all axes automatic: explicit ones cannot cut a dim unevenly."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    return jax.jit(jax.sharding.auto_axes(function, axes=explicit, out_sharding=out_shardings))
