"""Exchange fragments between nodes: pseudo-gradients out, new outer parameters in.

Everything here runs in the program of one node (`map_nodes`), whose arrays are global over the
node's devices. Each device cuts, encodes and merges its own shards (`map_devices`).

Exchanged leaves are the parameters that nodes exchange; anchors are their outer values, equal on
all nodes. Residuals are the rounding errors of encoding that a node has not sent yet.

A leaf of the outer optimizer's state that has the path and shape of a parameter (momentum) is laid
out like this parameter, and cut into fragments in the same way. Any other leaf (a counter) has a
copy for each fragment, because the optimizer runs once for each fragment.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from .._collectives import accumulator_dtype, gather_nodes, labelled, reduce_nodes
from .._mesh import LOCAL, NODE, NodeMesh, map_devices
from .._sharding import LeafSpec, path_endings, path_name
from .fragments import Cut, Part, decode, encode, mean_of_nodes
from .settings import LocalSteps

AsTree = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class OuterLayout:
    """The layout of the outer optimizer's state, and the optimizer itself.

    Attributes:
        tx: the optimizer.
        as_tree: builds the tree that the optimizer sees, from one value for each exchanged leaf.
        treedef: the structure of the optimizer's state.
        owners: for each leaf of the state, the index of the exchanged leaf that has its path and
            shape; None: the leaf has a copy for each fragment.
        fragments: the number of fragments.
    """

    tx: optax.GradientTransformation
    as_tree: AsTree
    treedef: Any
    owners: tuple[int | None, ...]
    fragments: int

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        as_tree: AsTree,
        full: Sequence[jax.ShapeDtypeStruct],
        parts: Sequence[jax.ShapeDtypeStruct],
        fragments: int,
    ) -> OuterLayout:
        """Find, for each leaf of the state of `tx`, the exchanged leaf that it belongs to.

        Args:
            tx: the optimizer.
            as_tree: as in the class.
            full: for each exchanged leaf, its global shape on one node and its dtype.
            parts: for each exchanged leaf, the shape and dtype of its part in one fragment.
            fragments: the number of fragments.

        Raises:
            ValueError: initialized on a fragment, `tx` keeps an array whose shape is neither that
                of a leaf's part nor that of the same array of `tx` for full leaves.
        """
        paths = jax.tree_util.tree_flatten_with_path(as_tree(full))[0]
        leaves = {path_name(path): i for i, (path, _) in enumerate(paths)}
        state = jax.eval_shape(tx.init, as_tree(full))
        named, treedef = jax.tree_util.tree_flatten_with_path(state)
        of_part = jax.tree.leaves(jax.eval_shape(tx.init, as_tree(parts)))
        owners = []
        for (path, x), part in zip(named, of_part, strict=True):
            candidates = (leaves[name] for name in path_endings(path) if name in leaves)
            is_like = jnp.issubdtype(x.dtype, jnp.floating)  # a counter is not, whatever its name
            owner = next((i for i in candidates if is_like and full[i].shape == x.shape), None)
            expected = x.shape if owner is None else parts[owner].shape
            if part.shape != expected:
                raise ValueError(
                    f"`outer` keeps an array of shape {x.shape} as `{path_name(path)}`, and one of "
                    f"{part.shape} for a fragment, which is no part of it. Take `fragments=1`, or "
                    "an optimizer that keeps arrays of the parameters' shapes, such as `optax.sgd`."
                )
            owners.append(owner)
        return cls(tx, as_tree, treedef, tuple(owners), fragments)

    def init(self, anchors: Sequence[Array]) -> list[Array]:
        """Return the leaves of the first state; a leaf without an owner has a copy per fragment."""
        state = jax.tree.leaves(self.tx.init(self.as_tree(anchors)))
        return [
            jnp.broadcast_to(x, (self.fragments, *jnp.shape(x))) if owner is None else x
            for x, owner in zip(state, self.owners, strict=True)
        ]

    def update(
        self, gradients: Sequence[Array], state: Sequence[Array], anchors: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Run the optimizer on one fragment; return its new outer parameters and new state.

        All arguments are lists of the fragment's arrays; `gradients` are mean pseudo-gradients.
        """
        params = self.as_tree(anchors)
        old = jax.tree.unflatten(self.treedef, state)
        updates, new = self.tx.update(self.as_tree(gradients), old, params)
        return jax.tree.leaves(optax.apply_updates(params, updates)), jax.tree.leaves(new)


