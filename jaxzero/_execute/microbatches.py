"""Run the micro-batches of one device, add up their gradients, and combine other outputs.

The program of one micro-batch runs `k` times in a `lax.scan` whose carry holds the sums of loss,
weight and gradients, in float32 if they are narrower. With hpZ the first micro-batch runs before
that loop, by a program of its own, which makes the node slices that the other micro-batches gather
from. Sharded gradients are reduced in every micro-batch and added up as shards (or as node slices,
if only `local` was reduced); unsharded gradients are added up in full. `mean_gradients` turns the
sums into means.

Where nodes run different numbers of micro-batches (`CommSpec.node_microbatches`), the loop is a
`while` with a number of iterations of its own on each node, and without collectives over `node`.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import (
    CommSpec,
    accumulator_dtype,
    all_gather,
    all_max,
    repeated,
    sum_over_devices,
)
from .._mesh import AXES, NODE, in_host
from .._program import Block, exchanges, traced_once
from .._sharding import split_dim


@dataclasses.dataclass(frozen=True)
class Accumulators:
    """Sums over this device's micro-batches: of losses, of weights, and of each gradient."""

    loss: Any  # scalar array
    weight: Any  # scalar array; None if all examples weigh the same
    gradients: list[Any]  # shards or node slices, full if not sharded; None if not a float


jax.tree_util.register_dataclass(Accumulators, ["loss", "weight", "gradients"], [])

# Takes the index of a micro-batch and its inputs; returns sums and other outputs.
Run = Callable[[Array | None, list[Any]], tuple[Accumulators, list[Any]]]


def check_microbatches(num: Any) -> None:
    """Raise `ValueError` unless `num` is an integer of at least 1."""
    if not isinstance(num, numbers.Integral) or isinstance(num, bool) or int(num) < 1:
        raise ValueError(f"`microbatches` must be an integer of at least 1; got {num!r}.")


def check_exchanges(block: Block) -> None:
    """Raise `NotImplementedError` for a collective that may wait for devices of another node.

    It would deadlock, because nodes run different numbers of micro-batches. A `ppermute` over any
    axis is refused too: XLA runs it on all devices.
    """
    for operation in block.operations:
        for name, axes in exchanges(operation):
            if NODE in axes or name == "ppermute":
                raise NotImplementedError(
                    f"`{name}` over {axes} at {operation.where} may wait for devices of other "
                    "nodes, which run different numbers of micro-batches with `shares`. Use "
                    "`psum`, `all_gather`, `all_to_all` and the like over `local`, or leave out "
                    "`shares`."
                )


def split_microbatches(x: Array, spec: Any, num: int) -> Array:
    """Cut one device's rows into `num` micro-batches, on a new leading dim.

    The rows are the dim of `x` that `spec` splits.
    """
    dim = split_dim(spec)
    assert dim is not None
    shape = (*x.shape[:dim], num, x.shape[dim] // num, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def accumulate(
    run: Run,
    inputs: Sequence[Any],
    specs: Sequence[Any],
    num: int,
    comm: CommSpec,
    first: Run | None = None,
    means: Container[int] = (),
) -> tuple[Accumulators, list[Any]]:
    """Run a program on every micro-batch, and add up its sums.

    Args:
        run: takes the micro-batch's index and its inputs; returns sums and other outputs.
        inputs: this device's rows, and replicated values.
        specs: the `PartitionSpec` of each input; an input that its spec splits is cut into
            micro-batches.
        num: the number of micro-batches. If it is 1, the index is None and there is no loop.
        comm: its `node_microbatches` give the number for the devices of each node; None: `num`.
        first: runs the first micro-batch in place of `run`, before the loop over the others.
        means: indices of gradients that the program of a single micro-batch leaves as means. They
            are returned as they are.

    Returns:
        The sums; and the other outputs, stacked over micro-batches on a new leading dim, with zeros
        for micro-batches that this device does not run.
    """
    if num == 1:
        sums, others = (first or run)(None, list(inputs))
        return _widened(sums, means), [jnp.expand_dims(x, 0) for x in others]
    is_split = [split_dim(spec) is not None for spec in specs]
    rows = [
        split_microbatches(x, spec, num) if split else None
        for x, spec, split in zip(inputs, specs, is_split, strict=True)
    ]

    def step(run: Run, index, rows):
        merged = [row if split else x for row, x, split in zip(rows, inputs, is_split, strict=True)]
        sums, others = run(index, merged)
        return _widened(sums), others

    def body(carry, scanned):
        sums, others = step_of_one(*scanned)
        return jax.tree.map(jnp.add, carry, sums), others

    scanned = jnp.arange(num), rows
    before = jax.tree.map(lambda x: x[0], scanned)
    step_of_one, note = repeated(
        functools.partial(step, run), num - (first is not None), microbatches=True
    )
    if first is None:
        # The shapes of the sums are needed before the scan, which would trace the program again.
        step_of_one, shapes = traced_once(step_of_one, *before)
        start, before_others = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0]), []
    else:
        start, before_others = step(first, *before)
        scanned = jax.tree.map(lambda x: x[1:], scanned)
    if comm.node_microbatches is None:
        sums, others = lax.scan(body, start, scanned)
    else:
        here = num_here(comm.node_microbatches) - int(first is not None)
        sums, others = _scan_first(body, start, scanned, here)
    note()
    for i, x in enumerate(before_others):
        others[i] = jnp.concatenate([jnp.expand_dims(x, 0), others[i]])
    return sums, others


