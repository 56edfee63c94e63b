"""On CPUs nothing with collectives runs beside a loop with collectives (`_mesh.loop_order`)."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxzero as jz
from tests import zoo
from tests.processes import ROOT

from .loop_order import num_loops, side_by_side

AXES = ("node", "local")
WIDTH, LAYERS, ROWS = 32, 3, 16


def _params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / WIDTH**0.5)

    return {"in": draw(WIDTH, WIDTH), "layers": draw(LAYERS, WIDTH, WIDTH), "scale": draw(WIDTH)}


def _batch(seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((ROWS, WIDTH), np.float32))


def _loss(params, x):
    x = jnp.tanh(x @ params["in"])
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["scale"]) ** 2)


def _own_collectives(params, x):
    """Collectives of the user: in a scan, a while loop and a cond, and beside them."""

    def normalized(x, w):
        return x @ w / (1 + lax.psum(jnp.sum(x**2), AXES)), lax.psum(jnp.max(x), "local")

    y, maxima = lax.scan(normalized, x, params["layers"])
    steps = lax.while_loop(lambda n: lax.psum(n, AXES) < 40.0, lambda n: n + 1.0, jnp.float32(0))
    z = lax.cond(jnp.sum(x) < 1e6, lambda z: lax.psum(jnp.sum(z), "local"), jnp.sum, x)
    everyone = lax.all_gather(x @ params["in"], "node", tiled=True)
    loss = jnp.mean(y**2) + jnp.mean(everyone**2) + jnp.mean(maxima) * 1e-3 + z * 1e-6
    return loss + 0 * steps + jnp.mean(params["scale"])


def _step(zero: jz.Zero, loss=_loss, **options):
    grads = zero.value_and_grad(loss, **options)
    if zero.config.needs_wire_state:
        return lambda params, x: grads(params, x, wire_state=zero.init_wire_state(params))
    return lambda params, x: grads(params, x)


def _adamw(zero: jz.Zero):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    grads = zero.value_and_grad(_loss)

    def step(params, x):
        opt_state = zero.init_optimizer(tx, params)
        loss, g = grads(params, x)
        updates, opt_state = tx.update(g, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    return step


def _update_in_backward(zero: jz.Zero):
    tx = optax.adamw(1e-3)
    run = zero.value_and_update(_loss, tx)
    return lambda params, x: run(params, zero.init_optimizer(tx, params), x)


def _two_calls(zero: jz.Zero):
    grads, apply = zero.value_and_grad(_loss), zero.apply(_loss)

    def step(params, x):
        halved = jax.tree.map(lambda g: g / 2, grads(params, x)[1])
        return halved, apply(params, -x), grads(params, 2 * x)

    return step


PROGRAMS = {
    "two calls": (jz.zero3(), _two_calls),
    "own collectives": (
        jz.zero3(),
        lambda zero: _step(zero, _own_collectives, row_statistics="device"),
    ),
    "zeropp4": (jz.zeropp4(), _step),
}
MORE_PROGRAMS = {
    "zeropp": (jz.zeropp(), _step),
    "micro-batches": (jz.zero3(), lambda zero: _step(zero, microbatches=2)),
    "AdamW": (jz.zero3(), _adamw),
    "update in backward": (jz.zero3(), _update_in_backward),
}


@pytest.mark.standard_promotion  # for optax
@pytest.mark.parametrize(
    "name", [*PROGRAMS, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in MORE_PROGRAMS)]
)
def test_nothing_runs_beside_a_loop(name):
    config, make = (PROGRAMS | MORE_PROGRAMS)[name]
    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    params = zero.shard(_params())
    text = jax.jit(make(zero)).lower(params, _batch()).compile().as_text()
    assert num_loops(text) >= 2
    assert side_by_side(text) == []


# An unrolled loop reduces zeros, which XLA knows, in its first iteration.
_UNROLLED = "scanned_with_unroll"


@pytest.mark.parametrize("preset", ["zero3", pytest.param("zeropp", marks=pytest.mark.ci)])
@pytest.mark.parametrize(
    "name",
    [
        _UNROLLED,
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in zoo.CASES if x != _UNROLLED),
    ],
)
def test_nothing_runs_beside_a_loop_of_the_zoo(name, preset):
    case = zoo.CASES[name]
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), zoo.PRESETS.get(preset, jz.zero3()))
    trees, batch = zoo.arguments(case, "float32")
    step = zero.value_and_grad(
        case.loss, case.argnums, has_aux=case.has_aux, row_statistics="device"
    )
    lowered = jax.jit(step).lower(*map(zero.shard, trees), batch)
    if "while" not in lowered.as_text() and "stablehlo.case" not in lowered.as_text():
        pytest.skip("no loops")
    assert side_by_side(lowered.compile().as_text()) == []


@pytest.mark.parametrize(
    ("preset", "threads", "steps"),
    [
        pytest.param("zero3", 2, 10, marks=pytest.mark.ci),
        pytest.param("zeropp", 32, 10, marks=pytest.mark.ci),
        *(
            pytest.param(preset, threads, 50, marks=pytest.mark.exhaustive)
            for preset in ("zero3", "zeropp", "zeropp4")
            for threads in (2, 4, 8, 16, 32)
        ),
    ],
)
def test_training_is_the_same_twice_with_any_number_of_threads(preset, threads, steps):
    done = subprocess.run(
        [sys.executable, "-m", "tests.mesh.train_twice", preset, str(steps), "donate"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "NPROC": str(threads)},
    )
    assert done.returncode == 0, done.stderr
