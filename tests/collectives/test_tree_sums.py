"""Sums over devices in a tree: bit for bit those of NumPy, on every mesh of as many devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._collectives.comm_spec import CommSpec, ReduceSpec
from jaxzero._collectives.reduce_hop import sum_full
from jaxzero._collectives.reductions import reduce_next_axis, start_reduction
from jaxzero._sharding.layout import DimSharding

CONFIG = jz.ZeroConfig(schedule=jz.CommSchedule(deterministic="mesh"))
# The number of devices, and of nodes on all meshes of so many that are allowed.
MESHES = [(8, 1), (8, 2), (8, 4), (8, 8), (6, 1), (6, 3), (6, 6)]


def _tree(x):
    """The sum over the devices of `x`, written out."""
    x = np.asarray(x, np.float32)
    pairs = [x[i] + x[i + 1] for i in range(0, len(x), 2)]
    if len(x) == 6:
        return (pairs[0] + pairs[1]) + pairs[2]
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])


def _summands(num, shape, dtype=np.float32):
    """One array for each device, of numbers whose sum is rounded in every order differently."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((num, *shape)) * 10.0 ** generator.integers(-3, 3, (num, *shape))
    return np.asarray(jnp.asarray(x, dtype))


def _on_devices(function, mesh, out_specs):
    run = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    return jax.jit(run(function, in_specs=P(("node", "local")), out_specs=out_specs))


@pytest.mark.parametrize(("num", "nodes"), MESHES)
def test_buckets_are_summed_in_the_tree(num, nodes):
    mesh = jz.make_mesh(nodes, devices=jax.devices()[:num])
    comm = CommSpec.of(mesh, CONFIG)
    leaves = [  # shape, dtype and split dim
        ((5, 2 * num), np.float32, 1),
        ((num + 1, 3), np.float32, 0),  # padded
        ((num, 4), jnp.bfloat16, 0),
        ((3, num), jnp.bfloat16, 1),
    ]
    layouts = [DimSharding(dim, shape[dim], num) for shape, _, dim in leaves]
    xs = [_summands(num, shape, dtype) for shape, dtype, _ in leaves]
    specs = [
        ReduceSpec("x", shape, dtype, layout)
        for (shape, dtype, _), layout in zip(leaves, layouts, strict=True)
    ]

    def reduced(*xs):
        bucket = start_reduction([x[0] for x in xs], specs, comm)
        for number in range(len(comm.axes_with_peers(("local", "node")))):
            bucket = reduce_next_axis(bucket, specs, number, comm)
        return [bucket.rest[i] for i in range(len(xs))]

    split = ("local", "node")
    out_specs = [P(*[split if i == x.dim else None for i in range(2)]) for x in layouts]
    totals = _on_devices(reduced, mesh, out_specs)(*xs)
    for total, x, layout in zip(totals, xs, layouts, strict=True):
        assert total.dtype == np.float32
        total = np.asarray(total).take(range(layout.size), layout.dim)
        np.testing.assert_array_equal(total, _tree(x))


@pytest.mark.parametrize(("num", "nodes"), MESHES)
def test_full_arrays_are_summed_in_the_tree(num, nodes):
    mesh = jz.make_mesh(nodes, devices=jax.devices()[:num])
    comm = CommSpec.of(mesh, CONFIG)
    # The first is gathered; those of bfloat16 are too many elements for that, and padded.
    xs = [_summands(num, (7,)), *[_summands(num, (n,), jnp.bfloat16) for n in (1001, 1002)]]
    summed = _on_devices(lambda *xs: sum_full([x[0] for x in xs], [0] * 3, comm)[0], mesh, P())
    for total, x in zip(summed(*xs), xs, strict=True):
        np.testing.assert_array_equal(np.asarray(total), _tree(x))


@pytest.mark.parametrize(("num", "nodes"), [(6, 2), (8, 2)])
def test_nodes_whose_sums_are_no_subtrees_are_refused(num, nodes):
    mesh = jz.make_mesh(nodes, devices=jax.devices()[:num])
    if num == 8:
        jz.Zero(mesh, CONFIG)
        return
    with pytest.raises(ValueError, match="2 nodes of 3 devices.*make nodes of 2, 4 or 8"):
        jz.Zero(mesh, CONFIG)
