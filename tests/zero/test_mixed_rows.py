"""Losses that mix rows are warned of, at their lines; with the remedy they are those of one device.

Each mistake is a loss as one writes it for one device, with `# here` at the line that mixes rows,
and a second one with what the warning proposes. The oracle is the first on one device.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxzero as jz

pytestmark = pytest.mark.standard_promotion
AXES = ("node", "local")
ROWS = 32
random = np.random.default_rng(0)
PARAMS = {
    "w": random.normal(size=(6, 4)).astype(np.float32),
    "b": random.normal(size=4).astype(np.float32),
}
BATCH = {
    "x": random.normal(size=(ROWS, 6)).astype(np.float32),
    "y": random.normal(size=(ROWS, 4)).astype(np.float32),
    "action": random.integers(0, 4, ROWS).astype(np.int32),
    "advantage": random.normal(size=ROWS).astype(np.float32),
    "mask": (random.random((ROWS, 4)) < 0.6).astype(np.float32),
}


def _net(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["w"] + params["b"][None])


def _policy(params: Any, batch: Any, advantage: Any) -> Any:
    rows = jnp.arange(batch["action"].shape[0])
    log_p = jax.nn.log_softmax(_net(params, batch))[rows, batch["action"]]
    ratio = jnp.exp(log_p + 1.4)
    return -jnp.mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage))


def ppo(params: Any, batch: Any) -> Any:
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # here
    return _policy(params, batch, advantage)


def ppo_over_devices(params: Any, batch: Any) -> Any:
    mean, squares = (
        lax.pmean(jnp.mean(x), AXES) for x in (batch["advantage"], batch["advantage"] ** 2)
    )
    advantage = (batch["advantage"] - mean) / (jnp.sqrt(squares - mean**2) + 1e-8)
    return _policy(params, batch, advantage)


def _siglip(scores: Any, first: Any) -> Any:
    rows, columns = scores.shape
    is_pair = jnp.arange(rows)[:, None] + first == jnp.arange(columns)[None]
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(jnp.where(is_pair, scores, -scores)), axis=-1))


def siglip(params: Any, batch: Any) -> Any:
    scores = _net(params, batch) @ batch["y"].T  # here
    return _siglip(scores, 0)


def siglip_gathered(params: Any, batch: Any) -> Any:
    others = lax.all_gather(batch["y"], AXES, tiled=True)
    first = lax.axis_index(AXES) * len(batch["y"])
    return _siglip(_net(params, batch) @ others.T, first)


def clip(params: Any, batch: Any) -> Any:
    left, right = _net(params, batch), batch["y"]
    scores = left @ right.T  # here
    labels = jnp.arange(left.shape[0])
    each = [optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in (scores, scores.T)]
    return jnp.mean(each[0] + each[1])


def clip_gathered(params: Any, batch: Any) -> Any:
    pair = _net(params, batch), batch["y"]
    left, right = (lax.all_gather(x, AXES, tiled=True) for x in pair)
    scores, labels = left @ right.T, jnp.arange(left.shape[0])
    each = [optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in (scores, scores.T)]
    return jnp.mean(each[0] + each[1])


def tokens(params: Any, batch: Any) -> Any:
    losses = (_net(params, batch) - batch["y"]) ** 2
    return jnp.sum(batch["mask"] * losses) / jnp.maximum(jnp.sum(batch["mask"]), 1)  # here


def tokens_weighted(params: Any, batch: Any) -> Any:
    losses = (_net(params, batch) - batch["y"]) ** 2
    return jnp.sum(batch["mask"] * losses), jnp.maximum(jnp.sum(batch["mask"]), 1)


def _normalized(params: Any, batch: Any, norm: nn.BatchNorm) -> Any:
    ones, zeros = jnp.ones(4), jnp.zeros(4)
    variables = {
        "params": {"scale": ones, "bias": zeros},
        "batch_stats": {"mean": zeros, "var": ones},
    }
    out, _ = norm.apply(variables, _net(params, batch), mutable=["batch_stats"])  # here
    return jnp.mean((out - batch["y"]) ** 2)


def linen_batch_norm(params: Any, batch: Any) -> Any:
    return _normalized(params, batch, nn.BatchNorm(use_running_average=False))


def linen_batch_norm_over_devices(params: Any, batch: Any) -> Any:
    return _normalized(params, batch, nn.BatchNorm(use_running_average=False, axis_name=AXES))


def nnx_batch_norm(params: Any, batch: Any, axis_name: Any = None) -> Any:
    norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=nnx.Rngs(0))
    out = norm(_net(params, batch))  # here
    return jnp.mean((out - batch["y"]) ** 2)


def nnx_batch_norm_over_devices(params: Any, batch: Any) -> Any:
    return nnx_batch_norm(params, batch, AXES)


def inner_step(params: Any, batch: Any, over: Any = lambda x: x) -> Any:
    """MAML: a gradient inside of the loss is that of one device's mean."""

    def mean(params: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)  # here

    inner = jax.tree.map(lambda p, g: p - 0.1 * over(g), params, jax.grad(mean)(params))
    return jnp.mean((_net(inner, batch) - batch["y"]) ** 2)


