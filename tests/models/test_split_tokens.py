"""The models compute the same where tokens are split over devices (`jz.make_mesh(tokens=...)`)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero.models import Decoder, DecoderConfig, Encoder, EncoderConfig

from . import tiny_models
from .drawn import drawn

pytestmark = pytest.mark.standard_promotion

# Families that differ in attention: learned positions, one key-value head, windows of data in
# scanned layers, caps, rotary parts, sinks, latent attention.
DECODERS = (
    "gpt2",
    "llama3-tied-1-kv-head",
    "qwen2-late-window",
    "gemma2",
    "gemma3",
    "phi3-partial",
    "gpt-oss",
    "deepseek",
)
TOKENS = 8


def _config(path: Path, kind: Any, pair: tuple[str, dict[str, Any]], **changes: Any) -> Any:
    model_type, fields = pair
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **fields}))
    made = kind.from_json(path)
    return dataclasses.replace(made, compute_dtype="float64", **changes)


def _compare(make: Any, loss: Any, batch: Any, tokens: int, **options: Any) -> None:
    """Loss and gradients with tokens split over devices are those of one device."""
    graph, params = drawn(make)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)

    def loss_fn(params: Any, batch: Any) -> Any:
        return loss(nnx.merge(graph, params), batch)

    def on_one(params: Any) -> Any:
        made = loss_fn(params, batch)
        return made[0] / made[1] if options else made

    want = jax.device_get(jax.jit(jax.value_and_grad(on_one))(params))
    zero = jz.Zero(jz.make_mesh(nodes=2, tokens=tokens))
    step = jax.jit(zero.value_and_grad(loss_fn, batch_argnums="batch", **options))
    text = str(jax.make_jaxpr(step)(zero.shard(params), batch))
    assert "sharding_constraint" in text
    value, grads = step(zero.shard(params), batch)
    found = jax.tree.leaves(jax.device_get((value, zero.unshard(grads))))
    for x, y in zip(found, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11 * max(1, np.abs(y).max()))


def _rows(num: int = 4) -> dict[str, Any]:
    random = np.random.default_rng(0)
    ids = random.integers(0, 37, (num, TOKENS + 1)).astype(np.int32)
    segments = np.repeat(np.array([[1, 1, 2, 0]] * num, np.int32), TOKENS // 4, axis=1)
    return {
        "ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "segments": segments,
        "weights": (segments != 0) * random.random(segments.shape),
        "mask": segments != 0,
    }


@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, tokens: int, tmp_path: Path):
    with jax.enable_x64(True):
        scanned = name not in ("gpt-oss", "deepseek")  # of which layers differ in kind
        config = _config(tmp_path, DecoderConfig, tiny_models.DECODERS[name], scan_layers=scanned)

        def loss(model: Any, batch: Any) -> Any:
            hidden = model.hidden(batch["ids"], segments=batch["segments"])
            return model.cross_entropy(hidden, batch["labels"], batch["weights"], chunk=4)

        def make() -> Any:
            return Decoder(config, rngs=nnx.Rngs(0))

        _compare(make, loss, _rows(), tokens, weighted=True)


def test_dropout_and_padding_of_decoders(tmp_path: Path):
    with jax.enable_x64(True):
        pair = tiny_models.DECODERS["llama"]
        config = _config(tmp_path, DecoderConfig, pair, attention_dropout=0.3)

        def loss(model: Any, batch: Any) -> Any:
            key = jax.random.key(3)
            logits = model(batch["ids"], batch["mask"], dropout_key=key)
            return jnp.mean(jnp.where(batch["mask"][..., None], logits, 0) ** 2)

        _compare(lambda: Decoder(config, rngs=nnx.Rngs(0)), loss, _rows(), 2)


def test_encoders(tmp_path: Path):
    with jax.enable_x64(True):
        model_type, fields = tiny_models.ENCODERS["bert-gelu-new"]
        fields = fields | {"layer_norm_eps": 1e-5, "type_vocab_size": 2}
        config = _config(tmp_path, EncoderConfig, (model_type, fields))

        def loss(model: Any, batch: Any) -> Any:
            return jnp.mean(model(batch["ids"], batch["mask"])[:, 0] ** 2)

        _compare(lambda: Encoder(config, rngs=nnx.Rngs(0)), loss, _rows(), 2)


def test_rows_that_do_not_divide_are_refused(tmp_path: Path):
    config = _config(tmp_path, DecoderConfig, tiny_models.DECODERS["llama"])
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    zero = jz.Zero(jz.make_mesh(nodes=2, tokens=4))
    params = zero.shard(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes))
    run = zero.apply(lambda params, ids: nnx.merge(graph, params)(ids))
    with pytest.raises(ValueError, match="has 6 tokens in dim 1.*over 4 devices"):
        run(params, np.zeros((2, 6), np.int32))
