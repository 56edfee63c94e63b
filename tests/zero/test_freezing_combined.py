"""Frozen layers with updates in backward, with arrays in host memory, and with local steps.

The oracle is one device with `stop_gradient` on what is frozen, and optax.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

from . import test_freezing as plain

pytestmark = pytest.mark.standard_promotion  # optax mixes dtypes
TOLERANCE, NODES, PREFIX, STEPS = plain.TOLERANCE, 2, 4, 2
TX = optax.sgd(0.01, momentum=0.9)  # linear in gradients, unlike Adam
OFFLOAD = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=0)


def _trained(loss, tree, batch):
    """Losses and parameters of one device, with `stop_gradient` around what is frozen."""
    state, losses = TX.init(tree), []
    with jax.default_matmul_precision("highest"):
        for _ in range(STEPS):
            value, grads = jax.value_and_grad(lambda t: loss(plain._stop(t, PREFIX), batch))(tree)
            updates, state = TX.update(grads, state, tree)
            tree = optax.apply_updates(tree, updates)
            losses.append(value)
    return jax.device_get((losses, tree))


def _frozen(kind, config):
    """Active and frozen parameters of a partly frozen model, and optimizer state split alike."""
    loss, tree, layers = plain._model(kind)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), config)
    params = zero.shard(tree)
    freezing = zero.freeze(params, PREFIX, layers=layers, before="embed")
    state, _ = freezing.split_optimizer(TX, zero.init_optimizer(TX, params))
    return loss, tree, zero, freezing, freezing.split(params), state


@pytest.mark.parametrize(("kind", "offload"), [("scan", OFFLOAD), ("list", None)])
@pytest.mark.one_in(2)
def test_updates_in_backward_and_host_memory(kind, offload):
    config = dataclasses.replace(jz.zero3(), offload=offload)
    loss, tree, zero, freezing, (active, frozen), state = _frozen(kind, config)
    step = jax.jit(zero.value_and_update(freezing.wrap(loss), TX))
    losses = []
    with jax.default_matmul_precision("highest"):
        for _ in range(STEPS):
            value, active, state = step(active, state, frozen, plain._batch())
            losses.append(jax.device_get(value))
    want_losses, want = _trained(loss, tree, plain._batch())
    zoo.assert_close(losses, want_losses, TOLERANCE, "losses")
    got = jax.device_get(zero.unshard(freezing.join(active, frozen)))
    zoo.assert_close(got, want, TOLERANCE, "params")


@pytest.mark.ci
def test_local_steps():
    """Frozen parameters are passed beside the optimizer state, which nodes do not exchange."""
    loss, tree, zero, freezing, (active, frozen), state = _frozen("scan", jz.zero3())
    loss_and_grads = zero.value_and_grad(freezing.wrap(loss), batch_argnums=2)

    def step(active, state, batch):
        opt_state, frozen = state
        value, grads = loss_and_grads(active, frozen, batch)
        updates, opt_state = TX.update(grads, opt_state, active)
        return optax.apply_updates(active, updates), (opt_state, frozen), {"loss": value}

    batch = plain._batch()
    rounds = zero.local_steps(step, every=STEPS, outer=optax.sgd(1.0))
    batches = jax.tree.map(lambda x: np.stack([x] * STEPS), batch)
    with jax.default_matmul_precision("highest"):
        local, metrics = jax.jit(rounds)(rounds.init(active, (state, frozen)), batches)
    rows = plain.ROWS // NODES
    nodes = [jax.tree.map(lambda x, i=i: x[i * rows :][:rows], batch) for i in range(NODES)]
    losses, trees = zip(*(_trained(loss, tree, x) for x in nodes), strict=True)
    want = jax.tree.map(lambda *xs: np.mean(xs, axis=0), *trees)
    got = jax.device_get(zero.unshard(freezing.join(rounds.mean(local), frozen)))
    zoo.assert_close(got, want, TOLERANCE, "params")
    zoo.assert_close(jax.device_get(metrics["loss"]), np.transpose(losses), TOLERANCE, "losses")


def test_a_frozen_tree_from_outside_of_local_steps_is_refused():
    loss, _, zero, freezing, (active, frozen), state = _frozen("scan", jz.zero3())
    loss_and_grads = zero.value_and_grad(freezing.wrap(loss))

    def step(active, opt_state, batch):
        value, grads = loss_and_grads(active, frozen, batch)
        updates, opt_state = TX.update(grads, opt_state, active)
        return optax.apply_updates(active, updates), opt_state, {"loss": value}

    rounds = zero.local_steps(step, every=STEPS)
    batches = jax.tree.map(lambda x: np.stack([x] * STEPS), plain._batch())
    with pytest.raises(ValueError, match="`frozen` .*Put the tree into one of these; frozen"):
        rounds(rounds.init(active, state), batches)
