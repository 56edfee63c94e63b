"""SimiGrad on sharded gradients, and in a checkpoint."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import jaxzero as jz
from tests import zoo

from .helpers import assert_same_bits, feed_all, make_gradients, make_params, make_simigrad


def _sharded(axis_type, tx):
    zero = jz.Zero(jz.make_mesh(nodes=2, axis_type=axis_type))
    params = zero.init(lambda: {"w": jnp.ones((16, 8)), "b": jnp.ones(8), "s": jnp.ones([])})
    return zero, params, zero.init_optimizer(tx, params)


def _loss(params, batch):
    return params["s"] * jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def _batch(zero, i):
    batch = jnp.asarray(np.random.default_rng(i).normal(size=(16, 16)), jnp.float32)
    return jax.device_put(batch, jax.NamedSharding(zero.mesh, zero.batch_spec))


_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


@pytest.mark.standard_promotion
@_TYPES
@pytest.mark.one_in(2)
def test_a_split_state_of_whole_gradients(axis_type):
    """At stage 1 updates are split as the state is, also those of a batch that is not full."""
    tx = make_simigrad(optax.adam(1e-2), initial=2, min_steps=2)
    zero = jz.Zero(jz.make_mesh(nodes=2, axis_type=axis_type), jz.ZeroConfig(stage=1))
    whole = {"w": np.ones((16, 8), np.float32), "b": np.ones(8, np.float32), "s": np.float32(1)}
    params, plain = zero.shard(whole), whole
    state, plain_state = zero.init_optimizer(tx, params), tx.init(whole)

    @jax.jit
    def step(params, state, batch):
        _, grads = zero.value_and_grad(_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(4):
        params, state = step(params, state, _batch(zero, i))
        grads = jax.grad(_loss)(plain, jax.device_get(_batch(zero, i)))
        updates, plain_state = tx.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    # Two updates by Adam of 1e-2 each, whose divisions keep relative errors of float32 gradients.
    for got, want in zip(*map(jax.tree.leaves, (zero.unshard(params), plain)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert int(state.updates) == int(cast(Any, plain_state).updates) == 2


@pytest.mark.standard_promotion
@_TYPES
@pytest.mark.one_in(2)
def test_sharded_gradients(axis_type):
    """Layout of the state, donation, and the numbers of one device."""
    tx = make_simigrad(
        optax.adam(1e-2), rule="jump", groups=lambda path: path, target_similarity=0.1
    )
    zero, params, state = _sharded(axis_type, tx)
    whole, plain = jax.device_get(params), tx.init(jax.device_get(params))

    traced = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        traced.append(1)
        _, grads = zero.value_and_grad(_loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step_of_one(params, state, batch):
        updates, state = tx.update(jax.grad(_loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    before = jax.tree.map(lambda x: x.sharding, state)
    types = jax.tree.map(jax.typeof, state)
    for i in range(9):
        batch = _batch(zero, i)
        old = state
        params, state = step(params, state, batch)
        whole, plain = step_of_one(whole, plain, jax.device_get(batch))
        assert all(x.is_deleted() for x in jax.tree.leaves(old)), "Not all of it was donated."
        assert jax.tree.map(jax.typeof, state) == types
        jax.tree.map(
            lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or pytest.fail(x),
            state,
            before,
        )
    assert state.mean["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
    assert len(traced) == 1, "The type of an output differs from that of the input."
    got, want = jz.simigrad_stats(state), jz.simigrad_stats(plain)
    assert got["updates"] >= 2 and got["steps"] == want["steps"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), got, want)


@pytest.mark.standard_promotion
@_TYPES
@pytest.mark.one_in(2)
def test_only_scalars_travel(axis_type):
    tx = make_simigrad(optax.adam(1e-2), groups=lambda path: path)

    def compiled(tx):
        zero, params, state = _sharded(axis_type, tx)

        @jax.jit
        def step(params, state, batch):
            _, grads = zero.value_and_grad(_loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return zoo.hlo.collectives(step.lower(params, state, _batch(zero, 0)).compile().as_text())

    def sizes(found):
        return sorted((c.op, s.size) for c in found for s in c.results if s.size > 1)

    ours, theirs = (
        compiled(tx),
        compiled(optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation()),
    )
    assert sizes(ours) == sizes(theirs)
    # And those not for each micro-batch: they are in a branch, not in the program itself.
    _, params, state = _sharded(axis_type, tx)
    text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    branches, program = text.split("\nENTRY")
    assert not zoo.hlo.collectives("ENTRY" + program)
    (sums,) = zoo.hlo.collectives(branches)
    leaves = len(jax.tree.leaves(params))
    assert sums.op == "all-reduce" and len(sums.results) <= 3 * leaves
    assert all(s.size == 1 for s in sums.results)


@pytest.mark.standard_promotion
def test_a_checkpoint_in_the_middle_of_a_batch(tmp_path):
    tx = make_simigrad(
        optax.adam(1e-2), rule="jump", groups={"a": "x", "b": "y"}, min_steps=4, lr_scaling="sqrt"
    )
    gradients, params = make_gradients(16), make_params()
    _, states = feed_all(tx, gradients[:6], params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", states[-1])
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, params))
    assert states[-1].updates == 1 and states[-1].count == 2
    assert_same_bits(restored, states[-1])
    want = feed_all(tx, gradients[6:], params, states[-1])
    got = feed_all(tx, gradients[6:], params, restored)
    assert_same_bits(got, want)
