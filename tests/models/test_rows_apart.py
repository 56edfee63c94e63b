"""The dense models compute each row by itself, so that no loss on them is warned of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero.models import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    ModernBert,
    ViTClassifier,
    ViTConfig,
)

from . import tiny_models
from .test_shapes_only import MODERN_BERT
from .test_vit import SIZES

pytestmark = pytest.mark.standard_promotion

# Families that differ in norms, windows, caps and positions; the others are made of the same parts.
DECODERS = ("gpt2", "llama3-tied-1-kv-head", "qwen2-late-window", "gemma2", "gemma3", "olmo2")
TOKENS = {"ids": np.zeros((16, 9), np.int32), "mask": np.ones((16, 9), bool)}


def _trace(model: type, config: Any, loss: Any, batch: Any) -> None:
    """Trace a step, of which any warning is an error."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0))))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    zero = jz.Zero(jz.make_mesh(nodes=2))

    def loss_fn(params: Any, batch: Any, key: Any) -> Any:
        return loss(nnx.merge(graph, params), batch, jz.fold_in_device(key))

    step = zero.value_and_grad(loss_fn, batch_argnums="batch")
    jax.eval_shape(step, zero.shard(params), batch, jax.random.key(0))


def _config(path: Path, kind: type, model_type: str, fields: dict[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    return kind.from_json(path)


def _next_token(model: Any, batch: Any, key: Any) -> Any:
    logits = model(batch["ids"], batch["mask"], dropout_key=key)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["ids"][:, 1:])
    )


def _squared(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(model(batch["ids"], batch["mask"], dropout_key=key)[:, 0] ** 2)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, tmp_path: Path):
    config = _config(tmp_path, DecoderConfig, *tiny_models.DECODERS[name])
    _trace(Decoder, config, _next_token, TOKENS)


def test_encoder(tmp_path: Path):
    model_type, fields = tiny_models.ENCODERS["bert-gelu-new"]
    fields = fields | {"layer_norm_eps": 1e-5, "type_vocab_size": 2}
    config = _config(tmp_path, EncoderConfig, model_type, fields)
    _trace(Encoder, config, _squared, TOKENS)


def test_modern_bert():
    _trace(ModernBert, MODERN_BERT, _squared, TOKENS)


def test_vit(tmp_path: Path):
    config = _config(tmp_path, ViTConfig, "vit", SIZES)
    config = dataclasses.replace(config, num_labels=2)
    batch = {"x": np.zeros((16, 3, 8, 8), np.float32), "y": np.zeros(16, np.int32)}

    def loss(model: Any, batch: Any, key: Any) -> Any:
        logits = model(batch["x"], dropout_key=key)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    _trace(ViTClassifier, config, loss, batch)
