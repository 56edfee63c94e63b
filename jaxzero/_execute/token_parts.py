"""Gather weights and reduce gradients in parts, on meshes with the axis `tokens`.

A matrix is split over `node` and `local` on one dim and over `tokens` on another dim. Each device
gathers the shards of its own part over `node` and `local`, with messages, codecs and buckets of
parts; last, the parts are gathered over `tokens`. Gradients are first summed over `tokens` into
parts. A leaf without a second dim to split is equal on all devices along `tokens`, and each of them
sends it.

In flight, the arrays of a bucket are those of parts, with a leading dim that counts parts. On a
mesh without the axis, each function here calls the one of `_collectives` that it extends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from .._collectives import (
    CommSpec,
    EncodedShards,
    GatherBucket,
    ReduceBucket,
    ReduceSpec,
    arrays,
    gather_hop,
    labelled,
    note,
    picked,
    reduce_next_axis,
    repeated,
    start_gather,
    start_reduction,
)
from .._mesh import (
    TOKENS,
    num_token_parts,
    on_token_parts,
    split_weight_gradient,
    weight_dim_of_tokens,
    whole_weight,
)
from .._program import Block, token_exchanges
from .._sharding import DimSharding, unpad

_IN_FLIGHT = 0  # the dim of parts in a bucket, where no weight has its own dims


def start_gather_of_parts(
    shards: Sequence[EncodedShards], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """Start the gather of weights in parts: call `start_gather` with this device's parts."""
    if num_token_parts() == 1:
        return start_gather(shards, sizes, comm)
    described: list[GatherBucket] = []

    def run(data: list[Array]) -> list[Array]:
        pairs = zip(shards, data, strict=True)
        parts = [_with_data(shard, x) for shard, x in pairs]
        described[:] = start_gather(parts, sizes, comm)
        return [x.data[None] for x in described]

    data = [x.data for x in shards]
    dims = [part_dim(x, x.data.shape, x.dim) for x in shards]
    return _filled(described, on_token_parts(run, (dims,), _IN_FLIGHT)(data))


def gather_hop_of_parts(
    buckets: Sequence[GatherBucket], sizes: Sequence[int], comm: CommSpec
) -> list[GatherBucket]:
    """Gather buckets of parts over their next axis: call `gather_hop`."""
    if num_token_parts() == 1:
        return gather_hop(buckets, sizes, comm)
    described: list[GatherBucket] = []

    def run(data: list[Array]) -> list[Array]:
        described[:] = gather_hop(_filled(buckets, [x[0] for x in data]), sizes, comm)
        return [x.data[None] for x in described]

    data = [x.data for x in buckets]
    return _filled(described, on_token_parts(run, (_IN_FLIGHT,), _IN_FLIGHT)(data))


def decoded_parts(
    buckets: Sequence[GatherBucket],
    dtypes: Sequence[Any],
    layouts: Sequence[DimSharding],
    dims: Sequence[int | None],
) -> list[Array]:
    """Decode gathered buckets of parts, and gather the full weights over `tokens`.

    Args:
        buckets: gathered over `node` and `local`.
        dtypes: the dtype to decode each weight to; None: its own.
        layouts: the layout of each weight; the results have no padding.
        dims: for each weight, the dim that is split over `tokens` (`part_dim`).
    """
    if num_token_parts() == 1:
        pairs = zip(arrays(buckets, dtypes), layouts, strict=True)
        return [unpad(x, layout) for x, layout in pairs]

    def run(data: list[Array]) -> list[Array]:
        made = arrays(_filled(buckets, [x[0] for x in data]), dtypes)
        return [unpad(x, layout) for x, layout in zip(made, layouts, strict=True)]

    data = [x.data for x in buckets]
    fulls = [whole_weight(x) for x in on_token_parts(run, (_IN_FLIGHT,), [*dims])(data)]
    _note(
        "all-gather", [x if dim is not None else None for x, dim in zip(fulls, dims, strict=True)]
    )
    return fulls


