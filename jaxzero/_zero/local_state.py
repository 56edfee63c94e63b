"""`LocalState`: the arrays that local steps keep, their layouts, and their means over nodes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Shaped

from .._collectives import accumulator_dtype, all_gather, shard_shape
from .._local_steps import AsTree, Cut, Exchange, LocalSteps, OuterLayout
from .._mesh import LOCAL, NODE, AnyMesh, NodeMesh, SimulatedMesh, map_devices
from .._sharding import (
    LeafSpec,
    Static,
    StoredArray,
    TreeLayout,
    ZeroConfig,
    flatten,
    layout_of_leaf,
    of_arrays,
    overwritten_leaves,
    rebuild,
    statics_of,
    stored_leaf,
)
from ..pallas_kernels import add_up

RESIDUAL_DTYPE = jnp.dtype(jnp.bfloat16)  # as that of `ErrorFeedback`


@dataclasses.dataclass(frozen=True)
class Kept:
    """The arrays of one field of `LocalState`, which local steps keep from round to round.

    Attributes:
        leaves: the layout of each array on the devices of one node.
        is_per_node: whether every node has arrays of its own; then a leading dim counts nodes.
        axes: the mesh axes that split the arrays inside a node.
        build: builds the tree that users see from one stored leaf for each array.
    """

    leaves: tuple[LeafSpec, ...]
    is_per_node: bool
    axes: tuple[str, ...]
    build: Callable[[Sequence[Any]], Any]

    def global_leaves(self, nodes: int, *, split: bool = True) -> tuple[LeafSpec, ...]:
        """Return the layouts of the arrays of `nodes` nodes.

        Per-node arrays are stacked on a leading dim, which the axis `node` splits if `split`.
        """
        if not self.is_per_node:
            return self.leaves
        return tuple(stacked(leaf, nodes, split) for leaf in self.leaves)

    def tree(self, nodes: int, arrays: Sequence[Any]) -> Any:
        """Build the tree that users see from the global arrays of `nodes` nodes."""
        pairs = zip(self.global_leaves(nodes), arrays, strict=True)
        return self.build([stored_leaf(leaf, x) for leaf, x in pairs])

    @property
    def overwritten(self) -> list[bool]:
        """For each array, whether gradients overwrite it; see `overwritten_leaves`."""
        tree = self.build([leaf.stored for leaf in self.leaves])
        return of_arrays(tree, overwritten_leaves(tree))

    def device_bytes(self, mesh: AnyMesh) -> int:
        """Return the bytes that these arrays take on one device, which may be a simulated one."""
        num_shards = math.prod(mesh.shape[axis] for axis in self.axes)
        pairs = [(leaf.stored, num_shards if leaf.layout else 1) for leaf in self.leaves]
        return sum(x.size * x.dtype.itemsize // pieces for x, pieces in pairs)

    def spec(self) -> PartitionSpec:
        """Return the `PartitionSpec` of each array over the axis `node`."""
        return PartitionSpec(NODE) if self.is_per_node else PartitionSpec()


def stacked(leaf: LeafSpec, nodes: int, split: bool) -> LeafSpec:
    """Return the layout of an array that stacks one node's array over all nodes, on a new dim 0.

    Args:
        leaf: the layout of one node's array.
        nodes: the number of nodes.
        split: whether the mesh axis `node` splits the new dim.
    """
    return dataclasses.replace(
        leaf,
        shape=(nodes, *leaf.shape),
        layout=leaf.layout and leaf.layout.moved(leaf.layout.dim + 1),
        other_axes=PartitionSpec(NODE) if split else PartitionSpec(),
    )


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts of all arrays that local steps keep, and the exchange between nodes.

    Attributes:
        kept: for each field of `LocalState`, the layouts of its arrays.
        params: the layout of the parameters on one node, which a step sees.
        opt_state: the layout of the optimizer state on one node.
        exchanged: indices of the parameters that nodes exchange.
        exchange: how nodes exchange these parameters.
    """

    kept: dict[str, Kept]
    params: TreeLayout
    opt_state: TreeLayout
    exchanged: tuple[int, ...]
    exchange: Exchange

    @classmethod
    def of(
        cls,
        method: LocalSteps,
        params: TreeLayout,
        opt_state: TreeLayout,
        trained: Sequence[bool],
        mesh: NodeMesh,
        config: ZeroConfig,
    ) -> Layouts:
        """Make the layouts from those of the parameters and the optimizer state over all nodes.

        Args:
            method: how local steps are exchanged.
            params: the layout of the parameters over all nodes.
            opt_state: the layout of the optimizer state over all nodes.
            trained: for each parameter, whether it is trained.
            mesh: the devices of one node.
            config: gives axes, stage and the persistence threshold.
        """
        inner, state = (_on_one_node(layout, mesh, config) for layout in (params, opt_state))
        numbers = tuple(i for i, is_trained in enumerate(trained) if is_trained)
        leaves = tuple(_exchanged_leaf(inner.leaves[i], mesh, config) for i in numbers)

        # Optimizers see arrays only: no functions of an `eqx.Module`.
        nothing = tuple(None if x is None else Static(None) for x in inner.statics)
        of_arrays_only = dataclasses.replace(inner, statics=nothing)

        def tree_of(numbers: Sequence[int], arrays: Sequence[Any]) -> Any:
            values = dict(zip(numbers, arrays, strict=True))
            return of_arrays_only.whole([values.get(i) for i in range(len(inner.leaves))])

        as_tree = functools.partial(tree_of, numbers)
        exchange = _exchange(method, leaves, as_tree, mesh, config)
        weight_axes = (LOCAL,) if config.stage >= 3 else ()
        state_axes = (LOCAL,) if config.stage >= 1 else ()
        anchors = tuple(
            dataclasses.replace(leaf, dtype=accumulator_dtype(leaf.dtype)) for leaf in leaves
        )
        encoded = [leaves[i] for i in exchange.encoded]
        residuals = tuple(dataclasses.replace(leaf, dtype=RESIDUAL_DTYPE) for leaf in encoded)
        treedef = exchange.outer.treedef
        numbered = [numbers[i] for i in exchange.encoded]
        kept = {
            "params": Kept(inner.leaves, True, weight_axes, inner.whole),
            "opt_state": Kept(state.leaves, True, state_axes, state.whole),
            "outer_params": Kept(anchors, False, (LOCAL,), as_tree),
            "outer_state": Kept(
                _outer_leaves(exchange.outer, anchors),
                False,
                (LOCAL,),
                lambda x: jax.tree.unflatten(treedef, x),
            ),
            "residuals": Kept(residuals, True, (LOCAL,), functools.partial(tree_of, numbered)),
        }
        return cls(kept, inner, state, numbers, exchange)

    def each(self, function: Callable[..., Any], *values: Mapping[str, Any]) -> dict[str, Any]:
        """Call `function(kept[field], values[0][field], ...)` for each field; return a dict."""
        return {
            name: function(kept, *(value[name] for value in values))
            for name, kept in self.kept.items()
        }

    @property
    def outer_layout(self) -> TreeLayout:
        """The layout of the tree of outer parameters, which the outer optimizer updates."""
        leaves, kept = self.exchange.leaves, self.kept["outer_params"]
        _, found, treedef = flatten(kept.build([leaf.stored for leaf in leaves]))
        return TreeLayout(treedef, kept.leaves, statics_of(found))


