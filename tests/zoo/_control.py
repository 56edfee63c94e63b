"""Branches, jit, vmapped ensembles, mixtures of experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._case import affine, case, dense, normal, squared, vectors


def _two(key):
    return [dense(key, i, 8, 8) for i in range(2)]


def _experts(key):
    return {
        "router": normal(key, 0, 8, 4),
        "in": normal(key, 1, 4, 8, 6),
        "out": normal(key, 2, 4, 6, 8),
    }


@case(_two, vectors(8, 8))
def cond_on_data_of_one_example(params, batch):
    def one(x):
        # Under vmap a cond becomes a select; under map it stays a branch.
        return lax.cond(
            x[0] > 0, lambda: x @ params[0]["w"], lambda: jnp.tanh(affine(params[1], x[None]))[0]
        )

    selected = jax.vmap(one)(batch["x"])
    branched = lax.map(one, batch["x"])
    return squared(selected + branched, batch)


@case(_two, vectors(8, 8))
def cond_on_weights_with_operands(params, batch):
    def left(p, x):
        return jnp.tanh(affine(p[0], x))

    def right(p, x):
        return affine(p[1], x) @ p[0]["w"]

    x = lax.cond(params[0]["w"].sum() > params[1]["w"].sum(), left, right, params, batch["x"])
    return squared(lax.cond(True, left, right, params, x), batch)


@case(lambda key: normal(key, 0, 4, 6, 6), vectors(6, 6))
def switch_in_a_scan(params, batch):
    branches = [lambda x, w: jnp.tanh(x @ w), lambda x, w: x @ w.T, lambda x, w: x + w[0][None]]

    def layer(x, scanned):
        i, w = scanned
        return lax.switch(i % 3, branches, x, w), None

    x, _ = lax.scan(layer, batch["x"], (jnp.arange(4), params))
    return squared(x, batch)


@case(lambda key: normal(key, 0, 3, 6, 6), vectors(6, 6))
def switch_that_picks_weights(params, batch):
    def layer(i, x):
        w = lax.switch(i, [lambda: params[0], lambda: params[1].T, lambda: params[2] * 2.0])
        return jnp.tanh(x @ w)

    x = lax.fori_loop(0, 3, layer, batch["x"])
    return squared(x, batch)


@case(lambda key: normal(key, 0, 4, 6, 6), vectors(6, 6))
def cond_inside_remat_inside_scan(params, batch):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, scanned):
        i, w = scanned
        return lax.cond(i % 2 == 0, lambda: jnp.tanh(x @ w), lambda: jnp.sin(x @ w.T)), None

    x, _ = lax.scan(layer, batch["x"], (jnp.arange(4), params))
    return squared(x, batch)


@case(lambda key: [dense(key, i, 8, 8) for i in range(2)], vectors(8, 8))
def where_picks_one_of_two_weights(params, batch):
    mask = (jnp.arange(8) < 3)[:, None]
    return squared(batch["x"] @ jnp.where(mask, params[0]["w"], params[1]["w"]), batch)


@case(_two, vectors(8, 8))
def jit_called_with_two_weights(params, batch):
    layer = jax.jit(lambda p, x: jnp.tanh(affine(p, x)))
    return squared(layer(params[1], layer(params[0], layer(params[1], batch["x"]))), batch)


@case(_two, vectors(8, 8))
def jit_over_a_closure_that_returns_weights(params, batch):
    @jax.jit
    def pick(x):
        return params[0]["w"], params[1]["w"].T, jnp.tanh(x @ params[0]["w"])

    w, v, x = pick(batch["x"])
    return squared(x @ w @ v, batch)


@case(_two, vectors(8, 8))
def jit_inlined_and_jit_of_the_loss(params, batch):
    @functools.partial(jax.jit, inline=True)
    def layer(p, x):
        return jnp.tanh(affine(p, x))

    @jax.jit
    def whole(params, batch):
        return squared(layer(params[1], layer(params[0], batch["x"])), batch)

    return whole(params, batch)


@case(
    lambda key: jax.tree.map(lambda *p: np.stack(p), *[dense(key, i, 8, 5) for i in range(3)]),
    vectors(8, 5),
)
def vmapped_ensemble(params, batch):
    predict = jax.vmap(lambda p, x: jnp.tanh(affine(p, x)), in_axes=(0, None))
    return squared(predict(params, batch["x"]).mean(0), batch)


@case(lambda key: {"w": normal(key, 0, 8, 6, 6), "v": normal(key, 1, 6, 8, 6)}, vectors(6, 6))
def vmapped_ensemble_on_two_dims(params, batch):
    def member(w, v, x):
        return jnp.tanh(x @ w) @ v

    outputs = jax.vmap(member, in_axes=(0, 1, None), out_axes=2)(
        params["w"], params["v"], batch["x"]
    )
    return squared(outputs.sum(-1), batch)


@case(_experts, vectors(8, 8))
def experts_gathered_by_index(params, batch):
    gates = jax.nn.softmax(batch["x"] @ params["router"])
    chosen = jnp.argmax(gates, axis=-1)
    hidden = jnp.tanh(jnp.einsum("nd,ndf->nf", batch["x"], params["in"][chosen]))
    output = jnp.einsum("nf,nfd->nd", hidden, params["out"][chosen])
    return squared(output * jnp.max(gates, axis=-1, keepdims=True), batch)


@case(_experts, vectors(8, 8))
def experts_by_scatter_and_gather(params, batch):
    n = batch["x"].shape[0]
    gates, chosen = lax.top_k(jax.nn.softmax(batch["x"] @ params["router"]), 2)
    example = jnp.broadcast_to(jnp.arange(n)[:, None], chosen.shape)
    slots = jnp.zeros((4, n, 8), batch["x"].dtype)
    slots = slots.at[chosen, example].add(gates[..., None] * batch["x"][:, None])
    hidden = jnp.tanh(jnp.einsum("end,edf->enf", slots, params["in"]))
    outputs = jnp.einsum("enf,efd->end", hidden, params["out"])
    return squared(outputs[chosen, example].sum(1), batch)


@case(
    lambda key: jax.tree.map(
        lambda *p: np.stack(p), *[_experts(k) for k in jax.random.split(key, 3)]
    ),
    vectors(8, 8),
)
def experts_in_a_scan_with_remat(params, batch):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, p):
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jnp.argmax(gates, axis=-1)
        hidden = jnp.tanh(jnp.einsum("nd,ndf->nf", x, p["in"][chosen]))
        output = jnp.einsum("nf,nfd->nd", hidden, p["out"][chosen])
        return x + output * jnp.max(gates, axis=-1, keepdims=True), None

    x, _ = lax.scan(layer, batch["x"], params)
    return squared(x, batch)
