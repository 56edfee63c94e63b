"""Gather and reduce against numpy, over both axes, padded and not, in every wire type."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._collectives.comm_spec import CommSpec, ReduceSpec
from jaxzero._collectives.encoded_shards import EncodedShards
from jaxzero._collectives.gather import gather_hop, move_split, start_gather
from jaxzero._collectives.gather_bucket import unpack
from jaxzero._collectives.reduce_hop import sum_full
from jaxzero._collectives.reductions import reduce_gradient
from jaxzero._sharding.layout import DimSharding, pad, unpad

CONFIGS = {
    "plain": jz.zero3(),
    "bfloat16": jz.zero3(
        weights=jz.PerAxis(node=jz.Cast(jnp.bfloat16), local=jz.Cast(jnp.bfloat16)),
        gradients=jz.PerAxis(node=jz.Cast(jnp.bfloat16), local=jz.Cast(jnp.bfloat16)),
    ),
    "hsdp": jz.hsdp(),
    "hsdp_bfloat16": jz.hsdp(gradients=jz.PerAxis(node=jz.Cast(jnp.bfloat16))),
}


def _spec(x, layout):
    return ReduceSpec("x", x.shape, x.dtype, layout)


def _on_devices(function, mesh, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def _gathered(shard, layout, wire):
    pieces = dataclasses.replace(EncodedShards.plain(shard, layout.dim), axes=wire.gather_axes)
    sizes = [shard.size * wire.num_shards]
    parcels = start_gather([pieces], sizes, wire)
    for _ in wire.gather_axes:
        parcels = gather_hop(parcels, sizes, wire)
    (full,) = unpack(parcels)
    return unpad(full.join(), layout)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_gather_and_reduce(nodes, config):
    config = CONFIGS[config]
    mesh = jz.make_mesh(nodes, devices=jax.devices()[: 8 if nodes < 3 else 6])
    wire = CommSpec.of(mesh, config)
    x = np.random.default_rng(0).normal(size=(5, 13)).astype(np.float32)
    layout = DimSharding(1, 13, wire.num_shards)
    split = P(None, config.axes)
    full = _on_devices(lambda s: _gathered(s, layout, wire), mesh, split, P())(pad(x, layout))
    bits = any(getattr(config.weights, axis) for axis in ("node", "local"))
    np.testing.assert_array_equal(full, x.astype(jnp.bfloat16).astype(np.float32) if bits else x)

    each = np.random.default_rng(1).normal(size=(wire.num_devices, 5, 13)).astype(np.float32)
    sums = _on_devices(
        lambda g: reduce_gradient(g[0], _spec(g[0], layout), wire),
        mesh,
        P(("node", "local")),
        split,
    )
    total = each.astype(np.float64).sum(0)
    narrow = any(getattr(config.gradients, axis) for axis in ("node", "local"))
    # Every value is rounded at most once for each of the hops: half a unit in the last of 8
    # bits of bfloat16, of the sum of magnitudes. In float32 the additions round 24 bits.
    bound = (3 * 2.0**-9 if narrow else wire.num_devices * 2.0**-24) * np.abs(each).sum(0)
    got = np.asarray(sums(each))
    assert (np.abs(got[:, :13] - total) <= bound).all()
    assert not got[:, 13:].any()


def test_sixteen_bit_gradients_are_summed_in_float32():
    mesh = jz.make_mesh(2)
    wire = CommSpec.of(mesh, jz.zero3())
    values = np.full((8, 8), 2.0**-9, jnp.bfloat16)
    values[0] = 1.0  # in bfloat16 each further addend would be lost: 1 + 2**-9 == 1
    run = _on_devices(
        lambda g: reduce_gradient(g[0], _spec(g[0], DimSharding(0, 8, 8)), wire),
        mesh,
        P(("node", "local")),
        P(("local", "node")),
    )
    got = run(values)
    assert got.dtype == jnp.float32
    # The sum of four is rounded to bfloat16 for the second hop: to within 2**-9 of 1.
    np.testing.assert_allclose(got, 1 + 7 * 2.0**-9, atol=2.0**-9)


def test_bfloat16_travels_as_sixteen_bits():
    mesh = jz.make_mesh(2)
    wire = CommSpec.of(mesh, jz.zero3())
    layout = DimSharding(0, 16, 8)
    gathered = _on_devices(lambda s: _gathered(s, layout, wire), mesh, P(("local", "node")), P())
    reduced = _on_devices(
        lambda g: reduce_gradient(g, _spec(g, layout), wire), mesh, P(), P(("local", "node"))
    )
    struct = jax.ShapeDtypeStruct((16,), jnp.bfloat16)
    for run in (gathered, reduced):
        text = run.lower(struct).compile().as_text()
        lines = [x for x in text.splitlines() if "all-gather(" in x or "all-to-all(" in x]
        assert lines
        assert all("u16[" in line for line in lines), lines


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_move_split(nodes):
    mesh = jz.make_mesh(nodes, devices=jax.devices()[: 8 if nodes < 3 else 6])
    wire = CommSpec.of(mesh, jz.zero3())
    x = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    old, new = DimSharding(0, 7, wire.num_shards), DimSharding(1, 5, wire.num_shards)
    axes = ("local", "node")
    move = functools.partial(
        move_split, shape=x.shape, old=old, new=new, axes=wire.axes_with_peers(axes)
    )
    moved = _on_devices(move, mesh, P(axes), P(None, axes))(pad(x, old))
    np.testing.assert_array_equal(moved, pad(x, new))


def test_sum_full():
    mesh = jz.make_mesh(2)
    xs = [np.arange(8, dtype=np.float32), np.arange(16, dtype=np.float32).reshape(8, 2)]
    for config in (jz.zero3(), CONFIGS["bfloat16"]):
        wire = CommSpec.of(mesh, config)
        run = _on_devices(
            lambda xs, wire=wire: sum_full([x[0] for x in xs], [x[0].size for x in xs], wire)[0],
            mesh,
            P(("node", "local")),
            P(),
        )
        for got, x in zip(run(xs), xs, strict=True):
            np.testing.assert_allclose(got, x.sum(0), rtol=2.0**-8)
