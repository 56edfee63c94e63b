"""GPT-2, T5 and CLIP in Flax Linen, for programs that are only compiled.

Computed in bfloat16. `constrain` is called on the activations after every layer and on logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._llama import POLICIES, Policy

Constrain = Callable[[Array], Array]
_HEAD = 64  # width of a head in all three


class _Layer(nn.Module):
    """Attention, attention to `memory` if there is one, and an MLP, each after a norm."""

    hidden: int
    causal: bool = False
    bias: bool = True  # T5 has no biases, and its norm only scales
    constrain: Constrain = lambda x: x

    @nn.compact
    def __call__(self, x: Array, memory: Array | None = None) -> tuple[Array, None]:
        dense = functools.partial(nn.Dense, use_bias=self.bias, dtype=jnp.bfloat16)
        norm = functools.partial(nn.LayerNorm if self.bias else nn.RMSNorm, dtype=jnp.bfloat16)
        width = x.shape[-1]

        def attend(y: Array, source: Array, causal: bool) -> Array:
            heads = (width // _HEAD, _HEAD)
            query = dense(width)(y).reshape(*y.shape[:2], *heads)
            key, value = (dense(width)(source).reshape(*source.shape[:2], *heads) for _ in "kv")
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=causal)
            return dense(width)(mixed.reshape(y.shape))

        y = norm()(x)
        x = x + attend(y, y, self.causal)
        if memory is not None:
            x = x + attend(norm()(x), memory, False)
        return self.constrain(x + dense(width)(nn.gelu(dense(self.hidden)(norm()(x))))), None


def _scanned(layers: int, **settings: Any) -> nn.Module:
    """A stack of layers, rematerialised, in a loop."""
    memory: Any = nn.broadcast  # the same for all
    stack = nn.scan(
        nn.remat(_Layer, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=memory,
        length=layers,
    )
    return stack(**settings)


def _cross_entropy(logits: Array, labels: Int[Array, "b t"]) -> Float[Array, ""]:
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1))


class GPT2(nn.Module):
    """By default GPT-2 124M (Radford et al. 2019), its layers unrolled, its embedding tied."""

    layers: int = 12
    width: int = 768
    vocabulary: int = 50304  # 50257, padded to a multiple of 128
    positions: int = 1024
    keeps: Policy = "nothing"  # of each layer, until backward
    constrain: Constrain = lambda x: x

    @nn.compact
    def __call__(self, tokens: Int[Array, "b t"]) -> Array:
        """Logits of the next token."""
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        at = nn.Embed(self.positions, self.width, dtype=jnp.bfloat16)
        x = self.constrain(embed(tokens) + at(jnp.arange(tokens.shape[1])))
        kind = _Layer
        if self.keeps != "everything":
            kind = nn.remat(_Layer, policy=POLICIES[self.keeps])
        for _ in range(self.layers):
            layer = kind(4 * self.width, causal=True, constrain=self.constrain)
            x, _ = layer(x)
        return self.constrain(embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)))


def init_gpt2(model: GPT2, key: Array) -> Any:
    """Parameters in float32."""
    return model.init(key, jnp.zeros((1, 8), jnp.int32))


def gpt2_loss(
    model: GPT2, params: Any, tokens: Int[Array, "b t"], constrain: Constrain = lambda x: x
) -> Float[Array, ""]:
    """Mean cross-entropy of the next token."""
    logits: Any = model.clone(constrain=constrain).apply(params, tokens)
    return _cross_entropy(logits[:, :-1], tokens[:, 1:])


class T5(nn.Module):
    """By default T5-large (https://arxiv.org/abs/1910.10683) without its biases of positions."""

    layers: int = 24  # of the encoder, and of the decoder
    width: int = 1024
    hidden: int = 4096
    vocabulary: int = 32128
    constrain: Constrain = lambda x: x

    @nn.compact
    def __call__(self, source: Int[Array, "b s"], target: Int[Array, "b t"]) -> Array:
        """Logits of the next token of `target`."""
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        settings = {"bias": False, "constrain": self.constrain}
        encoder = _scanned(self.layers, hidden=self.hidden, **settings)
        memory, _ = encoder(self.constrain(embed(source)), None)
        memory = nn.RMSNorm(dtype=jnp.bfloat16)(memory)
        decoder = _scanned(self.layers, hidden=self.hidden, causal=True, **settings)
        x, _ = decoder(self.constrain(embed(target)), memory)
        return self.constrain(embed.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x)))


