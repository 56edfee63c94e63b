"""Batches whose rows the devices do not divide, and auxiliary outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo

from .helpers import (
    assert_equal,
    make_rows,
    mean_loss,
    on_one_device,
    whole_params,
)


@pytest.mark.parametrize("num_rows", [1, 13, 16, 21])
@pytest.mark.one_in(2)
def test_a_padded_batch_counts_every_row_once(zero, num_rows):
    params, x = zero.shard(whole_params()), zoo.normal(jax.random.key(5), 0, num_rows, 8)

    def row_losses(params, x):
        hidden = jnp.tanh(x @ params["body"]["w"]) @ params["head"]
        return jnp.log(jnp.sum(hidden**2, axis=-1))  # not finite for a row of zeros

    def loss(params, batch):
        rows, weights = batch
        return jnp.sum(weights * row_losses(params, rows["x"])), jnp.sum(weights)

    want = on_one_device(lambda p, x: jnp.mean(row_losses(p, x)))(whole_params(), x)
    rows, weights = jz.pad_batch({"x": x, "key": jax.random.key(0)}, zero)
    assert len(weights) == len(rows["x"]) == -(-num_rows // zero.num_devices) * zero.num_devices
    assert_equal(zero, zero.value_and_grad(loss, weighted=True)(params, (rows, weights)), want)


def test_pad_batch_to_a_number_of_rows(auto):
    x = np.arange(5, dtype=np.float32)
    rows, weights = jz.pad_batch(x, auto, rows=24)
    np.testing.assert_array_equal(rows, [0, 1, 2, 3, *[4] * 20])
    np.testing.assert_array_equal(weights, [*[1] * 5, *[0] * 19])
    assert len(jz.pad_batch(x, auto, microbatches=3)[1]) == 24
    for bad in (4, 12):
        with pytest.raises(ValueError, match="`rows` must be a multiple of 8"):
            jz.pad_batch(x, auto, rows=bad)
    with pytest.raises(ValueError, match="at least one row"):
        jz.pad_batch(x[:0], auto)


def test_evaluation_over_all_rows(auto):
    params = auto.shard(whole_params())
    data = zoo.normal(jax.random.key(6), 0, 53, 8)

    def score(params, batch):
        x, weights = batch
        return jnp.sum(weights * jnp.sum(x @ params["body"]["w"], axis=-1)), jnp.sum(weights)

    evaluate = jax.jit(auto.apply(score, out_reduce="sum"))
    batches = (jz.pad_batch(data[i : i + 16], auto, rows=16) for i in range(0, 53, 16))
    total, num = map(sum, zip(*(evaluate(params, batch) for batch in batches), strict=True))
    assert num == 53
    want = np.mean(np.sum(data.astype(np.float64) @ whole_params()["body"]["w"], axis=-1))
    np.testing.assert_allclose(total / num, want, rtol=1e-4)


# Auxiliary outputs.


@pytest.mark.parametrize(
    ("leaf", "proposal"),
    [
        (lambda x: jnp.int32(len(x)), "'sum' for a number of examples, 'first' for a counter"),
        (lambda x: jax.random.key(0), "'first' for a random key"),
        (lambda x: jax.random.PRNGKey(0), "'first' for a random key"),
        (lambda x: jnp.bool_(True), "'first' if it is the same on every device"),
        (lambda x: jnp.argmax(x, axis=-1), "'concat' if its dim 0 is the rows"),
    ],
)
def test_aux_without_a_mean_gets_a_proposal(auto, leaf, proposal):
    step = auto.value_and_grad(lambda p, x: (mean_loss(p, x), {"seen": leaf(x)}), has_aux=True)
    with pytest.raises(ValueError, match=f"`seen`.*`aux_reduce`.*{proposal}"):
        step(auto.shard(whole_params()), make_rows(auto))


def test_values_of_rows_have_no_mean(auto):
    params, x = auto.shard(whole_params()), make_rows(auto)

    def loss(params, x):
        return mean_loss(params, x), {"losses": jnp.sum(x @ params["body"]["w"], axis=-1)}

    for microbatches in (1, 2):
        step = auto.value_and_grad(loss, has_aux=True, microbatches=microbatches)
        with pytest.raises(ValueError, match=r"`losses`.*mix rows.*'concat'"):
            step(params, x)
        step = auto.value_and_grad(
            loss, has_aux=True, microbatches=microbatches, aux_reduce="concat"
        )
        (_, aux), _ = step(params, x)
        want = jnp.sum(x @ whole_params()["body"]["w"], axis=-1)
        zoo.assert_close(aux["losses"], want, 1e-5, "losses")


@pytest.mark.parametrize(
    ("form", "hint"),
    [
        pytest.param(lambda x: jnp.repeat(x, 3, axis=0).reshape(-1), r"the batch\.\s", id="flat"),
        pytest.param(lambda x: x.T, r"if rows are moved to dim 0\.", id="transposed"),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_nor_have_rows_that_are_not_dim_0(auto, form, hint, microbatches):
    def loss(params, x):
        return mean_loss(params, x), {"losses": form(x @ params["body"]["w"])}

    step = auto.value_and_grad(loss, has_aux=True, microbatches=microbatches)
    with pytest.raises(ValueError, match=rf"`losses`.*mix rows.*'concat'.*{hint}"):
        step(auto.shard(whole_params()), make_rows(auto))


def test_statistics_as_long_as_the_rows_have_a_mean(auto):
    params, x = auto.shard(whole_params()), make_rows(auto)

    def loss(params, x):
        return mean_loss(params, x), jnp.mean(x, axis=0)[: len(x)][:2]

    (_, aux), _ = auto.value_and_grad(loss, has_aux=True)(params, x)
    assert aux.shape == (2,)  # and a device has two rows
    zoo.assert_close(aux, jnp.mean(x, axis=0)[:2], 1e-5, "aux")


def test_where_no_other_number_of_rows_fits_it_is_asked(auto):
    def loss(params, x):
        return mean_loss(params, x), jnp.reshape(x, (2, 8))

    with pytest.raises(ValueError, match=r"mix rows"):
        auto.value_and_grad(loss, has_aux=True)(auto.shard(whole_params()), make_rows(auto))
