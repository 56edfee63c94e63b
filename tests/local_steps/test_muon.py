"""Muon as the inner optimizer, against rounds written in numpy, in float64.

The oracle shares no code with jaxzero or optax: gradients, Muon with its Newton-Schulz iteration,
the AdamW of the other leaves and the outer Nesterov momentum are written out below. The sizes are
such that some leaves are padded over all devices, and others, too, over those of one node.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

NODES, EVERY, ROUNDS, LAYERS, WIDTH, ROWS = 2, 3, 3, 2, 5, 8  # rows of one node
RATE, ADAM_RATE, DECAY, BETA, B1, B2 = 0.02, 0.01, 0.1, 0.95, 0.9, 0.95
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.6


def init():
    rng = np.random.default_rng(7)
    return {
        "bias": rng.normal(size=7),
        "layers": rng.normal(size=(LAYERS, WIDTH, WIDTH)) * 0.5,
        "out": rng.normal(size=(WIDTH, 7)) * 0.5,
    }


def batches(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(EVERY, NODES * ROWS, WIDTH)).astype(np.float32)
    weights = np.random.default_rng(99).normal(size=(WIDTH, 7)).astype(np.float32)
    return x, np.sin(x @ weights)


# In numpy.


def gradients(w, x, y):
    """Gradients of half the mean square of `tanh(tanh(x @ layers) ...) @ out + bias - y`."""
    hidden = [x]
    for layer in w["layers"]:
        hidden.append(np.tanh(hidden[-1] @ layer))
    error = (hidden[-1] @ w["out"] + w["bias"] - y) / y.size
    back, layers = error @ w["out"].T, np.zeros_like(w["layers"])
    for i in reversed(range(LAYERS)):
        back = back * (1 - hidden[i + 1] ** 2)
        layers[i], back = hidden[i].T @ back, back @ w["layers"][i].T
    return {"bias": error.sum(0), "layers": layers, "out": hidden[-1].T @ error}


def orthogonal(x):
    """Five Newton-Schulz iterations with the coefficients of Jordan's Muon."""
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Node:
    """The parameters and optimizer of a node. Muon has matrices, AdamW the rest."""

    def __init__(self):
        self.w, self.t = init(), 0
        self.m, self.v = ({k: 0 * x for k, x in init().items()} for _ in range(2))

    def step(self, x, y):
        self.t += 1
        for k, g in gradients(self.w, x, y).items():
            if k == "bias":
                self.m[k] = B1 * self.m[k] + (1 - B1) * g
                self.v[k] = B2 * self.v[k] + (1 - B2) * g**2
                v = self.v[k] / (1 - B2**self.t)
                self.w[k] = self.w[k] - ADAM_RATE * self.ahead(k, g, B1) / (np.sqrt(v) + 1e-8)
                continue
            self.m[k] = BETA * self.m[k] + (1 - BETA) * g
            ahead = self.ahead(k, g, BETA)
            stack = [orthogonal(x) for x in ahead.reshape(-1, *ahead.shape[-2:])]
            update = np.stack(stack).reshape(g.shape) * max(1, g.shape[-1] / g.shape[-2]) ** 0.5
            self.w[k] = self.w[k] - RATE * (update + DECAY * self.w[k])

    def ahead(self, k, g, beta):
        """The momentum one step ahead (Nesterov), with Dozat's corrections of the bias."""
        return beta * self.m[k] / (1 - beta ** (self.t + 1)) + (1 - beta) * g / (1 - beta**self.t)


def in_numpy():
    """The outer parameters after all rounds, and the nodes."""
    nodes, outer = [Node() for _ in range(NODES)], init()
    velocity = {k: 0 * x for k, x in outer.items()}
    for seed in range(ROUNDS):
        for x, y in zip(*batches(seed), strict=True):
            for n, node in enumerate(nodes):
                rows = slice(n * ROWS, (n + 1) * ROWS)
                node.step(x[rows].astype(np.float64), y[rows].astype(np.float64))
        for k in outer:
            delta = np.mean([outer[k] - node.w[k] for node in nodes], axis=0)
            velocity[k] = OUTER_MOMENTUM * velocity[k] + delta
            outer[k] = outer[k] - OUTER_RATE * (OUTER_MOMENTUM * velocity[k] + delta)
            for node in nodes:
                node.w[k] = outer[k].copy()
    return outer, nodes


# In jaxzero.


def muon():
    dims = optax.contrib.MuonDimensionNumbers
    return optax.contrib.muon(
        RATE,
        beta=BETA,
        weight_decay=DECAY,
        adam_b1=B1,
        adam_b2=B2,
        adam_learning_rate=ADAM_RATE,
        muon_weight_dimension_numbers={"bias": None, "layers": dims(1, 2), "out": dims(0, 1)},
    )


