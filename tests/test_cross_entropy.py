"""The loss over chunks of tokens against optax on full logits, in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

WIDTH, VOCABULARY = 6, 13


def arrays(*rows_and_tokens: int, dtype: str = "float64") -> tuple[np.ndarray, ...]:
    """Hidden vectors, a head, labels, and a weight for each token, some of them 0."""
    random = np.random.default_rng(0)
    hidden = random.standard_normal((*rows_and_tokens, WIDTH)).astype(dtype)
    head = random.standard_normal((WIDTH, VOCABULARY)).astype(dtype)
    labels = random.integers(0, VOCABULARY, rows_and_tokens).astype(np.int32)
    return hidden, head, labels, random.integers(0, 3, rows_and_tokens).astype(dtype)


def plain(hidden, head, labels, *, scale=1.0, soft_cap=None, z_loss=0.0):
    logits = hidden @ head * scale
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2


def value_and_grads(function: Any, arguments: tuple[np.ndarray, ...]) -> Any:
    hidden, head, labels, weights = arguments

    def total(hidden, head):
        losses = function(hidden, head, labels)
        return jnp.sum(losses * weights), losses

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(hidden, head)


@pytest.mark.parametrize(
    ("rows_and_tokens", "chunk", "options"),
    [
        ((2, 10), 4, {}),  # chunks do not divide the tokens
        ((11,), 1, {"soft_cap": 3.0}),
        ((2, 3, 7), 3, {"z_loss": 0.1, "scale": 0.25}),
        ((3, 8), 100, {"soft_cap": 2.0, "z_loss": 0.1, "scale": 2.0}),
    ],
)
@pytest.mark.parametrize("vocabulary_dim", [1, 0])
@pytest.mark.one_in(2)
def test_losses_and_gradients_are_those_of_full_logits(
    rows_and_tokens, chunk, options, vocabulary_dim
):
    def chunked(hidden, head, labels):
        head = head if vocabulary_dim else head.T
        return jz.softmax_cross_entropy(
            hidden, head, labels, chunk=chunk, vocabulary_dim=vocabulary_dim, **options
        )

    with jax.enable_x64(True):
        given = arrays(*rows_and_tokens)
        got = jax.device_get(value_and_grads(chunked, given))
        want = jax.device_get(value_and_grads(functools.partial(plain, **options), given))
    assert got[0][1].shape == rows_and_tokens and got[0][1].dtype == np.float64
    zoo.assert_close(got, want, 1e-12, "losses and gradients")


@pytest.mark.parametrize("vocabulary_dim", [1, 0])
def test_a_weighted_sum_and_its_weight(vocabulary_dim: int):
    """One product for the logits and two for gradients; without weights, logits twice."""
    options = {"soft_cap": 2.0, "z_loss": 0.1, "scale": 0.5}

    def chunked(hidden, head, labels, weights):
        head = head if vocabulary_dim else head.T
        labels = jnp.where(weights == 0, -100, labels)
        total, weight = jz.softmax_cross_entropy(
            hidden, head, labels, weights, chunk=3, vocabulary_dim=vocabulary_dim, **options
        )
        return total / weight

    def plainly(hidden, head, labels, weights):
        return jnp.sum(plain(hidden, head, labels, **options) * weights) / jnp.sum(weights)

    with jax.enable_x64(True):
        given = arrays(2, 10)
        got, want = (
            jax.device_get(jax.jit(jax.value_and_grad(each, (0, 1)))(*given))
            for each in (chunked, plainly)
        )
        zoo.assert_close(got, want, 1e-12, "mean and gradients")
        assert str(jax.make_jaxpr(jax.grad(chunked, (0, 1)))(*given)).count("dot_general") == 3
        assert str(jax.make_jaxpr(chunked)(*given)).count("dot_general") == 1
        is_token = given[3] > 0
        total, weight = jz.softmax_cross_entropy(*given[:3], is_token)
        np.testing.assert_allclose(total, plain(*given[:3])[is_token].sum(), rtol=1e-12)
        assert int(weight) == is_token.sum() and weight.dtype == jnp.float64


def test_sixteen_bits_are_summed_in_float32():
    """Errors are at most one rounding to 16 bits; the head's gradient is rounded once."""
    hidden, head, labels, _ = arrays(1, 4000, dtype="float32")
    # Vectors and weights are alike, so that a sum in 16 bits would stop to grow.
    weights = np.ones((1, 4000), np.float32)
    narrow = (jnp.bfloat16(np.abs(hidden)), jnp.bfloat16(head))

    def of_sum(hidden, head, labels):
        return jz.softmax_cross_entropy(hidden, head, labels, weights, chunk=8)[0]

    sum_grads = jax.jit(jax.grad(of_sum, (0, 1)))(*narrow, labels)
    chunked = functools.partial(jz.softmax_cross_entropy, chunk=8)
    (total, losses), grads = value_and_grads(chunked, (*narrow, labels, weights))
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    (_, want), want_grads = value_and_grads(plain, (*wide, labels, weights))
    assert losses.dtype == total.dtype == jnp.float32
    np.testing.assert_allclose(losses, want, rtol=1e-5, atol=1e-5)
    for got, expected in zip((*grads, *sum_grads), want_grads * 2, strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.abs(np.float32(got) - expected).max()
        assert error < 2**-7 * np.abs(expected).max()


def test_a_label_outside_of_the_vocabulary_has_no_loss():
    hidden, head, labels, _ = arrays(2, 5, dtype="float32")
    bad = labels.copy()
    bad[0, 1], bad[1, 3] = -100, VOCABULARY
    losses = jz.softmax_cross_entropy(hidden, head, bad, chunk=2)
    np.testing.assert_array_equal(np.isnan(losses), bad != labels)

    def kept(head, bad):
        losses = jz.softmax_cross_entropy(hidden, head, bad, chunk=2)
        return jnp.sum(jnp.where(bad == labels, losses, 0))

    def plainly(head):
        return jnp.sum(jnp.where(bad == labels, plain(hidden, head, labels), 0))

    got, want = jax.grad(kept)(head, bad), jax.grad(plainly)(head)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _temporaries(function: Any, num_tokens: int, vocabulary: int) -> int:
    shapes = ((2, num_tokens, WIDTH), (WIDTH, vocabulary))
    given = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    labels = jax.ShapeDtypeStruct((2, num_tokens), jnp.int32)

    def loss(hidden, head, labels):
        return jnp.mean(function(hidden, head, labels))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return step.lower(*given, labels).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    chunked = functools.partial(jz.softmax_cross_entropy, chunk=32)

    def summed(hidden, head, labels):
        return chunked(hidden, head, labels, jnp.ones(labels.shape))[0]

    vocabulary, added_logits = 2048, 2 * 512 * 2048 * 4
    grown = [
        _temporaries(function, 1024, vocabulary) - _temporaries(function, 512, vocabulary)
        for function in (plain, chunked, summed)
    ]
    assert grown[0] >= added_logits, "full logits"
    assert max(grown[1:]) < added_logits / 20, "vectors and losses only"
    logits_of_a_chunk = 2 * 32 * vocabulary * 4
    assert _temporaries(chunked, 1024, vocabulary) < 6 * logits_of_a_chunk


def _weighted(params: Any, batch: Any, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(batch["x"] @ params["body"])
    return jz.softmax_cross_entropy(
        hidden, params["head"], batch["labels"], batch["weights"], chunk=chunk
    )


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.one_in(2)
def test_the_head_is_gathered_once_in_each_direction(microbatches: int):
    """Not once for each chunk; and the weighted mean is that of one device."""
    zero = jz.Zero(jz.make_mesh(nodes=2))
    x, head, labels, weights = arrays(16, 10, dtype="float32")
    whole = {"body": zoo.normal(jax.random.key(0), 0, WIDTH, WIDTH), "head": head}
    batch = {"x": x, "labels": labels, "weights": weights}
    loss = functools.partial(_weighted, chunk=2)
    step = zero.value_and_grad(loss, weighted=True, microbatches=microbatches)
    compiled = jax.jit(step).lower(params := zero.shard(whole), batch).compile()

    def mean(params):
        hidden = jnp.tanh(x @ params["body"])
        return jnp.sum(plain(hidden, params["head"], labels) * weights) / jnp.sum(weights)

    got, grads = compiled(params, batch)
    want, want_grads = jax.value_and_grad(mean)(whole)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")
    trips = [x.trips for x in zoo.hlo.collectives(compiled.as_text())]
    assert trips and max(trips) <= microbatches, "5 chunks would send 5 times"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"chunk": 0}, ValueError, "`chunk` must be a number of tokens, at least 1; got 0"),
        ({"vocabulary_dim": 2}, ValueError, r"`vocabulary_dim` must be 1 .* or 0 .*; got 2"),
        ({"vocabulary_dim": 0}, ValueError, r"`head` must be \[vocabulary, width\] .* of 6.*13"),
        ({"head": np.ones((5, 7), np.float32)}, ValueError, r"\[width, vocabulary\].*`vocab.*=0`"),
        ({"soft_cap": 0.0}, ValueError, "`soft_cap` must be positive and .*, or None .*; got 0.0"),
        ({"soft_cap": np.inf}, ValueError, "`soft_cap` must be positive and finite, .*; got inf"),
        ({"z_loss": -1.0}, ValueError, "`z_loss` must be a finite number, at least 0; got -1.0"),
        ({"labels": np.ones((2, 4), np.int32)}, ValueError, r"got shapes \(2, 5, 6\) and \(2, 4\)"),
        ({"weights": np.ones(5)}, ValueError, r"`weights` must have .* \(2, 5\); got \(5,\)"),
        ({"labels": np.ones((2, 5), np.float32)}, TypeError, "`labels` must be integers.*float32"),
        ({"hidden": np.ones((2, 5, 6), np.int32)}, TypeError, "`hidden` must be floating.* int32"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], message: str):
    hidden, head, labels, _ = arrays(2, 5, dtype="float32")
    given = {"hidden": hidden, "head": head, "labels": labels} | change
    with pytest.raises(error, match=message):
        jz.softmax_cross_entropy(**given)
