"""What the wire remembers from step to step, as global arrays.

Two choices need a memory: weight differences need the nodes' slices that they are added to,
and error feedback needs what rounding lost. Both are sharded: a device holds its node's
slice of each. Like optimizer state it is the caller's, to carry and to save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._collectives import CommSpec
from .._mesh import LOCAL, NODE, AnyMesh, map_devices
from .._sharding import GradientHop, LeafSpec, TreePlan, arrays_of
from .weight_differences import first_slice, has_kept_slice


class WireState(NamedTuple):
    """Trees like the parameters; `None` where a leaf needs no memory.

    Attributes:
        slices: the nodes' slices of the weights, as `HpZ.codec` writes them.
        errors: what rounding lost of the gradients, `[nodes, *shape]`.
    """

    slices: Any
    errors: Any


@dataclasses.dataclass(frozen=True)
class LocalWireState:
    """The same for the leaves of all sharded arguments of a call, by number; or their specs."""

    slices: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    errors: Mapping[int, Any] = dataclasses.field(default_factory=dict)


jax.tree_util.register_dataclass(LocalWireState, ["slices", "errors"], [])


@dataclasses.dataclass(frozen=True)
class Stored:
    """A global array of the state."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


def slice_of(leaf: LeafSpec, comm: CommSpec) -> Stored | None:
    """How a leaf's slices are stored; None: it is not sent as differences."""
    if not has_kept_slice(leaf, comm):
        return None
    assert leaf.layout is not None and comm.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    codec = comm.suitable(comm.hpz.codec, leaf.layer_size, leaf.dtype)
    if codec is None:
        return Stored(leaf.padded_shape, leaf.dtype, PartitionSpec(*[None] * dim, LOCAL))
    messages = leaf.messages(codec, comm.sizes[LOCAL])
    return Stored(messages.shape, messages.dtype, PartitionSpec(*[None] * lead, LOCAL))


def error_of(leaf: LeafSpec, comm: CommSpec) -> Stored | None:
    """How the errors of a leaf's gradient are stored; None: there is no feedback."""
    hop = comm.gradients.node
    if not isinstance(hop, GradientHop) or leaf.layout is None or leaf.codec is not None:
        return None
    codec = comm.suitable(hop.codec, leaf.layer_size, leaf.dtype)
    if NODE not in comm.long(comm.axes) or codec is None:
        return None
    spec = PartitionSpec(NODE, *[None] * leaf.layout.dim, LOCAL)
    return Stored((comm.sizes[NODE], *leaf.padded_shape), hop.dtype, spec)


def make_state(
    plan: TreePlan, params: Any, axes: tuple[str, ...], mesh: AnyMesh, comm: CommSpec
) -> WireState:
    """The state before the first step.

    Args:
        plan: of the parameters.
        params: as they are stored.
        axes: that split them.
        mesh: where they are.
        comm: which leaves need what.
    """
    mapped = map_devices(
        lambda shards: _first_memory(plan.leaves, shards, comm),
        mesh,
        in_specs=([leaf.spec(axes, manual_only=True) for leaf in plan.leaves],),
        out_specs=specs_of(plan.leaves, comm),
    )
    return to_tree(plan, jax.jit(mapped)(arrays_of(params)))


def _first_memory(
    leaves: Sequence[LeafSpec], shards: Sequence[Array], comm: CommSpec
) -> LocalWireState:
    slices, errors = {}, {}
    for i, (leaf, shard) in enumerate(zip(leaves, shards, strict=True)):
        if slice_of(leaf, comm):
            slices[i] = first_slice(shard, leaf, comm).data
        if stored := error_of(leaf, comm):
            assert leaf.layout is not None
            shape = list(leaf.padded_shape)
            shape[leaf.layout.dim] //= comm.sizes[LOCAL]
            errors[i] = jnp.zeros((1, *shape), stored.dtype)
    return LocalWireState(slices, errors)


def specs_of(leaves: Sequence[LeafSpec], comm: CommSpec) -> LocalWireState:
    """The specs of the state of all leaves, as a tree like it."""
    slices = {i: slice_of(leaf, comm) for i, leaf in enumerate(leaves)}
    errors = {i: error_of(leaf, comm) for i, leaf in enumerate(leaves)}
    return LocalWireState(
        {i: stored.spec for i, stored in slices.items() if stored},
        {i: stored.spec for i, stored in errors.items() if stored},
    )


def to_tree(plan: TreePlan, memory: LocalWireState, start: int = 0) -> WireState:
    """The state of one argument, whose first leaf is number `start`."""
    numbers = range(start, start + len(plan.leaves))
    return WireState(
        plan.whole([memory.slices.get(i) for i in numbers]),
        plan.whole([memory.errors.get(i) for i in numbers]),
    )


def from_tree(
    plan: TreePlan, state: Any, comm: CommSpec, name: str, start: int = 0
) -> LocalWireState:
    """Undo `to_tree`.

    Raises:
        ValueError: the state is not one of these parameters on this mesh.
    """
    remedy = "Make it with `zero.init_wire_state(params)`."
    if not isinstance(state, WireState):
        raise ValueError(
            f"`wire_state` must be a `WireState` for {name}; got {type(state).__name__}. {remedy}"
        )
    found: list[dict[int, Array]] = []
    for kind, tree, expect in (
        ("slices", state.slices, slice_of),
        ("errors", state.errors, error_of),
    ):
        try:
            leaves = plan.flatten_like(tree)
        except ValueError as error:
            raise ValueError(
                f"`wire_state.{kind}` is not a tree like {name}: {error}. {remedy}"
            ) from error
        by_number = {}
        for i, (leaf, x) in enumerate(zip(plan.leaves, leaves, strict=True)):
            want = expect(leaf, comm)
            given = None if x is None else (tuple(x.shape), jnp.dtype(x.dtype))
            wanted = None if want is None else (want.shape, jnp.dtype(want.dtype))
            if given != wanted:
                raise ValueError(
                    f"`wire_state.{kind}`, leaf `{leaf.path}`: wanted {wanted}, got {given}. It "
                    f"is of other parameters, another mesh or config. {remedy}"
                )
            if x is not None:
                by_number[start + i] = x
        found.append(by_number)
    return LocalWireState(*found)