def loss(params, batch):
    x, y = batch
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    return jnp.mean((h @ params["out"] + params["bias"][None] - y) ** 2) / 2


def step_of(zero, tx):
    def step(params, opt_state, batch):
        _, grads = zero.value_and_grad(loss)(params, batch)
        with (  # Adam's `decay ** count`, and Muon's coefficients times matrices
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    return step


def trained(mesh, **options):
    """The rounds and their state after all of them."""
    zero = jz.Zero(mesh, jz.zero3())
    tx = zero.optimizer(muon())
    params = zero.shard(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), init()))
    outer = optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    rounds = zero.local_steps(step_of(zero, tx), every=EVERY, outer=outer, **options)
    state, run = rounds.init(params, zero.init_optimizer(tx, params)), jax.jit(rounds)
    for seed in range(ROUNDS):
        state, _ = run(state, batches(seed))
    return zero, tx, rounds, state


@pytest.mark.parametrize("simulated", [True, False])
def test_rounds_of_muon_are_those_of_numpy(simulated):
    mesh = jz.make_mesh(NODES, simulate=NODES) if simulated else jz.make_mesh(NODES)
    zero, _, rounds, state = trained(mesh)
    expected, nodes = in_numpy()
    found = zero.unshard(rounds.mean(state))
    # Float32 rounds the momentum by 2**-24 of its norm. Newton-Schulz multiplies small singular
    # values, and their errors, by up to 3.4445**5 = 485; so an update of norm about 1 is off by
    # 485 * 2**-24 = 3e-5, a weight by RATE times that in each of 9 steps, and the outer step
    # carries it on by a factor of 0.7 * 1.6.
    for k, x in expected.items():
        np.testing.assert_allclose(found[k], x, rtol=0, atol=9 * RATE * 3e-5 * 1.12)
    momentum = state.opt_state.inner_states["muon"].inner_state[0].mu["layers"]
    (momentum,) = jax.tree.leaves(momentum)  # a `StoredArray` where it is padded
    expected = np.stack([node.m["layers"] for node in nodes])
    # Weights that are off by 6e-6, as above, move gradients, which are below 1, by as much.
    own = jax.device_get(momentum)[..., :WIDTH, :]
    np.testing.assert_allclose(own, expected, rtol=0, atol=6e-6)


def test_muon_joins_with_the_mean_on_another_number_of_nodes(tmp_path):
    streaming = {"fragments": 3, "delay": 1, "codec": jz.Int4(), "mixing": 0.5}
    zero, _, rounds, state = trained(jz.make_mesh(NODES), **streaming)
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"local": state})
    four = jz.Zero(jz.make_mesh(4), jz.zero3())
    tx = four.optimizer(muon())
    abstract = four.abstract(lambda: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), init()))
    more = four.local_steps(step_of(four, tx), every=EVERY, **streaming)
    like = more.abstract(abstract, four.init_optimizer(tx, abstract), nodes=NODES)
    with jz.Checkpoints(tmp_path, four) as checkpoints:
        joined = more.rejoin(checkpoints.restore(like={"local": like}).state["local"])
    old, new = (x.opt_state.inner_states["muon"].inner_state[0].mu for x in (state, joined))
    for k in ("layers", "out"):
        old_k, new_k = (jax.device_get(jax.tree.leaves(tree[k])[0]) for tree in (old, new))
        mean = old_k.mean(0)[tuple(slice(n) for n in init()[k].shape)]
        assert new_k.shape[0] == 4
        for each in new_k:
            np.testing.assert_array_equal(each[tuple(slice(n) for n in mean.shape)], mean)
    mean, again = zero.unshard(rounds.mean(state)), four.unshard(more.mean(joined))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-7), mean, again)
    joined, _ = jax.jit(more)(joined, batches(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(four.unshard(more.mean(joined))))


def test_masked_state_of_padded_leaves():
    """A mask made by `jax.tree.map` has a `StoredArray` for each padded leaf, over all devices."""

    def labels(params):
        return jax.tree.map(lambda x: "momentum" if x.ndim > 1 else "adam", params)

    parts = {"momentum": optax.sgd(RATE, momentum=0.9), "adam": optax.adam(RATE)}
    tx = optax.partition(parts, labels)
    full = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), init())
    results = []
    for mesh in (jz.make_mesh(NODES, simulate=NODES), jz.make_mesh(NODES)):
        zero = jz.Zero(mesh, jz.zero3())
        params = zero.shard(full)
        rounds = zero.local_steps(step_of(zero, tx), jz.diloco(every=EVERY))
        state = rounds.init(params, zero.init_optimizer(tx, params))
        state, _ = jax.jit(rounds)(state, batches(0))
        results.append(jax.device_get(zero.unshard(rounds.mean(state))))
    # Three steps of Adam, which turns an error of 2**-24 of a small gradient into as much of RATE.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *results)
