"""Collectives as they are on CPUs of several processes, against JAX's own and numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._hlo import collectives as _hlo
from jaxzero._mesh import gloo_workaround
from jaxzero._mesh import mesh as _mesh
from jaxzero._mesh.gloo_workaround import reduce_scatter, uses_gloo, with_workaround
from jaxzero._mesh.mesh_kinds import SimulatedMesh

AXES = ("node", "local")


def _collectives(compiled) -> set[str]:
    return {collective.op for collective in _hlo.collectives(compiled.as_text())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("axes", ["local", "node", AXES, AXES[::-1]])
def test_each_device_keeps_its_piece_of_the_sum(axes, dim, tiled, dtype):
    mesh = jz.make_mesh(nodes=2)
    num = np.prod([mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes)])
    shape = [2, 3, 5]
    shape[dim] = int(num) * (2 if tiled else 1)
    each = np.random.default_rng(0).integers(-4, 5, (8, *shape))  # sums are exact in every type

    def on_device(x):
        return reduce_scatter(x[0], axes, dim, tiled=tiled)[None]

    def of_jax(x):
        return lax.psum_scatter(x[0], axes, scatter_dimension=dim, tiled=tiled)[None]

    x = jnp.asarray(each, dtype)
    options = {"mesh": mesh, "in_specs": P(AXES), "out_specs": P(AXES), "check_vma": False}
    compiled = jax.jit(jax.shard_map(with_workaround(on_device), **options)).lower(x).compile()
    assert _collectives(compiled) == {"all-to-all"}
    expected = jax.jit(jax.shard_map(of_jax, **options))(x)
    np.testing.assert_array_equal(compiled(x), expected)

    if axes == AXES:
        pieces = np.split(each.sum(0), 8, axis=dim)
        pieces = pieces if tiled else [piece.squeeze(dim) for piece in pieces]
        np.testing.assert_array_equal(np.asarray(expected, np.int64), pieces)


# Rows of a message over `node` have 240 bytes: one piece, or eight of which some have less.
@pytest.mark.parametrize("piece", [256, 33])
@pytest.mark.parametrize("axes", ["local", "node", AXES])
def test_pieces_between_nodes_are_joined_as_jax_joins_them(axes, piece, monkeypatch):
    monkeypatch.setattr(gloo_workaround, "PIECE_BYTES", piece)
    mesh = jz.make_mesh(nodes=2)
    num = int(np.prod([mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes)]))
    x = np.random.default_rng(0).integers(-99, 99, (8, 2 * num, 3 * num, 5), np.int32)

    def ours(x):
        gathered = [gloo_workaround.all_gather(x[0], axes, dim) for dim in (0, 1, 2)]
        pairs = [(0, 0), (0, 1), (1, 0), (1, 2)]
        exchanged = [gloo_workaround.all_to_all(x[0], axes, *dims) for dims in pairs]
        return [y[None] for y in (*gathered, *exchanged)]

    options = {"mesh": mesh, "in_specs": P(AXES), "out_specs": P(AXES), "check_vma": False}
    in_pieces = jax.jit(jax.shard_map(with_workaround(ours), **options)).lower(x).compile()
    whole = jax.jit(jax.shard_map(ours, **options)).lower(x).compile()
    for got, expected in zip(in_pieces(x), whole(x), strict=True):
        np.testing.assert_array_equal(got, expected)
    count = len(_hlo.collectives(in_pieces.as_text())) - len(_hlo.collectives(whole.as_text()))
    assert (count > 0) == (axes != "local" and piece < 4 * 2 * 3 * 5 * num)


@pytest.mark.parametrize("axes", ["local", "node", AXES])
def test_a_permutation_is_in_pieces_where_devices_send_to_each_other(axes, monkeypatch):
    monkeypatch.setattr(gloo_workaround, "PIECE_BYTES", 33)
    mesh = jz.make_mesh(nodes=2)
    num = 2 if axes == "node" else 4 if axes == "local" else 8
    x = np.random.default_rng(0).integers(-99, 99, (8, 5, 3), np.int32)
    options = {"mesh": mesh, "in_specs": P(AXES), "out_specs": P(AXES), "check_vma": False}
    for shift in (num // 2, 1):  # with the first, each sends to the one that it receives from
        pairs = [(i, (i + shift) % num) for i in range(num)]

        def ours(x, pairs=pairs):
            return gloo_workaround.permute(x, axes, pairs)

        def of_jax(x, pairs=pairs):
            return lax.ppermute(x, axes, pairs)

        compiled = jax.jit(jax.shard_map(with_workaround(ours), **options)).lower(x).compile()
        expected = jax.jit(jax.shard_map(of_jax, **options))(x)
        np.testing.assert_array_equal(compiled(x), expected)
        is_mutual = 2 * shift == num and axes != "local"
        assert len(_hlo.collectives(compiled.as_text())) == (2 if is_mutual else 1)


def _init():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (7, 24), "down": (24, 5), "bias": (5,)}
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _embed(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"][None]


def _contrastive(params, x):
    own = _embed(params, x)
    everyone = lax.all_gather(own, AXES, tiled=True)
    right = lax.axis_index(AXES) * len(own) + jnp.arange(len(own), dtype=jnp.int32)
    log_p = jax.nn.log_softmax(own @ everyone.T)
    return -jnp.take_along_axis(log_p, right[:, None], axis=1).mean()


def _on_one_device(params, x):
    own = _embed(params, x)
    return -jnp.diagonal(jax.nn.log_softmax(own @ own.T)).mean()


CONFIGS = {
    "zero3": jz.zero3(),
    "hpz": dataclasses.replace(jz.zero3(), hpz=jz.HpZ()),
    "hsdp": jz.hsdp(),
    "zeropp": dataclasses.replace(jz.zeropp(), min_quantized_size=10**6),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.one_in(2)
def test_gradients_are_right_and_no_reduce_scatter_is_left(
    nodes, config, microbatches, monkeypatch
):
    """Also of gathers that the loss makes itself: JAX makes reduce-scatters of their gradients."""
    monkeypatch.setattr(_mesh, "uses_gloo", lambda mesh: True)
    zero = jz.Zero(jz.make_mesh(nodes), CONFIGS[config])
    params = zero.init(_init)
    x = jax.random.normal(jax.random.key(1), (16 * microbatches, 7))
    call = jax.jit(zero.value_and_grad(_contrastive, microbatches=microbatches))
    compiled = call.lower(params, x).compile()
    assert "reduce-scatter" not in _collectives(compiled)
    loss, grads = compiled(params, x)
    # A device takes its micro-batches from neighbouring rows.
    rows = x.reshape(8, microbatches, -1, 7).swapaxes(0, 1).reshape(microbatches, 16, 7)
    each = [jax.value_and_grad(_on_one_device)(_init(), batch) for batch in rows]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / microbatches, *each)
    # Some hundred terms near 1, whose sums are taken in another order.
    np.testing.assert_allclose(loss, mean[0], rtol=200 * 2**-24)
    for name, g in zero.unshard(grads).items():
        scale = np.abs(mean[1][name]).max()
        np.testing.assert_allclose(g, mean[1][name], atol=200 * 2**-24 * scale, rtol=0)


def test_reports_say_what_is_sent(monkeypatch):
    def planned():
        zero = jz.Zero(jz.make_mesh(nodes=2))
        x = jax.ShapeDtypeStruct((16, 7), jnp.float32)
        return zero.plan(_contrastive, zero.init(_init), x)

    plain = planned()
    monkeypatch.setattr(_mesh, "uses_gloo", lambda mesh: True)
    exchanged = planned()
    kinds = [
        {transfer.collective for transfer in plan.transfers if transfer.purpose == "gradients"}
        for plan in (plain, exchanged)
    ]
    assert kinds == [{"reduce-scatter"}, {"all-to-all"}]
    received = [
        sum(transfer.entering_bytes for transfer in p.transfers) for p in (plain, exchanged)
    ]
    assert received[0] == received[1]


def test_only_cpus_of_a_distributed_run_are_exchanged(monkeypatch):
    mesh = jz.make_mesh(nodes=2)
    assert not uses_gloo(mesh)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert uses_gloo(mesh)
    assert isinstance(jz.make_mesh(nodes=2, simulate=8), SimulatedMesh)
