"""Rows are followed through dims, loops and lookups; what is certain is found, and nothing else.

Each case is a function of rows `x [8, 6]` and `ids [8]`, and what is found in its scalar result.
The oracle is the function itself: whether it is the mean of its values for two halves of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz
from jaxzero._program import RowInput, find_mixings, trace
from jaxzero._program.row_states import NotAligned, as_rows, is_paired, merged, reshaped, simplified
from jaxzero._zero import mixed_rows

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
IDS = np.array([0, 3, 1, 5, 2, 2, 4, 0], np.int32)


def _kinds(function: Callable, x: Any = X, ids: Any = IDS) -> set[str]:
    block, _ = trace(function, x, ids)
    inputs = {0: RowInput(0, len(x)), 1: RowInput(0, len(ids))}
    (found,) = find_mixings(block, inputs, frozenset({"node"}), [0])
    return {mixing.kind for mixing in found}


def _mean(x: Any) -> Any:
    return jnp.mean(x**2)


def _convolved(x: Any, kernel: Any) -> Any:
    """Along the features of each row."""
    kernel = jnp.asarray(kernel, jnp.float32)[None, None]
    return lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")


APART: dict[str, Callable] = {
    "transposed": lambda x, ids: _mean(x.T.sum(0)),
    "merged with another dim": lambda x, ids: _mean(
        jnp.tanh(x.reshape(-1)).reshape(x.shape).sum(1)
    ),
    "in groups": lambda x, ids: _mean(
        x.reshape(-1, 2, 6) - x.reshape(-1, 2, 6).mean(1, keepdims=True)
    ),
    "one group": lambda x, ids: _mean(
        x.reshape(-1, 4, 6) - x.reshape(-1, 4, 6).mean(1, keepdims=True)
    ),
    "joined and cut": lambda x, ids: _mean(
        jnp.split(jnp.tanh(jnp.concatenate([x, 2 * x])), 2)[0] * jnp.concatenate([x, x])[len(x) :]
    ),
    "repeated": lambda x, ids: _mean(jnp.repeat(x, 3, axis=0).reshape(-1, 3, 6) - x[:, None]),
    "tiled": lambda x, ids: _mean(jnp.tile(x, (2, 1))[: len(x)] * x),
    "one after the other": lambda x, ids: lax.map(lambda row: jnp.sqrt(jnp.sum(row**2)), x).mean(),
    "added up in a loop": lambda x, ids: (
        lax.scan(lambda sum, row: (sum + jnp.exp(row).sum(), None), 0.0, x)[0] / len(x)
    ),
    "in micro-batches": lambda x, ids: (
        lax.scan(lambda sum, rows: (sum + _mean(rows), None), 0.0, x.reshape(2, -1, 6))[0] / 2
    ),
    "a loop over positions": lambda x, ids: _mean(
        lax.scan(lambda h, column: (jnp.tanh(h + column), h), x[:, 0], x.T)[1]
    ),
    "a vmapped loop": lambda x, ids: _mean(
        jax.vmap(lambda row: lax.while_loop(lambda r: r.sum() < 9, lambda r: r + 1, row))(x)
    ),
    "looked up": lambda x, ids: _mean(jnp.arange(12.0).reshape(6, 2)[ids] * x[:, :1]),
    "picked": lambda x, ids: _mean(x[jnp.arange(len(x)), ids]),
    "picked by vmap": lambda x, ids: _mean(jax.vmap(lambda row, i: row[i])(x, ids)),
    "written": lambda x, ids: _mean(
        jnp.tanh(jnp.zeros((len(x), 6)).at[jnp.arange(len(x)), ids].add(x[:, 0]))
    ),
    "counted": lambda x, ids: (jnp.zeros(6).at[ids].add(x[:, 0]) * jnp.arange(6.0)).sum() / len(x),
    "sorted inside": lambda x, ids: _mean(jnp.sort(x, axis=1)[:, 1]),
    "products of features": lambda x, ids: (jnp.einsum("bi,bj->ij", x, x)[0, 1]) / len(x),
    "a cumulative sum of means": lambda x, ids: jnp.cumsum((x**2).mean(0))[2],
    "a convolution of means": lambda x, ids: _convolved(x.mean(0)[None], np.ones(3)).sum(),
    "a mean of means": lambda x, ids: jnp.mean(x**2 + jnp.mean(x)),
    "by a condition": lambda x, ids: lax.cond(jnp.asarray(True), _mean, lambda x: x.mean(), x),
    "a guard": lambda x, ids: jnp.where(jnp.isfinite(_mean(x)), _mean(x), 0.0),
    "in windows": lambda x, ids: _mean(lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID")),
}
MIXED: dict[str, tuple[str, Callable]] = {
    "a statistic": ("statistic", lambda x, ids: _mean(x - x.mean(0)[None])),
    "one of picked columns": (
        "statistic",
        lambda x, ids: _mean(x[:, 1] * x[:, jnp.array([2, 0])].mean(0)[0]),
    ),
    "one of a slice of columns": ("statistic", lambda x, ids: _mean(x[:, 1] * x.T[0].mean())),
    "across groups": (
        "statistic",
        lambda x, ids: _mean(x.reshape(2, -1, 6) - x.reshape(2, -1, 6).mean(0)[None]),
    ),
    "softmax over rows": ("statistic", lambda x, ids: _mean(jnp.exp(x) / jnp.exp(x).sum(0)[None])),
    "a ratio": ("ratio", lambda x, ids: x.sum() / ids.astype(jnp.float32).sum()),
    "a ratio with a least weight": (
        "ratio",
        lambda x, ids: x.sum() / jnp.maximum(x[:, 0].sum(), 1),
    ),
    "a ratio by an inverse": ("ratio", lambda x, ids: x.sum() * (1 / x[:, 0].sum())),
    "a product": ("product", lambda x, ids: x.mean() * x[:, 0].mean()),
    "a function": ("function", lambda x, ids: jnp.log(_mean(x))),
    "a convolution by means": (
        "statistic",
        lambda x, ids: _mean(_convolved(x, x.mean(0)[:3])),
    ),
    "a function of what is picked": (
        "function",
        lambda x, ids: jnp.log(_mean(x[jnp.arange(len(x)), ids])),
    ),
    "means in order": ("function", lambda x, ids: jnp.sort(x.mean(0))[3]),
    "pairs": ("pairs", lambda x, ids: _mean(x[:, None] - x[None])),
    "pairs by a product": ("pairs", lambda x, ids: _mean(x @ x.T)),
    "pairs in a loop": (
        "pairs",
        lambda x, ids: lax.map(lambda row: jnp.exp(x @ row).sum(), x).mean(),
    ),
    "a maximum": ("extreme", lambda x, ids: _mean(x) + x.max()),
    "a sort": ("order", lambda x, ids: _mean(jnp.sort(x, axis=0) * x)),
    "a cumulative sum": ("order", lambda x, ids: _mean(jnp.cumsum(x.reshape(-1)))),
    "the largest": ("order", lambda x, ids: _mean(lax.top_k(x[:, 0], 2)[0])),
    "a loop with a state": (
        "statistic",
        lambda x, ids: lax.scan(lambda h, row: (jnp.tanh(h + row), None), jnp.zeros(6), x)[0].sum(),
    ),
    "gradients": (
        "statistic",
        lambda x, ids: _mean(x @ jax.grad(lambda w: _mean(x @ w))(jnp.ones(6))),
    ),
    "in a branch": (
        "statistic",
        lambda x, ids: lax.cond(jnp.asarray(True), lambda x: _mean(x - x.mean()), _mean, x),
    ),
    "in a nested jit": ("statistic", lambda x, ids: jax.jit(lambda x: _mean(x - x.mean()))(x)),
    "in a rule": ("statistic", lambda x, ids: jax.nn.relu(x - x.mean()).sum()),
    "noise": ("key", lambda x, ids: _mean(x + jax.random.normal(jax.random.key(0), x.shape))),
}
SETTLED: dict[str, Callable] = {
    "a mean": lambda x, ids: _mean(x - lax.pmean(x.mean(0), "node")[None]),
    "pairs": lambda x, ids: _mean(x @ lax.all_gather(x, "node", tiled=True).T),
    "a ratio": lambda x, ids: lax.psum(x.sum(), "node") / lax.psum(x[:, 0].sum(), "node"),
    "afterwards": lambda x, ids: _mean(lax.pmean(jnp.log(_mean(x)), "node")),
    "in a ring": lambda x, ids: _mean(
        x * (x.mean() + lax.ppermute(x.mean(), "node", [(0, 1), (1, 0)]))
    ),
    "noise": lambda x, ids: _mean(
        x
        + jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index("node")), x.shape)
    ),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart(name: str):
    function = APART[name]
    assert _kinds(function) == set()
    halves = [function(X[i : i + 4], IDS[i : i + 4]) for i in (0, 4)]
    np.testing.assert_allclose(function(X, IDS), np.mean(halves), rtol=1e-5)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_are_mixed(name: str):
    kind, function = MIXED[name]
    assert kind in _kinds(function)
    halves = [function(X[i : i + 4], IDS[i : i + 4]) for i in (0, 4)]
    assert kind == "key" or abs(function(X, IDS) - np.mean(halves)) > 1e-4


@pytest.mark.parametrize("name", SETTLED)
def test_a_collective_settles_it(name: str):
    def per_device(x: Any, ids: Any) -> set[str]:
        return _kinds(SETTLED[name], x, ids)

    found: list[set[str]] = []

    def traced(x: Any, ids: Any) -> Any:
        found.append(per_device(x, ids))
        return x

    jax.make_jaxpr(traced, axis_env=[("node", 2)])(X, IDS)
    assert found == [set()]


def test_a_group_of_all_rows_of_a_device_is_a_group():
    def in_groups(x: Any, ids: Any) -> Any:
        groups = x.reshape(-1, 8, 6)
        return _mean(groups - groups.mean(1, keepdims=True))

    assert _kinds(in_groups) == set()


def test_parts_of_dims():
    assert simplified(((2, 4), (4, 1), (3, 0), (5, 0), (1, 0))) == ((8, 1), (15, 0))
    assert merged(((8, 1),), ((2, 4), (4, 0))) == ((8, 1),)
    with pytest.raises(NotAligned):
        merged(((8, 1),), ((4, 1), (2, 4)))
    rows = {0: ((8, 1),)}
    assert as_rows(reshaped(rows, (8, 6), (48,), 8)) == ((0, ((8, 1), (6, 0))),)
    assert as_rows(reshaped(rows, (8, 6), (2, 4, 6), 8)) == ((0, ((2, 4),)), (1, ((4, 1),)))
    with pytest.raises(NotAligned):
        reshaped(rows, (8, 6), (6, 8), 8)
    assert is_paired(((0, ((8, 1),)), (1, ((8, 1),))), 8)
    assert not is_paired(((0, ((2, 4),)), (1, ((4, 1),)), (2, ((4, 1),))), 8)


def test_a_failure_is_told_and_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise KeyError("x")

    monkeypatch.setattr(mixed_rows, "find_mixings", fail)
    zero = jz.Zero(jz.make_mesh(nodes=2))
    step = jax.jit(zero.value_and_grad(lambda params, x: jnp.sqrt(_mean(x @ params["w"]))))
    with pytest.warns(UserWarning, match=r"could not be found out \(KeyError: 'x'\)"):
        loss, _ = step(zero.shard({"w": np.ones((6, 4), np.float32)}), X)
    assert np.isfinite(loss)
