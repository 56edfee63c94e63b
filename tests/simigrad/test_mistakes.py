"""Gradients that are not finite, and wrong options."""

import copy
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz

from .helpers import (
    assert_same_bits,
    feed_all,
    flattened,
    make_gradients,
    make_params,
    make_simigrad,
)


@pytest.mark.parametrize("rule", ["walk", "jump"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
def test_what_is_not_finite_changes_nothing_and_is_counted(bad, rule):
    gradients = make_gradients(12)
    if bad is None:  # no gradient at all: its direction is 0 / 0
        gradients[4:8] = 4 * [jax.tree.map(jnp.zeros_like, gradients[0])]
    else:
        gradients[5]["a"] = gradients[5]["a"].at[1, 1].set(bad)
    tx = make_simigrad(rule=rule, target_similarity=0.5, min_steps=4, max_steps=4)
    updates, states = feed_all(tx, gradients)
    before, after = states[3], states[7]
    assert before.skipped == 0 and after.skipped == 1 and after.updates == 2
    for name in ("steps", "similarity", "moments", "memory", "unmeasured"):
        assert_same_bits(getattr(after, name), getattr(before, name))
    # The next batch starts clean.
    want = -0.1 * np.mean([flattened(g) for g in gradients[8:]], 0)
    np.testing.assert_allclose(flattened(updates[-1]), want, rtol=1e-5, atol=1e-7)
    assert states[-1].skipped == 1 and np.isfinite(states[-1].similarity)


def test_a_micro_batch_without_examples_is_left_out():
    gradients = make_gradients(4)
    gradients[1] = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), gradients[1])
    extras = [{"weight": np.float32(w)} for w in (3, 0, 2, 1)]
    updates, states = feed_all(make_simigrad(optax.sgd(1.0)), gradients, extras=extras)
    flat = np.stack([flattened(gradients[i]) for i in (0, 2, 3)])
    np.testing.assert_allclose(flattened(updates[-1]), -(np.array([3, 2, 1]) @ flat) / 6, atol=1e-6)
    assert states[-1].skipped == 0 and states[-1].seen == 6


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_similarity": 1.0}, "`target_similarity` is a cosine.*got 1.0"),
        ({"target_similarity": -0.1}, "`target_similarity`.*got -0.1"),
        ({"target_similarity": "high"}, "`target_similarity`.*got 'high'"),
        ({"initial": 0}, "`initial` is a number of micro-batches.*got 0"),
        ({"initial": 2.5}, "`initial`.*got 2.5"),
        ({"max_steps": True}, "`max_steps`.*got True"),
        ({"max_steps": 2**25}, "`max_steps`.*to 16777216"),
        ({"initial": 9}, "`initial` must lie between.*initial=9, min_steps=1, max_steps=8"),
        ({"min_steps": 5}, "`initial` must lie between.*min_steps=5"),
        ({"rule": "run"}, '`rule` must be "walk", "jump".*got \'run\''),
        ({"rule": jz.WalkRule}, "`rule` must be"),
        ({"lr_scaling": "log"}, '`lr_scaling` must be "sqrt", "linear" or None'),
        ({"combine": "max"}, '`combine` must be "mean"'),
        ({"noise_window": 1}, "`noise_window`.*got 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_simigrad(**options)


def test_wrong_types():
    simigrad = inspect.unwrap(jz.simigrad)  # before annotations are checked
    options = {"target_similarity": 0.5, "initial": 2, "max_steps": 8}
    with pytest.raises(TypeError, match="`inner` must be an optax transform.*got float"):
        simigrad(0.1, **options)
    with pytest.raises(ValueError, match='`rule` must be "walk", "jump".*got 0.1'):
        simigrad(optax.sgd(0.1), rule=0.1, **options)


@pytest.mark.parametrize(
    ("rule", "field", "value", "message"),
    [
        (jz.WalkRule(), "growth", 1, "`growth` of `WalkRule`.*got 1 and 0.9"),
        (jz.WalkRule(), "shrink", 1.5, "`growth` of `WalkRule`.*got 1.1 and 1.5"),
        (jz.WalkRule(), "window", 0, "`window` of `WalkRule` counts updates.*got 0"),
        (jz.JumpRule(), "window", 2.5, "`window` of `JumpRule`.*got 2.5"),
        (jz.JumpRule(), "max_change", 1, "`max_change` of `JumpRule`.*got 1"),
        (jz.JumpRule(), "average", "mode", "`average` of `JumpRule`.*got 'mode'"),
    ],
)
def test_wrong_rules(rule, field, value, message):
    rule = copy.copy(rule)  # and not `jz.WalkRule(...)`: tests check annotations first
    object.__setattr__(rule, field, value)
    with pytest.raises(ValueError, match=message):
        rule.__post_init__()


@pytest.mark.parametrize(
    ("options", "gradient", "extras", "message"),
    [
        ({}, {"a": jnp.ones(3)}, {}, "`updates` must be a tree like the parameters"),
        ({}, {"a": jnp.ones(3), "b": {"c": jnp.ones(5)}}, {}, r"shape \(3,\) at `a`.*\(3, 4\)"),
        ({}, None, {"weight": jnp.ones(2)}, r"`weight` must be a real scalar.*\(2,\)"),
        ({}, None, {"halves": (1.0, 2.0)}, "`halves` must be from.*got tuple of 2"),
        ({}, None, {"codec_noise": 0.01}, "`codec_noise` must be from.*got 0.01"),
        ({}, None, {"codec_noise": (0.01, jnp.ones(2))}, "`codec_noise` must be from"),
        ({}, None, {"halves": 1.0}, "`halves` must be from.*got float"),
        ({}, None, {"halves": (1.0, 2.0, jnp.ones(3))}, r"`halves` must be three scalars"),
        ({"groups": lambda p: p}, None, {"halves": (1.0, 2.0, 1.0)}, "three trees like the grad"),
        ({"groups": len}, None, {}, "`groups` must give each leaf a label.*got 1 for `a`"),
    ],
)
def test_wrong_updates(options, gradient, extras, message):
    with pytest.raises(ValueError, match=message):
        tx = make_simigrad(**options)
        tx.update(make_params() if gradient is None else gradient, tx.init(make_params()), **extras)


def test_stats_of_a_state_without_simigrad():
    with pytest.raises(ValueError, match="`state` must hold one state of `simigrad`.*with 0"):
        jz.simigrad_stats(optax.sgd(0.1).init(make_params()))
    state = make_simigrad().init(make_params())
    with pytest.raises(ValueError, match="got tuple with 2"):
        jz.simigrad_stats((state, state))
