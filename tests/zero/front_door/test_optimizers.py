"""Optimizers that need more than gradients, or the true shapes of padded leaves."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import zoo

from .helpers import (
    make_rows,
    mean_loss,
    on_one_device,
    whole_params,
)


@pytest.mark.standard_promotion
def test_an_optimizer_that_asks_for_functions_is_tried_with_them(auto):
    params = auto.shard(whole_params())
    tx = optax.contrib.sam(optax.sgd(0.1), optax.adam(1e-2), sync_period=2, opaque_mode=True)
    opt_state = auto.init_optimizer(tx, params)  # warnings are errors here

    def one_step(grad, params, opt_state, x):
        def gradient(params, _):
            return grad(params, x)[1]

        grads = gradient(params, 0)
        updates, opt_state = tx.update(grads, opt_state, params, grad_fn=gradient)
        return optax.apply_updates(params, updates), opt_state

    whole = whole_params()
    want, _ = one_step(on_one_device(mean_loss), whole, tx.init(whole), make_rows(auto))
    got, _ = one_step(auto.value_and_grad(mean_loss), params, opt_state, make_rows(auto))
    zoo.assert_close(jax.device_get(auto.unshard(got)), jax.device_get(want), 1e-4, "params")


def test_an_optimizer_that_cannot_be_tried_is_warned_of(auto):
    def update(updates, state, params=None, *, curvature):
        return updates, state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    with pytest.warns(UserWarning, match=r"could not be tried.*curvature.*zero\.optimizer"):
        auto.init_optimizer(tx, auto.shard(whole_params()))


def test_a_list_of_statistics_for_a_padded_leaf_asks_for_true_shapes(auto):
    params = auto.shard({"head": whole_params()["head"]})
    match = r"a list of arrays as `0\.mu\.head`.*zero\.optimizer\(tx\)"
    with pytest.raises(ValueError, match=match):
        auto.init_optimizer(optax.sm3(1e-2), params)
    auto.init_optimizer(auto.optimizer(optax.sm3(1e-2)), params)


def test_statistics_that_do_not_fit_a_padded_leaf_ask_for_true_shapes(auto):
    params = auto.shard({"head": whole_params()["head"]})
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    with (
        pytest.warns(UserWarning, match=r"zero\.optimizer"),
        pytest.raises(ValueError, match=r"`0\.v.*head`.*\(15, 31\).*zero\.optimizer\(tx\)"),
    ):
        auto.init_optimizer(tx, params)


@pytest.mark.parametrize("name", ["adam", "adafactor"])
def test_a_train_state_is_made_inside_init(auto, name):
    """As `TrainState.create` makes it, also with an optimizer that pads its own leaves."""
    tx = optax.adam(1e-2)
    if name == "adafactor":
        tx = auto.optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=8))

    def create(params):
        return {"params": params, "opt_state": tx.init(params)}

    state = auto.init(create, {"head": whole_params()["head"]})
    want = auto.init_optimizer(tx, state["params"])
    assert jax.tree.structure(state["opt_state"]) == jax.tree.structure(want)
    pairs = zip(jax.tree.leaves(state["opt_state"]), jax.tree.leaves(want), strict=True)
    for got, expected in pairs:
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "change", [lambda x: x.T, lambda x: x.ravel(), lambda x: jnp.concatenate([x, x])]
)
def test_data_that_no_longer_fit_their_layout_are_refused(auto, change):
    params = jax.tree.map(change, auto.shard({"head": whole_params()["head"]}))
    match = r"`head` of shape \(15, 31\).*zero\.unshard"
    with pytest.raises(ValueError, match=match):
        auto.value_and_grad(lambda p, x: jnp.sum(p["head"]) + jnp.mean(x))(params, make_rows(auto))
    with pytest.raises(ValueError, match=match):
        auto.unshard(params)


def test_sizes_are_true_sizes(auto):
    params = auto.shard(whole_params())
    leaves = jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "size"))
    assert sum(x.size for x in leaves) == sum(x.size for x in jax.tree.leaves(whole_params()))
    assert params["head"] not in [None, "head"]


def _no_decay_on_bias(tree):
    def is_decayed(path, _):
        return not jax.tree_util.keystr(path, simple=True, separator="/").endswith("b")

    return jax.tree_util.tree_map_with_path(is_decayed, tree)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("name", "tx", "is_warned_of"),
    [
        ("by_path", optax.adamw(0.1, weight_decay=0.5, mask=_no_decay_on_bias), True),
        (
            "by_rank",
            optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
            False,
        ),
        (
            "by_label",
            optax.multi_transform(
                {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)},
                lambda tree: jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", tree),
            ),
            False,
        ),
    ],
)
@pytest.mark.one_in(2)
def test_masked_optimizers(auto, name, tx, is_warned_of):
    params, whole = auto.shard(whole_params()), whole_params()
    if is_warned_of:
        with pytest.warns(UserWarning, match=r"zero\.optimizer\(tx\)"):
            auto.init_optimizer(tx, params)
        tx = auto.optimizer(tx)

    def two_steps(grad, params, opt_state):
        for _ in range(2):
            updates, opt_state = tx.update(grad(params, make_rows(auto))[1], opt_state, params)
            params = optax.apply_updates(params, updates)
        return params

    got = two_steps(auto.value_and_grad(mean_loss), params, auto.init_optimizer(tx, params))
    tx = tx.inner if is_warned_of else tx
    want = two_steps(on_one_device(mean_loss), whole, tx.init(whole))
    zoo.assert_close(jax.device_get(auto.unshard(got)), jax.device_get(want), 1e-4, name)


def _warm(peak):
    return optax.linear_schedule(0.0, peak, 3)


_BY_SHAPE = optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1))
_SHOWN_LATER = {
    "warmup": optax.adamw(_warm(0.1), weight_decay=0.5, mask=_no_decay_on_bias),
    "small_decay": optax.adamw(1e-3, weight_decay=1e-4, mask=_no_decay_on_bias),
    "micro_batches": optax.MultiSteps(
        optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1.0)), 4
    ).gradient_transformation(),
    "threshold": optax.chain(optax.clip_by_block_rms(100.0), optax.sgd(0.1)),
    "condition": optax.conditionally_transform(_BY_SHAPE, lambda step: jnp.greater_equal(step, 3)),
}
_SAME = {
    "adam": optax.adam(_warm(1e-3)),
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-3),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(_warm(1e-3))),
    "micro_batches": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 4
    ).gradient_transformation(),
    "prodigy": optax.contrib.prodigy(1.0),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "growing": optax.scale_by_param_block_norm(),  # to infinity, since it has no learning rate
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", _SHOWN_LATER)
def test_padding_that_the_first_small_update_does_not_show_is_warned_of(auto, name):
    with pytest.warns(UserWarning, match=r"updates of their own shapes.*zero\.optimizer\(tx\)"):
        auto.init_optimizer(_SHOWN_LATER[name], auto.shard(whole_params()))


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:In .* parameters in 16 bits")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(_SAME, [jnp.float32, jnp.bfloat16]),
        *itertools.product(("adam", "clip"), [jnp.complex64]),  # the others are for real numbers
    ],
)
@pytest.mark.one_in(2)
def test_optimizers_that_padding_does_not_change_are_not_warned_of(auto, name, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), whole_params())
    auto.init_optimizer(_SAME[name], auto.shard(params))  # warnings are errors here


def test_an_optimizer_whose_trial_gives_nan_is_not_warned_of(auto):
    """Roots of negative gradients are NaN, whether the leaf is padded or not."""
    tx = optax.stateless(lambda updates, _: jax.tree.map(jnp.sqrt, updates))
    auto.init_optimizer(tx, auto.shard(whole_params()))  # warnings are errors here


@pytest.mark.standard_promotion
def test_one_layer_that_is_selected_by_its_path_is_warned_of(auto):
    """The trial takes many updates for one of several equal layers, and one update for all."""

    def is_third(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/") == "2/b", tree
        )

    params = auto.shard([{"b": np.ones(9, np.float32)} for _ in range(4)])
    with pytest.warns(UserWarning, match=r"updates of their own shapes.*zero\.optimizer\(tx\)"):
        auto.init_optimizer(optax.adamw(0.1, weight_decay=0.5, mask=is_third), params)
