"""A bucket of weights gives each weight's own numbers, in few operations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._collectives.comm_spec import CommSpec
from jaxzero._collectives.encoded_shards import EncodedShards
from jaxzero._collectives.gather import gather_hop, start_gather
from jaxzero._collectives.gather_bucket import arrays
from jaxzero._sharding.layout import DimSharding, pad, unpad

from .test_joined_sums import operations

_INT8 = jz.zero3(weights=jz.PerAxis(node=jz.Int8(block=32), local=jz.Int8(block=32)))
# (shape, split dim): along the first dim and another, with padding and without.
_LEAVES = (((16, 3), 0), ((3, 16), 1), ((13,), 0), ((5, 9), 1), ((1, 8, 2), 1), ((2, 3, 8), 2))
_DTYPES = {
    "one": ("bfloat16",),
    "sixteen_bits": ("bfloat16", "float16"),
    "mixed": ("bfloat16", "float32", "int8"),
    "float8": ("float8_e4m3fn",),
    "float32": ("float32",),
}


def _program(config, leaves):
    """A function that gathers a bucket of shards over all axes, and the layouts of its leaves."""
    mesh = jz.make_mesh(2, devices=jax.devices()[:8])
    comm = CommSpec.of(mesh, config)
    layouts = [DimSharding(dim, shape[dim], 8) for shape, dim in leaves]

    def on_device(shards):
        given = [
            dataclasses.replace(EncodedShards.plain(x, layout.dim), axes=comm.gather_axes)
            for x, layout in zip(shards, layouts, strict=True)
        ]
        sizes = [x.size * 8 for x in shards]
        buckets = start_gather(given, sizes, comm)
        for _ in comm.gather_axes:
            buckets = gather_hop(buckets, sizes, comm)
        fulls = arrays(buckets, [None] * len(shards))
        return [unpad(x, layout) for x, layout in zip(fulls, layouts, strict=True)]

    splits = [P(*[None] * dim, config.axes) for _, dim in leaves]
    run = jax.shard_map(on_device, mesh=mesh, in_specs=(splits,), out_specs=P(), check_vma=False)
    return run, layouts


@pytest.mark.parametrize("dtypes", _DTYPES)
def test_gathered_bits_are_those_of_each_weight(dtypes):
    generator = np.random.default_rng(0)
    names = _DTYPES[dtypes]
    numbers = [
        (8 * generator.normal(size=shape)).astype(jnp.dtype(names[i % len(names)]))
        for i, (shape, _) in enumerate(_LEAVES)
    ]
    run, layouts = _program(jz.zero3(), _LEAVES)
    gathered = jax.jit(run)([pad(x, y) for x, y in zip(numbers, layouts, strict=True)])
    for got, x in zip(gathered, numbers, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), x.view(np.uint8))


def test_codes_and_plain_weights_share_a_bucket():
    """Int8 is exact for integers whose largest, in each block of the codec, is 127."""
    config = dataclasses.replace(_INT8, min_quantized_size=1024)
    leaves = (((64, 32), 0), ((16, 4), 0), ((8, 3), 0))
    numbers = [np.arange(np.prod(shape)).reshape(shape) % 32 for shape, _ in leaves]
    numbers = [np.where(x == 31, 127, x).astype(jnp.bfloat16) for x in numbers]
    run, _ = _program(config, leaves)
    for got, x in zip(jax.jit(run)([jnp.asarray(x) for x in numbers]), numbers, strict=True):
        np.testing.assert_array_equal(np.asarray(got), x)


def test_the_number_of_bitcasts_does_not_depend_on_the_number_of_weights():
    """XLA takes time for each, for each layer of an unrolled model."""
    counts = []
    for num in (2, 8):
        run, _ = _program(jz.zero3(), [((16, 3), 0)] * num)
        jaxpr = jax.make_jaxpr(run)([jnp.zeros((16, 3), jnp.bfloat16)] * num)
        counts.append(operations(jaxpr.jaxpr)["bitcast_convert_type"])
    assert counts == [2, 2]
