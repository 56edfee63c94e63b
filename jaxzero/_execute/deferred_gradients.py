"""Gradients that a pipelined loop reduces in later iterations, and the stacks that they fill.

An iteration encodes the buckets of its own gradients; each later iteration reduces them over one
more mesh axis. Once fully reduced, the outputs made of them are written to their layer of the
stacks. These are carried by the loop, because a layer is written after its own iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import ReduceBucket, Sum, copy_to_host, recording
from .._mesh import empty_in_host
from .._plan import LoopPlan
from .gradient_buckets import GradientBuckets
from .host_stacks import LayerIndex

Outputs = Callable[[Mapping[int, ReduceBucket]], dict[int, Any]]  # `Runner.deferred_outputs`


class Deferred(NamedTuple):
    """What the loop carries."""

    buckets: dict[int, list[ReduceBucket]]  # for each deferred group, a bucket by axes done
    stacks: dict[int, Sum]  # of the deferred outputs, by index of the output


class DeferredGradients:
    """The deferred gradients of one loop.

    Args:
        plan: the plan of the loop.
        gradients: reduces the buckets of its body.
        length: the number of iterations.
        layer_index: the layer of an iteration.
        outputs: computes the deferred outputs of an iteration from its reduced buckets.
    """

    def __init__(
        self,
        plan: LoopPlan,
        gradients: GradientBuckets,
        length: int,
        layer_index: LayerIndex,
        outputs: Outputs,
    ):
        self._plan = plan
        self._gradients = gradients
        self._length = length
        self._layer_index = layer_index
        self._outputs = outputs

    def start(self, iteration: Callable[[Deferred], Deferred]) -> Deferred:
        """The buckets and stacks before the first iteration; the buckets hold zeros.

        Args:
            iteration: runs the first iteration; it is traced for the shapes of its buckets.
        """

        def shapes() -> tuple[dict[int, list[ReduceBucket]], dict[int, Any]]:
            in_flight, done = {}, {}
            for number, buckets in iteration(Deferred({}, {})).buckets.items():
                for axis in range(self._gradients.num_axes(number)):
                    buckets.append(self._gradients.reduce_next(number, axis, buckets[axis]))
                done[number] = buckets.pop()
                in_flight[number] = buckets
            return in_flight, self._finished_outputs(done)

        with recording(None):  # traced only for shapes: its collectives must not be counted
            in_flight, outputs = jax.eval_shape(shapes)
        buckets = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), in_flight)
        stacks = {
            number: jax.tree.map(functools.partial(self._empty_stack, number), x)
            for number, x in outputs.items()
        }
        return Deferred(buckets, stacks)

    def advance(
        self, state: Deferred, new: Mapping[int, ReduceBucket], iteration: Array
    ) -> Deferred:
        """Reduce every deferred bucket over one more axis, and add this iteration's `new` buckets.

        The buckets of the oldest iteration are then fully reduced. In the first iterations these
        are the zeros of `start`, stored for the first layer and overwritten by its gradients.
        """
        buckets, done, num_axes = {}, {}, 0
        for number, in_flight in state.buckets.items():
            reduce_next = self._gradients.reduce_next
            sent = [reduce_next(number, axis, bucket) for axis, bucket in enumerate(in_flight)]
            buckets[number], done[number] = [new[number], *sent[:-1]], sent[-1]
            num_axes = len(in_flight)
        if not done:  # no group is deferred, or `start` traces this
            return Deferred({number: [bucket] for number, bucket in new.items()}, state.stacks)
        return Deferred(buckets, self._store_layer(state.stacks, done, iteration - num_axes))

    def finish(self, state: Deferred) -> dict[int, Sum]:
        """Reduce the buckets that are in flight after the last iteration; return the stacks."""
        stacks = state.stacks
        num_axes = max((len(buckets) for buckets in state.buckets.values()), default=0)
        for axis in reversed(range(num_axes)):
            done = {
                number: self._gradients.reduce_rest(number, axis, buckets[axis])
                for number, buckets in state.buckets.items()
            }
            stacks = self._store_layer(stacks, done, jnp.asarray(self._length - 1 - axis))
        return stacks

    def finished(self, number: int, x: Any) -> Any:
        """Output `number` of an iteration; a gradient for host memory as its mean, and there."""
        leaf = self._plan.host_gradients.get(number)
        if leaf is None or x is None:
            return x
        mean = x / jnp.asarray(self._gradients.comm.num_devices, x.dtype)
        return copy_to_host(mean.astype(leaf.dtype), "gradients", f"{leaf.path}[i]", windowed=True)

    def _finished_outputs(self, done: dict[int, ReduceBucket]) -> dict[int, Any]:
        """The deferred outputs of one iteration, from its fully reduced buckets."""
        return {number: self.finished(number, x) for number, x in self._outputs(done).items()}

    def _empty_stack(self, number: int, layer: Any) -> Array:
        """A stack for the deferred output `number`, in the memory where it belongs."""
        shape = (self._length, *layer.shape)
        if number in self._plan.host_gradients:
            return empty_in_host(shape, layer.dtype, number)
        return jnp.zeros(shape, layer.dtype)

    def _store_layer(
        self, stacks: dict[int, Sum], done: dict[int, ReduceBucket], iteration: Array
    ) -> dict[int, Sum]:
        """Write one iteration's deferred outputs (reduced gradients, mostly) into their stacks.

        Args:
            stacks: by index among the loop's outputs.
            done: the fully reduced buckets of the iteration, by index of the group.
            iteration: the iteration that computed these gradients.
        """
        outputs, layer_index = self._finished_outputs(done), self._layer_index(iteration)
        return {
            number: jax.tree.map(
                lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, layer_index, 0),
                stack,
                outputs[number],
            )
            for number, stack in stacks.items()
        }
