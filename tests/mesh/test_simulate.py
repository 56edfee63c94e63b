"""A simulated mesh gives what a real one of the same shape gives: here, 8 fake devices.

Both run the same program. Where sums over devices are exact (integers), results are the same bit
for bit; where they round, they may be taken in another order, so float64 is compared to 1e-12. A
wire of 16 bits does not change that: what is rounded to it agrees to far more bits than it has.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType

import jaxzero as jz
from tests import zoo

from .both_meshes import assert_same, make_meshes

NARROW = jz.PerAxis(node=jz.Cast(jnp.bfloat16), local=jz.Cast(jnp.bfloat16))
CONFIGS = {
    "zero3": jz.zero3(),
    "narrow": jz.zero3(weights=NARROW, gradients=NARROW),
    "hsdp": jz.hsdp(gradients=NARROW),
    "stage2": jz.ZeroConfig(stage=2),
    "stage1": jz.ZeroConfig(stage=1, gradients=NARROW),
    "stage0": jz.ddp(),
    "zeropp": dataclasses.replace(jz.zeropp(), min_quantized_size=0),
    "memory": dataclasses.replace(
        jz.zeropp4(),
        gradients=jz.PerAxis(
            node=jz.ErrorFeedback(jz.Int4()), local=jz.Int8(rounding="stochastic")
        ),
        min_quantized_size=0,
    ),
}


def _memory(zero, params):
    """The keyword that a config with a memory needs."""
    needed = zero.config.needs_wire_state
    return {"wire_state": zero.init_wire_state(params)} if needed else {}


# Gradients.

_CASES = {
    "contrastive_with_gathered_negatives": "2x4",
    "mean_over_all_tokens_by_psum_of_counts": "1x8",
    "synchronised_batch_norm_in_a_scan": "2x3",
    "ring_of_ppermutes": "3x2",
    "features_exchanged_by_all_to_all": "2x4",
    "features_reduced_by_psum_scatter": "4x2",
    "statistics_in_aux": "8x1",
    "collective_in_a_branch_that_all_take": "2x4",
    "scanned_over_a_stack_on_dim_one": "2x4",  # shards change dims by an all-to-all
    "remat_in_scan_that_prevents_cse": "2x4",
    "spectral_norm_by_while_loop": "2x3",
    "mlp_of_odd_widths": "2x3",
}


def _case_results(name, mesh, config, **options):
    """Loss and gradients of a zoo case on the real and the simulated mesh, as stored."""
    case, results = zoo.CASES[name], []
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        to_float64 = functools.partial(
            jax.tree.map,
            lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype),
        )
        trees = to_float64(case.init(jax.random.key(0)))
        batch = to_float64(case.batch(jax.random.key(1), 48))
        for each in make_meshes(mesh):
            zero = jz.Zero(each, config)
            step = zero.value_and_grad(case.loss, case.argnums, has_aux=case.has_aux, **options)
            params = [zero.shard(tree) for tree in trees]
            results.append(jax.device_get(step(*params, batch, **_memory(zero, params[0]))))
    return results


@pytest.mark.parametrize("name", _CASES)
def test_gradients_equal_those_of_devices(name):
    assert_same(_case_results(name, _CASES[name], jz.zero3()), 1e-12)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.one_in(2)
def test_stages_and_codecs(config):
    mesh = ("2x4", "2x3")[list(CONFIGS).index(config) % 2]
    results = _case_results("scanned_layers", mesh, CONFIGS[config], microbatches=2)
    # Sums on the way are in float32 where the wire is narrow, but each device adds up by itself.
    assert_same(results, 1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_bits_are_the_same_where_sums_are_exact(config):
    """Gradients of a linear loss of integers; 16 bits on the wire round them, in the same way."""
    drawn = np.random.default_rng(0)
    whole = drawn.integers(-8, 8, (16, 5)).astype(np.float32) + np.float32(2**-12)
    rows = drawn.integers(-300, 300, (32, 16)).astype(np.float32)

    def loss(w, x):
        return jnp.mean(jnp.sum(x @ w, axis=1)) + jnp.sum(w)  # the second is alike on all devices

    results = []
    for each in make_meshes("2x4"):
        zero = jz.Zero(each, CONFIGS[config])
        params = zero.shard(whole)
        step = zero.value_and_grad(loss, microbatches=2)
        results.append(step(params, rows, **_memory(zero, params))[1:])
    assert_same(results)


def test_gradient_that_is_alike_on_all_devices():
    """An all-to-all of what does not depend on the batch; `vmap` by itself gets it wrong."""
    results = []
    for each in make_meshes("2x4"):
        zero = jz.Zero(each, CONFIGS["narrow"])
        params = zero.shard({"w": np.arange(40, dtype=np.float32).reshape(8, 5)})
        step = zero.value_and_grad(lambda p, x: jnp.sum(p["w"] ** 2) + 0 * jnp.sum(x))
        results.append(step(params, np.ones((8, 2), np.float32)))
    assert_same(results)


def test_more_devices_than_there_are():
    case = zoo.CASES["mlp"]
    (whole,), batch = case.init(jax.random.key(0)), case.batch(jax.random.key(1), 48)
    want = jax.jit(jax.value_and_grad(case.loss))(whole, batch)
    zero = jz.Zero(jz.make_mesh(2, simulate=24))
    loss, grads = zero.value_and_grad(case.loss)(zero.shard(whole), batch)
    zoo.assert_close(*jax.device_get(((loss, zero.unshard(grads)), want)), 1e-5, "grads")
    assert zero.report(zero.shard(whole)).num_devices == 24


def test_random_numbers_and_how_outputs_are_combined():
    def f(params, batch, key):
        key = jz.fold_in_device(key)
        noise = jax.random.normal(key, (3,))
        aux = {
            "mean": noise,
            "sum": jnp.int32(1) + lax.axis_index("local").astype(jnp.int32),
            "first": (key, noise),
            "stack": noise,
            "concat": batch[:, 0] * noise[0],
        }
        return jnp.mean(batch @ params) * noise[0], aux

    results = []
    for each in make_meshes("2x3"):
        zero = jz.Zero(each)
        step = zero.value_and_grad(
            f,
            has_aux=True,
            microbatches=2,
            aux_reduce={name: name for name in ("mean", "sum", "first", "stack", "concat")},
        )
        rows = np.arange(24, dtype=np.float32).reshape(12, 2)
        params = zero.shard(np.ones((2, 4), np.float32))
        (_, aux), _ = step(params, rows, jax.random.key(3))
        aux["first"] = (jax.random.key_data(aux["first"][0]), aux["first"][1])
        results.append(aux)
    mean, simulated = results[0].pop("mean"), results[1].pop("mean")
    np.testing.assert_allclose(mean, simulated, atol=6 * 2.0**-24)
    assert_same(results)
    assert len(np.unique(results[0]["stack"])) == 6 * 2 * 3


# Training, and everything else that a `Zero` does.


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("config", "mesh"), [("narrow", "2x3"), ("hsdp", "2x4"), ("stage1", "2x3")]
)
def test_two_steps_of_adam(config, mesh):
    results, stored = [], []
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        for each in make_meshes(mesh):
            zero = jz.Zero(each, CONFIGS[config])
            # Smooth for all gradients, so that no rounding error becomes a step.
            tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-2, eps=1e-2))
            params, states = _train(zero, tx)
            stored.append(params)
            results.append((zero.unshard(params), states))
    assert_same(results, 1e-11)
    real, simulated = (jax.tree.map(lambda x: (x.shape, x.sharding.spec), p) for p in stored)
    assert real == simulated
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(stored[1]))


def _train(zero, tx):
    def init(key):
        drawn = functools.partial(jax.random.normal, dtype=jnp.float64)
        return {"stack": 0.3 * drawn(key, (3, 16, 16)), "odd": 0.3 * drawn(key, (16, 7))}

    def loss(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        x, _ = lax.scan(layer, batch, params["stack"])
        return jnp.mean((x @ params["odd"]) ** 2)

    params = zero.init(init, jax.random.key(0))
    state = zero.init_optimizer(tx, params)
    batch = np.random.default_rng(0).normal(size=(48, 16))

    @functools.partial(jax.jit, out_shardings=(zero.shardings(params), zero.shardings(state)))
    def step(params, state, batch):
        _, grads = zero.value_and_grad(loss, microbatches=2)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state, batch)
    return params, state


@pytest.mark.standard_promotion
def test_layout_plan_and_checkpoint_are_those_of_the_mesh(tmp_path):
    def init():
        return {"w": jnp.arange(35.0).reshape(7, 5), "b": jnp.ones((12,)), "s": jnp.float32(1)}

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2) + params["s"] * jnp.sum(params["b"])

    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    said, states = [], []
    for each in make_meshes("2x3"):
        zero = jz.Zero(each)
        params = zero.init(init)
        opt_state = zero.init_optimizer(zero.optimizer(tx), params)
        report = zero.report(params, opt_state).as_dict()
        # Numbers of operations differ: JAX writes one more, of one number, for a mesh of devices.
        plan = re.sub(r"op \d+", "op", str(zero.plan(loss, params, np.ones((6, 7), np.float32))))
        said.append((repr(zero), report, plan, str(zero.shardings(params)["w"].data.spec)))
        states.append((zero, {"params": params, "opt_state": opt_state}))
    assert said[0] == said[1]
    (real, state), (simulated, like) = states
    with jz.Checkpoints(tmp_path, real) as checkpoints:
        checkpoints.save(1, state)
    with jz.Checkpoints(tmp_path, simulated) as checkpoints:
        restored = checkpoints.restore(jax.tree.map(jnp.zeros_like, like)).state
    assert_same([state, restored])


def test_user_code_places_a_batch_as_ever():
    zero = jz.Zero(jz.make_mesh(2, simulate=4, devices=jax.devices()[3:4]))
    params = zero.shard(np.ones((8, 4), np.float32))
    rows = jax.device_put(
        np.ones((8, 8), np.float32), jax.sharding.NamedSharding(zero.mesh, zero.batch_spec)
    )
    with jax.set_mesh(zero.mesh):
        loss, grads = zero.value_and_grad(lambda w, x: jnp.mean(x @ w))(params, rows)
    assert float(loss) == 8
    assert params.devices() == grads.devices() == {jax.devices()[3]}


def test_mistakes():
    with pytest.raises(ValueError, match="`nodes` must divide.*simulated devices, 8; got 3"):
        jz.make_mesh(3, simulate=8)
    with pytest.raises(ValueError, match="no explicit axes"):
        jz.make_mesh(2, simulate=8, axis_type=AxisType.Explicit)
    zero = jz.Zero(jz.make_mesh(2, simulate=8))
    with pytest.raises(ValueError, match=r"`x` \(argument 1\): dim 0 .*split over 8 devices"):
        params = zero.shard(np.ones((8,), np.float32))
        zero.value_and_grad(lambda w, x: jnp.sum(w) * jnp.mean(x))(params, np.ones((6, 1)))
    # A mesh of real devices still takes an ordered callback, which a simulated one refuses.
    real, heard = jz.Zero(jz.make_mesh(2)), []

    def loss(w, x):
        io_callback(heard.append, None, jnp.mean(x), ordered=True)
        return jnp.mean(w)

    jax.block_until_ready(real.apply(loss)(real.shard(np.ones((8,), np.float32)), np.ones((8, 1))))
    jax.effects_barrier()
    assert len(heard) == 8
