"""Plain models of sequences: a decoder with tied embeddings, recurrent nets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._case import case, cross_entropy, normal, sequences, squared, tokens

VOCABULARY, WIDTH, LENGTH, LAYERS = 12, 8, 5, 2


def _block(key):
    return {
        "norm": np.ones((WIDTH,), np.float32),
        "qkv": normal(key, 0, WIDTH, 3, 2, WIDTH // 2, scale=WIDTH**-0.5),
        "out": normal(key, 1, 2, WIDTH // 2, WIDTH, scale=WIDTH**-0.5),
        "up": normal(key, 2, WIDTH, 3 * WIDTH),
        "down": normal(key, 3, 3 * WIDTH, WIDTH),
    }


def _decoder(key, stacked):
    keys = jax.random.split(key, LAYERS + 1)
    blocks = [_block(k) for k in keys[1:]]
    return {
        "embed": normal(keys[0], 0, VOCABULARY, WIDTH, scale=0.5),
        "position": normal(keys[0], 1, LENGTH - 1, WIDTH, scale=0.1),
        "blocks": jax.tree.map(lambda *p: np.stack(p), *blocks) if stacked else blocks,
        "norm": np.ones((WIDTH,), np.float32),
    }


def _rms_norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale[None, None]


def _attend(p, x):
    q, k, v = jnp.einsum("ntd,dihe->inthe", x, p["qkv"])
    scores = jnp.einsum("nthe,nshe->nhts", q, k) / 2.0
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("nhts,nshe,hed->ntd", weights, v, p["out"])


def _apply_block(x, p):
    x = x + _attend(p, _rms_norm(x, p["norm"]))
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def _tied(params, batch, apply_blocks):
    known, following = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    x = params["embed"][known] + params["position"][None]
    x = _rms_norm(apply_blocks(x, params["blocks"]), params["norm"])
    return cross_entropy(x @ params["embed"].T, following)


@case(lambda key: _decoder(key, stacked=False), tokens(LENGTH, VOCABULARY))
def decoder_in_a_loop(params, batch):
    def blocks(x, layers):
        for layer in layers:
            x = _apply_block(x, layer)
        return x

    return _tied(params, batch, blocks)


@case(lambda key: _decoder(key, stacked=False), tokens(LENGTH, VOCABULARY))
def decoder_in_a_loop_with_remat(params, batch):
    def blocks(x, layers):
        for layer in layers:
            x = jax.checkpoint(_apply_block)(x, layer)
        return x

    return _tied(params, batch, blocks)


@case(lambda key: _decoder(key, stacked=True), tokens(LENGTH, VOCABULARY))
def decoder_in_a_scan_with_remat(params, batch):
    @functools.partial(
        jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable
    )
    def body(x, layer):
        return _apply_block(x, layer), None

    return _tied(params, batch, lambda x, layers: lax.scan(body, x, layers)[0])


def _recurrent(key):
    return {
        "in": normal(key, 0, 5, 24),
        "hidden": normal(key, 1, 8, 24),
        "bias": normal(key, 2, 24, scale=0.1),
        "out": normal(key, 3, 8, 3),
    }


def _gru(params, h, x):
    given = x @ params["in"] + params["bias"][None]
    before = h @ params["hidden"]
    reset, update = jnp.split(jax.nn.sigmoid(given[:, :16] + before[:, :16]), 2, axis=-1)
    new = jnp.tanh(given[:, 16:] + reset * before[:, 16:])
    return update * h + (1 - update) * new


@case(_recurrent, sequences(6, 5, 3))
def recurrent_over_time(params, batch):
    def step(h, x):
        h = _gru(params, h, x)
        return h, h

    start = jnp.zeros((batch["x"].shape[0], 8), batch["x"].dtype)
    h, hs = lax.scan(step, start, jnp.swapaxes(batch["x"], 0, 1))
    return squared((h + hs.mean(0)) @ params["out"], batch)


@case(lambda key: [_recurrent(k) for k in jax.random.split(key)], sequences(5, 5, 3))
def recurrent_in_both_directions_with_remat(params, batch):
    total = 0.0
    for p, reverse in zip(params, (False, True), strict=True):
        step = jax.checkpoint(lambda h, x, p=p: (_gru(p, h, x), None), prevent_cse=False)
        start = jnp.zeros((batch["x"].shape[0], 8), batch["x"].dtype)
        h, _ = lax.scan(step, start, jnp.swapaxes(batch["x"], 0, 1), reverse=reverse)
        total = total + h @ p["out"]
    return squared(total, batch)
