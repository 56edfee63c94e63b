"""The models compute the same where tokens are split over devices (`jz.make_mesh(tokens=...)`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxzero as jz
import jaxzero.models._attention
from jaxzero.models import Decoder, DecoderConfig, Encoder, EncoderConfig, LatentConfig, Rope

from .drawn import drawn

pytestmark = pytest.mark.standard_promotion

TOKENS = 8
PLAIN = DecoderConfig(
    vocabulary_size=37,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    head_size=8,
    max_length=TOKENS,  # learned positions: rotations are in float32
    compute_dtype="float64",
    scan_layers=True,
)
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "heads, tied": (2, {"tied_head": True, "num_key_value_heads": 4}),
    "one key-value head": (4, {"num_key_value_heads": 1, "remat": "full"}),
    "windows that are data": (4, {"sliding_window": 3, "sliding_layers": (1,)}),
    "caps": (2, {"attention_softcap": 0.5, "logit_softcap": 2.0, "attention_scale": 0.9}),
    "sinks": (
        4,
        {
            "attention_sinks": True,
            "sliding_window": 4,
            "sliding_layers": (0,),
            "scan_layers": False,
        },
    ),
    "latent": (
        2,
        {
            "latent": LatentConfig(key_value_rank=6, plain_size=4, value_size=5),
            "rope": Rope(rotary_size=4),
            "num_key_value_heads": 4,
        },
    ),
    "rotations": (4, {"rope": Rope(rotary_size=8), "query_key_norm": "head"}),
}


def _written_out(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
    implementation: Any = None,
) -> Any:
    """What JAX computes, with a softmax in the dtype of its arguments; JAX's is in float32."""
    assert bias is None and implementation is None
    key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bthk,bshk->bhts", query, key) * (scale or query.shape[-1] ** -0.5)
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    before, after = local_window_size or (10**6, 10**6)
    seen = (distance <= before) & (distance >= (0 if is_causal else -after))
    seen = seen[None, None] if mask is None else seen[None, None] & mask
    logits = jnp.where(seen, logits, -1e30)
    powers = jnp.exp(logits - logits.max(-1, keepdims=True)) * seen
    total = powers.sum(-1, keepdims=True)
    return jnp.einsum("bhts,bshk->bthk", powers / jnp.where(total == 0, 1, total), value)


def _check(
    make: Any, loss: Any, tokens: int, monkeypatch: Any, limit: float = 1e-12, **options: Any
) -> None:
    """Compare loss and gradients with tokens split over devices with those of one device."""
    graph, params = drawn(make)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    batch = _rows()

    def loss_fn(params: Any, batch: Any) -> Any:
        return loss(nnx.merge(graph, params), batch)

    def on_one(params: Any) -> Any:
        made = loss_fn(params, batch)
        return made[0] / made[1] if options else made

    with monkeypatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", _written_out)
        want = jax.device_get(jax.jit(jax.value_and_grad(on_one))(params))
    zero = jz.Zero(jz.make_mesh(nodes=2, tokens=tokens))
    step = jax.jit(zero.value_and_grad(loss_fn, batch_argnums="batch", **options))
    value, grads = step(zero.shard(params), batch)
    found = jax.tree.leaves(jax.device_get((value, zero.unshard(grads))))
    for x, y in zip(found, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=10 * limit, atol=limit * max(1, np.abs(y).max()))


def _rows(num: int = 4) -> dict[str, Any]:
    random = np.random.default_rng(0)
    ids = random.integers(0, 37, (num, TOKENS + 1)).astype(np.int32)
    segments = np.repeat(np.array([[1, 1, 2, 0]] * num, np.int32), TOKENS // 4, axis=1)
    rows = {
        "ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "segments": segments,
        "weights": (segments != 0) * random.random(segments.shape),
        "mask": segments != 0,
    }
    return jax.tree.map(jnp.asarray, rows)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if i % 2 == 0 else pytest.mark.exhaustive)
        for i, name in enumerate(CONFIGS)
    ],
)
@pytest.mark.one_in(2)
def test_decoders(name: str, monkeypatch: Any):
    tokens, changes = CONFIGS[name]
    config = dataclasses.replace(PLAIN, **changes)
    limit = 1e-12 if config.rope is None else 1e-6

    def loss(model: Any, batch: Any) -> Any:
        hidden = model.hidden(batch["ids"], segments=batch["segments"])
        return model.cross_entropy(hidden, batch["labels"], batch["weights"], chunk=4)

    with jax.enable_x64(True):
        _check(
            lambda: Decoder(config, rngs=nnx.Rngs(0)),
            loss,
            tokens,
            monkeypatch,
            limit,
            weighted=True,
        )


