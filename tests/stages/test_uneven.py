"""Stages that do not divide the layers: what padding layers do, and what is stored of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxzero as jz

from . import models


def _zero(nodes: int, num_devices: int) -> jz.Zero:
    return jz.Zero(jz.make_mesh(nodes, devices=jax.devices()[:num_devices]), jz.pipeline(2))


def _divides(params, batch):
    """Layers that make NaN of zeros, counted by the loop, of which each has a mask of its own."""

    def body(carry, given):
        x, count = carry
        w, mask = given
        x = models.layer(x, w) / w["gain"][None, None] * mask / jnp.sum(w["up"] ** 2)
        x = x + jnp.sin(x @ params["shared"]) / (w["scale"] ** 2)
        return (x, count + 1), jnp.mean(jnp.log(jnp.abs(x)))

    dtype, num = params["embed"].dtype, len(params["layers"]["scale"])
    start = params["embed"][batch["ids"]], jnp.zeros((), dtype)
    masks = jnp.linspace(0.5, 1.5, num, dtype=dtype)
    (x, count), logs = lax.scan(body, start, (params["layers"], masks))
    loss = models.cross_entropy(x, params["head"], batch) + count + jnp.sum(logs)
    return loss, {"logs": logs, "count": count}


@pytest.mark.parametrize(("nodes", "num_devices", "layers"), [(3, 6, 4), (2, 4, 3)])
@pytest.mark.one_in(2)
def test_padding_layers_reach_nothing(nodes, num_devices, layers):
    params = models.params(dtype=np.float64)
    params["layers"] = jax.tree.map(lambda x: x[:layers], params["layers"])
    zero, batch = _zero(nodes, num_devices), models.batch()
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        want = jax.jit(jax.value_and_grad(_divides, has_aux=True))(params, batch)
        step = jax.jit(zero.value_and_grad(_divides, has_aux=True))
        value, grads = step(zero.shard(params), batch)
        found = value, zero.unshard(grads)
    # The order of sums of 64 tokens, 4 layers and 16 products.
    for x, y in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        scale = max(1e-3, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13 * scale)
    for x in jax.tree.leaves(grads["layers"]):
        assert x.shape[0] > layers
        np.testing.assert_array_equal(x[layers:], 0)


def test_checkpoints_have_the_true_shapes(tmp_path):
    params = models.params()
    params["layers"]["odd"] = np.arange(20, dtype=np.float32).reshape(4, 5)
    tx = optax.adam(1e-2)

    def state(zero, params):
        params = zero.shard(params)
        return {"params": params, "opt_state": zero.init_optimizer(tx, params)}

    zeros = jax.tree.map(np.zeros_like, params)
    first = _zero(3, 6)
    saved = state(first, params)
    with jz.Checkpoints(tmp_path, first) as checkpoints:
        checkpoints.save(1, saved)
    for zero in (first, _zero(2, 4), jz.Zero(jz.make_mesh(2))):
        with jz.Checkpoints(tmp_path, zero) as checkpoints:
            _, restored, _ = checkpoints.restore(state(zero, zeros))
        found = zero.unshard(restored["params"])
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(x, y)
        moments = zero.unshard(restored["opt_state"])
        shapes = [np.shape(x) for x in jax.tree.leaves(moments)]
        assert shapes == [np.shape(x) for x in jax.tree.leaves(tx.init(params))]


def test_an_optimizer_that_counts_layers_is_told():
    zero = _zero(3, 6)
    params = zero.shard({"layers": {"w": np.ones((4, 8, 8), np.float32)}})
    tx = optax.stateless(lambda updates, _: jax.tree.map(lambda x: x - jnp.mean(x), updates))
    with pytest.warns(UserWarning, match="`layers.w` the first, and this optimizer would not"):
        zero.init_optimizer(tx, params)


@pytest.mark.parametrize(("nodes", "num_devices"), [(2, 4), (3, 6)])
def test_report_counts_what_a_device_of_a_stage_holds(nodes, num_devices):
    zero = _zero(nodes, num_devices)
    params = zero.shard(models.params())
    report = zero.report(params)
    held = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params)]
    rows = [row for row in report.rows if row.kind == "parameters"]
    assert [row.device_bytes for row in rows] == held
    padded = {row.path: row.padding_layers for row in rows if row.padding_layers}
    stacks = [f"layers.{name}" for name in models.params()["layers"]]
    assert padded == (dict.fromkeys(stacks, 2) if nodes == 3 else {})
