"""Single cases that are easy to get wrong: each broke, or would break, an obvious shortcut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(jz.make_mesh(2))


def _normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def _equal(zero, loss, params, batch, tolerance=1e-5):
    sharded = zero.shard(params)
    value, grads = zero.value_and_grad(loss)(sharded, batch)
    want_value, want = jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, want_value, rtol=tolerance)
    for got, right in zip(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(got - right) <= tolerance * np.linalg.norm(right)


def test_a_copy_in_another_dtype_does_not_change_the_gradients_of_the_first(zero):
    params = zero.shard({"w": _normal(8, 8)})
    copies = [jax.tree.map(lambda x, t=t: x.astype(t), params) for t in (jnp.bfloat16, jnp.int8)]
    for copy in copies:
        zero.shard(jax.tree.map(np.asarray, zero.unshard(copy)))
    grad = jax.jit(zero.value_and_grad(lambda p, x: jnp.mean(x @ p["w"])))
    assert grad(params, _normal(8, 8))[1]["w"].dtype == jnp.float32
    half = zero.value_and_grad(lambda p, x: jnp.mean(x.astype(jnp.bfloat16) @ p["w"]))
    assert half(copies[0], _normal(8, 8))[1]["w"].dtype == jnp.bfloat16


def test_rounding_to_integers_is_not_moved_past_a_sum(zero):
    """The backward pass rounds: sums of rounded values are not rounded sums."""

    @jax.custom_vjp
    def coarse(w):
        return w

    def backward(_, g):
        return (jnp.clip(g * 1e3, -100, 100).astype(jnp.int8).astype(jnp.float32),)

    coarse.defvjp(lambda w: (w, None), backward)

    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ coarse(p["w"]))) * 0.05

    params, rows = {"w": _normal(8, 8)}, np.tile(_normal(2, 8), (4, 1))[:8]
    rows = np.repeat(rows[:1], 8, axis=0)  # every device has the same row, so the same gradient
    grads = zero.value_and_grad(loss)(zero.shard(params), rows)[1]
    want = jax.jit(jax.grad(loss))(params, rows[:1])
    np.testing.assert_allclose(zero.unshard(grads)["w"], want["w"], rtol=1e-6)


@pytest.mark.ci
def test_a_weight_used_a_thousand_times(zero):
    def loss(p, x):
        total = jnp.float32(0)
        for i in range(1000):
            total = total + jnp.mean(x[:, i % 8] * p["w"][i % 8])
        return total

    plan = zero.plan(loss, zero.shard({"w": _normal(8)}), _normal(8, 8))
    assert [step.action for step in plan.steps].count("reduce") >= 1


def test_stacks_scaled_and_reversed_before_a_scan_stay_shards(zero):
    def loss(p, x):
        stack = 0.5 * p["w"][::-1]
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0])

    params = {"w": _normal(5, 16, 16)}
    _equal(zero, loss, params, _normal(8, 16))
    plan = zero.plan(loss, zero.shard(params), _normal(8, 16))
    assert {step.shape for step in plan.steps} == {(16, 16)}


def test_an_element_reshaped_and_scanned(zero):
    def loss(p, x):
        one = lax.reshape(lax.slice(p["w"], (3,), (4,)), ())
        return jnp.mean(lax.scan(lambda c, s: (c * s, None), x, one.reshape(1))[0]) + p["w"].sum()

    _equal(zero, loss, {"w": _normal(16)}, _normal(8, 4))


@pytest.mark.parametrize(
    "config",
    [
        jz.zero3(),
        jz.zero3(gradients=jz.PerAxis(node=jz.Cast(jnp.float16), local=jz.Cast(jnp.float16))),
        jz.hsdp(gradients=jz.PerAxis(node=jz.Cast(jnp.float16))),
    ],
    ids=["plain", "cast", "hsdp"],
)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a_sum_of_float16_gradients_may_exceed_float16(config, dtype):
    zero = jz.Zero(jz.make_mesh(2), config)
    params = zero.shard({"w": np.zeros(8, dtype), "s": np.zeros((), dtype)})

    def loss(p, x):
        return jnp.sum(p["w"] * x[0]).astype(jnp.float32) + (p["s"] * x[0, 0]).astype(jnp.float32)

    grads = zero.value_and_grad(loss)(params, np.full((8, 8), 20000, dtype))[1]
    for leaf in jax.tree.leaves(zero.unshard(grads)):
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 20000, dtype))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("devices", [8, 6])
def test_explicit_axes_with_the_mesh_set(devices, tmp_path):
    mesh = jz.make_mesh(2, devices=jax.devices()[:devices], axis_type=AxisType.Explicit)
    zero = jz.Zero(mesh)
    with jax.set_mesh(mesh):
        params = zero.init(lambda: {"w": jnp.ones((7, 4)), "b": jnp.zeros(4)})
        tx = zero.optimizer(optax.adam(1e-2))
        opt_state = zero.init_optimizer(tx, params)
        step = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"] + p["b"][None]) ** 2))
        batch = jax.device_put(_normal(24, 7), NamedSharding(mesh, zero.batch_spec))
        _, grads = step(params, batch)
        updates, opt_state = jax.jit(tx.update)(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        assert zero.unshard(params)["w"].shape == (7, 4)
        with jz.Checkpoints(tmp_path, zero) as checkpoints:
            checkpoints.save(1, {"params": params})
            restored = checkpoints.restore({"params": params}).state
        jax.tree.map(np.testing.assert_array_equal, restored["params"], params)


def test_gradients_keep_the_split_over_a_third_axis():
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    types = (AxisType.Auto,) * 3
    mesh = jax.sharding.Mesh(devices, ("node", "local", "tensor"), axis_types=types)
    zero = jz.Zero(mesh)
    params = zero.shard({"w": _normal(8, 16)}, specs=P(None, "tensor"))
    grads = zero.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2))(params, _normal(8, 8))
    assert grads[1]["w"].sharding == params["w"].sharding


def test_mistakes_in_arguments(zero):
    params = zero.shard({"w": _normal(8, 8)})
    batch = _normal(8, 8)

    def loss(p, x, **_):
        return jnp.mean(x @ p["w"])

    with pytest.raises(ValueError, match="names an argument twice"):
        zero.value_and_grad(loss, argnums=(0, -2))(params, batch)
    with pytest.raises(ValueError, match="16 rows.* 8"):
        zero.value_and_grad(loss)(params, {"kernel": batch, "bias": _normal(16)})
    with pytest.raises(ValueError, match=r"`in_specs\[1\]`.*lays out itself"):
        frozen = lambda p, q, x: jnp.mean(x @ p["w"] @ q["w"])  # noqa: E731
        zero.value_and_grad(frozen, in_specs=(None, P(), None))(params, params, batch)
    with pytest.raises(ValueError, match="concatenate the leaf `.`, but it is a scalar"):
        zero.apply(loss, out_reduce="concat")(params, batch)
    other_order = (None, P(("local", "node")))
    with pytest.raises(ValueError, match="out_reduce"):
        zero.apply(lambda p, x: x @ p["w"], in_specs=other_order)(params, batch)


def test_weights_that_a_loss_casts_to_float64_have_it_where_the_step_has_not(zero):
    def loss(p, x):
        with jax.enable_x64(True):
            # In float32 the argument, up to 1e7, would be rounded by up to half a radian.
            w = jnp.sin(p["w"].astype(jnp.float64) * 1e7).astype(jnp.float32)
        return jnp.mean(x @ w)

    params, x = {"w": _normal(8, 8)}, _normal(8, 8)
    _equal(zero, loss, params, x)
    evaluated = zero.apply(loss)(zero.shard(params), x)
    np.testing.assert_allclose(evaluated, jax.jit(loss)(params, x), rtol=1e-5)
