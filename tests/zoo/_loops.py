"""Layers in loops: unrolled over slices of a stack, scanned in every direction, nested."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._case import BFLOAT16, affine, case, normal, sequences, squared, vectors


def _stack(key, layers=8, width=6):
    """Eight layers, which eight devices divide, of a width that they do not."""
    return {
        "w": normal(key, 0, layers, width, width),
        "b": normal(key, 1, layers, width, scale=0.1),
    }


def _layer(x, layer):
    return jnp.tanh(affine(layer, x)), None


@case(_stack, vectors(6, 6))
def scanned_layers(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params)
    return squared(x, batch)


@case(lambda key: _stack(key, layers=3, width=8), vectors(8, 8))
def scanned_layers_of_divisible_width(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params)
    return squared(x, batch)


@case(lambda key: {**_stack(key), "gain": 1 + normal(key, 2, 8, scale=0.1)}, vectors(6, 6))
def scanned_layers_with_a_scalar_each(params, batch):
    def layer(x, p):
        return p["gain"] * jnp.tanh(affine(p, x)), None

    x, _ = lax.scan(layer, batch["x"], params)
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scanned_in_reverse(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params, reverse=True)
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scanned_twice(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params)
    x, _ = lax.scan(_layer, x, params)
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scanned_forth_and_back(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params)
    x, _ = lax.scan(_layer, x, params, reverse=True)
    return squared(x, batch)


@case(lambda key: _stack(key, layers=7), vectors(6, 6))
def scanned_with_unroll(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params, unroll=3)
    x, _ = lax.scan(_layer, x, params, unroll=True)
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scanned_with_split_transpose(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params, _split_transpose=True)
    return squared(x, batch)


@case(lambda key: _stack(key, layers=1), vectors(6, 6))
def scanned_once(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params)
    return squared(x, batch)


@case(lambda key: {"none": _stack(key, layers=0), "out": normal(key, 5, 6, 6)}, vectors(6, 6))
def scanned_never(params, batch):
    x, _ = lax.scan(_layer, batch["x"], params["none"])
    return squared(x @ params["out"], batch)


@case(lambda key: normal(key, 0, 6, 8, 6), vectors(6, 6))
def scanned_over_a_stack_on_dim_one(params, batch):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], jnp.moveaxis(params, 1, 0))
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scanned_over_slices_of_a_stack(params, batch):
    head, tail = jax.tree.map(lambda p: (p[:3], p[3:]), params), None
    x = batch["x"]
    for half in range(2):
        part = {name: head[name][half] for name in params}
        x, tail = lax.scan(_layer, x, part)
    x, _ = lax.scan(_layer, x, jax.tree.map(lambda p: p[::-2], params))
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scan_inside_scan(params, batch):
    groups = jax.tree.map(lambda p: p.reshape(2, 4, *p.shape[1:]), params)

    def group(x, stack):
        x, _ = lax.scan(_layer, x, stack)
        return 0.5 * x, None

    x, _ = lax.scan(group, batch["x"], groups)
    return squared(x, batch)


@case(lambda key: {"w": normal(key, 0, 2, 3, 8, 5), "v": normal(key, 1, 2, 5, 8)}, vectors(8, 8))
def scan_inside_scan_of_two_stacking_dims(params, batch):
    def outer(x, p):
        def inner(x, w):
            return jnp.tanh((x @ w) @ p["v"]), None

        return lax.scan(inner, x, p["w"])

    x, _ = lax.scan(outer, batch["x"], params)
    return squared(x, batch)


@case(_stack, sequences(3, 6, 6))
def scanned_over_time_inside_scanned_layers(params, batch):
    def layer(x, p):
        def step(h, x_t):
            h = jnp.tanh(x_t @ p["w"] + h @ p["w"].T + p["b"][None])
            return h, h

        _, hs = lax.scan(step, jnp.zeros_like(x[0]), x)
        return hs, None

    x, _ = lax.scan(layer, jnp.swapaxes(batch["x"], 0, 1), params)
    return squared(x[-1], batch)


@case(lambda key: {"w": normal(key, 0, 4, 6, 6)}, vectors(6, 6))
def stack_both_scanned_and_constant(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w + x @ params["w"].mean(0) + x @ params["w"][1]), None

    x, _ = lax.scan(layer, batch["x"], params["w"])
    return squared(x, batch)


@case(lambda key: {"w": normal(key, 0, 6, 6)}, vectors(6, 6))
def one_square_scanned_by_rows_and_constant(params, batch):
    def step(x, row):
        return jnp.tanh(x @ params["w"] + row[None]), None

    x, _ = lax.scan(step, batch["x"], params["w"])
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def scan_that_indexes_its_constants(params, batch):
    def layer(x, i):
        picked = jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, i, keepdims=False), params)
        return jnp.tanh(affine(picked, x)), None

    x, _ = lax.scan(layer, batch["x"], jnp.arange(8))
    return squared(x, batch)


@case(lambda key: normal(key, 0, 6, 6), vectors(6, 6))
def scan_of_a_length_only(params, batch):
    x, norms = lax.scan(lambda x, _: (jnp.tanh(x @ params), jnp.mean(x**2)), batch["x"], length=5)
    return squared(x, batch) + norms.sum()


@case(_stack, vectors(6, 6))
def scan_that_returns_weights_and_activations(params, batch):
    def layer(x, p):
        x = jnp.tanh(affine(p, x))
        return x, (p["w"], p["w"].sum(0), x)

    x, (same, sums, xs) = lax.scan(layer, batch["x"], params)
    penalty = jnp.sum(same**2 * params["w"]) + jnp.sum(jnp.sin(sums))
    return squared(x, batch) + 0.1 * penalty + jnp.mean(xs**2)


@case(lambda key: {"w": normal(key, 0, 6, 6), "rate": np.float32(0.1)}, vectors(6, 6))
def weights_carried_and_changed_in_a_scan(params, batch):
    def step(state, _):
        w, x = state
        x = jnp.tanh(x @ w)
        return (w * (1 - params["rate"]) + 0.1 * w.T, x), None

    (w, x), _ = lax.scan(step, (params["w"], batch["x"]), length=3)
    return squared(x @ w, batch)


@case(lambda key: normal(key, 0, 6, 6), vectors(6, 6))
def weights_carried_unchanged_in_a_scan(params, batch):
    def step(state, _):
        w, x = state
        return (w, jnp.tanh(x @ w)), None

    (_, x), _ = lax.scan(step, (params, batch["x"]), length=3)
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def unrolled_over_slices(params, batch):
    x = batch["x"]
    for i in range(8):
        x, _ = _layer(x, jax.tree.map(lambda p, i=i: p[i], params))
    return squared(x, batch)


@case(lambda key: _stack(key, layers=5), vectors(6, 6))
def unrolled_over_slices_in_disorder(params, batch):
    x = batch["x"]
    for i in (4, -1, 0, 2, 2):  # two layers twice, two never
        x, _ = _layer(x, jax.tree.map(lambda p, i=i: p[i], params))
    for w in jnp.unstack(params["w"][:2]):
        x = jnp.tanh(x @ w)
    return squared(x, batch)


@case(_stack, vectors(6, 6))
def unrolled_with_remat(params, batch):
    x = batch["x"]
    for i in range(8):
        layer = jax.tree.map(lambda p, i=i: p[i], params)
        x = jax.checkpoint(lambda x, p: _layer(x, p)[0])(x, layer)
    return squared(x, batch)


@case(_stack, vectors(6, 6), tolerance=BFLOAT16)
def scanned_with_casts_in_the_body(params, batch):
    def layer(x, p):
        p = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
        return jnp.tanh(affine(p, x.astype(jnp.bfloat16))).astype(jnp.float32), None

    x, _ = lax.scan(layer, batch["x"], params)
    return squared(x, batch)


@case(lambda key: normal(key, 0, 8, 6, 6), vectors(6, 6), tolerance=BFLOAT16)
def scanned_over_a_cast_and_turned_stack(params, batch):
    stack = jnp.swapaxes(params.astype(jnp.bfloat16), 1, 2)
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(jnp.float32)), None), batch["x"], stack)
    return squared(x, batch)


@case(
    lambda key: jax.tree.map(lambda p: p.astype(jnp.bfloat16), _stack(key)),
    vectors(6, 6),
    tolerance=BFLOAT16,
)
def scanned_stack_of_bfloat16(params, batch):
    x, _ = lax.scan(_layer, batch["x"].astype(jnp.bfloat16), params)
    return squared(x.astype(jnp.float32), batch)


@case(lambda key: _stack(key, layers=4), vectors(6, 6))
def fori_loop_over_layers(params, batch):
    def layer(i, x):
        return jnp.tanh(x @ params["w"][i] + params["b"][i][None])

    return squared(lax.fori_loop(0, 4, layer, batch["x"]), batch)


@case(lambda key: normal(key, 0, 6, 6), vectors(6, 6))
def fori_loop_with_constant_weights(params, batch):
    return squared(lax.fori_loop(1, 4, lambda i, x: jnp.tanh(x @ params), batch["x"]), batch)


@case(lambda key: normal(key, 0, 8, 6, 5), vectors(6, 5))
def mapped_over_experts(params, batch):
    outputs = lax.map(lambda w: jnp.tanh(batch["x"] @ w), params)
    again = lax.map(lambda w: jnp.sin(batch["x"] @ w), params, batch_size=4)
    return squared(outputs.mean(0) + again.sum(0), batch)


@case(lambda key: _stack(key, layers=4), vectors(6, 6))
def scanned_body_in_jit_and_partial(params, batch):
    @functools.partial(jax.jit, static_argnums=0)
    def layer(power, x, p):
        return jnp.tanh(affine(p, x)) ** power, None

    x, _ = lax.scan(functools.partial(layer, 1), batch["x"], params)
    return squared(x, batch)


@case(lambda key: {"a": _stack(key, 4), "b": _stack(jax.random.key(9), 4)}, vectors(6, 6))
def two_stacks_in_one_scan_one_stopped(params, batch):
    def layer(x, ps):
        a, b = ps
        x, _ = _layer(x, a)
        return _layer(x, lax.stop_gradient(b))

    x, _ = lax.scan(layer, batch["x"], (params["a"], params["b"]))
    return squared(x, batch)


@case(lambda key: _stack(key, layers=4), vectors(6, 6))
def vmap_of_a_scan(params, batch):
    def one(x):
        return lax.scan(_layer, x[None], params)[0][0]

    return squared(jax.vmap(one)(batch["x"]), batch)


@case(lambda key: _stack(key, layers=6), vectors(6, 6))
def scan_of_pairs_of_layers_unrolled_within(params, batch):
    pairs = jax.tree.map(lambda p: p.reshape(3, 2, *p.shape[1:]), params)

    def both(x, pair):
        for i in range(2):
            x, _ = _layer(x, jax.tree.map(lambda p, i=i: p[i], pair))
        return x, None

    x, _ = lax.scan(both, batch["x"], pairs)
    return squared(x, batch)
