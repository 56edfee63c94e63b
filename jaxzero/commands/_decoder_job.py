"""Make the job that `jaxzero plan --model` plans: a decoder and its loss, from a `config.json`."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from ..models import Decoder, DecoderConfig


def decoder_job(directory: Path) -> tuple[Callable, Callable[[], Any]]:
    """Return the loss of a decoder, and the function that makes its parameters.

    The loss has no `jax.checkpoint`, so that the planner chooses which activations are kept.

    Args:
        directory: the folder with `config.json`.

    Returns:
        `loss(params, ids)`, the mean over all next tokens of ids `[rows, tokens]`; and `init_fn()`,
        which returns the parameters.
    """
    config = DecoderConfig.from_json(directory, compute_dtype="bfloat16", scan_layers=True)
    make = functools.partial(_make, config)
    graph, _ = nnx.split(nnx.eval_shape(make))
    return functools.partial(_loss, graph), functools.partial(_state, make)


def _make(config: DecoderConfig) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(0))


def _state(make: Callable[[], Decoder]) -> Any:
    return nnx.split(make())[1]


def _loss(graph: Any, params: Any, ids: Int[Array, "b t"]) -> Float[Array, ""]:
    logits = nnx.merge(graph, params)(ids)[:, :-1].astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()
