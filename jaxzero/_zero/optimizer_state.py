"""Shard optimizer state like the parameters, and give optimizers unpadded leaves where needed.

An optax chain runs outside the `shard_map`, on global arrays, so norms over a leaf or the full
model are right without knowing about devices. Only padding is visible to the chain: if the mesh
divides no dim of a leaf, the leaf is padded with zeros (`StoredArray`), and `jax.tree.map` sees the
padded array. Adam, LAMB and clipping compute the same updates on padded leaves. An optimizer that
divides by the number of elements, or decides by shape (Adafactor, Muon), does not: `true_shapes`
wraps it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AxisType

from .._mesh import (
    HOST,
    AnyMesh,
    in_host,
    is_traced,
    to_device,
    to_host,
    with_automatic_axes,
)
from .._sharding import (
    LeafSpec,
    StoredArray,
    TreeLayout,
    ZeroConfig,
    array_leaves,
    data_of,
    flatten,
    in_memory,
    is_array,
    is_stored,
    lay_out,
    layout_as_stored,
    named_leaves,
    of_arrays,
    other_variables,
    overwritten_leaves,
    path_endings,
    statics_of,
    trained_leaves,
)
from .._warnings import warn
from .host_memory import check_room
from .matrix_layouts import by_layer_of, may_be_split_matrix, may_be_split_stack
from .matrix_updates import MatrixUpdate
from .placement import constrain, make_leaves, pad_leaf, stored_struct, unpad_leaf
from .programs import Initializer, Programs


class TrueShapes(optax.GradientTransformationExtraArgs):
    """An optimizer that `true_shapes` has wrapped; `inner` is the optimizer without the wrapper."""

    inner: optax.GradientTransformationExtraArgs


def check_is_optimizer(tx: Any) -> None:
    """Raise `TypeError` unless `tx` is an optimizer, with methods `init` and `update`."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            "`tx` must be an optimizer of optax, such as `optax.adamw(1e-3)`; got a "
            f"{type(tx).__name__}."
        )


def check_optimized(tx: Any, params: Any) -> None:
    """Check that `tx` is an optimizer, and warn if it would update more than parameters."""
    check_is_optimizer(tx)
    if others := other_variables(params):
        path, kind = next(iter(others.items()))
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warn(
            f"`params` holds variables that are no `nnx.Param`: `{path}`, a `{kind}`{more}. The "
            "optimizer will update them with gradients, decay them, and count them in norms. Give "
            "the parameters alone, `graph, params, rest = nnx.split(model, nnx.Param, ...)`, and "
            "`rest` to the loss as an argument of its own."
        )


def trained_part(tree: Any, layout: TreeLayout) -> tuple[Any, TreeLayout]:
    """Replace leaves that an optimizer must not update by None; return the tree and its layout.

    These are leaves that their module does not train, and leaves whose gradient is the next value.
    """
    kept = trained_tree(tree)
    pairs = zip(layout.leaves, of_arrays(tree, _trained(tree)), strict=True)
    layouts = [leaf for leaf, is_kept in pairs if is_kept]
    _, leaves, treedef = flatten(kept)
    return kept, TreeLayout(treedef, tuple(layouts), statics_of(leaves))


def trained_tree(tree: Any) -> Any:
    """Replace the leaves that an optimizer must not update by None; see `trained_part`."""
    _, leaves, treedef = flatten(tree)
    # An empty `StoredArray` stays, as it does in gradients.
    pairs = zip(leaves, _trained(tree), strict=True)
    dropped = [not is_kept and (is_array(x) or not is_stored(x)) for x, is_kept in pairs]
    return jax.tree.unflatten(
        treedef, [None if drop else x for x, drop in zip(leaves, dropped, strict=True)]
    )


def _trained(tree: Any) -> list[bool]:
    """Return for each leaf whether an optimizer updates it."""
    pairs = zip(trained_leaves(tree), overwritten_leaves(tree), strict=True)
    return [kind is not False and not is_overwritten for kind, is_overwritten in pairs]