def init_t5(model: T5, key: Array) -> Any:
    """Parameters in float32; those of layers are stacked."""
    return model.init(key, *[jnp.zeros((1, 8), jnp.int32)] * 2)


def t5_loss(
    model: T5, params: Any, batch: Mapping[str, Array], constrain: Constrain = lambda x: x
) -> Float[Array, ""]:
    """Mean cross-entropy of `batch["target"]`, given `batch["source"]`: (b, t) and (b, s)."""
    target = batch["target"]
    logits: Any = model.clone(constrain=constrain).apply(params, batch["source"], target)
    return _cross_entropy(logits[:, :-1], target[:, 1:])


class CLIP(nn.Module):
    """By default ViT-L/14 (https://arxiv.org/abs/2103.00020), both towers scanned."""

    width: int = 1024
    layers: int = 24
    patch: int = 14
    text_width: int = 768
    text_layers: int = 12
    vocabulary: int = 49408
    embedding: int = 768
    constrain: Constrain = lambda x: x

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w 3"], tokens: Int[Array, "b t"]
    ) -> tuple[Array, Array]:
        """Embeddings of images and of texts, (b, embedding) each, of length 1, in float32."""
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, strides=patch, use_bias=False, dtype=jnp.bfloat16)(images)
        x = self._tower(x.reshape(len(x), -1, self.width), self.layers)
        y = nn.Embed(self.vocabulary, self.text_width, dtype=jnp.bfloat16)(tokens)
        y = self._tower(y, self.text_layers, causal=True)
        return _unit(self._embed(x.mean(1))), _unit(self._embed(y[:, -1]))

    def _tower(self, x: Array, layers: int, causal: bool = False) -> Array:
        at = nn.Embed(x.shape[1], x.shape[-1], dtype=jnp.bfloat16)
        x = self.constrain(x + at(jnp.arange(x.shape[1])))
        settings = {"hidden": 4 * x.shape[-1], "causal": causal, "constrain": self.constrain}
        x, _ = _scanned(layers, **settings)(x, None)
        return nn.LayerNorm(dtype=jnp.bfloat16)(x)

    def _embed(self, x: Array) -> Array:
        return nn.Dense(self.embedding, use_bias=False, dtype=jnp.bfloat16)(x)


def _unit(x: Array) -> Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))


def init_clip(model: CLIP, batch: Mapping[str, Any], key: Array) -> Any:
    """Parameters in float32 for images and texts of the sizes of `batch`."""
    pair = (batch["images"], batch["tokens"])
    return model.init(key, *(jnp.zeros((1, *x.shape[1:]), x.dtype) for x in pair))


def clip_loss(
    model: CLIP,
    params: Any,
    batch: Mapping[str, Array],
    constrain: Constrain = lambda x: x,
    gather: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, ""]:
    """Mean cross-entropy of each image among all texts, and of each text among all images.

    Args:
        model: the towers.
        params: from `init_clip`.
        batch: `images`, (b, h, w, 3), and `tokens`, (b, t).
        constrain: called on activations.
        gather: the embeddings of all devices from those of one.
    """
    apply = model.clone(constrain=constrain).apply
    x, y = (jnp.asarray(z) for z in apply(params, batch["images"], batch["tokens"]))
    scale = 1 / 0.07
    paired = 2 * jnp.sum(x * y, axis=-1)
    among = sum(jax.nn.logsumexp(scale * a @ gather(b).T, axis=-1) for a, b in ((x, y), (y, x)))
    return jnp.mean(among - scale * paired) / 2
