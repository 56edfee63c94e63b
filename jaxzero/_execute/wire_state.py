"""State of the collectives that persists across steps: node slices and residuals.

Two options need it. Weight differences (`WeightDelta`) are added to node slices. Error feedback
(`ErrorFeedback`) adds residuals, the rounding errors of the last step, to the gradients. Both are
global sharded arrays: a device holds one node slice of each. The caller passes the state from step
to step and saves it, like optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._collectives import CommSpec
from .._mesh import LOCAL, NODE, AnyMesh, map_devices, to_device
from .._sharding import GradientHop, LeafSpec, TreeLayout
from .gather_sources import first_slice, has_kept_slice


class WireState(NamedTuple):
    """The wire state of a tree of parameters: two trees of the same structure.

    A leaf that has no node slice, or no residual, is None in that tree.

    Attributes:
        slices: the node slices of the weights, encoded by `HpZ.codec`.
        errors: the residuals of the gradients, `[nodes, *shape]`, padded like the parameters.
    """

    slices: Any
    errors: Any


@dataclasses.dataclass(frozen=True)
class DeviceWireState:
    """The wire state of all sharded arguments of a call, by index of the leaf among all leaves.

    Inside the `shard_map` the values are this device's shards: a node slice in `slices`, an array
    `[1, *shape]` in `errors`. Outside they are global arrays, or `PartitionSpec`s (`specs_of`).
    """

    slices: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    errors: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def without(self, leaves: Collection[int]) -> tuple[DeviceWireState, DeviceWireState]:
        """Split the state into the state of all other leaves, and the state of `leaves`."""
        kept, rest = (
            DeviceWireState(
                {i: x for i, x in self.slices.items() if (i in leaves) is is_in},
                {i: x for i, x in self.errors.items() if (i in leaves) is is_in},
            )
            for is_in in (False, True)
        )
        return kept, rest

    def joined(self, other: DeviceWireState) -> DeviceWireState:
        """Return this state together with `other`, the state of other leaves."""
        return DeviceWireState({**self.slices, **other.slices}, {**self.errors, **other.errors})


jax.tree_util.register_dataclass(DeviceWireState, ["slices", "errors"], [])


@dataclasses.dataclass(frozen=True)
class StateArray:
    """The shape, dtype and sharding of one global array of the wire state."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


def slice_array(leaf: LeafSpec, comm: CommSpec) -> StateArray | None:
    """Describe the array that keeps a leaf's node slices from step to step; None if none does."""
    if not has_kept_slice(leaf, comm):
        return None
    assert leaf.layout is not None and comm.hpz is not None
    lead, dim = leaf.num_lead, leaf.layout.dim
    codec = comm.suitable_for_weights(comm.hpz.codec, leaf.layer_size, leaf.dtype)
    if codec is None:
        return StateArray(leaf.padded_shape, leaf.dtype, PartitionSpec(*[None] * dim, LOCAL))
    messages = leaf.messages(codec, comm.sizes[LOCAL])
    return StateArray(messages.shape, messages.dtype, PartitionSpec(*[None] * lead, LOCAL))


def error_array(leaf: LeafSpec, comm: CommSpec) -> StateArray | None:
    """Describe the array that stores a leaf's residuals; None if it has no error feedback."""
    hop = comm.gradients.node
    if not isinstance(hop, GradientHop) or leaf.layout is None or leaf.codec is not None:
        return None
    codec = comm.suitable(hop.codec, leaf.layer_size, leaf.dtype)
    if NODE not in comm.axes_with_peers(comm.axes) or codec is None:
        return None
    spec = PartitionSpec(NODE, *[None] * leaf.layout.dim, LOCAL)
    return StateArray((comm.sizes[NODE], *leaf.padded_shape), hop.dtype, spec)


