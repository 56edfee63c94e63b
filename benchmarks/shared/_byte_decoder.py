"""A small decoder over bytes in plain JAX.

Pre-norm transformer: RMSNorm, rotary positions, causal attention, squared ReLU (exact and cheap on
a CPU), tied embeddings. The layers are stacked and scanned, so that gathers and reductions run
inside the loop. A matrix of one layer has at least 2**14 elements, so that codecs encode it
(`min_quantized_size`).

Shapes: b rows, t positions, d width, h heads, k width of a head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The model: 1.02M parameters by default."""

    layers: int = 5
    width: int = 128
    heads: int = 4
    length: int = 48


def init(size: Size, key: jax.Array) -> dict[str, Any]:
    """Parameters in float32, those of all layers stacked on dim 0."""
    d = size.width
    into_residual = (2 * size.layers) ** -0.5  # so that the sum over layers keeps its size
    matrices = {  # name: (shape, deviation)
        "qkv": ((d, 3 * d), d**-0.5),
        "out": ((d, d), d**-0.5 * into_residual),
        "up": ((d, 4 * d), d**-0.5),
        "down": ((4 * d, d), (4 * d) ** -0.5 * into_residual),
    }
    embedding_key, *keys = jax.random.split(key, 1 + len(matrices))
    layers = {
        name: jax.random.normal(k, (size.layers, *shape)) * deviation
        for k, (name, (shape, deviation)) in zip(keys, matrices.items(), strict=True)
    }
    norms = {name: jnp.ones((size.layers, d)) for name in ("norm_attention", "norm_mlp")}
    return {
        "embedding": jax.random.normal(embedding_key, (VOCABULARY, d)) * 0.02,
        "layers": {**layers, **norms},
        "norm": jnp.ones(d),
    }


def logits(size: Size, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Scores of the next byte after each position: int `[b, t]` to float `[b, t, 256]`."""

    @functools.partial(jax.checkpoint, prevent_cse=False)  # inside a scan nothing would be merged
    def layer(x, p):
        x = x + _attention(size, _norm(x, p["norm_attention"]), p)
        return x + jnp.square(jax.nn.relu(_norm(x, p["norm_mlp"]) @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return _norm(x, params["norm"]) @ params["embedding"].T


def losses(size: Size, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Cross-entropy in nats of each next byte: int `[b, t + 1]` to float `[b, t]`."""
    log_probabilities = jax.nn.log_softmax(logits(size, params, tokens[:, :-1]))
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)[..., 0]


def _norm(x_btd, scale_d):
    mean_square = jnp.mean(x_btd * x_btd, -1, keepdims=True)
    return x_btd * jax.lax.rsqrt(mean_square + 1e-6) * scale_d[None, None]


def _attention(size: Size, x_btd, p):
    b, t, _ = x_btd.shape
    qkv = (x_btd @ p["qkv"]).reshape(b, t, 3, size.heads, -1)
    q_bthk, k_bthk, v_bthk = _rotate(qkv[:, :, 0]), _rotate(qkv[:, :, 1]), qkv[:, :, 2]
    scores = jnp.einsum("bqhk,bshk->bhqs", q_bthk, k_bthk) * q_bthk.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
    shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("bhqs,bshk->bqhk", shares, v_bthk)
    return mixed.reshape(x_btd.shape) @ p["out"]


def _rotate(x_bthk):
    """Turn pairs of features by angles that grow with the position (rotary embedding)."""
    t, half = x_bthk.shape[1], x_bthk.shape[3] // 2
    frequencies = 1e4 ** -(np.arange(half) / half)
    angles = np.arange(t)[:, None] * frequencies
    cos, sin = (jnp.asarray(f(angles)[None, :, None], x_bthk.dtype) for f in (np.cos, np.sin))
    a, b = x_bthk[..., :half], x_bthk[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