def test_dropout_of_probabilities_and_padding():
    """The same bits are drawn as without the axis, for the same rows of a device."""
    config = dataclasses.replace(PLAIN, attention_dropout=0.3, compute_dtype="float32")
    graph, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))

    def loss(params: Any, batch: Any) -> Any:
        key = jz.fold_in_device(jax.random.key(3))
        logits = nnx.merge(graph, params)(batch["ids"], batch["mask"], dropout_key=key)
        return jnp.mean(jnp.where(batch["mask"][..., None], logits, 0) ** 2)

    found = []
    for mesh in (
        jz.make_mesh(nodes=2, tokens=2),
        jz.make_mesh(nodes=2, devices=jax.devices()[:4]),
    ):
        zero = jz.Zero(mesh)
        step = jax.jit(zero.value_and_grad(loss, batch_argnums="batch"))
        value, grads = step(zero.shard(params), _rows())
        found.append(jax.tree.leaves(jax.device_get((value, zero.unshard(grads)))))
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * max(1, np.abs(y).max()))


def test_encoders(monkeypatch: Any):
    config = EncoderConfig(
        vocabulary_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        compute_dtype="float64",
    )

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(model(batch["ids"], batch["mask"])[:, 0] ** 2)

    with jax.enable_x64(True):
        _check(lambda: Encoder(config, rngs=nnx.Rngs(0)), loss, 2, monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        "windows that are data",
        "sinks",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("latent", "heads, tied")),
    ],
)
def test_the_columns_of_a_cache_are_split(name: str, monkeypatch: Any):
    """A prompt in two pieces and single tokens, against all tokens at once on one device."""
    tokens, changes = CONFIGS[name]
    config = dataclasses.replace(PLAIN, **{"max_length": 16, **changes})
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 37, (4, 14)).astype(np.int32))
    mask = jnp.arange(14)[None] >= jnp.array([0, 3, 1, 0])[:, None]

    def run(params: Any, ids: Any, mask: Any) -> Any:
        model = nnx.merge(graph, params)
        cache, pieces = model.make_cache(len(ids), 14), []
        for part in (slice(0, 8), slice(8, 12)):
            hidden, cache = model.extend(cache, ids[:, part], mask[:, part])
            pieces.append(hidden)

        def step(cache: Any, one: Any) -> Any:
            hidden, cache = model.extend(cache, one[:, None])
            return cache, hidden[:, 0]

        _, last = jax.lax.scan(step, cache, ids[:, 12:].T)
        return jnp.concatenate([*pieces, jnp.swapaxes(last, 0, 1)], axis=1)

    with jax.enable_x64(True):
        graph, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        places = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
        with monkeypatch.context() as patch:
            patch.setattr(jax.nn, "dot_product_attention", _written_out)
            want = nnx.merge(graph, params).hidden(ids, mask, positions=places)
        zero = jz.Zero(jz.make_mesh(nodes=2, tokens=tokens))
        step = jax.jit(zero.apply(run, batch_argnums=("ids", "mask")))
        step = step.lower(zero.shard(params), ids, mask).compile()
        found = np.asarray(step(zero.shard(params), ids, mask))
    limit = 1e-12 if config.rope is None else 1e-6
    np.testing.assert_allclose(found[mask], np.asarray(want)[mask], rtol=limit, atol=limit)
    if name == "windows that are data":  # 2 layers, 2 rows of a device, 2 heads of 8 numbers
        text = step.as_text() or ""
        assert "f64[2,2,2,4,8]" in text
        assert "f64[2,2,2,16,8]" not in text


def test_long_rows_on_one_device_have_no_logits_of_all_pairs(monkeypatch: Any):
    monkeypatch.setattr(jaxzero.models._attention, "LONG_ROW", TOKENS // 2)
    config = dataclasses.replace(PLAIN, attention_softcap=0.5)

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean(model.hidden(batch["ids"], segments=batch["segments"]) ** 2)

    with jax.enable_x64(True):
        graph, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)

        def gradient(params: Any) -> Any:
            return jax.grad(lambda x: loss(nnx.merge(graph, x), _rows()))(params)

        blocks = jax.jit(gradient)(params)
        monkeypatch.undo()
        for x, y in zip(*map(jax.tree.leaves, (blocks, jax.jit(gradient)(params))), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12 * np.abs(y).max())


def test_rows_that_do_not_divide_are_refused():
    config = dataclasses.replace(PLAIN, compute_dtype="float32")
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    zero = jz.Zero(jz.make_mesh(nodes=2, tokens=4))
    params = zero.shard(jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes))
    run = zero.apply(lambda params, ids: nnx.merge(graph, params)(ids))
    with pytest.raises(ValueError, match="has 6 tokens in dim 1.*over 4 devices"):
        run(params, np.zeros((2, 6), np.int32))
    cache = jax.device_get(nnx.merge(graph, shapes).make_cache(2, 6))
    step = zero.apply(lambda params, ids: nnx.merge(graph, params).extend(cache, ids)[0])
    with pytest.raises(ValueError, match="`cache` has 6 columns.*over 4 devices"):
        step(params, np.zeros((2, 1), np.int32))