def start_reduction_of_parts(
    fulls: Sequence[Array], specs: Sequence[ReduceSpec], comm: CommSpec
) -> ReduceBucket:
    """Start the reduction of gradients in parts: sum over `tokens`, then `start_reduction`."""
    if num_token_parts() == 1:
        return start_reduction(fulls, specs, comm)
    pairs = zip(fulls, specs, strict=True)
    fulls = [split_weight_gradient(x, spec.layout.dim) for x, spec in pairs]
    _note("all-reduce", fulls)
    local_specs = _of_parts(specs)

    def run(fulls: list[Array]) -> ReduceBucket:
        return jax.tree.map(lambda x: x[None], start_reduction(fulls, local_specs, comm))

    dims = [weight_dim_of_tokens(x.shape, x.layout.dim, num_token_parts()) for x in specs]
    return on_token_parts(run, (dims,), _IN_FLIGHT)(fulls)


def reduce_next_axis_of_parts(
    bucket: ReduceBucket,
    specs: Sequence[ReduceSpec],
    number: int,
    comm: CommSpec,
    divisor: int | float = 1,
) -> ReduceBucket:
    """Reduce a bucket of parts over one more axis: call `reduce_next_axis`."""
    if num_token_parts() == 1:
        return reduce_next_axis(bucket, specs, number, comm, divisor)
    local_specs = _of_parts(specs)

    def run(bucket: ReduceBucket) -> ReduceBucket:
        bucket = jax.tree.map(lambda x: x[0], bucket)
        made = reduce_next_axis(bucket, local_specs, number, comm, divisor)
        return jax.tree.map(lambda x: x[None], made)

    return on_token_parts(run, (_IN_FLIGHT,), _IN_FLIGHT)(bucket)


def joined_gradient(x: Any, spec: ReduceSpec) -> Any:
    """Join the parts of a reduced gradient, and return this device's shard of the sum."""
    if num_token_parts() == 1:
        return x
    dim = weight_dim_of_tokens(spec.shape, spec.layout.dim, num_token_parts())
    return on_token_parts(lambda x: jax.tree.map(lambda x: x[0], x), (_IN_FLIGHT,), dim)(x)


def note_exchanges(block: Block) -> None:
    """Record the collectives over `tokens` that the compiler adds to the user's program.

    Each of `token_exchanges` is recorded once, with the number of times it runs in a step.
    """
    if num_token_parts() == 1:
        return
    for collective, x, trips in token_exchanges(block):
        if collective in ("all-to-all", "permute"):  # a device sends its own part
            x = jax.ShapeDtypeStruct((x.size // num_token_parts(),), x.dtype)
        run, done = repeated(lambda x=x, name=collective: note(name, TOKENS, x), trips)
        with labelled("activations"):
            run()
        done()


def _note(collective: str, fulls: Sequence[Array | None]) -> None:
    """Record that the compiler adds `collective` over `tokens` for each array, except for None."""
    for i, x in enumerate(fulls):
        if x is not None:
            with picked([i]):
                note(collective, TOKENS, x)


def _of_parts(specs: Sequence[ReduceSpec]) -> list[ReduceSpec]:
    """Return how one part of each gradient is reduced, from how the gradient is reduced."""
    num, part_specs = num_token_parts(), []
    for spec in specs:
        shape, dim = list(spec.shape), weight_dim_of_tokens(spec.shape, spec.layout.dim, num)
        if dim is not None:
            shape[dim] //= num
        part_specs.append(dataclasses.replace(spec, shape=tuple(shape)))
    return part_specs


def part_dim(shards: EncodedShards, shape: Sequence[int], dim: int) -> int | None:
    """Return the dim along which a weight is split over `tokens`; None if it is not split.

    Args:
        shards: the shards, or the node slice, that the weight is gathered from. If they are encoded
            already, each message holds all parts, so they are not split.
        shape: the shape of the full weight as it is gathered, or of a shard.
        dim: the dim that `node` and `local` split.
    """
    if shards.codec is not None:
        return None
    return weight_dim_of_tokens(tuple(shape), dim, num_token_parts())


def _with_data(shards: EncodedShards, data: Array) -> EncodedShards:
    """Return `shards` with `data`, a part of its data, in place of its data."""
    shape = shards.shape if shards.codec is not None else tuple(data.shape)
    return dataclasses.replace(shards, data=data, shape=shape)


def _filled(buckets: Sequence[GatherBucket], data: Sequence[Array]) -> list[GatherBucket]:
    return [dataclasses.replace(x, data=d) for x, d in zip(buckets, data, strict=True)]
