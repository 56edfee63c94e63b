"""What the wire remembers: kept slices that differences are added to, and errors fed back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo

import jaxzero as jz

WHOLE = {
    "w": zoo.normal(jax.random.key(0), 0, 16, 24),
    "stack": zoo.normal(jax.random.key(0), 1, 3, 24, 24),
    "bias": np.zeros(24, np.float32),
}
X = zoo.normal(jax.random.key(0), 2, 48, 16, scale=1.0)


def _loss(params, x):
    h = x @ params["w"] + params["bias"][None]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])
    return jnp.mean(h**2)


def _zero(config, mesh="2x4-auto", **changes):
    changes = {"min_quantized_size": 100, **changes}
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, **changes))


def _distances(state, params):
    """How far the slices, where they are kept whole, are from the weights."""
    kept = {key: np.asarray(x) for key, x in state.slices.items() if x is not None}
    return {key: np.abs(x - np.asarray(params[key])).max() for key, x in kept.items()}


@pytest.mark.parametrize("mesh", ["2x4-auto", "3x2-explicit", "1x8-auto"])
def test_what_rounding_lost_is_in_the_next_difference(mesh):
    """The slices approach weights that stand still, by a factor of at least 14 each step."""
    zero = _zero(jz.zeropp4(), mesh, hpz=jz.HpZ(codec=None), gradients=jz.Hops())
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    assert state.slices["bias"] is None and state.errors["w"] is None
    moved = jax.tree.map(
        lambda x: x + 0.1 * jnp.sin(7 * jnp.arange(x.size)).reshape(x.shape), params
    )
    moved = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), moved, params)
    step = jax.jit(zero.value_and_grad(_loss))
    before = _distances(state, moved)
    assert set(before) == {"w", "stack"}
    for _ in range(4):
        _, _, state = step(moved, X, wire_state=state)
        now = _distances(state, moved)
        for key, off in now.items():
            # Half a step of amax / 7, the scale rounded up; and the rounding of float32.
            assert off <= before[key] / 14 * (1 + 1 / 128) + 1e-6
        before = now


@pytest.mark.parametrize("kept", [jz.Int8(block=64), jz.Cast(jnp.bfloat16), None])
def test_differences_train_like_whole_weights(kept):
    """After some steps the loss is that of the weights as the kept slice can write them."""
    zero = _zero(jz.zeropp4(), hpz=jz.HpZ(codec=kept), gradients=jz.Hops())
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    step = jax.jit(zero.value_and_grad(_loss))
    for _ in range(5):
        value, grads, state = step(params, X, wire_state=state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    value, _, _ = step(params, X, wire_state=state)
    want = _loss(jax.device_get(zero.unshard(params)), X)
    np.testing.assert_allclose(value, want, rtol=0.02)


def test_errors_do_not_add_up():
    """The sum of what T steps return is off by one step's error, and not by T of them."""
    for feedback in (jz.ErrorFeedback(dtype=jnp.float32), jz.Int4()):
        zero = _zero(jz.zero3(gradients=jz.Hops(node=feedback)))
        params = zero.shard(WHOLE)
        want = jax.device_get(jax.grad(_loss)(WHOLE, X))
        step = jax.jit(zero.value_and_grad(_loss))
        state = zero.init_wire_state(params)
        total, steps = jax.tree.map(np.zeros_like, want), 12
        for _ in range(steps):
            _, grads, state = step(params, X, wire_state=state)
            total = jax.tree.map(np.add, total, jax.device_get(zero.unshard(grads)))
        off = np.linalg.norm(total["stack"] - steps * want["stack"])
        one = np.linalg.norm(want["stack"])
        assert off < 0.4 * one if isinstance(feedback, jz.ErrorFeedback) else off > 0.8 * one


def test_microbatches_feed_errors_back_once():
    zero = _zero(jz.zero3(gradients=jz.Hops(node=jz.ErrorFeedback(dtype=jnp.float32))))
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    results = [
        zero.value_and_grad(_loss, microbatches=k)(params, X, wire_state=state) for k in (1, 3)
    ]
    for one, other in zip(*(jax.tree.leaves(result[1:]) for result in results), strict=True):
        # The same sums, taken in another order, may fall on the other side of a rounding.
        step = np.abs(np.asarray(one, np.float64)).max() / 7 * 1.02
        assert np.abs(np.asarray(one, np.float64) - np.asarray(other)).max() <= step + 1e-6


def test_memory_is_sharded():
    zero = _zero(jz.zeropp4(), gradients=jz.Hops(node=jz.ErrorFeedback()))
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    local = zero.mesh.shape["local"]
    for key in ("w", "stack"):
        kept = state.slices[key].addressable_shards[0].data.nbytes
        assert kept <= 1.05 * WHOLE[key].size / local, "int8 over the devices of a node"
        error = state.errors[key].addressable_shards[0].data.nbytes
        assert error == 2 * WHOLE[key].size / local, "bfloat16 over the devices of a node"


def test_state_is_saved_and_restored(tmp_path):
    zero = _zero(jz.zeropp4(), gradients=jz.Hops(node=jz.ErrorFeedback()))
    params = zero.shard(WHOLE)
    _, _, state = zero.value_and_grad(_loss)(params, X, wire_state=zero.init_wire_state(params))
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"wire_state": state})
        tree, _ = checkpoints.restore(like={"wire_state": zero.init_wire_state(params)})
    restored = tree["wire_state"]
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(one, other)
    zero.value_and_grad(_loss)(params, X, wire_state=restored)


def test_mistakes_are_named():
    zero = _zero(jz.zeropp4())
    params = zero.shard(WHOLE)
    step = zero.value_and_grad(_loss)
    with pytest.raises(ValueError, match=r"`wire_state` is missing.*init_wire_state"):
        step(params, X)
    with pytest.raises(ValueError, match=r"`wire_state` must be.*got dict"):
        step(params, X, wire_state={})
    other = _zero(jz.zeropp4(), "4x2-auto")
    state = other.init_wire_state(other.shard(WHOLE))
    with pytest.raises(ValueError, match=r"`wire_state.slices`, leaf `stack`: wanted .* got"):
        step(params, X, wire_state=state)
    fewer = zero.init_wire_state(zero.shard({"w": WHOLE["w"]}))
    with pytest.raises(ValueError, match=r"`wire_state.slices` is not a tree like"):
        step(params, X, wire_state=fewer)


def test_a_config_that_remembers_nothing_takes_a_state_too():
    zero = _zero(jz.zeropp())
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    assert not jax.tree.leaves(state)
    _, grads, state = zero.value_and_grad(_loss)(params, X, wire_state=state)
    _, same = zero.value_and_grad(_loss)(params, X)
    jax.tree.map(np.testing.assert_array_equal, grads, same)
