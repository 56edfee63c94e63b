"""A Llama-like decoder of stacked, scanned layers, for programs that are only compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """By default Llama-7B (https://arxiv.org/abs/2302.13971, table 2)."""

    layers: int = 32
    width: int = 4096
    hidden: int = 11008
    heads: int = 32
    vocabulary: int = 32000


def init(size: LlamaSize, key: Array) -> Params:
    """Parameters in float32."""
    width, hidden, layers = size.width, size.hidden, size.layers
    shapes = {
        "query": (layers, width, width),
        "key": (layers, width, width),
        "value": (layers, width, width),
        "out": (layers, width, width),
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
    }
    keys = jax.random.split(key, len(shapes) + 2)
    stacks = {
        name: jax.random.normal(k, shape) * shape[1] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    norms = {name: jnp.ones((layers, width)) for name in ("norm1", "norm2")}
    return {
        "embedding": jax.random.normal(keys[-1], (size.vocabulary, width)) * 0.02,
        "layers": {**stacks, **norms},
        "norm": jnp.ones(width),
        "head": jax.random.normal(keys[-2], (width, size.vocabulary)) * width**-0.5,
    }


def num_parameters(size: LlamaSize) -> int:
    """How many numbers `init` makes."""
    tree = jax.eval_shape(lambda key: init(size, key), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def loss(size: LlamaSize, params: Params, tokens: Int[Array, "b t"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token; computed in bfloat16, layers rematerialised."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    x = params["embedding"][tokens]

    @jax.checkpoint
    def layer(x, weights):
        return _mlp(_attention(x, weights, size.heads), weights), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = _norm(x, params["norm"]) @ params["head"]
    log_probabilities = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    picked = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def _norm(x: Array, scale: Array) -> Array:
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-5).astype(x.dtype) * scale


def _attention(x: Array, weights: Params, heads: int) -> Array:
    y = _norm(x, weights["norm1"])
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    query, key, value = ((y @ weights[n]).reshape(split) for n in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return x + mixed.reshape(x.shape) @ weights["out"]


def _mlp(x: Array, weights: Params) -> Array:
    y = _norm(x, weights["norm2"])
    return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]
