"""`lax.cond` and `lax.switch` that all devices take alike: the branch gathers and reduces.

Which branch is taken follows from a counter, a constant or a replicated argument. Where devices
may differ, weights are gathered before the `cond`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from tests import zoo

LAYERS, WIDTH = 4, 24
LAYER = WIDTH * WIDTH * 4  # bytes


def _init(key):
    names = ("a", "b", "c")
    return ({name: zoo.normal(key, i, LAYERS, WIDTH, WIDTH) for i, name in enumerate(names)},)


def _scan(stack, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return lax.scan(jax.checkpoint(layer), x, stack)[0]


def _of_an_argument(p, x, which):
    """One of two models, by a replicated argument; the third is not in the `cond`."""

    @jax.checkpoint
    def both(p, x):
        return lax.cond(which > 0, lambda: _scan(p["a"], x), lambda: _scan(p["b"], x) * 2)

    return jnp.mean(_scan(p["c"], both(p, x)) ** 2)


def _of_a_counter(p, x, which):
    """Layers of three kinds."""
    kinds = [
        lambda x, p: jnp.tanh(x @ p["a"]),
        lambda x, p: x + jnp.tanh(x @ p["b"]) @ p["c"],
        lambda x, p: x - 0.1 * x @ p["c"].T,
    ]

    def body(x, scanned):
        i, p = scanned
        return jax.checkpoint(lambda x, p: lax.switch((i + which) % 3, kinds, x, p))(x, p), None

    return jnp.mean(lax.scan(body, x, (jnp.arange(LAYERS), p))[0] ** 2)


def _without_checkpoint(p, x, which):
    x = lax.cond(which > 0, lambda: _scan(p["a"], x), lambda: _scan(p["b"], _scan(p["a"], x)))
    return jnp.mean(lax.cond(which > 1, lambda: x, lambda: _scan(p["c"].mT, x)) ** 2)


def _of_a_random_number(p, x, which):
    coin = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), which))

    @jax.checkpoint
    def both(p, x):
        return lax.cond(coin, lambda: _scan(p["a"], x), lambda: _scan(p["b"], _scan(p["c"], x)))

    return jnp.mean(both(p, x) ** 2)


def _of_the_batch(p, x, which):
    @jax.checkpoint
    def both(p, x):
        is_first = (x[0, 0] > 0) & (which == 0)
        return lax.cond(is_first, lambda: _scan(p["a"], x), lambda: _scan(p["b"], x) * 2)

    return jnp.mean(_scan(p["c"], both(p, x)) ** 2)


def _sums(p, x, which):
    """Backward reads no weight."""

    def layer(x, p):
        def add(sign):
            return lambda: x + sign * sum(jnp.sum(w, 0, keepdims=True) for w in p.values())

        return lax.cond(which > 0, add(1.0), add(-2.0)), None

    return jnp.mean(lax.scan(layer, x, p)[0] ** 2)


def _zero(mesh, config=None):
    config = config or jz.zero3()
    schedule = dataclasses.replace(config.schedule, loop_constant_bytes=0)
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, schedule=schedule))


def _check(zero, loss, batch, *each):
    """For each `which`, by one program."""
    (tree,) = _init(jax.random.key(0))
    params = zero.shard(tree)
    step, oracle = jax.jit(zero.value_and_grad(loss)), jax.jit(jax.value_and_grad(loss))
    for which in each:
        with jax.default_matmul_precision("highest"):
            value, grads = step(params, batch, which)
            want, want_grads = jax.device_get(oracle(tree, batch, which))
        zoo.assert_close(jax.device_get(value), want, 1e-5, "loss")
        zoo.assert_close(jax.device_get(zero.unshard(grads)), want_grads, 1e-5, "grads")


def _narrow(p, x, which):
    """Weights are cast in a branch and outside, and would be saved as casts for backward."""
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    x = x.astype(jnp.bfloat16)
    cast = jnp.bfloat16
    x = lax.cond(which > 0, lambda: _scan(p["a"].astype(cast), x), lambda: _scan(half["b"], x) * 2)
    return jnp.mean(_scan(half["c"], x).astype(jnp.float32) ** 2)


CASES = [
    (_of_an_argument, "2x2-auto"),
    (_of_a_counter, "2x2-explicit"),
    (_without_checkpoint, "2x2-explicit"),
    (_of_a_random_number, "2x2-auto"),
]


@pytest.mark.parametrize(
    "loss", [_of_an_argument, _without_checkpoint, _of_a_random_number, _narrow]
)
@pytest.mark.one_in(3)
def test_a_device_holds_a_layer(loss):
    zero = _zero("2x2-auto")
    (tree,), which = _init(jax.random.key(0)), jnp.int32(0)
    params, batch = zero.shard(tree), jnp.ones((8, WIDTH))
    plan = zero.plan(loss, params, batch, which)
    assert not plan.held_whole
    assert max(step.num_bytes for step in plan.steps) <= LAYER
    if loss is not _without_checkpoint:  # which keeps activations of all layers
        text = jax.jit(zero.value_and_grad(loss)).lower(params, batch, which).compile().as_text()
        wide = zoo.hlo.floats_of_at_least(text, LAYERS * WIDTH * WIDTH)
        assert not wide, "\n".join(wide)


def test_gradients_are_reduced_in_the_branch_that_runs():
    zero, (tree,) = _zero("2x2-auto"), _init(jax.random.key(0))
    plan = zero.plan(_sums, zero.shard(tree), jnp.ones((8, WIDTH)), jnp.int32(0))
    paths = [step.path for step in plan.steps if step.action == "reduce"]
    assert {len(path) for path in paths} == {2}, str(plan)  # the loop, and in it a branch


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "mesh"), CASES)
@pytest.mark.one_in(3)
def test_results_are_those_of_one_device(loss, mesh):
    batch = zoo.normal(jax.random.key(1), 0, 8, WIDTH, scale=1.0)
    _check(_zero(mesh), loss, batch, jnp.int32(0), jnp.int32(1))


def test_quantized_gradients_are_within_the_codecs_error():
    case = zoo.Case(
        name="branches",
        loss=lambda p, x: _of_an_argument(p, x, jnp.int32(1)),
        init=_init,
        batch=lambda key, n: zoo.normal(key, 0, n, WIDTH, scale=1.0),
        oracle=lambda p, x: jnp.mean(_scan(p["c"], _scan(p["a"], x)) ** 2),
    )
    zoo.check_quantised(case, _zero("2x2-auto", zoo.PRESETS["zeropp"]))


def test_where_devices_may_differ_weights_are_gathered_before():
    zero = _zero("2x2-auto")
    rows = zoo.normal(jax.random.key(1), 0, 8, WIDTH, scale=1.0)
    batch = jnp.abs(rows) * jnp.array([1, 1, -1, -1, 1, 1, -1, -1.0])[:, None]

    def by_device(p, x, which):  # two rows each, of one sign: those of one device
        halves = x.reshape(-1, 2, WIDTH)
        return sum(_of_the_batch(p, half, which) for half in halves) / len(halves)

    (tree,) = _init(jax.random.key(0))
    params, which = zero.shard(tree), jnp.int32(0)
    value, grads = jax.jit(zero.value_and_grad(_of_the_batch))(params, batch, which)
    want, want_grads = jax.jit(jax.value_and_grad(by_device))(tree, batch, which)
    zoo.assert_close(jax.device_get(value), np.asarray(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")
    held = [str(x) for x in zero.plan(_of_the_batch, params, batch, which).held_whole]
    assert [x.split()[2] for x in held] == ["a", "b"]
    assert all("its end, and devices may take different branches, " in x for x in held)


def _large(key):
    return ({name: jnp.zeros((4, 2**13, 2**13)) for name in "abc"},)


@pytest.mark.parametrize(("rows", "is_inside"), [(4096, True), (16, False)])
def test_the_default_is_by_bytes_and_by_work(rows, is_inside):
    """2 GiB in two branches are gathered inside, if enough is computed there."""
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    (params,) = zero.abstract(_large, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4 * rows, 2**13), jnp.float32)
    plan = zero.plan(_of_an_argument, params, batch, jnp.int32(0))
    assert bool(plan.held_whole) != is_inside


def test_a_small_cond_stays_one_operation():
    (tree,) = _init(jax.random.key(0))
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    plan = zero.plan(_of_an_argument, zero.shard(tree), jnp.ones((8, WIDTH)), jnp.int32(0))
    held = [str(x) for x in plan.held_whole]
    assert held and all("`cond` reads it from its start to its end, /" in x for x in held)