def inner_step_over_devices(params: Any, batch: Any) -> Any:
    return inner_step(params, batch, lambda x: lax.pmean(x, AXES))


def root(params: Any, batch: Any, over: Any = lambda x: x) -> Any:
    mean = jnp.mean((_net(params, batch) - batch["y"]) ** 2)  # here
    return jnp.sqrt(over(mean))


def root_over_devices(params: Any, batch: Any) -> Any:
    return root(params, batch, lambda x: lax.pmean(x, AXES))


def largest(params: Any, batch: Any) -> Any:
    most = jnp.max(jnp.abs(batch["advantage"]))  # here
    return _policy(params, batch, batch["advantage"] / most)


def largest_over_devices(params: Any, batch: Any) -> Any:
    most = lax.pmax(jnp.max(jnp.abs(batch["advantage"])), AXES)
    return _policy(params, batch, batch["advantage"] / most)


def ranks(params: Any, batch: Any) -> Any:
    order = jnp.sort(batch["advantage"])  # here
    return _policy(params, batch, order)


def ranks_gathered(params: Any, batch: Any) -> Any:
    every = jnp.sort(lax.all_gather(batch["advantage"], AXES, tiled=True))
    rows = batch["advantage"].shape[0]
    return _policy(
        params, batch, lax.dynamic_slice_in_dim(every, lax.axis_index(AXES) * rows, rows)
    )


MISTAKES: dict[Callable, tuple[Callable, str, dict[str, Any]]] = {
    ppo: (ppo_over_devices, r"Mean over 4 rows of float32\[4\], .*pmean", {}),
    siglip: (siglip_gathered, r"All pairs of 4 rows, float32\[4, 4\], .*all_gather", {}),
    clip: (clip_gathered, r"All pairs of 4 rows, .*all_gather", {}),
    tokens: (
        tokens_weighted,
        "sum over 4 rows divided by a sum.*weighted=True",
        {"weighted": True},
    ),
    linen_batch_norm: (
        linen_batch_norm_over_devices,
        r"Mean over 4 rows of float32\[4, 4\], .*linen/normalization.py.*pmean.*BatchNorm",
        {},
    ),
    nnx_batch_norm: (
        nnx_batch_norm_over_devices,
        r"Mean over 4 rows of float32\[4, 4\], .*nnx/nn/normalization.py.*pmean.*BatchNorm",
        {},
    ),
    inner_step: (inner_step_over_devices, "over 4 rows of .* combined with rows again.*pmean", {}),
    root: (root_over_devices, "Mean over 4 rows of .* goes through `sqrt`.*pmean", {}),
    largest: (largest_over_devices, r"Maximum over 4 rows of float32\[4\].*pmax", {}),
    ranks: (ranks_gathered, r"`sort` over 4 rows of float32\[4\].*all_gather", {}),
}
WRONG = pytest.mark.parametrize("wrong", MISTAKES, ids=lambda x: x.__name__)