class Sent(NamedTuple):
    """A fragment that has been sent and not yet merged.

    Attributes:
        messages: on each device the messages of all nodes, `[nodes, bytes]`; or their sum,
            `[1, elements]`, if `Exchange.is_reduced`.
        parts: this node's own parameters when it sent the fragment; empty if not needed to merge.
    """

    messages: Shaped[Array, "rows _"]
    parts: list[Array]


class Outer(NamedTuple):
    """The outer parameters and optimizer state, equal on all nodes, and this node's residuals.

    Attributes:
        anchors: the outer parameters.
        state: the leaves of the outer optimizer's state.
        residuals: for each encoded leaf, the errors of encoding that have not been sent yet.
    """

    anchors: list[Array]
    state: list[Array]
    residuals: list[Array]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Sends fragments of the exchanged leaves to all nodes, and merges their means.

    Attributes:
        method: the user's settings.
        leaves: the exchanged leaves, with their layouts on the devices of one node.
        cuts: how each device's shard of a leaf is cut into fragments.
        mesh: the devices of one node.
        min_quantized_size: leaves with fewer elements are sent without a codec.
        outer: the outer optimizer.
        has_tangents: whether JAX can differentiate the exchange: messages are floats, not bytes.
    """

    method: LocalSteps
    leaves: tuple[LeafSpec, ...]
    cuts: tuple[Cut, ...]
    mesh: NodeMesh
    min_quantized_size: int
    outer: OuterLayout
    has_tangents: bool = False

    @functools.cached_property
    def parts(self) -> list[Part]:
        dtypes = [accumulator_dtype(leaf.dtype) for leaf in self.leaves]
        are_floats = self.has_tangents or self.is_reduced
        in_floats = max(dtypes, key=lambda dtype: dtype.itemsize) if are_floats else None
        return [
            Part(
                cut.part_shape,
                accumulator_dtype(leaf.dtype),
                self.codec_of(leaf),
                leaf.layout is not None,
                in_floats,
            )
            for leaf, cut in zip(self.leaves, self.cuts, strict=True)
        ]

    def codec_of(self, leaf: LeafSpec) -> Any:
        """Return the codec of a leaf's pseudo-gradients; None if they are sent as floats."""
        codec, num, dtype = self.method.codec, leaf.layer_size, accumulator_dtype(leaf.dtype)
        if codec is None or not codec.is_used_for(num, dtype, self.min_quantized_size):
            return None
        return codec

    @property
    def encoded(self) -> list[int]:
        """The indices of the leaves whose pseudo-gradients are encoded by a codec."""
        return [i for i, leaf in enumerate(self.leaves) if self.codec_of(leaf) is not None]

    @property
    def num_nodes(self) -> int:
        return self.mesh.mesh.shape[NODE]

    @functools.cached_property
    def is_reduced(self) -> bool:
        """Whether an all-reduce sums the nodes' messages; otherwise every node gathers all of them.

        With n nodes and messages of B bytes, an all-gather brings (n - 1) B bytes to each device,
        and an all-reduce 2 (n - 1) / n B. For two nodes this is the same. Codes cannot be summed.
        If some leaves are encoded, the full message is gathered: the other leaves are small, and a
        second collective would add its latency.
        """
        return self.num_nodes > 2 and not self.encoded

    @property
    def sent_bytes(self) -> int:
        """Bytes of a device's message for one fragment."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def message_bytes(self) -> int:
        """Bytes of messages that a device holds while a fragment travels: all nodes' or a sum."""
        # An all-reduce needs no second buffer: XLA writes the sum over the message.
        return self.sent_bytes * (1 if self.is_reduced else self.num_nodes)

    @property
    def kept_bytes(self) -> int:
        """Bytes of `Sent.parts` on one device; 0 if merging does not need them."""
        if not self._keeps_progress:
            return 0
        pairs = zip(self.leaves, self.parts, strict=True)
        return sum(part.num * leaf.dtype.itemsize for leaf, part in pairs)

    @property
    def node_bytes(self) -> int:
        """Bytes that enter one node from other nodes in a round."""
        others = self.sent_bytes * (self.num_nodes - 1)
        into_device = 2 * others // self.num_nodes if self.is_reduced else others
        return into_device * self.method.fragments * self.mesh.mesh.shape[LOCAL]

    def _specs(self, numbers: Sequence[int] | None = None) -> list[PartitionSpec]:
        chosen = range(len(self.leaves)) if numbers is None else numbers
        return [self.leaves[i].spec((LOCAL,)) for i in chosen]

    def _on_devices(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return map_devices(function, self.mesh, in_specs, out_specs)

    def send(self, params: list[Array], outer: Outer, number: Array) -> tuple[Sent, list[Array]]:
        """Send this node's pseudo-gradients of fragment `number`; return also the new residuals.

        `params` are the node's own values of the exchanged leaves.
        """

        def on_device(
            params: list[Array], anchors: list[Array], residuals: list[Array], number: Array
        ) -> Any:
            own = [cut.read(x, number) for cut, x in zip(self.cuts, params, strict=True)]
            deltas = self._deltas(own, anchors, residuals, number)
            message = encode(self.parts, deltas)
            residuals = self._left_out(deltas, message, residuals, number)
            with labelled("fragments", *(leaf.path for leaf in self.leaves)):
                messages = reduce_nodes(message) if self.is_reduced else gather_nodes(message)
            return messages, own if self._keeps_progress else [], residuals

        specs, encoded = self._specs(), self._specs(self.encoded)
        run = self._on_devices(
            on_device,
            (specs, specs, encoded, PartitionSpec()),
            (PartitionSpec(None, LOCAL), specs if self._keeps_progress else [], encoded),
        )
        messages, parts, residuals = run(params, outer.anchors, outer.residuals, number)
        return Sent(messages, parts), residuals

    def _deltas(
        self, own: list[Array], anchors: list[Array], residuals: list[Array], number: Array
    ) -> list[Float[Array, ...]]:
        """Return what this device sends: outer parameters minus its own, plus earlier residuals."""
        left_out = dict(zip(self.encoded, residuals, strict=True))
        deltas = []
        for i, (cut, x, anchor) in enumerate(zip(self.cuts, own, anchors, strict=True)):
            delta = _difference(cut.read(anchor, number), x.astype(anchor.dtype))
            if i in left_out:
                delta += cut.read(left_out[i], number).astype(delta.dtype)
            # Elements of an earlier fragment are not written back; zeros widen no codec's scale.
            new = cut.is_new(number)
            deltas.append(delta if new is None else jnp.where(new, delta, 0))
        return deltas

    def _left_out(
        self,
        deltas: list[Float[Array, ...]],
        message: Shaped[Array, "1 m"],
        residuals: list[Array],
        number: Array,
    ) -> list[Array]:
        """Return the residuals, updated with the encoding errors of this fragment's message."""
        sent = decode(self.parts, message)
        result = []
        for i, old in zip(self.encoded, residuals, strict=True):
            error = deltas[i] - sent[i][0]
            # After a step that overflowed, NaN would spoil every later message too.
            error = jnp.where(jnp.isfinite(error), error, 0).astype(old.dtype)
            result.append(self.cuts[i].write(old, error, number))
        return result

    def receive(
        self, sent: Sent, params: list[Array], outer: Outer, number: Array
    ) -> tuple[list[Array], Outer]:
        """Apply a fragment's mean to the outer parameters, and merge these with the node's own.

        Returns the node's new values of the exchanged leaves, and the new outer state.
        """
        specs = self._specs()
        state_specs = [PartitionSpec() if i is None else specs[i] for i in self.outer.owners]
        everywhere, kept_specs = PartitionSpec(), specs if self._keeps_progress else []

        def read(
            messages: Shaped[Array, "rows _"], anchors: list[Array], state: list[Array], number
        ) -> Any:
            means = mean_of_nodes(self.parts, messages, self.num_nodes)
            anchors = [cut.read(x, number) for cut, x in zip(self.cuts, anchors, strict=True)]
            return means, anchors, self._state_part(state, number)

        run = self._on_devices(
            read,
            (PartitionSpec(None, LOCAL), specs, state_specs, everywhere),
            (specs, specs, state_specs),
        )
        means, anchors, state = run(sent.messages, outer.anchors, outer.state, number)
        anchors, state = self.outer.update(means, state, anchors)

        def write(
            params: list[Array],
            old_anchors: list[Array],
            old_state: list[Array],
            own: list[Array],
            anchors: list[Array],
            state: list[Array],
            number: Array,
        ) -> Any:
            new_params, new_anchors = [], []
            for i, cut in enumerate(self.cuts):
                anchor = anchors[i].astype(old_anchors[i].dtype)
                now = cut.read(params[i], number)
                sent_part = own[i] if self._keeps_progress else now
                merged = self._merged(now, sent_part, anchor).astype(now.dtype)
                new_params.append(cut.write(params[i], merged, number))
                new_anchors.append(cut.write(old_anchors[i], anchor, number))
            new_state = self._with_state_part(old_state, state, number)
            return new_params, new_anchors, new_state

        run = self._on_devices(
            write,
            (specs, specs, state_specs, kept_specs, specs, state_specs, everywhere),
            (specs, specs, state_specs),
        )
        params, anchors, state = run(
            params, outer.anchors, outer.state, sent.parts, anchors, state, number
        )
        return params, Outer(anchors, state, outer.residuals)

    def _merged(self, now: Array, own: Array, anchor: Array) -> Array:
        """Merge a fragment of the new outer parameters, `anchor`, with the node's own parameters.

        These were `own` when they were sent, and are `now` after the steps of the delay.
        """
        dtype = anchor.dtype
        if self.method.mixing is None:
            return anchor + _difference(now.astype(dtype), own.astype(dtype))
        mixing = jnp.asarray(self.method.mixing, dtype)
        return mixing * now.astype(dtype) + (1 - mixing) * anchor

    @property
    def _keeps_progress(self) -> bool:
        """Whether `Sent.parts` is kept, so that merging keeps the progress of the delay's steps."""
        return self.method.mixing is None and self.method.delay > 0

    def _state_part(self, state: list[Array], number: Array) -> list[Array]:
        pairs = zip(self.outer.owners, state, strict=True)
        return [
            lax.dynamic_index_in_dim(x, number, keepdims=False)
            if i is None
            else self.cuts[i].read(x, number)
            for i, x in pairs
        ]

    def _with_state_part(
        self, state: list[Array], parts: list[Array], number: Array
    ) -> list[Array]:
        result = []
        for i, old, part in zip(self.outer.owners, state, parts, strict=True):
            part = part.astype(old.dtype)
            if i is None:
                result.append(lax.dynamic_update_index_in_dim(old, part, number, 0))
            else:
                result.append(self.cuts[i].write(old, part, number))
        return result


def _difference(x: Array, y: Array) -> Array:
    """Return `x - y`; 0 where both are the same infinity, as in a parameter that masks by -inf."""
    return jnp.where((x == y) & jnp.isinf(x), jnp.zeros_like(x), x - y)