def num_here(node_microbatches: Sequence[int]) -> Array:
    """Return how many micro-batches this device runs, from the number for each node."""
    return jnp.asarray(node_microbatches, jnp.int32)[lax.axis_index(NODE)]


def _scan_first(body: Callable, start: Any, scanned: Any, num: Array) -> tuple[Any, Any]:
    """Run `lax.scan` over the first `num` slices of `scanned`; outputs of other slices are zeros.

    It is a `fori_loop`, because a `scan` has a length that is known when it is traced, and `num`
    differs between nodes. It cannot deadlock: nothing in the body waits for devices of other nodes.

    Returns:
        The last carry, and the stacked outputs, as `lax.scan` returns them.
    """

    def at(index: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), scanned)

    def step(index: Array, state: Any) -> Any:
        carry, stacks = state
        carry, outputs = body(carry, at(index))
        write = lax.dynamic_update_index_in_dim
        return carry, jax.tree.map(lambda stack, x: write(stack, x, index, 0), stacks, outputs)

    length = len(jax.tree.leaves(scanned)[0])
    shapes = jax.eval_shape(lambda: body(start, at(0))[1])
    stacks = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes)
    return lax.fori_loop(0, num, step, (start, stacks))


def _widened(sums: Accumulators, means: Container[int] = ()) -> Accumulators:
    """Cast sums to the dtype in which they are added up.

    Gradients in `means`, and gradients in host memory, are means already and stay as they are.
    """

    def widened(x: Array) -> Array:
        return x if in_host(x) else x.astype(accumulator_dtype(x.dtype))

    wide = jax.tree.map(widened, sums)
    pairs = enumerate(zip(sums.gradients, wide.gradients, strict=True))
    gradients = [x if i in means else y for i, (x, y) in pairs]
    return dataclasses.replace(wide, gradients=gradients)


GRADIENT_REDUCTIONS = ("mean", "sum", "max", "first")
REDUCTIONS = (*GRADIENT_REDUCTIONS, "stack", "concat")


def combine(x: Array, how: str, comm: CommSpec) -> Array:
    """Combine one output over micro-batches (its leading dim) and devices.

    Args:
        x: `[microbatches, ...]`.
        how: one of `REDUCTIONS`. "stack" and "concat" send nothing: the output specification of
            the `shard_map` joins the devices' arrays.
    """
    if how == "mean":
        if comm.node_microbatches is None:
            mean, num = jnp.mean(x, axis=0), comm.num_devices
        else:
            mean, num = jnp.sum(x, axis=0), comm.num_runs(len(x))
        total = sum_over_devices(mean, comm)
        return total / jnp.asarray(num, total.dtype)
    if how == "sum":
        return sum_over_devices(jnp.sum(x, axis=0), comm)
    if how == "max":
        if comm.node_microbatches is not None:  # zeros of those not run must not count
            ran = jnp.arange(len(x)) < num_here(comm.node_microbatches)
            x = jnp.where(ran.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1])
        return all_max(jnp.max(x, axis=0), AXES)
    if how == "first":
        return _from_first_device(x[0])
    if how == "concat":
        return x.reshape((x.shape[0] * x.shape[1], *x.shape[2:]))
    return x


def _from_first_device(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _from_first_device(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    for axis in AXES:
        x = all_gather(jnp.expand_dims(x, 0), axis, 0)[0]
    return x