def _on_one_node(layout: TreeLayout, mesh: NodeMesh, config: ZeroConfig) -> TreeLayout:
    """Convert the layout of a tree over all nodes to its layout on the devices of one node.

    Masked optimizers keep an empty `StoredArray` in place of a padded parameter. It gets the
    parameter's layout on one node, so that state and parameters still match in `jax.tree.map`.
    """
    leaves = tuple(_leaf_on_one_node(leaf, mesh, config) for leaf in layout.leaves)
    statics = []
    for static in layout.statics:
        if static is not None and isinstance(static.value, StoredArray):
            leaf = _leaf_on_one_node(static.value.form, mesh, config)
            static = Static(stored_leaf(leaf, static.value.data))
        statics.append(static)
    tree = rebuild(layout.treedef, statics, [leaf.stored for leaf in leaves])
    _, found, treedef = flatten(tree)
    return TreeLayout(treedef, leaves, statics_of(found))


def _leaf_on_one_node(leaf: LeafSpec, mesh: NodeMesh, config: ZeroConfig) -> LeafSpec:
    if leaf.codec is not None or leaf.other_axes:
        what = "is stored encoded" if leaf.codec else "is split over a third axis"
        raise NotImplementedError(
            f"`local_steps` cannot take the leaf `{leaf.path}`, which {what}. Train it in "
            "full precision over `node` and `local`, or without local steps."
        )
    layout = layout_of_leaf(leaf, mesh, config, leaf.other_axes)
    if layout is not None and layout.is_padded and leaf.layout is None:
        layout = None  # the optimizer keeps it in its own shape, so it stays replicated
    return dataclasses.replace(leaf, layout=layout)


def _exchanged_leaf(leaf: LeafSpec, mesh: NodeMesh, config: ZeroConfig) -> LeafSpec:
    """Return the layout in which nodes exchange a leaf: split over the devices of a node.

    So each device sends only its own shard, also of a leaf that is stored replicated. A leaf that
    would need padding to be split stays replicated, and every device sends all of it.
    """
    if leaf.layout is not None:
        return leaf
    split = dataclasses.replace(config, stage=3, param_persistence_threshold=0)
    layout = layout_of_leaf(leaf, mesh, split, leaf.other_axes)
    return leaf if layout is None or layout.is_padded else dataclasses.replace(leaf, layout=layout)


