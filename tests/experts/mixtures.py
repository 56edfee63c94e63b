"""A mixture of experts in layers, with tokens that move; and the same by dense products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxzero as jz
from jaxzero.models import apply_by_group

LAYERS, EXPERTS, WIDTH, INNER, CHOICES = 2, 8, 6, 10, 3
SHAPES = {
    "router": (WIDTH, EXPERTS),
    "experts": {
        "up": (EXPERTS, WIDTH, INNER),
        "up_bias": (EXPERTS, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    },
}
UNGATHERED = jz.Ungathered("experts.*", dim=1)


def init(key: Any, experts: int = EXPERTS) -> Any:
    random = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> Any:
        shape = tuple(experts if size == EXPERTS else size for size in shape)
        return jnp.asarray(random.normal(0, 0.5, (LAYERS, *shape)))

    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def batch(rows: int = 16) -> Any:
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, 4, WIDTH)))


def loss(params: Any, x: Any, *, form: str = "scan", choices: int = CHOICES, **options: Any) -> Any:
    """The mean over rows; `form`: of the loop over layers."""
    step = functools.partial(_layer, choices=choices, **options)
    if form == "unrolled":
        for i in range(LAYERS):
            x, _ = step(x, jax.tree.map(lambda w, i=i: w[i], params))
    else:
        step = jax.checkpoint(step) if form == "remat" else step
        x, _ = jax.lax.scan(step, x, params)
    return jnp.mean(jnp.sum(x**2, axis=(1, 2)))


def _expert(own: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ own["up"] + own["up_bias"][None]) @ own["down"]


def _layer(x: Any, w: Any, choices: int, by_blocks: bool = False, **options: Any) -> Any:
    tokens = x.reshape(-1, WIDTH)
    scores = jax.nn.softmax(tokens @ w["router"])
    weights, chosen = jax.lax.top_k(scores, choices)
    own = w["experts"]

    def compute(rows: Any, sizes: Any, row_weights: Any) -> Any:
        if by_blocks:
            return apply_by_group(_expert, own, rows, sizes, row_weights)
        number = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
        h = jax.lax.ragged_dot(rows, own["up"], sizes) + own["up_bias"][number]
        return jax.lax.ragged_dot(jnp.tanh(h), own["down"], sizes) * row_weights[:, None]

    y, _ = jz.exchange_tokens(
        compute,
        tokens,
        chosen,
        weights,
        num_experts=w["router"].shape[-1],
        num_local=len(own["up"]),
        **options,
    )
    return x + y.reshape(x.shape), None


def dense_loss(params: Any, x: Any, choices: int = CHOICES) -> Any:
    """The same, each expert being applied to every token."""
    for i in range(LAYERS):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        scores = jax.nn.softmax(jnp.einsum("btd,de->bte", x, w["router"]))
        least = jnp.sort(scores, axis=-1)[..., -choices][..., None]
        gates = jnp.where(scores >= least, scores, 0)
        own = w["experts"]
        bias = own["up_bias"][None, None]
        h = jnp.tanh(jnp.einsum("btd,edf->btef", x, own["up"]) + bias)
        x = x + jnp.einsum("bte,btef,efd->btd", gates, h, own["down"])
    return jnp.mean(jnp.sum(x**2, axis=(1, 2)))
