"""`jax.jvp` and `jax.linearize` of sharded functions, against the same of one device.

With codecs the tangents are those of one device too, within the rounding of float32 sums in another
order: nothing that makes a tangent is encoded.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

ROUNDED = 1e-5  # of float32, relative to the norm of a leaf
INT8 = jz.PerAxis(node=jz.Int8(), local=jz.Int8())
INT4 = jz.PerAxis(node=jz.Int4(hadamard=32), local=jz.Int4(hadamard=32))
FLOAT8 = jz.PerAxis(node=jz.Float8(), local=jz.Float8())


def whole_params():
    key = jax.random.key(0)
    return {
        "layers": zoo.normal(key, 0, 3, 8, 24),
        "back": zoo.normal(key, 1, 3, 24, 8),
        "head": zoo.normal(key, 2, 8, 13),
        "bias": zoo.normal(key, 3, 13),  # no device count divides it
    }


def direction(params):
    return jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params
    )


X = zoo.normal(jax.random.key(1), 0, 16, 8, scale=1.0)


def predict(params, x, scale=1.0):
    def layer(h, weights):
        up, down = weights
        return h + jnp.tanh(h @ up) @ down, None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x * scale, (params["layers"], params["back"]))
    return h @ params["head"] + params["bias"][None]


def loss(params, x, scale=1.0):
    return jnp.mean(jax.nn.logsumexp(predict(params, x, scale), axis=-1) ** 2)


def in_bfloat16(params, x):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    return loss(half, x.astype(jnp.bfloat16), jnp.bfloat16(1)).astype(jnp.float32)


def make_zero(config, mesh="2x4-auto"):
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, min_quantized_size=8))


@pytest.fixture(scope="module")
def zeropp():
    return make_zero(jz.zeropp())


@pytest.fixture(scope="module")
def expected():
    """Loss and gradients of one device, differentiated along `direction`."""
    return derivative(jax.value_and_grad(loss), whole_params())


def derivative(step, params, x=X):
    return jax.jit(lambda p, v: jax.jvp(lambda p: step(p, x), (p,), (v,))[1])(
        params, direction(params)
    )


def sharded_derivative(zero, f, x=X, **options):
    step = zero.value_and_grad(f, **options)
    params, vector = zero.shard(whole_params()), zero.shard(direction(whole_params()))
    value, grads = jax.jit(lambda p, v: jax.jvp(lambda p: step(p, x), (p,), (v,))[1])(
        params, vector
    )
    return jax.device_get(value), jax.device_get(zero.unshard(grads))


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (jz.zeropp(), "2x4-explicit", {"microbatches": 2}),
        (jz.ZeroConfig(stage=2, gradients=INT4), "2x3-auto", {}),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (jz.zero3(weights=FLOAT8, gradients=INT8), "2x4-auto", {}),
                (jz.zero3(weights=INT8), "2x3-explicit", {"microbatches": 2}),
                (jz.zero3(gradients=INT4), "2x2x2-explicit", {}),
                (dataclasses.replace(jz.zero3(), hpz=jz.HpZ()), "2x4-auto", {}),
                (dataclasses.replace(jz.zero3(), split="local"), "2x4-explicit", {}),
                (jz.ddp(), "2x4-explicit", {}),
            )
        ),
    ],
)
def test_hessian_vector_products_are_those_of_one_device(config, mesh, options):
    x = X[:12] if mesh.startswith("2x3") else X
    want = derivative(jax.value_and_grad(loss), whole_params(), x)
    got = sharded_derivative(make_zero(config, mesh), loss, x, **options)
    zoo.assert_close(got, jax.device_get(want), ROUNDED, "tangents")


@pytest.mark.standard_promotion
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_cast_has_the_cast_of_the_tangent(stage, expected):
    """Compute in bfloat16 is as far from float32 as on one device."""
    got = sharded_derivative(
        jz.Zero(zoo.make_mesh("2x4-auto"), jz.ZeroConfig(stage=stage)), in_bfloat16
    )
    one = derivative(jax.value_and_grad(in_bfloat16), whole_params())
    for x, y, right in zip(*map(jax.tree.leaves, (got, one, expected)), strict=True):
        assert np.linalg.norm(x - right) <= 2 * np.linalg.norm(y - right) + 2**-8 * np.linalg.norm(
            right
        )


@pytest.mark.ci
def test_linearize_vmap_and_second_derivatives_along_a_scalar(zeropp):
    """The scalar is an argument, or closed over."""
    params = zeropp.shard(whole_params())

    def gradient(scale):
        return zeropp.value_and_grad(loss)(params, X, scale)[1]["bias"].data

    def closing(scale):
        return zeropp.value_and_grad(lambda p, x: loss(p, x, scale))(params, X)[1]["bias"].data

    def first(gradient, scale):
        return jax.jvp(gradient, (scale,), (1.0,))[1]

    @jax.jit
    def run(scale):
        tangent = jax.linearize(gradient, scale)[1]
        return (
            jax.vmap(tangent)(jnp.arange(3.0))[2],
            2 * first(closing, scale),
            jax.jvp(lambda scale: first(gradient, scale), (scale,), (2.0,))[1],
        )

    def on_one(scale):
        return jax.grad(loss)(whole_params(), X, scale)["bias"]

    want = 2 * first(on_one, 1.5)
    second = 2 * first(lambda scale: first(on_one, scale), 1.5)
    for got, right in zip(run(1.5), (want, want, second), strict=True):
        zoo.assert_close(jax.device_get(got[:13]), jax.device_get(right), 3 * ROUNDED, "tangent")


def test_arrays_of_a_rule_and_of_what_is_not_computed(zeropp):
    """Of arrays that a function closes over, a program may read none, or one twice."""
    table, unread = jnp.linspace(0.5, 1.5, 8)[:, None], jnp.ones(3)

    @jax.custom_jvp
    def scaled(x):
        return x * table

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * table))

    def closing(head):
        jnp.sum(unread * 2)
        return jnp.mean((X @ scaled(head)) ** 2)

    head = whole_params()["head"]
    want = jax.jvp(jax.grad(closing), (head,), (jnp.cos(head),))[1]
    params, vector = zeropp.shard(head), zeropp.shard(jnp.cos(head))
    step = zeropp.value_and_grad(lambda head, x: closing(head))
    got = zeropp.unshard(jax.jvp(lambda head: step(head, X)[1], (params,), (vector,))[1])
    zoo.assert_close(jax.device_get(got), jax.device_get(want), ROUNDED, "gradient")


def test_tangents_of_evaluation_and_of_aux(zeropp):
    def outputs(params, x):
        y = predict(params, x)
        return {"rows": y, "mean": y.mean(), "best": jnp.argmax(y, axis=-1)}

    params, vector = whole_params(), direction(whole_params())
    along = jax.jvp(lambda p: outputs(p, X), (params,), (vector,))[1]
    evaluate = zeropp.apply(
        outputs, out_reduce={"rows": "concat", "mean": "mean", "best": "concat"}
    )
    sharded = zeropp.shard(params), zeropp.shard(vector)
    got = jax.jit(lambda p, v: jax.jvp(lambda p: evaluate(p, X), (p,), (v,))[1])(*sharded)
    assert got["best"].dtype == jax.dtypes.float0
    for name in ("rows", "mean"):
        zoo.assert_close(jax.device_get(got[name]), jax.device_get(along[name]), ROUNDED, name)


@pytest.mark.standard_promotion
def test_tangents_of_an_update():
    zero, tx = make_zero(jz.zero3(weights=INT8)), optax.sgd(0.1, momentum=0.9)
    params, vector = zero.shard(whole_params()), zero.shard(direction(whole_params()))
    state, step = zero.init_optimizer(tx, params), zero.value_and_update(loss, tx)

    def on_one(params):
        grads = jax.grad(loss)(params, X)
        return optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])

    got = jax.jit(lambda p, v: jax.jvp(lambda p: step(p, state, X)[1], (p,), (v,))[1])(
        params, vector
    )
    want = jax.jvp(on_one, (whole_params(),), (direction(whole_params()),))[1]
    zoo.assert_close(jax.device_get(zero.unshard(got)), jax.device_get(want), ROUNDED, "update")


def test_what_has_no_tangents_is_refused(zeropp):
    params = zeropp.shard(whole_params())

    def refuses(step, message):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(lambda p: jax.jvp(step, (p,), (p,)), params)

    refuses(lambda p: zeropp.value_and_grad(loss, halves=True)(p, X)[1], "`halves=True`. Leave")

    def weighted(params, x):
        return loss(params, x), params["bias"].sum()

    step = zeropp.value_and_grad(weighted, weighted=True)
    refuses(lambda p: step(p, X)[1], "weight of `weighted=True`.*`jax.lax.stop_gradient`")


def test_the_plan_counts_what_tangents_send(zeropp):
    def node_bytes(plan):
        found = {}
        for x in plan.transfers:
            found[x.purpose] = found.get(x.purpose, 0) + x.node_bytes * x.trips
        return found

    params = zeropp.shard(whole_params())
    alone, along = (
        node_bytes(zeropp.plan(loss, params, X, **o)) for o in ({}, {"tangent_argnums": 0})
    )
    assert "tangents" not in alone
    assert along["weights"] == alone["weights"]
    # Once between nodes, as hpZ keeps slices: weights and their tangents in float32, half of each
    # device's quarter; and as many tangents of gradients as there are weights.
    num = sum(x.size for x in jax.tree.leaves(params))
    assert along["tangents"] >= 3 * 4 * num / 8
    plan = zeropp.plan(loss, params, X, tangent_argnums=0)
    assert "tangents" in str(zeropp.report(params, plan=plan))
    with pytest.raises(ValueError, match="`tangent_argnums`.*from 0 to 1; got .2,"):
        zeropp.plan(loss, params, X, tangent_argnums=2)
