"""Encoding, decoding and adding all gradients of a bucket as one array gives the same bits."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._collectives import HalfBatchSum, ReduceSpec, reduce_next_axis, start_reduction
from jaxzero._collectives.comm_spec import CommSpec, reduce_axes
from jaxzero._sharding.layout import DimSharding

_CAST = jz.Cast(jnp.bfloat16)
_GRADIENTS = {
    "cast": jz.PerAxis(node=_CAST, local=_CAST),
    "cast_then_int8": jz.PerAxis(node=jz.Int8(block=32), local=_CAST),
    "cast_then_float32": jz.PerAxis(local=_CAST),
}
# (shape, split dim): along either dim, with padding and without.
_LEAVES = (((16, 3), 0), ((3, 16), 1), ((13,), 0), ((5, 9), 1))
_ROWS = P(("node", "local"))


def _comm(name, halves=False):
    config = jz.zero3(gradients=_GRADIENTS[name])
    return CommSpec.of(jz.make_mesh(2, devices=jax.devices()[:8]), config, halves=halves)


def _specs(comm, leaves=_LEAVES):
    return [
        ReduceSpec(str(i), shape, jnp.dtype("float32"), DimSharding(dim, shape[dim], 8))
        for i, (shape, dim) in enumerate(leaves)
    ]


def _program(comm, buckets):
    """A function that reduces buckets of gradients over devices; a bucket is a list of specs."""

    def on_device(gradients):
        sums = []
        for specs, fulls in zip(buckets, gradients, strict=True):
            bucket = start_reduction([x[0] for x in fulls], specs, comm)
            for number in range(len(reduce_axes(specs, comm))):
                bucket = reduce_next_axis(bucket, specs, number, comm)
            sums.append([bucket.rest[i] for i in range(len(specs))])
        return sums

    def split(spec):
        one = P(*[None] * spec.layout.dim, jz.zero3().axes)
        return HalfBatchSum(one, one) if comm.halves else one

    splits = [[split(spec) for spec in specs] for specs in buckets]
    mesh = jz.make_mesh(2, devices=jax.devices()[:8])
    return jax.shard_map(on_device, mesh=mesh, in_specs=(_ROWS,), out_specs=splits, check_vma=False)


def _gradients(specs, draw):
    generator = np.random.default_rng(0)
    return [draw(generator, (8, *spec.shape)).astype(np.float32) for spec in specs]


@pytest.mark.parametrize("halves", [False, True])
def test_each_sum_is_that_of_its_own_gradient(halves):
    """Of small integers, which no step of the reduction rounds."""
    comm = _comm("cast", halves)
    specs = _specs(comm)
    gradients = _gradients(specs, lambda rng, shape: rng.integers(-8, 9, shape))
    (sums,) = jax.jit(_program(comm, [specs]))([gradients])
    for x, spec, each in zip(sums, specs, gradients, strict=True):
        pairs = [(x.total, each), (x.first, each[:4])] if halves else [(x, each)]
        for got, added in pairs:
            unpadded = np.asarray(got)[tuple(slice(size) for size in spec.shape)]
            np.testing.assert_array_equal(unpadded, added.astype(np.float64).sum(0))


@pytest.mark.parametrize("name", _GRADIENTS)
def test_bits_do_not_depend_on_the_bucket(name):
    comm = _comm(name)
    specs = _specs(comm)
    gradients = _gradients(specs, lambda rng, shape: rng.normal(size=shape))
    (joined,) = jax.jit(_program(comm, [specs]))([gradients])
    alone = jax.jit(_program(comm, [[x] for x in specs]))([[x] for x in gradients])
    for x, (y,) in zip(joined, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", ["cast", "cast_then_float32"])
def test_the_number_of_operations_does_not_depend_on_the_number_of_gradients(name):
    """XLA takes time for each, for each layer of an unrolled model."""
    comm = _comm(name)
    counts = []
    for num in (2, 8):
        specs = _specs(comm, [((16, 3), 0)] * num)
        gradients = _gradients(specs, lambda rng, shape: rng.normal(size=shape))
        jaxpr = jax.make_jaxpr(_program(comm, [specs]))([gradients])
        count = operations(jaxpr.jaxpr)
        counts.append([count[name] for name in ("add", "div", "bitcast_convert_type")])
    assert counts[0] == counts[1]
    assert min(counts[0][::2]) > 0


def operations(jaxpr):
    """How many operations of each primitive are in a jaxpr, those of nested ones included."""
    count = Counter(equation.primitive.name for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        nested = equation.params.get("jaxpr")  # of `shard_map` and `jit`
        if nested is not None:
            count += operations(getattr(nested, "jaxpr", nested))
    return count


def test_a_bucket_of_one_cast_is_joined_once():
    """Not again between the axes: one concatenation, however many axes."""
    comm = _comm("cast")
    specs = _specs(comm)
    gradients = _gradients(specs, lambda rng, shape: rng.normal(size=shape))
    count = operations(jax.make_jaxpr(_program(comm, [specs]))([gradients]).jaxpr)
    assert count["concatenate"] == 1
    assert count["all_to_all"] == 2
