"""Nothing that a loss closes over is remembered from one call to the next."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp

from tests.zero.compiles import COMPILES

from .helpers import (
    assert_equal,
    make_rows,
    mean_loss,
    on_one_device,
    whole_params,
)


class _Trainer:
    kl: float = 0.0
    table: jax.Array | None = None

    def loss(self, params, x):
        extra = 0 if self.table is None else jnp.sum(self.table)
        return mean_loss(params, x) + self.kl * jnp.sum(params["head"] ** 2) + extra


def test_changed_attributes_are_seen(auto):
    trainer, params, x = _Trainer(), auto.shard(whole_params()), make_rows(auto)
    step = auto.value_and_grad(trainer.loss)
    for kl, table in ((0.0, None), (1.0, jnp.ones(3)), (1.0, jnp.full(3, 2.0))):
        trainer.kl, trainer.table = kl, table
        want = on_one_device(trainer.loss)(whole_params(), x)
        assert_equal(auto, step(params, x), want)
    assert_equal(auto, jax.jit(auto.value_and_grad(trainer.loss))(params, x), want)


def test_a_traced_attribute(auto):
    trainer, params, x = _Trainer(), auto.shard(whole_params()), make_rows(auto)
    step = auto.value_and_grad(trainer.loss)

    @jax.jit
    def with_kl(kl, params, x):
        trainer.kl = kl
        return step(params, x)

    for kl in (0.5, 2.0):
        got = with_kl(kl, params, x)
        trainer.kl = kl
        assert_equal(auto, got, on_one_device(trainer.loss)(whole_params(), x))
        assert_equal(auto, step(params, x), on_one_device(trainer.loss)(whole_params(), x))


def test_a_second_call_traces_and_compiles_nothing_new(auto):
    params, traced = auto.shard(whole_params()), []

    def loss(params, x):
        traced.append(1)
        return mean_loss(params, x)

    step = auto.value_and_grad(loss)
    step(params, make_rows(auto))
    once, compiles = len(traced), len(COMPILES)
    step(params, 2 * make_rows(auto))
    assert len(COMPILES) == compiles
    assert len(traced) > once


def test_what_a_loss_closes_over_is_not_kept_alive(auto, request):
    gc.freeze()  # what other tests have left need not be looked through
    request.addfinalizer(gc.unfreeze)
    params = auto.shard(whole_params())

    class Table:
        def __init__(self):
            self.rows = jnp.ones(15)

    table = Table()
    alive = weakref.ref(table)

    def loss(params, x, table=table):
        return jnp.mean(x @ params["body"]["w"] * table.rows[None])

    auto.value_and_grad(loss)(params, make_rows(auto))
    jax.jit(auto.value_and_grad(loss))(params, make_rows(auto))
    del table, loss
    gc.collect()
    assert alive() is None


def test_callbacks_are_not_confused(auto):
    params, heard = auto.shard(whole_params()), []

    def make(word):
        def loss(params, x):
            jax.debug.callback(lambda: heard.append(word))
            return mean_loss(params, x)

        return loss

    words = ["first", "second"]

    def loss(params, x):
        return make(words[0])(params, x)

    step = auto.value_and_grad(loss)
    for expected in ("first", "second"):
        heard.clear()
        step(params, make_rows(auto))
        jax.effects_barrier()
        assert set(heard) == {expected}
        words.pop(0)
