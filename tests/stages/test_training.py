"""Training with pipeline stages: optimizer state, checkpoints, adapters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import lax

import jaxzero as jz

from . import models, test_lists


def _zero(nodes: int, num_devices: int, layers: str = "layers", microbatches: int = 2) -> jz.Zero:
    mesh = jz.make_mesh(nodes, devices=jax.devices()[:num_devices])
    return jz.Zero(mesh, jz.pipeline(microbatches, layers))


def test_bytes_that_are_kept_are_of_micro_batches_in_flight():
    """Of 1 and of 2 micro-batches all are in flight, of 8 three."""

    def kept(microbatches: int) -> int:
        least = jz.Activations(budget_bytes=0)
        config = dataclasses.replace(jz.pipeline(microbatches), activations=least)
        zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), config)
        plan = zero.plan(models.LOSSES["untied"], zero.shard(models.params()), models.batch())
        return sum(x.num_bytes for x in plan.residuals if x.action == "keep")

    assert kept(1) == kept(2) == kept(8) * 8 / 3 > 0


@pytest.mark.ci
def test_training_goes_on_with_other_stages(tmp_path):
    """Parameters and optimizer state have their true shapes, whatever the stages are."""
    tx, loss, batch = optax.adamw(1e-2), models.LOSSES["tied"], models.batch()
    params = models.params()
    state = tx.init(params)
    zeros = _zero(2, 4), _zero(3, 6), _zero(4, 8, microbatches=4), jz.Zero(jz.make_mesh(2))
    for step, zero in enumerate(zeros):
        p = zero.shard(params)
        tree = {"params": p, "state": zero.init_optimizer(tx, p)}
        with jz.Checkpoints(tmp_path, zero) as checkpoints:
            if step:
                tree = checkpoints.restore(tree)[1]
            _, grads = zero.value_and_grad(loss)(tree["params"], batch)
            with jax.numpy_dtype_promotion("standard"):  # for optax
                p, s = zero.apply_gradients(tx, grads, tree["state"], tree["params"])
            checkpoints.save(step, {"params": p, "state": s})
        grads = jax.jit(jax.grad(loss))(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    found = zero.unshard(p), zero.unshard(s)
    # Adam divides by the root of small second moments, which magnifies roundings of gradients.
    for x, y in zip(*map(jax.tree.leaves, (found, (params, state))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("layers", "loss"),
    [("layers", models.LOSSES["tied"]), ("layers.*", test_lists.LOSSES["tied"])],
)
@pytest.mark.one_in(2)
def test_optimizer_state_in_host_memory(layers, loss):
    """Of stacks that are padded, on three stages, and of lists; against optax on one device."""
    config = jz.pipeline(2, layers)
    config = dataclasses.replace(config, offload=jz.Offload(optimizer=True, min_size=1))
    zero, tx, batch = jz.Zero(_zero(3, 6).mesh, config), optax.adamw(1e-2), models.batch()
    params = models.params() if layers == "layers" else test_lists._params()
    p = zero.shard(params)
    s, state = zero.init_optimizer(tx, p), tx.init(params)

    @jax.jit
    def step(p: Any, s: Any, batch: Any) -> Any:
        _, grads = zero.value_and_grad(loss)(p, batch)
        with jax.numpy_dtype_promotion("standard"):  # for optax
            return zero.apply_gradients(tx, grads, s, p)

    for _ in range(2):
        p, s = step(p, s, batch)
        grads = jax.jit(jax.grad(loss))(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert {"pinned_host", "device"} == {x.sharding.memory_kind for x in jax.tree.leaves(s)}
    # As above: Adam magnifies roundings.
    for x, y in zip(*map(jax.tree.leaves, (zero.unshard(p), params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_adapters_of_layers():
    """Two trees with stacks, of which the first is trained (LoRA)."""
    rng = np.random.default_rng(0)
    shapes = {"a": (models.LAYERS, models.WIDTH, 2), "b": (models.LAYERS, 2, 2 * models.WIDTH)}
    adapters = {"layers": {k: rng.standard_normal(x).astype(np.float32) for k, x in shapes.items()}}

    def loss(adapters, params, batch):
        def body(x, given):
            low, w = given
            return models.layer(x, w | {"up": w["up"] + low["a"] @ low["b"]}), None

        stacks = adapters["layers"], params["layers"]
        x, _ = lax.scan(body, params["embed"][batch["ids"]], stacks)
        return models.cross_entropy(x, params["head"], batch)

    zero, params, batch = _zero(2, 4), models.params(), models.batch()
    step = jax.jit(zero.value_and_grad(loss))
    got, grads = step(zero.shard(adapters), zero.shard(params), batch)
    want, want_grads = jax.jit(jax.value_and_grad(loss))(adapters, params, batch)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # Sums of at most 64 tokens and 16 products in float32.
    for x, y in zip(*map(jax.tree.leaves, (zero.unshard(grads), want_grads)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(np.abs(y).max()))
