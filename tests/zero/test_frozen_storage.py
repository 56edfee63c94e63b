"""Frozen layers stored encoded, and their activations cached on the host."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo

from . import test_freezing as plain

TOLERANCE = plain.TOLERANCE


def _freeze(kind, prefix=4, codec=None, before="embed"):
    loss, tree, layers = plain._model(kind)
    config = dataclasses.replace(jz.zero3(), min_quantized_size=100)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), config)
    params = zero.shard(tree)
    freezing = zero.freeze(params, prefix, layers=layers, before=before, codec=codec)
    return zero, loss, tree, freezing, freezing.split(params)


@pytest.mark.parametrize("kind", ["scan", "list"])
@pytest.mark.one_in(2)
def test_frozen_layers_in_8_bits(kind):
    """As far off as the codec says; gathered as codes; gradients those of the decoded layers."""
    codec = jz.Int8(block=32)
    zero, loss, tree, freezing, (active, frozen) = _freeze(kind, codec=codec)
    leaf = frozen["layers"][0]["w"] if kind == "list" else frozen["layers"]["w"]
    small = frozen["layers"][0]["b"] if kind == "list" else frozen["layers"]["b"]
    assert leaf.data.dtype == jnp.uint8 and small.dtype == jnp.float32
    assert "stored as int8" in str(freezing)
    decoded = jax.device_get(zero.unshard(freezing.join(active, frozen)))
    pairs = zip(jax.tree.leaves(decoded), jax.tree.leaves(tree), strict=True)
    for got, want in pairs:
        # Half a step, whatever the block: a step is at most the leaf's largest number / 127,
        # which a scale in 16 bits rounds by at most 2^-8.
        assert np.abs(got - want).max() <= np.abs(want).max() / 127 * (0.5 + 127 * 2.0**-8)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (decoded, tree)), strict=True))
    step = freezing.wrap(loss)
    with jax.default_matmul_precision("highest"):
        value, grads = zero.value_and_grad(step)(active, frozen, plain._batch())
    want_value, want = plain._oracle(loss, decoded, 4, plain._batch())
    zoo.assert_close(jax.device_get(value), want_value, TOLERANCE, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want, TOLERANCE, "grads")
    lowered = jax.jit(zero.value_and_grad(step)).lower(active, frozen, plain._batch()).as_text()
    gathers = [x for x in lowered.splitlines() if "stablehlo.all_gather" in x]
    assert any("ui8>" in x for x in gathers), gathers


@pytest.mark.parametrize("kind", ["scan", "list"])
def test_cached_activations_change_nothing(kind):
    zero, loss, tree, freezing, (active, frozen) = _freeze(kind)
    cache = freezing.cache(loss, frozen)
    step = jax.jit(zero.value_and_grad(cache.rest, batch_argnums=(2, 3)))
    batch = plain._batch()
    with jax.default_matmul_precision("highest"):
        results = [step(active, frozen, cache("first", batch), batch) for _ in range(2)]
    assert (cache.hits, cache.misses) == (1, 1)
    num_kept = 1  # in a list, too: layers have no norm, of which the known part would be kept
    assert cache.num_bytes == num_kept * plain.ROWS * plain.WIDTH * 4
    want_value, want = plain._oracle(loss, tree, 4, batch)
    for value, grads in results:
        zoo.assert_close(jax.device_get(value), want_value, TOLERANCE, "loss")
        zoo.assert_close(jax.device_get(zero.unshard(grads)), want, TOLERANCE, "grads")
    plain._assert_bits_equal(jax.device_get(results[0]), jax.device_get(results[1]))
    activations = cache("first", batch)
    plan = str(zero.plan(cache.rest, active, frozen, activations, batch, batch_argnums=(2, 3)))
    gathered = [x for x in plan.splitlines() if "all-gather" in x]
    assert gathered and not any(" x4 " in x or "embed" in x for x in gathered), plan
    assert not any(f"layers.{i}." in x for x in gathered for i in range(4)), plan
    with pytest.raises(ValueError, match="`key` 'first' names two batches"):
        cache("first", {**batch, "y": batch["y"] + 1})
    with pytest.raises(ValueError, match="`key` 'first' names two batches"):
        cache("first", {"ids": batch["ids"], "z": batch["y"]})  # a tree of the same arrays
    with pytest.raises(ValueError, match="micro-batches"):
        zero.value_and_grad(cache.rest, batch_argnums=(2, 3), microbatches=2)(
            active, frozen, activations, batch
        )


def test_a_full_cache_computes_again():
    _, loss, _, freezing, (_, frozen) = _freeze("scan")
    cache = freezing.cache(loss, frozen, max_bytes=plain.ROWS * plain.WIDTH * 4)
    batch = plain._batch()
    first = cache(0, batch)
    for _ in range(2):
        plain._assert_bits_equal(cache(1, batch), first)
    assert (cache.hits, cache.misses) == (0, 3)
    assert "1 batches, 2,304 bytes" in repr(cache)


def test_frozen_layers_are_traced_once_for_each_shape_and_static_argument():
    zero, loss, _, freezing, (active, frozen) = _freeze("scan")
    traces = []

    def scaled(params, batch, scale):
        traces.append(scale)
        embed = params["embed"] * (2.0 if isinstance(scale, int) else 1.0)
        return loss({**params, "embed": embed}, batch)

    cache = freezing.cache(scaled, frozen)
    batch = plain._batch()
    batches = [{**batch, "ids": np.roll(batch["ids"], i, axis=0)} for i in range(3)]
    first = [cache(i, x, 1.0) for i, x in enumerate(batches)]
    num = len(traces)
    again = [cache((i, "again"), x, 1.0) for i, x in enumerate(batches)]
    assert len(traces) == num and cache.misses == 6
    assert np.any(first[0][0] != first[1][0])
    plain._assert_bits_equal(first, again)
    uncached = freezing.cache(scaled, frozen)(0, batch, 1)
    number = cache("an int", batch, 1)  # equal to 1.0, and another function
    assert len(traces) > num
    plain._assert_bits_equal(number, uncached)
    assert np.any(number[0] != first[0][0])


def test_what_cannot_be_cached_is_refused():
    _, loss, _, freezing, (_, frozen) = _freeze("scan", before=())
    with pytest.raises(ValueError, match="no activations to cache.*`before`"):
        freezing.cache(loss, frozen)(0, plain._batch())

    def with_dropout(params, batch):
        def layer(x, scanned):
            layer, key = scanned
            x, _ = plain._layer(x, layer)
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0), None

        keys = jax.random.split(jax.random.key(0), plain.NUM_LAYERS)
        x, _ = jax.lax.scan(layer, params["embed"][batch["ids"]], (params["layers"], keys))
        return jnp.mean(x @ params["head"])

    _, _, _, freezing, (_, frozen) = _freeze("scan")
    with pytest.raises(ValueError, match=r"random numbers.*test_frozen_storage\.py"):
        freezing.cache(with_dropout, frozen)(0, plain._batch())
