"""Halves of the devices: `zero.value_and_grad(..., halves=True)`.

The slow, obvious twin: run the plain program with the loss of one half of the devices set to
zero. What the others send is then what they send in the full run, to the bit, whatever the
codec; and zeros arrive as zeros.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

_CODED = jz.PerAxis(node=jz.Int8(block=32), local=jz.Int8(block=32))
CONFIGS = {
    "zero3": jz.zero3(),
    "unscheduled": jz.ZeroConfig(schedule=jz.CommSchedule(prefetch=0, bucket_bytes=0)),
    "zeropp": jz.zeropp(),
    "zeropp4": jz.zeropp4(),
    "feedback": jz.zero3(gradients=jz.PerAxis(node=jz.ErrorFeedback(jz.Int4(block=32)))),
    "hsdp": jz.hsdp(),
    "hsdp coded": jz.hsdp(gradients=_CODED),
    "ddp": jz.ddp(),
    "coded": jz.zero3(gradients=_CODED),
    "stage 1 coded": jz.ZeroConfig(stage=1, gradients=_CODED),
    "stage 2 persistent": jz.ZeroConfig(stage=2, param_persistence_threshold=200),
}
_ROWS, _FEATURES = 48, 16
WHOLE = {
    "w": zoo.normal(jax.random.key(0), 0, _FEATURES, 24),
    "stack": zoo.normal(jax.random.key(0), 1, 3, 24, 24),
    "bias": np.zeros(24, np.float32),
    "scale": np.float32(1.5),
    "unused": np.ones(5, np.float32),
    "steps": np.int32(3),
}
X = zoo.normal(jax.random.key(0), 2, _ROWS, _FEATURES, scale=1.0)
TOKENS = np.random.default_rng(0).integers(1, 9, _ROWS).astype(np.float32)


def _loss(params, batch, weighted=False):
    """The mean of what the rows give, each times 1 or 0; or the sum, and the tokens."""
    x, counts, tokens = batch
    h = x @ params["w"] + params["bias"][None]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])
    rows = params["scale"] * jnp.mean(h**2, 1) * counts + h[:, 0] * counts
    return (jnp.sum(rows * tokens), jnp.sum(tokens)) if weighted else jnp.mean(rows)


def _in_first_half(mesh, microbatches=1):
    """For each row of the batch whether it is of the first half of the devices."""
    nodes, local = mesh.devices.shape
    by_node = np.repeat(np.arange(nodes) < nodes // 2, local)
    by_device = by_node if nodes > 1 else np.arange(local) < local // 2
    return np.repeat(by_device, _ROWS // mesh.size).astype(np.float32)


def _dots(one, other):
    def dot(x, y):
        x, y = (np.asarray(each, np.float64).reshape(-1) for each in (x, y))
        return x @ y

    return np.array([dot(x, y) for x, y in zip(_leaves(one), _leaves(other), strict=True)])


def _leaves(tree):
    return [x for x in jax.tree.leaves(tree) if x.dtype != jax.dtypes.float0]


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        ("zero3", "2x4-explicit", {"weighted": True}),
        ("zeropp", "4x2-auto", {}),
        ("coded", "1x8-explicit", {"microbatches": 2}),
        ("feedback", "2x2-auto", {}),
        ("hsdp", "2x4-auto", {}),
        ("ddp", "3x2-explicit", {}),
        ("stage 2 persistent", "8x1-auto", {}),
        pytest.param("stage 1 coded", "1x3-auto", {}, marks=pytest.mark.exhaustive),
        pytest.param("zeropp4", "2x4-auto", {}, marks=pytest.mark.exhaustive),
        pytest.param(
            "unscheduled",
            "3x2-auto",
            {"microbatches": 2, "weighted": True},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@pytest.mark.one_in(2)
def test_halves_are_those_of_runs_with_one_half(config, mesh, options):
    mesh = zoo.make_mesh(mesh)
    zero = jz.Zero(mesh, dataclasses.replace(CONFIGS[config], min_quantized_size=500))
    params = zero.shard(WHOLE)
    remembered = {}
    if zero.config.needs_wire_state:
        remembered["wire_state"] = zero.init_wire_state(params)
    loss = functools.partial(_loss, weighted=options.get("weighted", False))

    plain, halved = (
        jax.jit(zero.value_and_grad(loss, allow_int=True, halves=halves, **options))
        for halves in (False, True)
    )

    def run(step, counts):
        return step(params, (X, counts, TOKENS), **remembered)

    value, grads, halves, *state = run(halved, np.ones(_ROWS, np.float32))
    # The same bits: XLA:CPU adds in the order of devices, here and in its reduce-scatter.
    want_value, want_grads, *want_state = run(plain, np.ones(_ROWS, np.float32))
    jax.tree.map(
        np.testing.assert_array_equal, (value, grads, state), (want_value, want_grads, want_state)
    )

    is_first = _in_first_half(mesh)
    weights = TOKENS if options.get("weighted") else np.ones(_ROWS)
    share = weights @ is_first / weights.sum()
    _, first, *_ = run(plain, is_first)
    _, second, *_ = run(plain, 1 - is_first)
    wanted = (
        _dots(first, first) / share**2,
        _dots(second, second) / (1 - share) ** 2,
        _dots(first, second) / share / (1 - share),
    )
    np.testing.assert_allclose(halves.share, share, rtol=2**-22)
    # float32: of each of a few hundred terms a few roundings, and of S - S1. A whole gradient is
    # encoded once more, to be gathered, after it was compared: off by sqrt(32) / 254 at most.
    near = 2 * math.sqrt(32) / 254 if config == "stage 1 coded" else 2e-6
    size = np.sqrt(wanted[0] * wanted[1])
    for got, want in zip(halves[:3], wanted, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(WHOLE)
        assert got["unused"] == 0 and got["steps"] == 0
        got = np.array([x for key, x in got.items() if key != "steps"])
        np.testing.assert_allclose(got, want, rtol=near, atol=near * size.max())
    assert np.all(wanted[0][:3] > 0) and not np.allclose(wanted[0], wanted[1], rtol=0.1)


def _rounded(x, dtype):
    return np.asarray(jnp.asarray(np.asarray(x), dtype), np.float64)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_halves_equal_numpy(dtype):
    """A linear model, whose gradient numpy has in float64."""
    mesh = zoo.make_mesh("2x4-auto")
    w, x = np.linspace(-1, 1, 12).reshape(3, 4), X[:, :3]
    w, x = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in (w, x))
    zero = jz.Zero(mesh)
    params = zero.shard({"w": jnp.asarray(w, dtype)})

    def loss(params, x):
        return jnp.mean((x @ params["w"].astype(jnp.float32)) ** 2)

    _, _, halves = jax.jit(zero.value_and_grad(loss, halves=True))(params, x)
    x, w = x.astype(np.float64), w.astype(np.float64)
    by_device = [x.T @ (x @ w) / x.shape[0] / 2 for x in x.reshape(8, -1, 3)]  # of 4 outputs
    # What is sent is rounded, between devices and between nodes; what is compared is not.
    g1, g2 = (
        _rounded(np.mean(_rounded(g, dtype), 0), dtype) for g in (by_device[:4], by_device[4:])
    )
    want = [np.sum(g1 * g1), np.sum(g2 * g2), np.sum(g1 * g2)]
    np.testing.assert_allclose([part["w"] for part in halves[:3]], want, rtol=2e-6)


# With SimiGrad: a quadratic, and noise of another spectrum, so that N is known.

_DIM = 2**13


def _noisy_rows(scale, num, dim=_DIM, seed=0):
    """Curvature, spread of the noise, and that of `num` rows: tr(Sigma) / |G|^2 is `scale`."""
    curvature, spread = np.geomspace(1, 0.1, dim), np.geomspace(1, 3, dim)
    spread *= math.sqrt(scale * np.sum(curvature**2) / np.sum(spread**2))
    noise = np.random.default_rng(seed).standard_normal((num, dim)) * spread
    return curvature, spread, noise.astype(np.float32)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(("mesh", "scale"), [("1x8-auto", 3.0), ("3x2-explicit", 0.5)])
@pytest.mark.one_in(2)
def test_noise_scale_of_one_micro_batch(mesh, scale):
    """Each batch is one micro-batch, a row for each device."""
    mesh = zoo.make_mesh(mesh)
    zero = jz.Zero(mesh)
    updates = 40
    curvature, spread, noise = _noisy_rows(scale * mesh.size, updates * mesh.size)
    tx = jz.simigrad(
        optax.sgd(0.0),
        target_similarity=0.5,
        initial=1,
        max_steps=1,
        noise_window=updates,
        groups=lambda path: path,
    )
    params = zero.shard(
        {"low": np.ones(_DIM // 2, np.float32), "high": np.ones(_DIM // 2, np.float32)}
    )
    state = zero.init_optimizer(tx, params)

    def loss(params, noise):
        x = jnp.concatenate([params["low"], params["high"]])
        return jnp.sum(curvature.astype(np.float32) * x**2) / 2 + jnp.mean(noise @ x)

    @jax.jit
    def step(state, noise):
        _, grads, halves = zero.value_and_grad(loss, halves=True)(params, noise)
        return tx.update(grads, state, params, halves=halves)[1]

    for batch in noise.reshape(updates, mesh.size, _DIM):
        state = step(state, batch)
    stats = jz.simigrad_stats(state)
    assert stats["updates"] == updates and stats["unmeasured"] == 0 and stats["skipped"] == 0
    np.testing.assert_allclose(stats["noise_scale"], scale, rtol=0.05)
    assert abs(stats["noise_scale"] - scale) < 5 * stats["noise_scale_error"]
    assert set(stats["groups"]) == {"low", "high"}
    low, high = (float(stats["groups"][name]["noise_scale"]) for name in ("low", "high"))
    squares = [np.sum(x[: _DIM // 2] ** 2) for x in (spread, curvature)]
    np.testing.assert_allclose(low, squares[0] / squares[1] / mesh.size, rtol=0.05)
    assert low < scale < high  # noise rises and curvature falls from the one to the other


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("microbatches", "runs", "hpz", "bias"),
    [
        (1, 1, None, 0.05),
        pytest.param(2, 1, None, 0.03, marks=pytest.mark.exhaustive),
        pytest.param(1, 4, None, 0.02, marks=pytest.mark.exhaustive),
        pytest.param(1, 4, jz.HpZ(), 0.04, marks=pytest.mark.exhaustive),
    ],
)
def test_noise_of_codecs_is_taken_out(microbatches, runs, hpz, bias):
    """4 bits on both hops, at a noise scale of a fifth of the batch; the same draws without.

    A gradient is the mean of `runs`, which send theirs each (between nodes together, with hpZ).
    """
    mesh = zoo.make_mesh("2x4-explicit")
    dim, updates, scale = 2**14, 10, 0.2
    num = mesh.size * microbatches * runs
    curvature, _, noise = _noisy_rows(scale * num, updates * num, dim)
    random = np.random.default_rng(1)
    gradient = random.permutation(curvature) * random.choice([-1, 1], dim)
    gradient = gradient.astype(np.float32)
    tx = jz.simigrad(
        optax.sgd(0.0),
        target_similarity=0.5,
        initial=microbatches,
        min_steps=microbatches,
        max_steps=microbatches,
        noise_window=updates,
    )

    def loss(params, noise):
        return jnp.mean((gradient[None] + noise) @ params["w"])

    def noise_scales(config):
        zero = jz.Zero(mesh, config)
        params = zero.shard({"w": np.zeros(dim, np.float32)})
        states = [zero.init_optimizer(tx, params)] * 2

        @jax.jit
        def step(states, noise):
            run = zero.value_and_grad(loss, microbatches=runs, halves=microbatches == 1)
            _, grads, *halves = run(params, noise)
            extras = {"halves": halves[0]} if halves else {}
            noises = None, zero.codec_noise(grads, microbatches=runs)
            return [
                tx.update(grads, state, params, codec_noise=added, **extras)[1]
                for state, added in zip(states, noises, strict=True)
            ]

        for batch in noise.reshape(updates * microbatches, mesh.size * runs, dim):
            states = step(states, batch)
        return [float(jz.simigrad_stats(x)["noise_scale"]) / microbatches for x in states]

    whole, unchanged = noise_scales(jz.zero3())
    assert whole == unchanged  # nothing is encoded
    config = dataclasses.replace(jz.zero3(gradients=jz.zeropp().gradients), hpz=hpz)
    coded, corrected = noise_scales(config)
    np.testing.assert_allclose(whole, scale, rtol=0.05)
    assert coded > (1 + bias) * whole
    np.testing.assert_allclose(corrected, whole, rtol=0.005)


@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_noise_of_codecs_is_measured_in_float32(size):
    """Whose squares are beyond float16, as gradients are."""
    zero = jz.Zero(zoo.make_mesh("2x2-auto"), jz.zero3(gradients=jz.zeropp().gradients))
    w = np.random.default_rng(0).standard_t(3, 2**14).astype(np.float16).astype(np.float32)
    w = np.where(abs(w) < 0.01, np.float32(0.01), w)  # no zeros, with which no block is rotated
    want = zero.codec_noise(zero.shard({"w": w}))
    got = zero.codec_noise(zero.shard({"w": (size * w).astype(np.float16)}))
    assert want.of_noise > 0.02
    # Near 1e-4 steps of float16 are 2**-24: they change some codes, and sums of squares little.
    np.testing.assert_allclose(got, want, rtol=0.02)


# Mistakes.


def test_one_device_has_no_halves():
    zero = jz.Zero(zoo.make_mesh("1x1-auto"))
    with pytest.raises(ValueError, match="`halves=True` compares.*there is one.*jz.simigrad"):
        zero.value_and_grad(_loss, halves=True)


def test_noise_of_no_micro_batch():
    zero = jz.Zero(zoo.make_mesh("2x2-auto"))
    params = zero.shard({"w": WHOLE["w"]})
    with pytest.raises(ValueError, match="`microbatches` must be an integer.*got 0"):
        zero.codec_noise(params, microbatches=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("feedback", "`ErrorFeedback` makes up for errors later"),
        ("hsdp coded", 'with `split="local"` sums over nodes are encoded twice'),
        ("stage 1 coded", "with `stage=1` sums are encoded twice"),
    ],
)
def test_noise_that_is_not_known(config, message):
    zero = jz.Zero(zoo.make_mesh("2x2-auto"), CONFIGS[config])
    params = zero.shard({"w": WHOLE["w"]})
    with pytest.raises(NotImplementedError, match=f"{message}.*Leave out `codec_noise`"):
        zero.codec_noise(params)
