"""Small models whose layers one scan runs through, of the kinds that a pipeline divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYERS, WIDTH, VOCABULARY, TOKENS, ROWS = 4, 8, 16, 4, 16
Params = dict[str, Any]


def params(seed: int = 0, dtype: Any = np.float32) -> Params:
    """An embedding, stacks of layers, a weight that all layers share, and a head."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / WIDTH**0.5).astype(dtype)

    return {
        "embed": draw(VOCABULARY, WIDTH),
        "layers": {
            "up": draw(LAYERS, WIDTH, 2 * WIDTH),
            "down": draw(LAYERS, 2 * WIDTH, WIDTH),
            "gain": 1 + draw(LAYERS, WIDTH),
            "scale": 1 + draw(LAYERS),
        },
        "shared": draw(WIDTH, WIDTH),
        "head": draw(WIDTH, VOCABULARY),
    }


def batch(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)
    return {
        "ids": rng.integers(0, VOCABULARY, shape, np.int32),
        "targets": rng.integers(0, VOCABULARY, shape, np.int32),
    }


def layer(x: jax.Array, w: Params) -> jax.Array:
    x = x * w["scale"]
    return x + jnp.tanh((x * w["gain"][None, None]) @ w["up"]) @ w["down"]


def cross_entropy(x: jax.Array, head: jax.Array, rows: Params) -> jax.Array:
    logp = jax.nn.log_softmax(x @ head)
    return -jnp.mean(jnp.take_along_axis(logp, rows["targets"][..., None], -1))


def _loss(
    body: Callable = layer,
    head: Callable = lambda p: p["head"],
    end: Callable = lambda x, start, p: x,
    extra: Callable = lambda p: 0.0,
) -> Callable:
    def loss(p: Params, rows: Params) -> jax.Array:
        start = p["embed"][rows["ids"]]
        x, _ = lax.scan(lambda x, w: (body(x, w), None), start, p["layers"])
        return cross_entropy(end(x, start, p), head(p), rows) + extra(p)

    return loss


def _end(p: Params, rows: Params) -> jax.Array:
    """The activations after the last layer."""
    start = p["embed"][rows["ids"]]
    return lax.scan(lambda x, w: (layer(x, w), None), start, p["layers"])[0]


def shares_a_weight(p: Params, rows: Params) -> jax.Array:
    """All layers read one more weight, whose gradient the backward loop sums up."""
    body = lambda x, w: layer(x, w) + jnp.tanh(x @ p["shared"])  # noqa: E731
    return _loss(body)(p, rows)


def loss_of_each_layer(p: Params, rows: Params) -> tuple[jax.Array, Any]:
    """The loss, and aux, read something of every layer."""

    def body(x: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
        x = layer(x, w)
        return x, jnp.mean(x**2)

    x, squares = lax.scan(jax.checkpoint(body), p["embed"][rows["ids"]], p["layers"])
    return cross_entropy(x, p["head"], rows) + 0.1 * jnp.mean(squares), {"squares": squares}


def decays_in_layers(p: Params, rows: Params) -> jax.Array:
    """The layers add to the loss without the head: their cotangents are constants."""

    def body(carry: Any, w: Params) -> tuple[Any, jax.Array]:
        x, total = carry
        x = layer(x, w)
        return (x, total + jnp.mean(x**2)), jnp.sum(w["up"] ** 2)

    start = p["embed"][rows["ids"]], jnp.zeros((), p["embed"].dtype)
    (x, total), squares = lax.scan(body, start, p["layers"])
    return cross_entropy(x, p["head"], rows) + 0.01 * total + 0.02 * jnp.sum(squares)


def sums_a_stack_by_layer(p: Params, rows: Params) -> jax.Array:
    """The gradient of `gain` is a cotangent that is known on all stages, and nothing else."""

    def body(x: jax.Array, w: Params) -> tuple[jax.Array, jax.Array]:
        return layer(x, w | {"gain": lax.stop_gradient(w["gain"])}), jnp.sum(w["gain"])

    x, sums = lax.scan(body, p["embed"][rows["ids"]], p["layers"])
    return cross_entropy(x, p["head"], rows) + 0.3 * jnp.sum(sums)


def indexes_layers(p: Params, rows: Params) -> jax.Array:
    """A loop that takes layer `i` out of the stacks."""
    take = lambda i: jax.tree.map(lambda w: w[i], p["layers"])  # noqa: E731
    x = lax.fori_loop(0, LAYERS, lambda i, x: layer(x, take(i)), p["embed"][rows["ids"]])
    return cross_entropy(x, p["head"], rows)


def _with_rule(change: Callable) -> Callable:
    """A layer whose rule of derivatives changes the cotangent of what it reads.

    What it adds is divided by the rows, as the cotangents of a mean over them are.
    """

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, cotangent: (change(cotangent),))
    return lambda x, w: layer(same(x), w)


def _filled(cotangent: jax.Array) -> jax.Array:
    """The last index is out of bounds, so it adds the fill value, which is no cotangent."""
    ids = jnp.arange(1, WIDTH + 1)
    return cotangent + cotangent.at[..., ids].get(mode="fill", fill_value=0.5 / len(cotangent))


def _behind_no_iteration(cotangent: jax.Array) -> jax.Array:
    """A loop that runs never returns what it began with, ones."""
    start = jnp.ones_like(cotangent) / len(cotangent)
    return cotangent + lax.fori_loop(0, 0, lambda i, x: 0 * cotangent, start)


LOSSES: dict[str, Callable] = {
    "untied": _loss(),
    "tied": _loss(head=lambda p: p["embed"].T),
    "remat": _loss(jax.checkpoint(layer)),
    "skip to the head": _loss(end=lambda x, start, p: x + start),
    "skip, tied": _loss(head=lambda p: p["embed"].T, end=lambda x, start, p: x + start),
    "product with the embedding": _loss(end=lambda x, start, p: x * start),
    "decay": _loss(extra=lambda p: jnp.sum(p["embed"] ** 2) + jnp.sum(p["layers"]["up"] ** 2)),
    "stacks changed as a whole": lambda p, rows: _loss()(
        {**p, "layers": jax.tree.map(lambda x: 0.5 * x, p["layers"])}, rows
    ),
    "shares a weight": shares_a_weight,
    "decays in layers": decays_in_layers,
    "sums a stack by layer": sums_a_stack_by_layer,
    "trains the head": lambda p, rows: cross_entropy(
        lax.stop_gradient(_end(p, rows)), p["head"], rows
    ),
    "trains the embedding": lambda p, rows: cross_entropy(
        _end(p | {"layers": lax.stop_gradient(p["layers"])}, rows), p["head"], rows
    ),
    "indexes layers": indexes_layers,
    # What the layers of a stage make of the zeros that it has before its first micro-batch is NaN.
    "divides by a norm": _loss(
        lambda x, w: layer(x, w) / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
    ),
    # Cotangents of zeros that are not zero.
    "fills a cotangent": _loss(_with_rule(_filled)),
    "adds what a loop began with": _loss(_with_rule(_behind_no_iteration)),
}
