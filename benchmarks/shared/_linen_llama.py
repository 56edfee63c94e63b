"""A Llama in plain Flax Linen, as many users write one, for programs that are only compiled.

Separate projections, `nn.scan` over layers with `nn.remat`, attention of `jax.nn`, computed in
bfloat16. Beside `_llama`, whose parameters are cast before the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._llama import LlamaSize

Constrain = Callable[[Array], Array]


class _Layer(nn.Module):
    size: LlamaSize
    constrain: Constrain

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        size, dense = self.size, functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        y, heads = nn.RMSNorm(dtype=jnp.bfloat16)(x), (size.heads, size.width // size.heads)
        query, key, value = (
            dense(size.width, name=name)(y).reshape(*x.shape[:2], *heads)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(size.width, name="out")(mixed.reshape(x.shape))
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        gate, up = (dense(size.hidden, name=name)(y) for name in ("gate", "up"))
        return self.constrain(x + dense(size.width, name="down")(nn.silu(gate) * up)), None


class _Llama(nn.Module):
    size: LlamaSize
    constrain: Constrain

    @nn.compact
    def __call__(self, ids: Array) -> Array:
        size = self.size
        x = self.constrain(nn.Embed(size.vocabulary, size.width, dtype=jnp.bfloat16)(ids))
        layers = nn.scan(
            nn.remat(_Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=size.layers,
        )
        x, _ = layers(size, self.constrain)(x, None)
        x = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return self.constrain(nn.Dense(size.vocabulary, use_bias=False, dtype=jnp.bfloat16)(x))


def init(size: LlamaSize, key: Array) -> Any:
    """Parameters in float32; those of layers are stacked."""
    return _Llama(size, lambda x: x).init(key, jnp.zeros((1, 8), jnp.int32))


def loss(
    size: LlamaSize, params: Any, tokens: Int[Array, "b t"], constrain: Constrain = lambda x: x
) -> Float[Array, ""]:
    """Mean cross-entropy of the next token; the arguments are those of `_llama.loss`."""
    logits: Any = _Llama(size, constrain).apply(params, tokens)
    log_probabilities = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    picked = jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)
