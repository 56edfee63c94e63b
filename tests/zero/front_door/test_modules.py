"""Equinox and NNX modules wherever a tree is."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero as jz
from tests import zoo

from .helpers import (
    assert_equal,
    make_rows,
    whole_params,
)


def _mlp(key):
    return eqx.nn.MLP(8, 3, 31, 2, activation=jax.nn.gelu, key=key)


def _module_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.standard_promotion
@pytest.mark.one_in(2)
def test_an_equinox_module_is_a_tree(zero):
    model = zero.init(_mlp, jax.random.key(0))
    whole = jax.device_get(zero.unshard(model))
    assert type(model) is type(whole) is eqx.nn.MLP
    oracle = eqx.filter_jit(eqx.filter_value_and_grad(_module_loss))
    want_loss, want = oracle(whole, make_rows(zero))
    loss, grads = eqx.filter_jit(zero.value_and_grad(_module_loss))(model, make_rows(zero))
    assert_equal(zero, (loss, grads), (want_loss, want))
    tx = optax.adamw(1e-2)
    opt_state = zero.init_optimizer(tx, model)
    params = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(opt_state[0].mu) == jax.tree.structure(params)

    @eqx.filter_jit
    def stepped(model, grads, opt_state):
        updates, _ = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates)

    stepped = stepped(model, grads, opt_state)
    assert zero.value_and_grad(_module_loss)(stepped, make_rows(zero))[0] < want_loss


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 31, rngs=rngs)
        self.norm = nnx.BatchNorm(31, rngs=rngs)
        self.outer = nnx.Linear(31, 5, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))


def _net(key):
    return _Net(nnx.Rngs(key))


@pytest.mark.standard_promotion
@pytest.mark.one_in(2)
def test_an_nnx_module_is_a_tree(zero):
    model = zero.init(_net, jax.random.key(0))
    model.eval()
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    whole = jax.device_get(zero.unshard(model))
    want_loss, want = nnx.jit(nnx.value_and_grad(loss_fn))(whole, make_rows(zero))
    loss, grads = zero.value_and_grad(loss_fn)(model, make_rows(zero))
    assert_equal(zero, (loss, nnx.state(grads, nnx.Param)), (want_loss, want))
    assert grads.norm.mean.get_value() is None
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, grads)
    assert zero.value_and_grad(loss_fn)(model, make_rows(zero))[0] < loss


@pytest.mark.standard_promotion
def test_what_an_nnx_module_writes_is_returned_or_refused(auto):
    model = auto.init(_net, jax.random.key(0))
    whole = auto.unshard(model)

    def lost(model, x):
        return jnp.mean(model(x) ** 2)

    with pytest.raises(ValueError, match=r"norm\.mean.*would be lost.*nnx\.state"):
        auto.value_and_grad(lost)(model, make_rows(auto))

    def returned(model, x):
        return lost(model, x), nnx.state(model, nnx.BatchStat)

    (_, stats), _ = auto.value_and_grad(returned, has_aux=True, row_statistics="device")(
        model, make_rows(auto)
    )
    slices = np.split(make_rows(auto), 8)
    means = []
    for rows in slices:
        each = nnx.clone(whole)
        each(rows)
        means.append(each.norm.mean[...])
    np.testing.assert_allclose(stats["norm"]["mean"][...], np.mean(means, 0), rtol=1e-5, atol=1e-7)
    nnx.update(model, stats)


@pytest.mark.standard_promotion
def test_keys_that_nnx_rngs_draw_are_returned_or_refused(auto):
    """A counter that did not advance would give the same dropout in every step."""
    model, rngs = auto.init(_net, jax.random.key(0)), nnx.Rngs(0)
    model.eval()

    def lost(model, rngs, x):
        key = jz.fold_in_device(rngs())
        return jnp.mean(model(x + jax.random.normal(key, x.shape)) ** 2)

    with pytest.raises(ValueError, match=r"`rngs`.*default\.count.*would be lost.*key = rngs\."):
        auto.value_and_grad(lost)(model, rngs, make_rows(auto))
    step = auto.value_and_grad(lambda *args: (lost(*args), nnx.state(args[1])), has_aux=True)
    losses = []
    for _ in range(2):
        (loss, drawn), _ = step(model, rngs, make_rows(auto))
        nnx.update(rngs, drawn)
        losses.append(float(loss))
    assert rngs.default.count[...] == 2 and losses[0] != losses[1]


def test_an_nnx_module_that_shares_a_variable_is_refused(auto):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    setattr(model, "again", model.kernel)  # noqa: B010
    with pytest.raises(ValueError, match=r"one variable as `again` and as `kernel`.*nnx\.split"):
        auto.shard(model)


class _Buffer(nnx.Variable):
    pass


class _Positioned(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.position = _Buffer(jnp.ones(8))


def test_an_optimizer_of_a_state_with_more_than_parameters_warns(auto):
    tx = optax.adam(1e-3)
    _, params, rest = nnx.split(_Positioned(), nnx.Param, ...)
    for trained in (params, nnx.filter_state(rest, _Buffer), _Positioned()):
        auto.init_optimizer(tx, auto.shard(trained))  # warnings are errors here
    with pytest.warns(UserWarning, match=r"no `nnx.Param`: `norm.mean`, a `BatchStat` and 2 more"):
        auto.init_optimizer(tx, auto.shard(nnx.state(_Positioned())))


@pytest.mark.standard_promotion
def test_frozen_parts_of_an_equinox_module(auto):
    model = auto.init(_mlp, jax.random.key(0))
    is_trained = jax.tree.map(eqx.is_inexact_array, model)
    is_trained = eqx.tree_at(lambda m: m.layers[0], is_trained, False)
    trained, frozen = eqx.partition(model, is_trained)

    def loss(trained, frozen, x):
        return _module_loss(eqx.combine(trained, frozen), x)

    whole = jax.device_get(auto.unshard(model))
    oracle = eqx.filter_jit(eqx.filter_value_and_grad(_module_loss))
    want_loss, want = oracle(whole, make_rows(auto))
    got, grads = auto.value_and_grad(loss)(trained, frozen, make_rows(auto))
    np.testing.assert_allclose(got, want_loss, rtol=1e-5)
    assert jax.tree.leaves(grads.layers[0]) == []
    zoo.assert_close(
        jax.device_get(auto.unshard(grads.layers[1:])),
        jax.device_get(want.layers[1:]),
        1e-5,
        "grads",
    )
    tx = optax.adam(1e-3)
    opt_state = auto.init_optimizer(tx, trained)

    @eqx.filter_jit
    def stepped(trained, grads, opt_state):
        updates, _ = tx.update(grads, opt_state, eqx.filter(trained, eqx.is_inexact_array))
        return eqx.apply_updates(trained, updates)

    stepped = stepped(trained, grads, opt_state)
    assert auto.value_and_grad(loss)(stepped, frozen, make_rows(auto))[0] < got


@pytest.mark.standard_promotion
def test_a_checkpoint_of_modules_and_parts(auto, tmp_path):
    model = auto.init(_mlp, jax.random.key(0))
    params = auto.shard(whole_params())
    state = {"model": model, "part": {"again": params["head"]}}
    with jz.Checkpoints(tmp_path, auto) as checkpoints:
        checkpoints.save(1, state)
    other = jz.Zero(zoo.make_mesh("2x3-auto"))
    like = {
        "model": other.init(_mlp, jax.random.key(1)),
        "part": {"again": other.shard({"head": np.zeros((15, 31), np.float32)})["head"]},
    }
    with jz.Checkpoints(tmp_path, other) as checkpoints:
        restored = checkpoints.restore(like).state
    assert restored["model"].activation is like["model"].activation
    for got, want in ((restored["model"], model), (restored["part"], state["part"])):
        trees = (other.unshard(got), auto.unshard(want))
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            if isinstance(a, jax.Array):
                np.testing.assert_array_equal(a, b)
