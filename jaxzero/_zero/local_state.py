"""`LocalState`, the arrays that local steps keep, and how they begin and are averaged."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from .._collectives import accumulator_dtype, all_gather
from .._mesh import NODE, SimulatedMesh, map_devices
from ..pallas_kernels import add_up
from .local_layouts import Kept, Layouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalState:
    """What local steps keep from round to round: save it like an optimizer state.

    Attributes:
        params: the parameters of every node, on a leading dim.
        opt_state: the optimizer state of every node, on a leading dim.
        outer_params: the outer parameters (float32), equal on all nodes; None where a leaf is not
            trained.
        outer_state: the state of the outer optimizer, equal on all nodes; leaves other than those
            like parameters have a leading dim that counts fragments.
        residuals: for each leaf that is encoded, by path, what every node has not sent yet
            (bfloat16).
    """

    params: Any
    opt_state: Any
    outer_params: Any
    outer_state: Any
    residuals: Any


FIELDS = tuple(field.name for field in dataclasses.fields(LocalState))

Arrays = dict[str, list[Array]]  # the arrays of a `LocalState`, by field


def first_arrays(layouts: Layouts, params: list[Array], opt_state: list[Array]) -> Arrays:
    """The arrays of one node before the first round, from those of its trees."""
    numbers = layouts.exchanged
    leaves = layouts.kept["outer_params"].leaves
    outer = [params[i].astype(leaf.dtype) for i, leaf in zip(numbers, leaves, strict=True)]
    residuals = [
        jnp.zeros(leaf.stored_shape, leaf.dtype) for leaf in layouts.kept["residuals"].leaves
    ]
    state = layouts.exchange.outer.init(outer)
    return dict(zip(FIELDS, (params, opt_state, outer, state, residuals), strict=True))


def for_nodes(arrays: Arrays, layouts: Layouts, nodes: int) -> Arrays:
    """The arrays of one node, with a copy for every node of those that each has of its own."""
    return {
        name: [jnp.broadcast_to(x, (nodes, *x.shape)) for x in xs]
        if layouts.kept[name].is_per_node
        else xs
        for name, xs in arrays.items()
    }


def mean_over_nodes(
    x: Shaped[Array, "nodes ..."], is_overwritten: bool = False
) -> Shaped[Array, ...]:
    """The mean over the leading dim, exact where all are equal; the first if they are no floats.

    Of state that gradients overwrite, it is the maximum.
    """
    if is_overwritten:
        return jnp.max(x, axis=0)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    wide = x.astype(accumulator_dtype(x.dtype))
    mean = add_up(wide) / jnp.asarray(len(x), wide.dtype)
    return jnp.where(jnp.all(wide == wide[:1], axis=0), wide[0], mean).astype(x.dtype)


def gathered_mean(arrays: list[Array], kept: Kept, mesh: Mesh | SimulatedMesh) -> list[Array]:
    """`mean_over_nodes` of arrays that are split over nodes, on every node."""
    nodes = mesh.shape[NODE]
    specs = [leaf.spec(kept.axes) for leaf in kept.global_leaves(nodes)]

    states = kept.overwritten

    def on_device(shards: list[Array]) -> list[Array]:
        pairs = zip(shards, states, strict=True)
        return [mean_over_nodes(all_gather(x, NODE, 0), is_state) for x, is_state in pairs]

    run = map_devices(on_device, mesh, (specs,), [leaf.spec(kept.axes) for leaf in kept.leaves])
    return run(arrays)
