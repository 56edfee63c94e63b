"""How the byte decoder is trained and judged, the same for all studies that compare runs of it."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import optax

from ._byte_decoder import Size, losses
from ._corpus import Corpus, even_windows

WARMUP_STEPS = 100
_B2, _WEIGHT_DECAY = 0.95, 0.1
_HELD_OUT_PARTS, _WINDOWS_PER_PART = 32, 96  # 147,456 bytes are judged


Inner = Literal["adamw", "muon"]


@functools.cache
def optimizer(
    peak: float, steps: int, *, end: float = 0.0, inner: Inner = "adamw"
) -> optax.GradientTransformation:
    """AdamW or Muon with clipped gradients; the rate warms up to `peak` and decays by a cosine.

    Muon trains the matrices of the layers; the embedding and the norms are AdamW's, at a tenth of
    the rate, because its updates are as large as the rate in each element.

    Args:
        peak: the learning rate after the warm-up.
        steps: at whose end it is `end`.
        end: the last learning rate.
        inner: the optimizer.
    """
    rates = optax.warmup_cosine_decay_schedule(0.0, peak, WARMUP_STEPS, steps, end)
    if inner == "adamw":
        tx = optax.adamw(rates, b2=_B2, weight_decay=_WEIGHT_DECAY)
    else:
        tx = optax.contrib.muon(
            rates,
            weight_decay=_WEIGHT_DECAY,
            adam_b2=_B2,
            adam_weight_decay=_WEIGHT_DECAY,
            adam_learning_rate=lambda step: rates(step) / 10,
            muon_weight_dimension_numbers=_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def _matrices(params: Any) -> Any:
    """For each leaf the dims of its matrices, or None if it is not Muon's."""
    of_stack = optax.contrib.MuonDimensionNumbers(1, 2)  # dim 0 counts layers
    names = params["layers"]  # not shapes: Muon asks for its own leaves alone, too
    layers = {name: None if name.startswith("norm") else of_stack for name in names}
    return {**dict.fromkeys(params), "layers": layers}


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