def _exchange(
    method: LocalSteps,
    leaves: tuple[LeafSpec, ...],
    as_tree: AsTree,
    mesh: NodeMesh,
    config: ZeroConfig,
) -> Exchange:
    cuts, full, parts = [], [], []
    for leaf in leaves:
        layout, padded = leaf.layout, leaf.padded_shape
        shard = padded if layout is None else shard_shape(padded, layout.dim, layout.num_shards)
        cut = Cut.of(shard, method.fragments)
        cuts.append(cut)
        dtype, shape = accumulator_dtype(leaf.dtype), list(cut.part_shape)
        full.append(jax.ShapeDtypeStruct(leaf.stored_shape, dtype))
        if leaf.layout is not None:
            shape[leaf.layout.dim] *= leaf.layout.num_shards
        parts.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
    outer = OuterLayout.of(method.outer, as_tree, full, parts, method.fragments)
    return Exchange(method, leaves, tuple(cuts), mesh, config.min_quantized_size, outer)


def _outer_leaves(outer: OuterLayout, anchors: Sequence[LeafSpec]) -> tuple[LeafSpec, ...]:
    """Return the layouts of the outer optimizer's state, from those of the outer parameters."""
    structs = jax.eval_shape(
        outer.init, [jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for leaf in anchors]
    )
    return tuple(
        LeafSpec("", x.shape, x.dtype, None)
        if owner is None
        else dataclasses.replace(anchors[owner], dtype=x.dtype)
        for x, owner in zip(structs, outer.owners, strict=True)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalState:
    """The arrays that local steps keep from round to round; save it like an optimizer state.

    Attributes:
        params: the parameters of all nodes, each array `[nodes, *shape]`.
        opt_state: the optimizer states of all nodes, each array `[nodes, *shape]`.
        outer_params: the outer parameters (float32), equal on all nodes; None where a leaf is not
            trained.
        outer_state: the state of the outer optimizer, equal on all nodes. A leaf that does not have
            a parameter's shape (a counter) has a leading dim that counts fragments.
        residuals: for each parameter that nodes exchange encoded, the rounding errors that each
            node has not sent yet, `[nodes, *shape]` (bfloat16); None for other parameters.
    """

    params: Any
    opt_state: Any
    outer_params: Any
    outer_state: Any
    residuals: Any


FIELDS = tuple(field.name for field in dataclasses.fields(LocalState))

Arrays = dict[str, list[Array]]  # the arrays of a `LocalState`, by field


def first_arrays(layouts: Layouts, params: list[Array], opt_state: list[Array]) -> Arrays:
    """Make one node's arrays before the first round, from its parameters and optimizer state."""
    numbers = layouts.exchanged
    leaves = layouts.kept["outer_params"].leaves
    outer = [params[i].astype(leaf.dtype) for i, leaf in zip(numbers, leaves, strict=True)]
    residuals = [
        jnp.zeros(leaf.stored_shape, leaf.dtype) for leaf in layouts.kept["residuals"].leaves
    ]
    state = layouts.exchange.outer.init(outer)
    return dict(zip(FIELDS, (params, opt_state, outer, state, residuals), strict=True))


def for_nodes(arrays: Arrays, layouts: Layouts, nodes: int) -> Arrays:
    """Copy the arrays that differ between nodes `nodes` times, along a new dim 0."""

    def copied(kept: Kept, xs: list[Array]) -> list[Array]:
        return [jnp.broadcast_to(x, (nodes, *x.shape)) for x in xs] if kept.is_per_node else xs

    return layouts.each(copied, arrays)


def mean_over_nodes(
    x: Shaped[Array, "nodes ..."], is_overwritten: bool = False
) -> Shaped[Array, ...]:
    """Return the mean over nodes, the leading dim of `x`.

    If `x` is not of floats, return the first node's value. If `x` is state that gradients
    overwrite, return the maximum. Where all nodes are equal, the mean is exactly their value,
    although a sum of equal numbers divided by their count may be rounded.
    """
    if is_overwritten:
        return jnp.max(x, axis=0)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    wide = x.astype(accumulator_dtype(x.dtype))
    mean = add_up(wide) / jnp.asarray(len(x), wide.dtype)
    return jnp.where(jnp.all(wide == wide[:1], axis=0), wide[0], mean).astype(x.dtype)


def gathered_mean(arrays: list[Array], kept: Kept, mesh: Mesh | SimulatedMesh) -> list[Array]:
    """All-gather per-node arrays over `node`; return `mean_over_nodes` of each, on every node."""
    nodes = mesh.shape[NODE]
    specs = [leaf.spec(kept.axes) for leaf in kept.global_leaves(nodes)]

    states = kept.overwritten

    def on_device(shards: list[Array]) -> list[Array]:
        pairs = zip(shards, states, strict=True)
        return [mean_over_nodes(all_gather(x, NODE, 0), is_state) for x, is_state in pairs]

    run = map_devices(on_device, mesh, (specs,), [leaf.spec(kept.axes) for leaf in kept.leaves])
    return run(arrays)
