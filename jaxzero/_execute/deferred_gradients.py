"""Gradients that a pipelined loop reduces in later iterations, and the stacks that they fill.

An iteration encodes the buckets of its own gradients; each later iteration reduces them over one
more mesh axis. Once fully reduced, the outputs made of them are written to their layer of the
stacks; to stacks in host memory one iteration later still, so that the copy overlaps with all of an
iteration, and so does the last reduction. The stacks are carried by the loop, because a layer is
written after its own iteration. The gradient of a leaf that the loop updates has no stack: the
update of its layer takes the place of the write (`update_in_loop`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import ReduceBucket, Sum, recording
from .._mesh import empty_in_host
from .._plan import LoopPlan
from .gradient_buckets import GradientBuckets
from .host_stacks import LayerIndex
from .mean_gradients import host_mean, mean_of_one_microbatch
from .update_in_loop import Layers, Updated, UpdatesInLoop
from .weight_buckets import Bind

Outputs = Callable[[Mapping[int, ReduceBucket]], dict[int, Any]]  # `Runner.deferred_outputs`


class Deferred(NamedTuple):
    """What the loop carries."""

    buckets: dict[int, list[ReduceBucket]]  # for each deferred group, a bucket by iterations since
    stacks: dict[int, Sum]  # of the deferred outputs, by index of the output
    updated: dict[int, Updated]  # leaves that the loop updates, by index of the output
    waiting: dict[int, Array]  # gradients of such leaves, used in the next iteration
    # Layers for the updates after the loop, fetched by the last iteration, the last one first.
    ahead: Sequence[dict[int, Layers]] = ()

    @property
    def num_in_flight(self) -> int:
        """The most iterations whose gradients of an output are in flight."""
        return max((len(buckets) for buckets in self.buckets.values()), default=0)


class DeferredGradients:
    """The deferred gradients of one loop.

    Args:
        plan: the plan of the loop.
        gradients: reduces the buckets of its body.
        length: the number of iterations.
        layer_index: the layer of an iteration.
        outputs: computes the deferred outputs of an iteration from its reduced buckets.
        updates: of the leaves that the loop updates, by index of the output.
    """

    def __init__(
        self,
        plan: LoopPlan,
        gradients: GradientBuckets,
        length: int,
        layer_index: LayerIndex,
        outputs: Outputs,
        updates: UpdatesInLoop,
    ):
        self._plan = plan
        self._gradients = gradients
        self._length = length
        self._layer_index = layer_index
        self._outputs = outputs
        self._updates = updates
        # Iterations from the last axis to the stack.
        self._delay = 1 if plan.host_gradients or plan.updates else 0

    def start(self, tie: Bind) -> Deferred:
        """What there is before the first iteration; `tie` is as in `UpdatesInLoop.start`."""
        updated = {number: self._updates.start(number, tie) for number in self._plan.updates}
        return Deferred({}, {}, updated, {})

    def fill(self, state: Deferred, first: Deferred) -> Deferred:
        """A state with zeros for all that earlier iterations would have left, and with all stacks.

        Args:
            state: before the first iteration, from `start`.
            first: shapes of the state after it.
        """
        zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        layers = {k: jax.tree.map(_layer_shape, x) for k, x in first.stacks.items()}
        state = state._replace(buckets=zeros(first.buckets), waiting=zeros(first.waiting))
        state = state._replace(stacks=self._with_stacks({}, layers))

        def later() -> tuple[dict[int, list[ReduceBucket]], dict[int, Any]]:
            buckets, done = {}, {}
            for number, in_flight in state.buckets.items():
                num_axes, x = self._gradients.num_axes(number), in_flight[-1]
                buckets[number] = list(in_flight)
                for axis in range(len(in_flight) - 1, num_axes):
                    buckets[number].append(self._gradients.reduce_next(number, axis, x))
                    x = buckets[number][-1]
                done[number] = buckets[number][num_axes]
                buckets[number] = buckets[number][: num_axes + self._delay]
            return buckets, self._finished_outputs(done)

        with recording(None):  # traced only for shapes: its collectives must not be counted
            buckets, layers = jax.eval_shape(later)
        missing = {k: zeros(x[len(state.buckets[k]) :]) for k, x in buckets.items()}
        return state._replace(
            buckets={k: [*x, *missing[k]] for k, x in state.buckets.items()},
            stacks=self._with_stacks(state.stacks, layers),
        )

    def take_final(self, outputs: list[Any]) -> dict[int, Array]:
        """Take, out of an iteration's outputs, the gradients for host memory that are not deferred.

        Those of leaves that the loop updates are taken too. The loop must not stack them itself:
        JAX 0.10 writes a stack in host memory in the wrong order where the loop is reversed. Sums
        of gradients that the loop stacks on the device become means.
        """
        final = {}
        for number in self._plan.means:
            outputs[number] = self._finished(number, outputs[number])
        for number in (*self._plan.host_gradients, *self._plan.updates):
            if outputs[number] is not None:
                final[number], outputs[number] = self._finished(number, outputs[number]), None
        return final

    def reduce_first(
        self, state: Deferred, bind: Bind, *, between_nodes: bool
    ) -> dict[int, ReduceBucket]:
        """Reduce the buckets of the last iteration over their first axis, for `advance`.

        Args:
            state: of the iteration before.
            bind: passes them through a barrier.
            between_nodes: as in `advance`.
        """
        newest = {
            number: in_flight[0]
            for number, in_flight in state.buckets.items()
            if in_flight and self._num_sent(number, between_nodes)
        }
        reduced = [self._gradients.reduce_next(number, 0, x) for number, x in newest.items()]
        if not newest and any(group.deferred for group in self._plan.body.reduce_groups):
            bind([jnp.zeros(())])  # see [Note: same bits] in `pipelined_loop`
        return dict(zip(newest, bind(reduced), strict=True))

    def _num_sent(self, number: int, between_nodes: bool) -> int:
        """The number of axes that buckets of a group are reduced over, from the first on."""
        return self._gradients.num_axes(number, past_nodes=between_nodes)

    def advance(
        self,
        state: Deferred,
        new: Mapping[int, ReduceBucket],
        final: dict[int, Array],
        iteration: Array,
        sent_early: Mapping[int, ReduceBucket],
        *,
        between_nodes: bool,
        late: Array,
    ) -> Deferred:
        """Reduce every deferred bucket over one more axis, and add those of this iteration.

        If the state has as many buckets as the loop carries, those of the oldest iteration are then
        fully reduced. They may be the zeros of `fill`, stored for the first layer and overwritten
        by its gradients.

        Args:
            state: of the iteration before.
            new: the buckets of this iteration.
            final: the gradients of this iteration that go to their stacks at once.
            iteration: its number.
            sent_early: what `reduce_first` has reduced in this iteration.
            between_nodes: whether buckets are reduced over `node`. If not, those that would be are
                zeros; they are dropped, and zeros stay in their places.
            late: `iteration`, known in the middle of its computation, when updates fetch their next
                layers.
        """
        stored: dict[int, Sum] = {k: x for k, x in final.items() if k not in self._plan.updates}
        waiting = {k: x for k, x in final.items() if k in self._plan.updates}
        buckets: dict[int, list[ReduceBucket]] = {}
        done: dict[int, ReduceBucket] = {}
        age = 0
        for number, bucket in new.items():
            reduce_next, num_axes = self._gradients.reduce_next, self._gradients.num_axes(number)
            in_flight = state.buckets.get(number, [])
            num_sent = self._num_sent(number, between_nodes)
            sent = [
                sent_early[number] if i == 0 and number in sent_early else reduce_next(number, i, x)
                for i, x in enumerate(in_flight[:num_sent])
            ]
            others = in_flight[num_axes:] if num_sent == num_axes else in_flight[num_sent + 1 :]
            buckets[number] = [bucket, *sent, *others]
            age = len(in_flight)
            if len(buckets[number]) > num_axes + self._delay:
                done[number] = buckets[number].pop()
        layers = self._finished_outputs(done)
        stacks = self._with_stacks(state.stacks, {**stored, **layers})
        stacks = _stored(stacks, stored, self._layer_index(iteration))
        stacks = _stored(stacks, layers, self._layer_index(iteration - age))
        updated = self._updates.advance(state.updated, state.waiting, iteration - 1, late)
        gradients = {k: x for k, x in layers.items() if k in updated}
        updated = self._updates.advance(updated, gradients, iteration - age, late - age + 1)
        return Deferred(buckets, stacks, updated, waiting)

    def with_room_ahead(self, state: Deferred) -> Deferred:
        """The state before the last iteration, with zeros for what `advance_last` will fetch."""
        updated = state.updated.items()
        layers = {number: x.layers for number, x in updated if number not in state.waiting}
        empty = jax.tree.map(jnp.zeros_like, layers)
        return state._replace(ahead=[empty] * max(0, state.num_in_flight - 2))

    def advance_last(
        self, state: Deferred, iteration: Array, fetched_at: Array, written_at: Array
    ) -> Deferred:
        """Do what is left and can be done in the last iteration, after `advance`.

        See [Note: the last updates] in `update_in_loop`.

        Args:
            state: of that iteration.
            iteration: its number.
            fetched_at: the same number, known when layers are fetched.
            written_at: the same number, known when a layer is written.
        """
        done = {number: buckets[-1] for number, buckets in state.buckets.items()}
        age = state.num_in_flight - 1
        if age < 1:
            return state
        layers = self._finished_outputs(done)
        stacks = _stored(state.stacks, layers, self._layer_index(iteration - age))
        gradients = {k: x for k, x in layers.items() if k in state.updated}
        ahead = [self._updates.fetch(state.updated, gradients, fetched_at - i) for i in range(age)]
        # A stack is written in its place only if all of these layers are fetched before.
        updated, ahead = lax.optimization_barrier((state.updated, ahead))
        updated = self._updates.advance(updated, gradients, written_at - age, None)
        updated = _with_layers(updated, ahead.pop())
        return state._replace(stacks=stacks, updated=updated, ahead=ahead)

    def finish(self, state: Deferred) -> dict[int, Any]:
        """Reduce the buckets that are in flight after the last iteration.

        Returns:
            The stack of each output; of a leaf that is updated a list, as in `LeafUpdate.stacks`.
        """
        stacks, last = state.stacks, jnp.asarray(self._length - 1)
        updated = self._updates.advance(state.updated, state.waiting, last, None)
        most, is_apart = state.num_in_flight, self._plan.updates_last_apart
        most -= 1 if is_apart and most > 1 else 0  # `advance_last` has done one
        for age in reversed(range(most)):  # the number of axes done, or one more
            done = {
                number: self._gradients.reduce_rest(number, age, buckets[age])
                for number, buckets in state.buckets.items()
            }
            layers = self._finished_outputs(done)
            stacks = _stored(stacks, layers, self._layer_index(last - age))
            gradients = {k: x for k, x in layers.items() if k in updated}
            following = last - age + 1 if age and not is_apart else None
            updated = self._updates.advance(updated, gradients, last - age, following)
            if age and is_apart:
                updated = _with_layers(updated, state.ahead[age - 1])
        return {**stacks, **{number: x.stacks for number, x in updated.items()}}

    def _finished(self, number: int, x: Any) -> Any:
        """Output `number` of an iteration; a final gradient as its mean, and where it belongs."""
        divisor = self._gradients.comm.divisor
        if x is not None and number in self._plan.updates:
            dtype = self._updates.leaves[number].stacks[0].dtype
            return mean_of_one_microbatch(x, dtype, divisor)
        if x is not None and number in self._plan.means:
            return mean_of_one_microbatch(x, self._plan.means[number].dtype, divisor)
        leaf = self._plan.host_gradients.get(number)
        if leaf is None or x is None:
            return x
        return host_mean(x, leaf.dtype, divisor, f"{leaf.path}[i]")

    def _finished_outputs(self, done: dict[int, ReduceBucket]) -> dict[int, Any]:
        """The deferred outputs of one iteration, from its fully reduced buckets."""
        outputs = self._outputs(done) if done else {}
        return {number: self._finished(number, x) for number, x in outputs.items()}

    def _with_stacks(self, stacks: dict[int, Sum], layers: Mapping[int, Any]) -> dict[int, Sum]:
        """The stacks, and an empty one for each output in `layers` that has none yet."""
        missing = layers.keys() - stacks.keys() - self._plan.updates.keys()
        empty = {
            number: jax.tree.map(functools.partial(self._empty_stack, number), layers[number])
            for number in sorted(missing)
        }
        return {**stacks, **empty}

    def _empty_stack(self, number: int, layer: Any) -> Array:
        """A stack for the deferred output `number`, in the memory where it belongs."""
        shape = (self._length, *layer.shape)
        if number in self._plan.host_gradients:
            return empty_in_host(shape, layer.dtype, number)
        return jnp.zeros(shape, layer.dtype)


def _with_layers(
    updated: Mapping[int, Updated], layers: Mapping[int, Layers]
) -> dict[int, Updated]:
    """The leaves with other layers on the device, where `layers` has any."""
    return {k: x._replace(layers=layers.get(k, x.layers)) for k, x in updated.items()}


def _layer_shape(stack: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)


def _stored(stacks: dict[int, Sum], layers: Mapping[int, Any], index: Array) -> dict[int, Sum]:
    """The stacks, with these arrays at `index`; those of other outputs are ignored."""
    return {
        number: jax.tree.map(
            lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, 0),
            stack,
            layers[number],
        )
        if number in layers
        else stack
        for number, stack in stacks.items()
    }
