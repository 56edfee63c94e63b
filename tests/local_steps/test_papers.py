"""Rounds of local steps against Streaming DiLoCo written in numpy, in float64, on least squares.

The oracle shares no code with jaxzero or optax: gradients, the inner AdamW, the outer Nesterov
momentum and the merge are written out below.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

NODES, EVERY, FRAGMENTS, ROUNDS = 3, 6, 2, 3  # more than two nodes: messages are reduced
LAYERS, WIDTH, ROWS = 4, 3, 8  # rows of one node
RATE, DECAY, B1, B2, EPS = 0.05, 0.1, 0.9, 0.95, 1e-8


def init():
    return {"bias": np.array([0.3, -0.4]), "layers": np.linspace(-1, 1, LAYERS * WIDTH)}


def batches(seed):
    """The inputs and targets of a round. The targets of each node come from weights of its own."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EVERY, NODES, ROWS, LAYERS * WIDTH))
    weights = np.random.default_rng(99).normal(size=(NODES, LAYERS * WIDTH))
    return x.astype(np.float32), np.einsum("knri,ni->knr", x, weights).astype(np.float32)


# In numpy: algorithm 2 of the paper (https://arxiv.org/abs/2501.18512).


def gradients(w, x, y):
    """Gradients of half the mean square of `x @ layers + bias - y`, over rows and both biases."""
    errors = (x @ w["layers"] - y)[:, None] + w["bias"]
    return {"bias": errors.sum(0) / errors.size, "layers": x.T @ errors.sum(1) / errors.size}


class Node:
    """The parameters of a node, and its AdamW, whose moments pass from round to round."""

    def __init__(self):
        self.w, self.t = init(), 0
        self.m, self.v = ({k: 0 * x for k, x in init().items()} for _ in range(2))

    def step(self, x, y):
        self.t += 1
        for k, g in gradients(self.w, x, y).items():
            self.m[k] = B1 * self.m[k] + (1 - B1) * g
            self.v[k] = B2 * self.v[k] + (1 - B2) * g**2
            m, v = self.m[k] / (1 - B1**self.t), self.v[k] / (1 - B2**self.t)
            self.w[k] = self.w[k] - RATE * (m / (np.sqrt(v) + EPS) + DECAY * self.w[k])


def fragment(k, number, fragments):
    """The part of leaf `k` that belongs to a fragment: consecutive layers, or biases."""
    size = len(init()[k]) // fragments
    return slice(number * size, (number + 1) * size)


def in_numpy(*, fragments, delay, mixing, rate, momentum):
    """The parameters of each node, and the outer parameters, after all rounds."""
    nodes, outer = [Node() for _ in range(NODES)], init()
    velocity = {k: 0 * x for k, x in outer.items()}
    period, pending, step = EVERY // fragments, {}, 0
    for seed in range(ROUNDS):
        for x, y in zip(*batches(seed), strict=True):
            step += 1
            for n, node in enumerate(nodes):
                node.step(x[n].astype(np.float64), y[n].astype(np.float64))
            if (step + delay) % period == 0:
                number = ((step + delay) // period - 1) % fragments
                pending[step + delay] = (
                    number,
                    {k: np.mean([outer[k] - node.w[k] for node in nodes], axis=0) for k in outer},
                )
            if step in pending:
                number, deltas = pending.pop(step)
                for k, delta in deltas.items():
                    part = fragment(k, number, fragments)
                    velocity[k][part] = momentum * velocity[k][part] + delta[part]
                    outer[k][part] -= rate * (momentum * velocity[k][part] + delta[part])
                    for node in nodes:
                        node.w[k] = node.w[k].copy()
                        node.w[k][part] = mixing * node.w[k][part] + (1 - mixing) * outer[k][part]
    return [node.w for node in nodes], outer


# In jaxzero.


def step_of(zero):
    tx = optax.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)

    def loss(params, batch):
        x, y = batch
        errors = (x @ params["layers"].reshape(-1) - y)[:, None] + params["bias"][None]
        return jnp.mean(errors**2) / 2

    def step(params, opt_state, batch):
        _, grads = zero.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # Adam's `decay ** count`
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    return tx, step


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (jz.diloco(every=EVERY), {"fragments": 1, "delay": 0, "mixing": 0.0}),
        (
            jz.streaming_diloco(every=EVERY, fragments=FRAGMENTS, delay=1, codec=None),
            {"fragments": FRAGMENTS, "delay": 1, "mixing": 0.5},
        ),
    ],
    ids=["diloco", "streaming"],
)
def test_rounds_are_those_of_the_paper(method, settings):
    full = {k: jnp.asarray(x, jnp.float32) for k, x in init().items()}
    full["layers"] = full["layers"].reshape(LAYERS, WIDTH)
    zero = jz.Zero(jz.make_mesh(NODES, simulate=NODES), jz.zero3())
    tx, step = step_of(zero)
    params = zero.shard(full)
    rounds = zero.local_steps(step, method)
    state, run = rounds.init(params, zero.init_optimizer(tx, params)), jax.jit(rounds)
    for seed in range(ROUNDS):
        state, _ = run(
            state, jax.tree.map(lambda x: x.reshape(EVERY, -1, *x.shape[3:]), batches(seed))
        )
    nodes, outer = in_numpy(**settings, rate=0.7, momentum=0.9)
    # Float32 rounds each of 18 steps some ten times, by 2**-24 of numbers of about 1, and the outer
    # step carries errors on by a factor of 0.7 * 1.9: about 18 * 10 * 1.33 * 2**-24 = 1.4e-5.
    close = {"atol": 3e-5, "rtol": 0}
    for k, expected in outer.items():
        own = np.asarray(state.params[k]).reshape(NODES, -1)
        np.testing.assert_allclose(own, [node[k] for node in nodes], **close)
        np.testing.assert_allclose(np.ravel(state.outer_params[k]), expected, **close)
