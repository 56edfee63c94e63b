"""Calls outside of `jax.jit` compile once, whatever is called, and keep no arrays."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jaxzero as jz
from tests import zoo
from tests.zero.compiles import COMPILES

from .helpers import make_rows, mean_loss, whole_params

_SCALE = np.linspace(0.5, 1.5, 8, dtype=np.float32)[None]


def _new_loss():
    def loss(params, x):
        return mean_loss(params, x * _SCALE)

    return loss


def _assert_same(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for x, y in jax.device_get(list(pairs)):
        np.testing.assert_array_equal(x, y)


def _calls(zero, params, x):
    """Calls of public methods, each with functions and optimizers that are new at every call."""

    def new_tx():
        return optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9))

    state, grads = zero.init_optimizer(new_tx(), params), params
    wrapped = zero.init_optimizer(zero.optimizer(new_tx()), params)
    whole = jax.device_get(zero.unshard(params))
    return {
        "init": lambda: zero.init(lambda: jax.tree.map(jnp.ones_like, whole)),
        "shard": lambda: zero.shard(whole),
        "shard_encoded": lambda: zero.shard(whole, codec=jz.Int8()),
        "unshard": lambda: zero.unshard(params),
        "init_optimizer": lambda: zero.init_optimizer(new_tx(), params),
        "apply_gradients": lambda: zero.apply_gradients(new_tx(), grads, state, params),
        "wrapped_update": lambda: zero.optimizer(new_tx()).update(grads, wrapped, params),
        "value_and_grad": lambda: zero.value_and_grad(_new_loss())(params, x),
        "apply": lambda: zero.apply(_new_loss())(params, x),
        "value_and_update": lambda: zero.value_and_update(_new_loss(), new_tx())(params, state, x),
        "codec_noise": lambda: zero.codec_noise(grads),
    }


@pytest.mark.standard_promotion
def test_a_second_call_compiles_nothing():
    zero = jz.Zero(zoo.make_mesh("2x4-explicit"))
    params, x = zero.shard(whole_params()), make_rows(zero)
    for name, call in _calls(zero, params, x).items():
        first = call()
        compiles = len(COMPILES)
        second = call()
        assert len(COMPILES) == compiles, name
        assert jax.tree.structure(first) == jax.tree.structure(second)
        _assert_same(first, second)


@pytest.mark.standard_promotion
def test_wire_states_checkpoints_and_cut_trees_compile_once(tmp_path):
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), jz.zeropp4())
    params = zero.shard(whole_params() | {"layers": zoo.normal(jax.random.key(2), 0, 4, 128, 256)})
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, params)
    calls = {
        "wire_state": lambda: zero.init_wire_state(params),
        "restore": lambda: checkpoints.restore(params).state,
        "split": lambda: zero.freeze(params, 2, layers="layers", before=()).split(params),
    }
    for name, call in calls.items():
        call()
        compiles = len(COMPILES)
        call()
        assert len(COMPILES) == compiles, name


@pytest.mark.standard_promotion
def test_transfers_of_a_second_call_are_none_that_a_guard_refuses(auto):
    zero = jz.Zero(auto.mesh, jz.zeropp())  # its rotations are NumPy arrays in the program
    params = zero.shard({"w": np.ones((8, 2048), np.float32), "odd": np.ones(9, np.float32)})
    x = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(zero.mesh, zero.batch_spec))
    table = jnp.ones(8)  # on one device

    def loss(params, x):
        return jnp.mean((x * _SCALE * table[None]) @ params["w"]) + jnp.sum(params["odd"])

    tx = optax.trace(0.9)
    state, grads = zero.init_optimizer(tx, params), zero.value_and_grad(loss)(params, x)[1]
    step = jax.jit(zero.value_and_grad(loss))
    calls = (
        lambda: step(params, x),
        lambda: zero.value_and_grad(loss)(params, x),
        lambda: zero.apply(loss)(params, x),
        lambda: zero.apply_gradients(tx, grads, state, params),
        lambda: zero.init_optimizer(tx, params),
        lambda: zero.unshard(params),
    )
    for call in calls:
        want = call()
        with jax.transfer_guard("disallow"):
            got = call()
        _assert_same(got, want)


def test_kept_programs_hold_no_arrays(auto, request):
    class Table:
        def __init__(self):
            self.rows = jnp.ones((1, 31))

    def new_loss(table):
        @jax.custom_jvp
        def scaled(x):
            return x * table.rows

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * table.rows))
        return lambda params, x: jnp.mean(scaled(x @ params["body"]["w"] @ params["head"]))

    def new_plain(table):
        return lambda params, x: jnp.mean(x @ params["body"]["w"] @ params["head"] * table.rows)

    gc.freeze()  # what other tests have left need not be looked through
    for restore in (gc.unfreeze, gc.enable):
        request.addfinalizer(restore)
    gc.disable()
    params, x = auto.shard(whole_params()), make_rows(auto)
    for new, collects in ((new_loss, True), (new_plain, False)):
        table = Table()
        alive = weakref.ref(table)
        auto.apply(new(table))(params, x)
        del table
        if collects:  # `scaled` and its rule refer to each other
            gc.collect()
        assert alive() is None


def test_a_program_that_prints_is_kept_with_its_words(auto, capsys):
    params, x = auto.shard(whole_params()), make_rows(auto)

    def said(word):
        def loss(params, x):
            jax.debug.print(word + " {}", x.size)
            return mean_loss(params, x)

        before = len(COMPILES)
        auto.value_and_grad(loss)(params, x)
        jax.effects_barrier()
        return capsys.readouterr().out.split("\n")[0], len(COMPILES) - before

    assert [said(word)[0] for word in ("first", "second")] == ["first 16", "second 16"]
    assert [said(word) for word in ("first", "second")] == [("first 16", 0), ("second 16", 0)]