def _warned(function: Callable, *args: Any, microbatches: int = 1, **options: Any) -> list[Any]:
    zero = jz.Zero(jz.make_mesh(nodes=2))
    step = zero.value_and_grad(function, microbatches=microbatches, **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jax.eval_shape(step, zero.shard(PARAMS), *args)
    return found


def _marked_line(function: Callable) -> int:
    """The line of the test's file with `# here`, in a function or in what it calls."""
    for each in (function, _normalized):
        lines, first = inspect.getsourcelines(each)
        for number, line in enumerate(lines):
            if line.endswith("# here\n"):
                return first + number
    raise ValueError(f"{function} has no mark")


@WRONG
def test_a_mistake_is_named_at_its_line(wrong: Callable):
    _, text, _ = MISTAKES[wrong]
    (found,) = _warned(wrong, BATCH)
    assert (found.category, found.filename) == (jz.RowsMixedWarning, __file__)
    assert found.lineno == _marked_line(wrong)
    assert f"test_mixed_rows.py:{found.lineno}" in str(found.message)
    with pytest.raises(jz.RowsMixedWarning, match=text):
        raise found.message


@WRONG
@pytest.mark.one_in(2)
def test_with_the_remedy_it_is_that_of_one_device(wrong: Callable):
    right, _, options = MISTAKES[wrong]
    zero = jz.Zero(jz.make_mesh(nodes=2))
    step = jax.jit(zero.value_and_grad(right, **options))  # a warning is an error
    loss, grads = step(zero.shard(PARAMS), BATCH)
    want_loss, want = jax.jit(jax.value_and_grad(wrong))(PARAMS, BATCH)
    # Sums of 32 rows in another order, in float32.
    np.testing.assert_allclose(loss, want_loss, rtol=2e-5)
    for x, y in zip(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-5 * np.abs(y).max())


@WRONG
def test_what_is_meant_is_not_warned_of(wrong: Callable):
    assert not _warned(wrong, BATCH, row_statistics="device")


def test_rows_of_a_micro_batch_are_mixed_on_one_device_too():
    (found,) = _warned(ppo, BATCH, microbatches=2)
    assert "in each of 2 micro-batches, uses that of its own 2 rows" in str(found.message)
    zero = jz.Zero(jz.make_mesh(devices=jax.devices()[:1]))
    params = zero.shard(PARAMS)
    with pytest.warns(jz.RowsMixedWarning, match="Each micro-batch uses that of its own 16 rows"):
        jax.eval_shape(zero.value_and_grad(ppo, microbatches=2), params, BATCH)
    jax.eval_shape(zero.value_and_grad(ppo), params, BATCH)


def dropped(params: Any, batch: Any, key: Any) -> Any:
    is_kept = jax.random.bernoulli(key, 0.5, batch["y"].shape)  # here
    return jnp.mean(jnp.where(is_kept, _net(params, batch), 0.0) ** 2)


def test_keys_that_are_equal_on_all_devices():
    key = jax.random.key(0)
    (found,) = _warned(dropped, BATCH, key, batch_argnums="batch", row_statistics="device")
    assert found.lineno == _marked_line(dropped)
    assert "`key = jz.fold_in_device(key)`" in str(found.message)

    def folded(params: Any, batch: Any, key: Any) -> Any:
        return dropped(params, batch, jz.fold_in_device(key))

    def same_for_all_rows(params: Any, batch: Any, key: Any) -> Any:
        is_kept = jax.random.bernoulli(key, 0.5, (1, 4))
        return jnp.mean(jnp.where(is_kept, _net(params, batch), 0.0) ** 2)

    for right in (folded, same_for_all_rows):
        for k in (1, 2):
            assert not _warned(right, BATCH, key, batch_argnums="batch", microbatches=k)


def test_aux_that_is_averaged():
    def loss(params: Any, batch: Any) -> Any:
        mean = jnp.mean(_net(params, batch) ** 2)
        return mean, jnp.exp(mean)

    (found,) = _warned(loss, BATCH, has_aux=True)
    assert "goes through `exp` on the way to `aux`" in str(found.message)
    assert not _warned(loss, BATCH, has_aux=True, aux_reduce="first")


def test_outputs_of_apply():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    run = zero.apply(lambda params, batch: _net(params, batch) - _net(params, batch).mean(0)[None])
    with pytest.warns(
        jz.RowsMixedWarning, match="combined with rows again on the way to an output"
    ):
        jax.eval_shape(run, zero.shard(PARAMS), BATCH)


def test_unknown_row_statistics():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    with pytest.raises(ValueError, match="`row_statistics` must be 'device'.*got 'global'"):
        zero.value_and_grad(ppo, row_statistics="global")
    with pytest.raises(ValueError, match="`row_statistics` must be 'device'"):
        zero.apply(ppo, row_statistics="global")


def test_it_is_said_once():
    zero = jz.Zero(jz.make_mesh(nodes=2))
    step, params = zero.value_and_grad(root), zero.shard(PARAMS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            jax.eval_shape(step, params, BATCH)
    assert len(found) == 1
