"""How the byte decoder is trained and judged, the same for all studies that compare runs of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax

from ._byte_decoder import Corpus, Size, even_windows, losses

WARMUP_STEPS = 100
_HELD_OUT_PARTS, _WINDOWS_PER_PART = 32, 96  # 147,456 bytes are judged


@functools.cache
def optimizer(peak: float, steps: int, *, end: float = 0.0) -> optax.GradientTransformation:
    """AdamW with clipped gradients; the rate warms up to `peak` and decays to `end` by a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, WARMUP_STEPS, steps, end)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )


def held_out_losses(size: Size, corpus: Corpus, params: Any) -> jax.Array:
    """The mean loss, in nats per byte, of each of 32 parts of the held-out windows.

    Args:
        size: of the model.
        corpus: whose held-out windows are judged, the same every time.
        params: in full, as float32; they are judged on the first device.
    """
    whole = jax.device_put(params, jax.devices()[0])
    windows = even_windows(corpus.held_out, _HELD_OUT_PARTS * _WINDOWS_PER_PART, size.length)
    return _evaluate(size, whole, windows.reshape(_HELD_OUT_PARTS, -1, size.length + 1))


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(size: Size, params: Any, windows: jax.Array) -> jax.Array:
    return jax.lax.map(lambda tokens: losses(size, params, tokens).mean(), windows)