def state_layout(
    tx: optax.GradientTransformation, params: TreeLayout, mesh: AnyMesh, config: ZeroConfig
) -> TreeLayout:
    """Lay out the state of `tx`.

    A leaf of the state is sharded like a parameter if it has the parameter's shape and its path
    ends with the parameter's path. Other leaves (row and column statistics, counters) are sharded
    by their own shape. If `tx` is wrapped by `true_shapes`, state that the matrix products of a
    stack read and replace is split by layer.

    Args:
        tx: the optimizer.
        params: layouts of the parameters, without leaves that a module does not train.
        mesh: gives the number of shards.
        config: gives axes, stage and the persistence threshold.

    Raises:
        ValueError: `tx` keeps an array of another shape for a padded leaf, so it must be wrapped.
    """
    is_wrapped = isinstance(tx, TrueShapes)
    parameters = {leaf.path: leaf for leaf in params.leaves}
    if is_wrapped:
        unpadded = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in params.leaves]
        state = Initializer(tx.inner.init).shapes(params.whole(unpadded))
        layout = lay_out(state, mesh, config)
    else:
        stored = params.stored([leaf.stored for leaf in params.leaves])
        state = Initializer(tx.init).shapes(stored)
        _check_shapes(state)
        layout = layout_as_stored(state, mesh, config)
    paths, leaves, _ = flatten(state)
    arrays = [(path, x) for path, x in zip(paths, leaves, strict=True) if is_array(x)]
    laid_out = []
    for (path, x), leaf in zip(arrays, layout.leaves, strict=True):
        parameter = _parameter_of(leaf, path, parameters)
        # An optimizer that is not wrapped has `StoredArray`s with their layout for padded leaves.
        if (
            parameter is not None
            and not isinstance(x, StoredArray)
            and (is_wrapped or parameter.is_plain)
        ):
            leaf = dataclasses.replace(
                leaf,
                layout=parameter.layout,
                other_axes=parameter.other_axes,
                stages=parameter.stages,
            )
        laid_out.append(_in_memory(leaf, parameter, mesh, config))
    if is_wrapped and any(map(may_be_split_stack, params.leaves)):
        laid_out = _by_layer(tx.inner, params, unpadded, state, laid_out)
    return dataclasses.replace(layout, leaves=tuple(laid_out))


def _by_layer(
    tx: optax.GradientTransformationExtraArgs,
    params: TreeLayout,
    unpadded: list[jax.ShapeDtypeStruct],
    state: Any,
    leaves: list[LeafSpec],
) -> list[LeafSpec]:
    """Return `leaves`, with the arrays that matrix products read and replace split by layer."""
    whole = params.whole(unpadded)
    try:
        owners = MatrixUpdate(tx, (whole, state, whole, {}), params).state_by_layer
    except Exception:  # it needs extra arguments, so what it does is not known
        return leaves
    laid_out = []
    for leaf, owner in zip(leaves, owners, strict=True):
        of_owner = None if owner is None else params.leaves[owner].layout
        if of_owner is not None and leaf.memory_kind is None:
            by_layer = by_layer_of(leaf, of_owner.num_shards)
            # With few layers, padding would take so much memory that moving the state costs less.
            if by_layer.padded_shape[0] <= 2 * leaf.shape[0]:
                leaf = by_layer
        laid_out.append(leaf)
    return laid_out


def _check_shapes(state: Any) -> None:
    for path, leaf in named_leaves(state):
        if not isinstance(leaf, StoredArray) or leaf.is_empty:
            continue
        kept = f"a {type(leaf.data).__name__} of arrays"  # SM3 keeps a list, an array for each dim
        if is_array(leaf):
            if tuple(leaf.data.shape) == leaf.form.padded_shape:
                continue
            kept = f"an array of shape {tuple(leaf.data.shape)}"
        if leaf.form.codec is not None:
            raise ValueError(
                f"The optimizer keeps {kept} as `{path}`, for a parameter that is "
                f"stored as messages of {leaf.form.codec}, which cannot be trained. Give "
                "`zero.init_optimizer` the trained tree without it."
            )
        raise ValueError(
            f"The optimizer keeps {kept} as `{path}`, for a parameter of shape "
            f"{leaf.shape} that is stored padded. "
            "It has to see parameters in their own shapes: `tx = zero.optimizer(tx)`."
        )


def _parameter_of(
    leaf: LeafSpec, path: tuple[Any, ...], parameters: dict[str, LeafSpec]
) -> LeafSpec | None:
    """Return the parameter that a leaf of the state belongs to, or None.

    The parameter has the leaf's shape, and the parameter's path ends `path`, the leaf's path.
    """
    candidates = (parameters.get(name) for name in path_endings(path))
    return next((x for x in candidates if x is not None and leaf.shape == x.shape), None)


def _in_memory(
    leaf: LeafSpec, parameter: LeafSpec | None, mesh: AnyMesh, config: ZeroConfig
) -> LeafSpec:
    """Return the layout of a leaf of the state, in the memory that `config.offload` gives it.

    `parameter` is the parameter that the leaf belongs to, or None.
    """
    offload = config.offload
    num_shards = config.num_shards(mesh)
    is_in_host = (
        offload is not None
        and parameter is not None
        and (leaf.layout is not None or num_shards == 1)
        and offload.takes("optimizer", parameter.path, math.prod(leaf.shape))
    )
    return in_memory(leaf, HOST if is_in_host else None, num_shards)


def init_state(
    tx: optax.GradientTransformation,
    params: Any,
    layout: TreeLayout,
    programs: Programs,
    axes: tuple[str, ...],
) -> Any:
    """Return `tx.init(params)`. Each device makes only its own shards.

    Args:
        tx: the optimizer.
        params: arrays, traced arrays, or `ShapeDtypeStruct`s (then so is the result).
        layout: layouts of the state.
        programs: the cache of compiled programs, of the mesh that the state is laid out on.
        axes: the mesh axes that shard the state.
    """
    mesh = programs.mesh
    run = Initializer(tx.init)

    def state(params: Any) -> list[Any]:
        return [data_of(x) for x in run(jax.tree.map(to_device, params))]

    given = jax.tree.leaves(params)
    if any(is_traced(x) for x in given):
        pairs = zip(state(params), layout.leaves, strict=True)
        arrays = [
            x if leaf.memory_kind is None else to_host(x)
            for x, leaf in ((constrain(x, mesh, leaf.spec(axes)), leaf) for x, leaf in pairs)
        ]
    elif any(isinstance(x, jax.ShapeDtypeStruct) for x in given):
        arrays = [stored_struct(leaf, mesh, axes) for leaf in layout.leaves]
    else:
        check_room("optimizer state", layout.leaves, mesh, axes)
        arrays = make_leaves(state, layout.leaves, programs, axes, params)
    return layout.stored(arrays)


