"""Functions with their own derivatives: on weights, in scans, never differentiated."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ._case import affine, case, dense, normal, squared, vectors


@jax.custom_vjp
def _product(x, w):
    """x @ w, whose derivative for `w` is scaled by two and for `x` clipped."""
    return x @ w


def _product_forward(x, w):
    return x @ w, (x, w)


def _product_backward(saved, g):
    x, w = saved
    return jnp.clip(g @ w.T, -1, 1), 2 * (x.T @ g)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(activation, x, w):
    return activation(x @ w)


def _apply_forward(activation, x, w):
    y, pull = jax.vjp(lambda x, w: activation(x @ w), x, w)
    return y, pull


def _apply_backward(activation, pull, g):
    del activation
    return pull(g)


_apply.defvjp(_apply_forward, _apply_backward)


@jax.custom_jvp
def _swish(x):
    return x * jax.nn.sigmoid(x)


@_swish.defjvp
def _swish_tangent(primals, tangents):
    (x,), (dx,) = primals, tangents
    gate = jax.nn.sigmoid(x)
    return x * gate, (gate + x * gate * (1 - gate)) * dx


@jax.custom_vjp
def _scale_gradient(w, factor):
    return w


_scale_gradient.defvjp(lambda w, factor: (w, factor), lambda factor, g: (factor * g, None))


def _two(key):
    return {"a": normal(key, 0, 8, 8), "b": normal(key, 1, 8, 8)}


@case(_two, vectors(8, 8))
def custom_vjp_with_weights(params, batch):
    x = _product(batch["x"], params["a"])
    return squared(_apply(jnp.tanh, x, params["b"]), batch)


@case(lambda key: normal(key, 0, 8, 6, 6), vectors(6, 6))
def custom_vjp_in_a_scan(params, batch):
    def layer(x, w):
        return _apply(jnp.sin, _product(x, w), w.T), None

    x, _ = lax.scan(layer, batch["x"], params)
    return squared(x, batch)


@case(lambda key: normal(key, 0, 4, 6, 6), vectors(6, 6))
def custom_vjp_in_remat_in_a_scan(params, batch):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, w):
        return jnp.tanh(_product(x, w)), None

    x, _ = lax.scan(layer, batch["x"], params)
    return squared(x, batch)


@case(_two, vectors(8, 8))
def custom_vjp_that_scales_gradients_of_weights(params, batch):
    scaled = jax.tree.map(lambda w: _scale_gradient(w, 0.5), params)
    return squared(jnp.tanh(batch["x"] @ scaled["a"]) @ scaled["b"], batch)


@case(_two, vectors(8, 8))
def custom_jvp_on_weights_and_activations(params, batch):
    x = _swish(batch["x"] @ _swish(params["a"]))
    return squared(jax.nn.relu(jax.nn.gelu(x) @ params["b"]), batch)


@case(lambda key: [dense(key, i, 8, 8) for i in range(2)], vectors(8, 8))
def custom_rules_that_are_not_differentiated(params, batch):
    stopped = lax.stop_gradient(params[0]["w"])
    x = _swish(_product(lax.stop_gradient(batch["x"]), stopped)) + _swish(stopped)[:1]
    return squared(affine(params[1], x) @ params[0]["w"], batch)


@case(_two, vectors(8, 8))
def custom_gradient_over_a_closure(params, batch):
    def loss_of(x):
        @jax.custom_gradient
        def halved(w):
            return x @ w, lambda g: (x.T @ g) / 2

        return halved(params["a"]) @ params["b"]

    return squared(loss_of(batch["x"]), batch)


@case(_two, vectors(8, 8))
def custom_batching(params, batch):
    @jax.custom_batching.custom_vmap
    def rows(x, w):
        return x @ w

    @rows.def_vmap
    def rows_rule(axis_size, in_batched, x, w):
        del axis_size
        x = x if in_batched[0] else x[None]
        return x @ w, True

    x = jax.vmap(lambda x: rows(x, params["a"]))(lax.stop_gradient(batch["x"]))
    return squared(jnp.tanh(x) @ params["b"], batch)


@case(_two, vectors(8, 8))
def custom_vjp_inside_jit_inside_vmap(params, batch):
    layer = jax.jit(lambda x: jnp.tanh(_product(x[None], params["a"]))[0])
    return squared(jax.vmap(layer)(batch["x"]) @ params["b"], batch)
