"""What stages send: messages that a codec writes, and gathers and reductions beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from jaxzero.extend import Codec
from tests import zoo

from . import models


def _zero(codec: Codec | None = None, microbatches: int = 2) -> jz.Zero:
    config = jz.pipeline(microbatches, messages=codec)
    config = dataclasses.replace(config, min_quantized_size=1)
    return jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), config)


def _rounding_between_halves(codec: Codec) -> Any:
    """The loss "untied" on one device, with activations and cotangents as two stages pass them."""

    def trip(x: jax.Array) -> jax.Array:
        return codec.decode(codec.encode(x), x.shape[-1], x.dtype)

    passed = jax.custom_vjp(trip)
    passed.defvjp(lambda x: (trip(x), None), lambda _, cotangent: (trip(cotangent),))

    def loss(params: Any, batch: Any) -> jax.Array:
        x, num = params["embed"][batch["ids"]], models.LAYERS // 2
        for i in range(2):
            layers = jax.tree.map(lambda w, i=i: w[i * num : (i + 1) * num], params["layers"])
            x, _ = lax.scan(lambda x, w: (models.layer(x, w), None), x, layers)
            x = passed(x) if i == 0 else x
        return models.cross_entropy(x, params["head"], batch)

    return loss


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_codec_rounds_each_message(is_divided, monkeypatch):
    """Of each device and micro-batch, whose losses are means."""
    if is_divided:  # one part beside each layer
        monkeypatch.setattr("jaxzero._stages.messages._DIVIDED_BYTES", 1)
    codec, params, batch = jz.Int8(block=32), models.params(), models.batch()
    zero = _zero(codec)
    step = jax.jit(zero.value_and_grad(models.LOSSES["untied"]))
    value, grads = step(zero.shard(params), batch)
    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)  # 2 devices, 2 parts
    one = jax.jit(jax.value_and_grad(_rounding_between_halves(codec)))
    made = [one(params, jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(4)]
    want, of_parts = np.mean([x for x, _ in made]), [x for _, x in made]
    np.testing.assert_allclose(value, want, rtol=1e-6)
    exact = jax.jit(jax.grad(models.LOSSES["untied"]))(params, batch)
    rounded = jax.tree.map(lambda *parts: sum(parts) / 4, *of_parts)
    for x, y, z in zip(*map(jax.tree.leaves, (zero.unshard(grads), rounded, exact)), strict=True):
        scale = max(1e-3, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale)  # the order of float32 sums
        assert not y.any() or np.abs(y - z).max() > 1e-4 * scale
    text = step.lower(zero.shard(params), batch).compile().as_text()
    sent = [x for x in zoo.hlo.collectives(text) if x.op == "collective-permute"]
    assert sent and all("u8[" in str(x) for x in sent)


def test_layers_that_do_not_divide_the_rows_of_a_message(monkeypatch):
    """One row beside two layers: parts are then of its elements."""
    monkeypatch.setattr("jaxzero._stages.messages._DIVIDED_BYTES", 1)
    zero, params, batch = _zero(microbatches=8), models.params(), models.batch()
    loss = models.LOSSES["untied"]
    value, grads = jax.jit(zero.value_and_grad(loss))(zero.shard(params), batch)
    want, want_grads = jax.device_get(jax.jit(jax.value_and_grad(loss))(params, batch))
    zoo.assert_close(jax.device_get(value), want, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want_grads, 1e-5, "grads")


def test_verify_needs_messages_without_a_codec():
    zero = _zero(jz.Int8(block=32))
    params, batch, loss = zero.shard(models.params()), models.batch(), models.LOSSES["untied"]
    with pytest.raises(NotImplementedError, match="`codecs=False`"):
        zero.verify(loss, params, batch)
    assert zero.verify(loss, params, batch, codecs=False).ok
    assert "float32[4, 4, 8] as int8/32" in str(zero.plan(loss, params, batch))
    with pytest.raises(ValueError, match="`messages` of `Stages` must be a codec"):
        jz.Stages(microbatches=2, messages=jz.Int8(implementation="nvlink"))


def test_two_stages_prefetch_before_and_after_the_steady_ticks():
    """Loops over layers inside a loop of one tick; what the head reads is reduced as it is made."""

    def loss(params, batch):
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return models.LOSSES["untied"](narrow, batch).astype(jnp.float32)

    config = dataclasses.replace(
        jz.pipeline(2),
        param_persistence_threshold=0,
        schedule=jz.CommSchedule(loop_constant_bytes=0),
    )
    zero = jz.Zero(_zero().mesh, config)
    plan = zero.plan(loss, zero.shard(models.params()), models.batch())
    # Stages send each other their slices of the embedding and of the head as they are read.
    sent = [x for x in plan.transfers if (x.axis, x.purpose) == ("stage", "weights")]
    dtypes = {x.name: x.dtype for x in sent}
    assert (dtypes["embed"], dtypes["head"]) == ("bfloat16", "bfloat16")
    lines = str(plan).splitlines()
    gathers = [x for x in lines if "layers.up[i]" in x and "all-gather" in x]
    assert len(gathers) == 4 and all("prefetched in the iteration before" in x for x in gathers)
    reduces = [x for x in lines if "reduce-scatter" in x]
    assert {"head", "embed", "layers.up[i]"} <= {name for x in reduces for name in x.split()}
    assert all("bfloat16[" in x for x in reduces)
