"""Losses that speak with other devices, each with the same formula on the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._case import AXES, affine, case, dense, normal, squared, tokens, vectors


def _towers(key):
    return {"left": dense(key, 0, 8, 6), "right": dense(key, 1, 5, 6), "heat": np.float32(2.0)}


def _embed(params, batch):
    left = affine(params["left"], batch["x"])
    right = affine(params["right"], batch["y"])
    left = left / jnp.linalg.norm(left, axis=-1, keepdims=True)
    return left * params["heat"], right / jnp.linalg.norm(right, axis=-1, keepdims=True)


def _picked(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def _contrastive_oracle(params, batch):
    left, right = _embed(params, batch)
    return _picked(left @ right.T, jnp.arange(left.shape[0], dtype=jnp.int32))


@case(_towers, vectors(8, 5), oracle=_contrastive_oracle)
def contrastive_with_gathered_negatives(params, batch):
    left, right = _embed(params, batch)
    everyone = lax.all_gather(right, AXES, tiled=True)
    labels = lax.axis_index(AXES) * left.shape[0] + jnp.arange(left.shape[0], dtype=jnp.int32)
    return _picked(left @ everyone.T, labels)


def _both_ways_oracle(params, batch):
    left, right = _embed(params, batch)
    labels = jnp.arange(left.shape[0], dtype=jnp.int32)
    logits = left @ right.T
    return (_picked(logits, labels) + _picked(logits.T, labels)) / 2


@case(_towers, vectors(8, 5), oracle=_both_ways_oracle)
def contrastive_whole_on_every_device(params, batch):
    everyone = jax.tree.map(lambda x: lax.all_gather(x, AXES, tiled=True), _embed(params, batch))
    logits = everyone[0] @ everyone[1].T
    labels = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return (_picked(logits, labels) + _picked(logits.T, labels)) / 2


def _masked(params, batch):
    ids = batch["tokens"]
    x = jnp.tanh(params["embed"][ids]) @ params["out"]
    mask = (ids > 2).astype(x.dtype)  # how many differs from device to device
    return jnp.sum(jnp.mean(x**2, -1) * mask), jnp.sum(mask)


def _masked_oracle(params, batch):
    total, count = _masked(params, batch)
    return total / count


def _table(key):
    return {"embed": normal(key, 0, 12, 8), "out": normal(key, 1, 8, 5)}


@case(_table, tokens(6, 12), oracle=_masked_oracle)
def mean_over_all_tokens_by_psum(params, batch):
    total, count = _masked(params, batch)
    return lax.psum(total, AXES) / lax.psum(count, AXES)


@case(_table, tokens(6, 12), oracle=_masked_oracle)
def mean_over_all_tokens_by_psum_of_counts(params, batch):
    total, count = _masked(params, batch)
    num_devices = lax.psum(1, AXES)
    return total * num_devices / lax.psum(lax.psum(count, "local"), "node")


def _mlp(key):
    return [dense(key, i, 8, 8) for i in range(3)]


def _batch_norm(x, mean):
    centre = mean(x.mean(0, keepdims=True))
    variance = mean(((x - centre) ** 2).mean(0, keepdims=True))
    return (x - centre) * lax.rsqrt(variance + 1e-3)


def _normalised(params, batch, mean, wrap=lambda f: f):
    x = batch["x"]
    for layer in params:
        x = wrap(lambda x, layer: jnp.tanh(_batch_norm(affine(layer, x), mean)))(x, layer)
    return squared(x, batch)


@case(_mlp, vectors(8, 8), oracle=lambda p, b: _normalised(p, b, lambda x: x))
def synchronised_batch_norm(params, batch):
    return _normalised(params, batch, lambda x: lax.pmean(x, AXES))


@case(_mlp, vectors(8, 8), oracle=lambda p, b: _normalised(p, b, lambda x: x))
def synchronised_batch_norm_with_remat(params, batch):
    return _normalised(params, batch, lambda x: lax.pmean(x, AXES), jax.checkpoint)


def _scanned_norm(params, batch, mean):
    def layer(x, w):
        return jnp.tanh(_batch_norm(x @ w, mean)), None

    return squared(lax.scan(layer, batch["x"], params)[0], batch)


@case(
    lambda key: normal(key, 0, 3, 6, 6),
    vectors(6, 6),
    oracle=lambda p, b: _scanned_norm(p, b, lambda x: x),
)
def synchronised_batch_norm_in_a_scan(params, batch):
    return _scanned_norm(params, batch, lambda x: lax.pmean(x, AXES))


def _centred(params, batch, mean):
    weights = jax.tree.map(mean, params)
    return squared(affine(weights[1], jnp.tanh(affine(weights[0], batch["x"]))), batch)


@case(_mlp, vectors(8, 8), oracle=lambda p, b: _centred(p, b, lambda w: w))
def pmean_of_weights_and_loss(params, batch):
    return lax.pmean(_centred(params, batch, lambda w: lax.pmean(w, AXES)), AXES)


def _ring_oracle(params, batch):
    # Every example meets the mean of all: what the ring adds up device by device.
    x = jnp.tanh(batch["x"] @ params)
    return jnp.mean((x * jnp.mean(x, 0, keepdims=True)) ** 2) + squared(x, batch)


@case(lambda key: normal(key, 0, 8, 6), vectors(8, 6), oracle=_ring_oracle)
def ring_of_ppermutes(params, batch):
    x = jnp.tanh(batch["x"] @ params)
    num_devices = lax.psum(1, AXES)
    ring = [(i, (i + 1) % num_devices) for i in range(num_devices)]
    passing = total = x.mean(0, keepdims=True)
    for _ in range(num_devices - 1):
        passing = lax.ppermute(passing, AXES, ring)
        total = total + passing
    return jnp.mean((x * total / num_devices) ** 2) + squared(x, batch)


def _exchange_oracle(params, batch):
    return squared(jnp.tanh(batch["x"] @ params["in"]) @ params["out"], batch)


@case(
    lambda key: {"in": normal(key, 0, 8, 24), "out": normal(key, 1, 24, 3)},
    vectors(8, 3),
    oracle=_exchange_oracle,
)
def features_exchanged_by_all_to_all(params, batch):
    """Each device applies tanh to a part of the features of all examples."""
    x = batch["x"] @ params["in"]
    exchange = functools.partial(lax.all_to_all, axis_name=AXES, tiled=True)
    x = jnp.tanh(exchange(x, split_axis=1, concat_axis=0))
    x = exchange(x, split_axis=0, concat_axis=1)
    return squared(x @ params["out"], batch)


def _scatter_oracle(params, batch):
    return jnp.sum(jnp.mean(jnp.tanh(batch["x"] @ params), 0) ** 2)


@case(lambda key: normal(key, 0, 8, 24), vectors(8, 1), oracle=_scatter_oracle)
def features_reduced_by_psum_scatter(params, batch):
    x = jnp.tanh(batch["x"] @ params).mean(0)
    mine = lax.psum_scatter(x, AXES, scatter_dimension=0, tiled=True) / lax.psum(1, AXES)
    return lax.psum(jnp.sum(mine**2), AXES)


def _statistics_oracle(params, batch):
    prediction = affine(params[0], batch["x"])
    aux = {"mean": prediction.mean(0), "norm": jnp.sqrt(jnp.mean(prediction**2))}
    return squared(prediction, batch) + aux["norm"], aux


@case(_mlp, vectors(8, 8), has_aux=True, oracle=_statistics_oracle)
def statistics_in_aux(params, batch):
    prediction = affine(params[0], batch["x"])
    norm = jnp.sqrt(lax.pmean(jnp.mean(prediction**2), AXES))
    aux = {"mean": lax.pmean(prediction.mean(0), AXES), "norm": norm}
    return squared(prediction, batch) + norm, aux


_SIGNS = np.asarray([1.0, -1.0], np.float32)


def _branch(params, batch, mean):
    score = lax.stop_gradient(mean(batch["x"].mean()))  # the same on every device
    sign = jnp.asarray(_SIGNS, batch["x"].dtype)

    def together(x):
        return mean(jnp.mean((x @ params) ** 2)) * sign[0]

    def apart(x):
        return jnp.mean(jnp.tanh(x @ params)) * sign[1]

    return lax.cond(score > -100, together, apart, batch["x"])


@case(
    lambda key: normal(key, 0, 8, 6), vectors(8, 6), oracle=lambda p, b: _branch(p, b, lambda x: x)
)
def collective_in_a_branch_that_all_take(params, batch):
    return _branch(params, batch, lambda x: lax.pmean(x, AXES))
