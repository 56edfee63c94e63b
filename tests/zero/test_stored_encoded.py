"""Frozen weights that are stored encoded: LoRA, and scanned stacks of vectors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo


def _zero(config, mesh="2x4-auto", **changes):
    changes = {"min_quantized_size": 0, **changes}
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, **changes))


def test_frozen_weights_stored_as_messages():
    """LoRA on quantised weights: exactly as if the decoded weights were frozen."""
    key = jax.random.key(0)
    whole = {"w": zoo.normal(key, 0, 3, 24, 24), "norm": np.ones(24, np.float32)}
    adapters = {"a": zoo.normal(key, 1, 24, 2), "b": zoo.normal(key, 2, 2, 24)}
    x = zoo.normal(key, 3, 48, 24, scale=1.0)

    def loss(adapters, frozen, x):
        def layer(h, w):
            return jnp.tanh(h @ (w + adapters["a"] @ adapters["b"])) * frozen["norm"][None], None

        return jnp.mean(jax.lax.scan(layer, x, frozen["w"])[0] ** 2)

    for config, mesh in ((jz.zero3(), "2x4-auto"), (jz.zeropp(), "2x3-explicit")):
        zero = _zero(config, mesh, gradients=jz.PerAxis(), min_quantized_size=100)
        frozen = zero.shard(whole, codec=jz.Int8(block=64))
        assert frozen["w"].data.dtype == jnp.uint8 and frozen["norm"].dtype == jnp.float32
        assert (frozen["w"].shape, frozen["w"].dtype) == ((3, 24, 24), jnp.float32)
        target = zero.abstract(lambda: whole, codec=jz.Int8(block=64))
        assert target["w"].data.shape == frozen["w"].data.shape
        assert target["w"].data.dtype == jnp.uint8
        held = frozen["w"].data.addressable_shards[0].data.nbytes * zero.mesh.size
        assert held < 1.2 * whole["w"].size
        decoded = jax.device_get(zero.unshard(frozen))
        assert 0 < np.abs(decoded["w"] - whole["w"]).max() <= np.abs(whole["w"]).max() / 250
        specs = (None, None, zero.batch_spec)
        params = zero.shard(adapters)
        _, grads = zero.value_and_grad(loss, in_specs=specs)(params, frozen, x)
        with jax.default_matmul_precision("highest"):
            want = jax.device_get(jax.grad(loss)(jax.device_get(zero.unshard(params)), decoded, x))
        # The adapters are too small to be quantised under `zeropp`.
        zoo.assert_close(jax.device_get(zero.unshard(grads)), want, 1e-5, "grads")
        with pytest.raises(ValueError, match=r"leaf `w`.*int8.*argnums"):
            zero.value_and_grad(loss, argnums=1, in_specs=specs)(params, frozen, x)
    with pytest.raises(ValueError, match="stage 3"):
        _zero(jz.ddp()).shard(whole, codec=jz.Int8())


@pytest.mark.parametrize("mesh", ["2x4-auto", "2x3-explicit"])
@pytest.mark.one_in(2)
def test_a_scanned_stack_of_vectors_stored_as_messages(mesh):
    """It is one message, which cannot be cut into layers: it is decoded before the loop."""
    key = jax.random.key(0)
    whole = {"scale": zoo.normal(key, 0, 4, 48, scale=1.0), "w": zoo.normal(key, 1, 48, 48)}
    x = zoo.normal(key, 2, 48, 48, scale=1.0)

    def loss(params, x, frozen):
        h, _ = jax.lax.scan(lambda h, n: (jnp.tanh(h * n[None]), None), x, frozen["scale"])
        return jnp.mean((h @ params["w"]) ** 2)

    zero = _zero(jz.zero3(), mesh, min_quantized_size=100)
    frozen = zero.shard({"scale": whole["scale"]}, codec=jz.Int8(block=32))
    assert frozen["scale"].data.dtype == jnp.uint8
    params = zero.shard({"w": whole["w"]})
    got = zero.value_and_grad(loss)(params, x, frozen)[1]
    with jax.default_matmul_precision("highest"):
        want = jax.grad(loss)({"w": whole["w"]}, x, jax.device_get(zero.unshard(frozen)))
    zoo.assert_close(jax.device_get(zero.unshard(got)), jax.device_get(want), 1e-5, "grads")


def test_messages_are_neither_cast_nor_trained():
    zero = _zero(jz.zero3(), "2x4-auto", min_quantized_size=100)
    frozen = zero.shard({"w": np.ones((48, 48), np.float32)}, codec=jz.Int8(block=32))
    changed = jax.tree.map(lambda x: x.astype(jnp.float32), frozen)
    with pytest.raises(ValueError, match=r"`w` is stored as messages.*are float32.*no numbers"):
        zero.unshard(changed)
    match = r"`0\.mu\.w`.*messages of int8/32.*cannot be trained"
    with pytest.raises(ValueError, match=match):
        zero.init_optimizer(optax.adam(1e-3), frozen)