def true_shapes(
    tx: optax.GradientTransformation,
    layout_of: Callable[[Any], TreeLayout],
    state_layout_of: Callable[[optax.GradientTransformation, TreeLayout], TreeLayout],
    programs: Programs,
    axes: tuple[str, ...],
) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` so that its inputs are unpadded, and its outputs padded again.

    A padded dim is stored in shards of `ceil(size / devices)`. XLA splits an uneven dim in the same
    way, so padding and unpadding move no data. Matrices are multiplied by layer (`MatrixUpdate`).
    Among the extra arguments of `update`, arrays are unpadded too, and functions (`value_fn`) are
    called with unpadded parameters.

    Args:
        tx: the optimizer.
        layout_of: returns the layout of a tree of parameters or gradients.
        state_layout_of: returns the layout of an optimizer's state, given that of the parameters.
        programs: the cache of compiled programs, of the mesh that trees are laid out on.
        axes: the mesh axes that split optimizer state.
    """
    check_is_optimizer(tx)
    inner, mesh = optax.with_extra_args_support(tx), programs.mesh

    def init(params):
        layout = state_layout_of(result, layout_of(params))
        pairs = zip(layout.leaves, Initializer(inner.init)(_unpadded(params)), strict=True)
        return layout.stored([pad_leaf(leaf, x) for leaf, x in pairs])

    def update(updates, state, params=None, **extra_args):
        _check_in_device_memory(gradients=updates, state=state, parameters=params)
        _, extras, structure = flatten(extra_args)
        arrays = [x for x in extras if is_array(x)]  # the others, such as functions, stay outside
        try:
            layout = layout_of(updates)
        except ValueError:  # a part of a chain may be given trees of other leaves
            if AxisType.Explicit in mesh.axis_types:
                raise
            layout = TreeLayout(None, (), ())
        # Functions among extra arguments may run programs of their own, which are not traced here.
        matrices = len(arrays) == len(extras) and any(map(may_be_split_matrix, layout.leaves))

        def run(updates, state, params, arrays):
            remaining = iter(arrays)
            filled = [next(remaining) if is_array(x) else x for x in extras]
            trees = (
                _unpadded(updates),
                _unpadded(state),
                None if params is None else _unpadded(params),
                _unpadded(jax.tree.unflatten(structure, filled)),
            )
            traced = MatrixUpdate(inner, trees, layout) if matrices else None
            if traced is not None and traced.moves:
                leaves = state_layout_of(result, layout).leaves
                new, new_state = traced.run(array_leaves(trees), leaves, mesh, axes)
            else:
                new, new_state = inner.update(*trees[:3], **trees[3])
            return _padded_like(updates, new), _padded_like(state, new_state)

        if AxisType.Explicit in mesh.axis_types:
            layouts = (layout, state_layout_of(result, layout))
            out = tuple(x.stored(x.shardings(mesh, axes)) for x in layouts)
            automatic = with_automatic_axes(run, out, mesh)
            return programs.run(automatic, updates, state, params, arrays)
        if matrices:
            return programs.run(run, updates, state, params, arrays)
        return run(updates, state, params, arrays)

    result = TrueShapes(init, update)
    result.inner = inner
    return result


def _check_in_device_memory(**trees: Any) -> None:
    for role, tree in trees.items():
        for path, x in named_leaves(tree):
            if in_host(data_of(x)):
                raise ValueError(
                    f"`tx.update` cannot compute with arrays in host memory, and the leaf "
                    f"`{path}` of the {role} is there. Use `params, opt_state = "
                    "zero.apply_gradients(tx, grads, opt_state, params)` in place of `tx.update` "
                    "and `optax.apply_updates`."
                )


def _unpadded(tree: Any) -> Any:
    """Replace every `StoredArray` in a tree by an array of its true shape."""
    return jax.tree.map(_unpadded_leaf, tree, is_leaf=is_stored)


def _unpadded_leaf(x: Any) -> Any:
    is_padded = isinstance(x, StoredArray) and is_array(x)
    return unpad_leaf(x.leaf(), x.data) if is_padded else data_of(x)


def _padded_like(stored: Any, tree: Any) -> Any:
    """Pad each leaf of `tree` like the leaf at the same place in `stored`."""
    return jax.tree.map(_padded_leaf, stored, tree, is_leaf=is_stored)


def _padded_leaf(old: Any, x: Any) -> Any:
    if not isinstance(old, StoredArray):
        return x
    return StoredArray(pad_leaf(old.leaf(), x) if is_array(old) else x, old.form)
