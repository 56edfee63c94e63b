"""`jz.exchange_tokens` by itself: choices that are none, capacities, dtypes, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz

ROWS, WIDTH, EXPERTS = 64, 4, 8


def _inputs(seed: int = 0, k: int = 2):
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.normal(size=(ROWS, WIDTH)), jnp.float32)
    experts = np.stack([random.permutation(EXPERTS)[:k] for _ in range(ROWS)]).astype(np.int32)
    weights = jnp.asarray(random.uniform(size=(ROWS, k)), jnp.float32)
    scales = {"scales": jnp.asarray(random.normal(size=(EXPERTS, WIDTH)), jnp.float32)}
    return scales, (x, jnp.asarray(experts), weights)


def _scaled(params, batch, factor=None):
    """Each expert multiplies by its scales."""
    x, experts, weights = batch
    own = params["scales"]

    def compute(rows, sizes, row_weights):
        number = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
        return (rows.astype(jnp.float32) * own[number] * row_weights[:, None]).astype(x.dtype)

    return jz.exchange_tokens(
        compute,
        x,
        experts,
        weights,
        num_experts=EXPERTS,
        num_local=len(own),
        capacity_factor=factor,
    )


def _wanted(params, batch, kept=None):
    x, experts, weights = (np.asarray(a) for a in batch)
    y = np.zeros_like(x)
    for t in range(ROWS):
        for j, e in enumerate(experts[t]):
            if 0 <= e < EXPERTS and (kept is None or kept[t, j]):
                y[t] += weights[t, j] * np.asarray(params["scales"])[e] * x[t]
    return y


def _zero(nodes: int = 2) -> jz.Zero:
    config = jz.ZeroConfig(ungathered=jz.Ungathered("scales", dim=0))
    return jz.Zero(jz.make_mesh(nodes), config)


def _run(zero: jz.Zero, params, batch, factor=None):
    def each(params, batch):
        y, dropped = _scaled(params, batch, factor)
        return y, dropped[None]

    return zero.apply(each, out_reduce=("concat", "concat"))(zero.shard(params), batch)


@pytest.mark.parametrize("factor", [None, 100.0])
def test_none_and_repeated(factor: float | None):
    """Indices of no expert add 0, and a token may choose the same expert twice."""
    params, (x, experts, weights) = _inputs()
    experts = experts.at[::5, 1].set(-1).at[3, 0].set(EXPERTS).at[8:16].set(5)
    batch = x, experts, weights
    want = _wanted(params, batch)
    y, dropped = _run(_zero(), params, batch, factor)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    assert not np.any(dropped)
    np.testing.assert_allclose(_scaled(params, batch)[0], want, rtol=1e-5, atol=1e-6)


def test_capacity():
    """The first choices of a device for each other one are sent, as many as fit."""
    params, batch = _inputs()
    y, dropped = _run(_zero(), params, batch, 0.5)
    num_devices, num_local = 4, 2
    rows = ROWS // 8
    room = round(0.5 * rows * 2 / num_devices)
    kept, lost = np.zeros((ROWS, 2), bool), []
    for start in range(0, ROWS, rows):
        taken = np.zeros(num_devices, int)
        for t in range(start, start + rows):
            for j in range(2):
                to = int(batch[1][t, j]) // num_local
                kept[t, j] = taken[to] < room
                taken[to] += 1
        lost.append(int(np.sum(~kept[start : start + rows])))
    assert 0 < sum(lost) < 2 * ROWS
    np.testing.assert_array_equal(dropped, lost)
    np.testing.assert_allclose(y, _wanted(params, batch, kept), rtol=1e-5, atol=1e-6)


def test_gradients_with_capacity():
    """With room for all they are those of one device."""
    params, batch = _inputs()
    x, experts, weights = batch

    def loss(params, batch, factor):
        return jnp.mean(jnp.sin(_scaled(params, batch, factor)[0]).sum(1))

    zero = _zero()
    _, found = zero.value_and_grad(lambda params, batch: loss(params, batch, 4.0))(
        zero.shard(params), batch
    )
    want = jax.grad(lambda params: loss(params, batch, None))(params)
    np.testing.assert_allclose(zero.unshard(found)["scales"], want["scales"], rtol=1e-5, atol=1e-6)

    def of_inputs(weights, x):
        return jnp.sum(_scaled(params, (x, experts, weights))[0] ** 2)

    def dense(weights, x):
        each = jnp.take(params["scales"], experts, axis=0) * x[:, None]
        return jnp.sum((each * weights[:, :, None]).sum(1) ** 2)

    pairs = (jax.grad(f, (0, 1))(weights, x) for f in (of_inputs, dense))
    for x, y in zip(*pairs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_sums_of_16_bits_are_rounded_once():
    """Each device rounds what it sends, and the receiver the sum."""
    params, (x, experts, weights) = _inputs()
    y, _ = _run(_zero(), params, (x.astype(jnp.bfloat16), experts, weights))
    assert y.dtype == jnp.bfloat16
    want = _wanted(params, (x, experts, weights))
    size = np.abs(want).max()
    np.testing.assert_allclose(np.asarray(y, np.float32), want, rtol=0, atol=size * 4 * 2**-8)


def test_errors():
    params, (x, experts, weights) = _inputs()

    def call(x=x, experts=experts, weights=weights, num_local=EXPERTS, **options):
        options = {"num_experts": EXPERTS, "num_local": num_local, **options}
        return jz.exchange_tokens(lambda rows, sizes, weights: rows, x, experts, weights, **options)

    for match, change in {
        "tokens, features": {"x": x[None]},
        "of the same shape": {"weights": weights[:, :1]},
        "must be integers": {"experts": weights},
        "`num_local` must be from 1": {"num_local": 9},
        "`capacity_factor` must be above 0": {"capacity_factor": 0.0},
        "must be floats": {"weights": experts},
        "must not be empty": {"x": x[:0], "experts": experts[:0], "weights": weights[:0]},
        "experts of other devices": {"num_local": 2},
    }.items():
        with pytest.raises(ValueError, match=match):
            call(**change)
    with pytest.raises(ValueError, match=r"must return \[rows, features\]"):
        jz.exchange_tokens(
            lambda rows, sizes, weights: rows[:1], x, experts, weights, num_experts=8, num_local=8
        )
    with pytest.raises(ValueError, match="Split the leaf by"):
        _run(_zero(4), {"scales": params["scales"][:2]}, (x, experts, weights))
