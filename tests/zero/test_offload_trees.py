"""Offload of trees of unusual forms, and of several trees by one `Zero`."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

GROUPS, LAYERS, WIDTH = 3, 2, 8
ALL = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=0)
ROWS = jnp.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)


def init():
    groups, layers = jax.random.split(jax.random.key(0))
    return {
        "groups": jax.random.normal(groups, (GROUPS, LAYERS, WIDTH, WIDTH)) * 0.3,
        "own": jax.random.normal(layers, (GROUPS, WIDTH, WIDTH)) * 0.3,
        "scale": jnp.ones(()),
    }


def nested(params, rows, with_own=False):
    """A loop over groups, whose body gathers nothing but in a loop over the layers of a group."""

    def group(h, weights):
        if with_own:
            h = h + jnp.tanh(h @ weights["own"])
        inner = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, weights["groups"])
        return inner[0], None

    h, _ = jax.lax.scan(group, rows, {name: params[name] for name in ("groups", "own")})
    return jnp.mean(h**2) * params["scale"]


def mesh_of(nodes, num_devices):
    return jz.make_mesh(nodes, devices=jax.devices()[:num_devices])


@pytest.mark.parametrize("with_own", [False, True])
@pytest.mark.parametrize("devices", [(2, 4), (1, 1)], ids=["2 x 2", "one device"])
@pytest.mark.one_in(2)
def test_loops_in_loops_and_scalars(devices, with_own):
    tx, results = optax.sgd(0.1, momentum=0.9), []
    for offload in (None, ALL):
        zero = jz.Zero(mesh_of(*devices), jz.ZeroConfig(offload=offload))
        params = zero.shard(jax.device_get(init()))
        opt_state = zero.init_optimizer(tx, params)

        def step(params, opt_state, zero=zero):
            loss, grads = zero.value_and_grad(lambda p, x: nested(p, x, with_own))(params, ROWS)
            return loss, zero.apply_gradients(tx, grads, opt_state, params)[0]

        loss, new = jax.jit(step)(params, opt_state)
        results.append((np.asarray(loss), jax.device_get(zero.unshard(new))))
    assert params["groups"].sharding.memory_kind == "pinned_host"
    assert params["scale"].sharding.memory_kind != "pinned_host"
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_pattern_may_be_for_another_tree():
    """Adapters (LoRA) are laid out after the frozen weights that a pattern is for."""
    zero = jz.Zero(mesh_of(2, 4), jz.ZeroConfig(offload=jz.Offload(weights="groups*", min_size=0)))
    full = jax.device_get(init())
    adapter = {"scale": full["scale"]}
    with pytest.raises(ValueError, match=r"matches no leaf .* for another tree, shard that one fi"):
        zero.shard(adapter)
    frozen = zero.shard({"groups": full["groups"], "own": full["own"]})
    params = zero.shard(adapter)
    loss, _ = zero.value_and_grad(lambda p, frozen, x: nested({**p, **frozen}, x))(
        params, frozen, ROWS
    )
    assert frozen["groups"].sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(loss, nested(init(), ROWS), rtol=1e-5)


def test_restoring_into_too_little_host_memory(monkeypatch, tmp_path):
    zero = jz.Zero(mesh_of(2, 4), jz.ZeroConfig(offload=ALL))
    params = zero.init(init)
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"params": params})
        checkpoints.close()
        monkeypatch.setattr("jaxzero._zero.host_memory.available_bytes", lambda: 1000)
        with pytest.raises(MemoryError, match="arrays of the checkpoint would take"):
            checkpoints.restore({"params": zero.abstract(init)})
        on_device = jz.Zero(zero.mesh, dataclasses.replace(zero.config, offload=None))
        checkpoints.restore({"params": on_device.abstract(init)})


def test_devices_without_host_memory(monkeypatch):
    memory = types.SimpleNamespace(kind="device")
    device = types.SimpleNamespace(addressable_memories=lambda: [memory])
    fake = types.SimpleNamespace(local_devices=[device])
    monkeypatch.setattr("jaxzero._zero.host_memory.physical", lambda mesh: fake)
    with pytest.raises(NotImplementedError, match="needs devices with the memory kind 'pinned_ho"):
        jz.Zero(mesh_of(2, 4), jz.ZeroConfig(offload=ALL))


def test_an_optimizer_is_begun_inside_of_jit():
    """Also where a leaf is padded, for which the optimizer is tried on tiny leaves."""
    zero, tx = jz.Zero(mesh_of(2, 4)), optax.adamw(1e-2)
    params = zero.init(lambda: {"odd": jnp.ones((7, 3))})
    inside = jax.jit(lambda params: zero.init_optimizer(tx, params))(params)
    jax.tree.map(np.testing.assert_array_equal, inside, zero.init_optimizer(tx, params))
