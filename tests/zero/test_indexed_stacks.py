"""Stacks that a loop indexes by its counter are scanned: a device holds a layer, not the stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from tests import zoo

LAYERS, WIDTH = 8, 24
MASK = np.tril(np.ones((WIDTH, WIDTH), np.float32))


def _layer(x, w):
    return jnp.tanh(x @ w)


def _mean(x):
    return jnp.mean(x**2)


def _over_arange(p, x):
    def body(x, i):
        one = jax.tree.map(lambda w: w[i], p)
        return _layer(x, one["w"]) + one["gain"], None

    return _mean(lax.scan(body, x, jnp.arange(LAYERS))[0])


def _fori_loop(p, x):
    def body(i, x):
        return _layer(x, lax.dynamic_index_in_dim(p["w"], i, keepdims=False))

    return _mean(lax.fori_loop(0, LAYERS, jax.checkpoint(body), x))


def _take(p, x):
    def body(x, i):
        return _layer(x, jnp.take(p["w"], i, axis=0)), None

    return _mean(lax.scan(jax.checkpoint(body), x, jnp.arange(LAYERS), reverse=True)[0])


def _last_layer_first(p, x):
    return _mean(lax.fori_loop(0, LAYERS, lambda i, x: _layer(x, p["w"][LAYERS - 1 - i]), x))


def _without_the_first(p, x):
    return _mean(lax.fori_loop(1, LAYERS, lambda i, x: _layer(x, p["w"][i]), x))


def _counted_from_the_end(p, x):
    return _mean(lax.scan(lambda x, i: (_layer(x, p["w"][-i - 1]), None), x, np.arange(6))[0])


def _with_the_next(p, x):
    def body(x, i):
        return _layer(x, p["w"][i]) + _layer(x, p["w"][i + 1]), None

    return _mean(lax.scan(body, x, jnp.arange(LAYERS - 1))[0])


def _twice(p, x):
    def body(x, i):
        return _layer(_layer(x, p["w"][i]), p["w"][i].T), None

    return _mean(lax.scan(body, x, jnp.arange(LAYERS))[0])


def _columns(p, x):
    def body(x, i):
        return x + jnp.pad(_layer(x, p["w"][i, :, 4:12]), ((0, 0), (0, WIDTH - 8))), None

    return _mean(lax.scan(body, x, jnp.arange(LAYERS))[0])


def _transposed_first(p, x):
    def body(x, i):
        return _layer(x, p["w"].transpose(0, 2, 1)[i]), None

    return _mean(lax.scan(body, x, jnp.arange(LAYERS))[0])


def _masked(p, x):
    masked = p["w"] * MASK[None]
    return _mean(lax.scan(lambda x, i: (_layer(x, masked[i]), None), x, jnp.arange(LAYERS))[0])


def _counted_in_the_carry(p, x):
    def body(carry, _):
        x, i, two = carry
        return (_layer(x, p["w"][i]), two - i, two + 2), None

    carry = x, jnp.int32(0), jnp.int32(1)
    return _mean(lax.scan(body, carry, length=LAYERS)[0][0])


def _in_a_loop_over_rows(p, x):
    def layer(i, x):
        return _layer(_layer(_layer(x, p["w"][i]), p["u"][i]), p["v"][i])

    def one(total, row):
        return total + _mean(lax.fori_loop(0, LAYERS, layer, row)), None

    rows = x.reshape(-1, 1, WIDTH)
    return lax.scan(one, 0.0, rows)[0] / len(rows)


def _init(key):
    shapes = {"w": (LAYERS, WIDTH, WIDTH), "gain": (LAYERS, 1, WIDTH)}
    shapes |= dict.fromkeys("uv", (LAYERS, WIDTH, WIDTH))
    return ({name: zoo.normal(key, i, *shape) for i, (name, shape) in enumerate(shapes.items())},)


def _case(loss):
    return zoo.Case(
        name=loss.__name__,
        loss=loss,
        init=_init,
        batch=lambda key, n: zoo.normal(key, 0, n, WIDTH, scale=1.0),
        oracle=loss,
    )


CASES = [
    (_over_arange, "2x2-auto"),
    (_over_arange, "2x2-explicit"),
    (_fori_loop, "2x2-explicit"),
    (_take, "2x2-auto"),
    (_last_layer_first, "2x4-auto"),
    (_without_the_first, "2x2-auto"),
    (_counted_from_the_end, "2x2-explicit"),
    (_with_the_next, "2x2-auto"),
    (_twice, "2x2-auto"),
    (_columns, "2x2-auto"),
    (_transposed_first, "2x2-auto"),
    (_masked, "2x2-explicit"),
    (_counted_in_the_carry, "2x2-auto"),
    (_in_a_loop_over_rows, "2x2-auto"),
]


def _zero(mesh, config=None):
    """With weights gathered inside of loops that close over them."""
    config = config or jz.zero3()
    schedule = dataclasses.replace(config.schedule, loop_constant_bytes=0)
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, schedule=schedule))


@pytest.mark.parametrize(("loss", "mesh"), CASES)
@pytest.mark.one_in(2)
def test_a_device_holds_a_layer_and_results_are_those_of_one_device(loss, mesh):
    zero = _zero(mesh)
    (tree,), batch = zoo.arguments(_case(loss), "float32")
    params = zero.shard(tree)
    plan = zero.plan(loss, params, batch)
    assert not plan.held_whole
    assert max(step.num_bytes for step in plan.steps) <= WIDTH * WIDTH * 4
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(zero.value_and_grad(loss)).lower(params, batch).compile()
        value, grads = compiled(params, batch)
        want, want_grads = jax.jit(jax.value_and_grad(loss))(tree, batch)
    wide = zoo.hlo.floats_of_at_least(compiled.as_text(), 4 * WIDTH * WIDTH)
    assert not wide, "\n".join(wide)
    zoo.assert_close(jax.device_get(value), np.asarray(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")


@pytest.mark.parametrize("preset", ["zeropp", "zeropp4"])
@pytest.mark.one_in(2)
def test_quantized_gradients_are_within_the_codecs_error(preset):
    zoo.check_quantised(_case(_over_arange), _zero("2x2-auto", zoo.PRESETS[preset]))


def _clamped(p, x):
    def body(i, x):
        return _layer(x, lax.dynamic_index_in_dim(p["w"], i + 1, keepdims=False))

    return _mean(lax.fori_loop(0, LAYERS, body, x))  # the last layer twice


def _of_the_batch(p, x):
    rows = jnp.argsort(x[0, :LAYERS])
    return _mean(lax.scan(lambda x, i: (_layer(x, p["w"][i]), None), x, rows)[0])


def _by_columns(p, x):
    order = jnp.arange(LAYERS).reshape(2, LAYERS // 2).reshape(-1, order="F")  # 0, 4, 1, 5, ...
    return _mean(lax.scan(lambda x, i: (_layer(x, p["w"][i]), None), x, order)[0])


def _used_as_a_whole_too(p, x):
    def body(x, i):
        return _layer(x, p["w"][i]) + jnp.sum(jnp.sort(p["w"], axis=0)[0]), None

    return _mean(lax.scan(body, x, jnp.arange(LAYERS))[0])


@pytest.mark.parametrize("loss", [_clamped, _of_the_batch, _by_columns, _used_as_a_whole_too])
def test_other_stacks_are_held_whole_and_results_are_right(loss):
    (tree,), batch = zoo.arguments(_case(loss), "float32")
    batch = jnp.broadcast_to(batch[:1], batch.shape)  # equal rows: a device takes its own first
    zero = _zero("2x2-auto")
    params = zero.shard(tree)
    (held, *_) = zero.plan(loss, params, batch).held_whole
    assert held.name == "w"
    with jax.default_matmul_precision("highest"):
        value, grads = jax.jit(zero.value_and_grad(loss))(params, batch)
        want, want_grads = jax.jit(jax.value_and_grad(loss))(tree, batch)
    zoo.assert_close(jax.device_get(value), np.asarray(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")
