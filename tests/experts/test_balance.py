"""Losses of routers count the tokens of all devices before they multiply."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero.models import Decoder, next_correction, router_balance
from tests.models.drawn import drawn

from .test_models import IDS, config_of

ROWS, WIDTH, EXPERTS, CHOICES = 32, 5, 6, 2


def _inputs():
    random = np.random.default_rng(0)
    router = {"router": jnp.asarray(random.normal(size=(WIDTH, EXPERTS)))}
    x, mask = random.normal(size=(ROWS, WIDTH)), random.uniform(size=ROWS) < 0.6
    return router, jnp.asarray(x), jnp.asarray(mask)


def _loss(params, batch, *, sigmoids=False):
    x, mask = batch
    logits = x @ params["router"]
    _, chosen = jax.lax.top_k(logits, CHOICES)
    balance = router_balance(logits, chosen, mask, sigmoids=sigmoids)
    return balance.load_balancing + 0.1 * balance.z, balance.loads


def _by_hand(params, batch, *, sigmoids=False):
    x, mask = batch
    logits = (x @ params["router"])[mask]
    shares = 1 / (1 + jnp.exp(-logits)) if sigmoids else jnp.exp(logits)
    shares = shares / shares.sum(1, keepdims=True)
    order = jnp.argsort(-logits, axis=1)[:, :CHOICES]
    loads = jnp.asarray([jnp.sum(order == e) for e in range(EXPERTS)]) / len(logits)
    z = jnp.mean(jnp.log(jnp.exp(logits).sum(1)) ** 2)
    return EXPERTS * jnp.sum(loads * shares.mean(0)) + 0.1 * z, loads


@pytest.mark.standard_promotion
@pytest.mark.parametrize("sigmoids", [False, True])
def test_losses_are_those_of_one_device(sigmoids: bool):
    with jax.enable_x64(True):
        router, *batch = _inputs()
        zero = jz.Zero(jz.make_mesh(2))
        loss = functools.partial(_loss, sigmoids=sigmoids)
        step = zero.value_and_grad(loss, has_aux=True, aux_reduce="first")
        (value, loads), grads = step(zero.shard(router), tuple(batch))
        by_hand = functools.partial(_by_hand, sigmoids=sigmoids)
        want, want_grads = jax.value_and_grad(by_hand, has_aux=True)(router, batch)
        np.testing.assert_allclose(value, want[0], rtol=1e-12)
        np.testing.assert_allclose(loads, want[1], rtol=1e-12)
        got = zero.unshard(grads)["router"]
        np.testing.assert_allclose(got, want_grads["router"], rtol=1e-9, atol=1e-12)
        outside, _ = loss(router, batch)
        np.testing.assert_allclose(outside, want[0], rtol=1e-12)


def test_corrections():
    loads = jnp.asarray([[0.5, 0.5, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = next_correction(jnp.ones((2, 4)), loads, 0.25)
    np.testing.assert_array_equal(found, [[1, 1, 0.75, 1.25], [1, 1, 1, 1]])


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name", [pytest.param("mixtral", marks=pytest.mark.exhaustive), "deepseek"]
)
def test_decoders(name: str, tmp_path):
    """In each layer, with padding, in a step and on one device; 0 in a dense layer."""
    config = config_of(name, tmp_path)
    graph, params = drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    mask = np.arange(7)[None] < np.arange(16)[:, None] % 7 + 1

    def outputs(params, batch):
        hidden, balance = nnx.merge(graph, params).hidden_and_balance(*batch)
        return hidden, balance

    zero = jz.Zero(jz.make_mesh(2))
    ids, mask = jnp.asarray(IDS), jnp.asarray(mask)
    run = zero.apply(outputs, out_reduce=("concat", "first"))
    hidden, balance = run(zero.shard(params), (ids, mask))
    want_hidden, want = outputs(params, (ids, mask))
    np.testing.assert_allclose(hidden, want_hidden, rtol=0, atol=1e-4)
    for x, y in zip(balance, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    has_experts = np.arange(2) >= (name == "deepseek")
    choices = config.experts.num_experts_per_token
    np.testing.assert_allclose(balance.loads.sum(1), choices * has_experts, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(balance.z) > 0, has_experts)
    with pytest.raises(ValueError, match="has no experts"):
        dense = dataclasses.replace(config, experts=None)
        graph, params = drawn(lambda: Decoder(dense, rngs=nnx.Rngs(0)))
        nnx.merge(graph, params).hidden_and_balance(ids)