def first_state(
    layout: TreeLayout, axes: tuple[str, ...], mesh: AnyMesh, comm: CommSpec
) -> Callable[[list[Array]], WireState]:
    """Return a function from the parameters' stored arrays to the state before the first step.

    That state has gathered node slices, and residuals of zero.

    Args:
        layout: leaves and structure of the parameters.
        axes: the mesh axes that shard the parameters.
        mesh: the mesh that the parameters are on.
        comm: its codecs decide which leaves have node slices or residuals.
    """
    mapped = map_devices(
        lambda shards: _first_state(layout.leaves, shards, comm),
        mesh,
        in_specs=([leaf.spec(axes, manual_only=True) for leaf in layout.leaves],),
        out_specs=specs_of(layout.leaves, comm),
    )
    return lambda arrays: to_tree(layout, mapped(arrays))


def _first_state(
    leaves: Sequence[LeafSpec], shards: Sequence[Array], comm: CommSpec
) -> DeviceWireState:
    slices, errors = {}, {}
    for i, (leaf, shard) in enumerate(zip(leaves, shards, strict=True)):
        if slice_array(leaf, comm):
            slices[i] = first_slice(to_device(shard), leaf, comm).data
        if stored := error_array(leaf, comm):
            assert leaf.layout is not None
            shape = list(leaf.padded_shape)
            shape[leaf.layout.dim] //= comm.sizes[LOCAL]
            errors[i] = jnp.zeros((1, *shape), stored.dtype)
    return DeviceWireState(slices, errors)


def specs_of(leaves: Sequence[LeafSpec], comm: CommSpec) -> DeviceWireState:
    """Return the wire state of all leaves with a `PartitionSpec` in place of each array."""
    slices = {i: slice_array(leaf, comm) for i, leaf in enumerate(leaves)}
    errors = {i: error_array(leaf, comm) for i, leaf in enumerate(leaves)}
    return DeviceWireState(
        {i: stored.spec for i, stored in slices.items() if stored},
        {i: stored.spec for i, stored in errors.items() if stored},
    )


def to_tree(layout: TreeLayout, wire_state: DeviceWireState, start: int = 0) -> WireState:
    """Return the `WireState` of one argument, with its first leaf at index `start`."""
    numbers = range(start, start + len(layout.leaves))
    return WireState(
        layout.whole([wire_state.slices.get(i) for i in numbers]),
        layout.whole([wire_state.errors.get(i) for i in numbers]),
    )


def from_tree(
    layout: TreeLayout, state: Any, comm: CommSpec, name: str, start: int = 0
) -> DeviceWireState:
    """Return the `DeviceWireState` of one argument, whose first leaf gets the index `start`.

    This is the reverse of `to_tree`; `name` is the argument's name, for messages.

    Raises:
        ValueError: the state does not fit these parameters, this mesh or this config.
    """
    remedy = "Make it with `zero.init_wire_state(params)`."
    if not isinstance(state, WireState):
        raise ValueError(
            f"`wire_state` must be a `WireState` for {name}; got {type(state).__name__}. {remedy}"
        )
    by_kind: list[dict[int, Array]] = []
    for kind, tree, expect in (
        ("slices", state.slices, slice_array),
        ("errors", state.errors, error_array),
    ):
        try:
            leaves = layout.flatten_like(tree)
        except ValueError as error:
            raise ValueError(
                f"`wire_state.{kind}` is not a tree like {name}: {error}. {remedy}"
            ) from error
        by_number = {}
        for i, (leaf, value) in enumerate(zip(layout.leaves, leaves, strict=True)):
            array = expect(leaf, comm)
            given = None if value is None else (tuple(value.shape), jnp.dtype(value.dtype))
            expected = None if array is None else (array.shape, jnp.dtype(array.dtype))
            if given != expected:
                raise ValueError(
                    f"`wire_state.{kind}`, leaf `{leaf.path}`: expected {expected}, got {given}. "
                    f"The state is of other parameters, or for another mesh or config. {remedy}"
                )
            if value is not None:
                by_number[start + i] = value
        by_kind.append(by_number)
    return DeviceWireState(*by_kind)
