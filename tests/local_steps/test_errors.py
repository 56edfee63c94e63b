"""Bad input ends in an error that names it, before anything is compiled."""

from __future__ import annotations

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]))


def step(params, opt_state, batch):
    return params, opt_state, {"mean": jnp.mean(batch)}


def init():
    return {"w": jnp.ones((8, 4)), "odd": jnp.ones((3, 5))}


@pytest.fixture(scope="module")
def trees(zero):
    params = zero.init(init)
    return params, zero.init_optimizer(optax.sgd(0.1, momentum=0.9), params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs `every`"),
        ({"every": 0}, "`every` of `LocalSteps` must be an integer of at least 1; got 0"),
        ({"every": 10, "fragments": 3}, "`fragments` must divide `every`.* got 3 fragments for 10"),
        ({"every": 6, "fragments": 3, "delay": 3}, "`delay` must be at most .* = 2 steps.*got 3"),
        ({"every": 6, "mixing": 1.0}, "`mixing` is the weight .* got 1.0"),
        ({"every": 6, "tau": 2}, "no option `tau`; it has every, delay, fragments"),
    ],
)
def test_options(zero, options, message):
    with pytest.raises(ValueError, match=message):
        zero.local_steps(step, **options)


def test_a_step_that_is_no_function(zero):
    # Where annotations are checked, a step of a wrong type is refused before.
    with pytest.raises((ValueError, TypeError), match="`step` must be a function.* got 2|'step'"):
        zero.local_steps(2, every=2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("codec", 4, "`codec` of `LocalSteps` must be a codec .* got 4"),
        ("mixing", "0.5", "`mixing` is the weight .* got '0.5'"),
        ("outer", 0.7, "`outer` must be an optax optimizer.* got 0.7"),
    ],
)
def test_options_of_another_type(field, value, message):
    method = copy.copy(jz.diloco())  # tests check annotations of calls first
    object.__setattr__(method, field, value)
    with pytest.raises(ValueError, match=message):
        method.__post_init__()


def test_meshes_and_configs_without_use():
    one = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="the mesh has one node"):
        one.local_steps(step, every=2)
    mesh = jz.make_mesh(2, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="`WeightDelta` and `ErrorFeedback`"):
        jz.Zero(mesh, jz.zeropp4()).local_steps(step, every=2)
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    three = jax.sharding.Mesh(devices, ("node", "local", "tensor"))
    with pytest.raises(NotImplementedError, match="this one also has \\('tensor',\\)"):
        jz.Zero(three).local_steps(step, every=2)
    offload = jz.ZeroConfig(offload=jz.Offload(weights=True))
    with pytest.raises(NotImplementedError, match="Leave out `offload`"):
        jz.Zero(mesh, offload).local_steps(step, every=2)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (np.ones((3, 8)), r"batches of 2 steps, stacked.* is float64\[3, 8\]"),
        ({"x": np.ones((2, 8)), "y": 3.0}, "the leaf `y` is float"),
        (np.ones((2, 6)), "6 rows for each step, which 4 devices cannot share"),
        (
            {"x": np.ones((2, 8)), "y": np.ones((2, 4))},
            r"equally many rows .* got `x` \[2, 8\], `y` \[2, 4\]. What has no rows",
        ),
    ],
)
def test_batches(zero, trees, batches, message):
    rounds = zero.local_steps(step, every=2)
    state = rounds.init(*trees)
    with pytest.raises(ValueError, match=message):
        rounds(state, batches)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda p, o, b: (p, o), "`step` must return three values; got 2"),
        (lambda p, o, b: ({"w": p["w"]}, o, 0.0), "returns `params` with another structure"),
        (lambda p, o, b: ({**p, "w": 1}, o, 0.0), "`params`, leaf `w`, as no array, 1"),
        (lambda p, o, b: (p, o, {"name": "x"}), "the metric `name` as str"),
        (
            lambda p, o, b: ({**p, "w": p["w"].astype(jnp.bfloat16)}, o, 0.0),
            r"returns `params`, leaf `w`, as bfloat16\[8, 4\]; it was given float32\[8, 4\]",
        ),
    ],
)
def test_what_a_step_returns(zero, trees, bad, message):
    rounds = zero.local_steps(bad, every=2)
    with pytest.raises(ValueError, match=message):
        rounds(rounds.init(*trees), np.ones((2, 8), np.float32))


def test_a_loss_may_not_reach_other_nodes(zero, trees):
    def across(params, opt_state, batch):
        def loss(params, batch):
            return jax.lax.pmean(jnp.mean(batch), ("node", "local")) * jnp.sum(params["w"])

        zero.value_and_grad(loss)(params, batch)
        return params, opt_state, {}

    rounds = zero.local_steps(across, every=2)
    with pytest.raises(ValueError, match="over the axis `node`, inside `zero.local_steps`"):
        rounds(rounds.init(*trees), np.ones((2, 8), np.float32))


def test_states(zero, trees):
    rounds = zero.local_steps(step, every=2)
    batches = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="do not know the trees yet"):
        rounds(trees[0], batches)
    with pytest.raises(ValueError, match="do not know the trees yet"):
        rounds.report()
    state = rounds.init(*trees)
    with pytest.raises(ValueError, match="must be a `LocalState`.*got dict"):
        rounds(trees[0], batches)
    other = zero.local_steps(step, every=2)
    other.init({"w": trees[0]["w"]}, trees[1])
    with pytest.raises(ValueError, match="`state.params` is not that of the trees given to `init`"):
        other(state, batches)
    renamed = zero.local_steps(step, every=2)
    renamed.init({"v": trees[0]["w"], "odd": trees[0]["odd"]}, trees[1])
    with pytest.raises(ValueError, match="`state.params` is not that of the trees given to `init`"):
        renamed.mean(state)
    adam = zero.local_steps(step, every=2, outer=optax.adam(0.1))
    adam_state = adam.init(*trees)
    with pytest.raises(ValueError, match="`state.outer_state` .* other `fragments`, `outer`"):
        rounds(adam_state, batches)
    three = jz.Zero(jz.make_mesh(3, devices=jax.devices()[:6]))
    more = three.local_steps(step, every=2)
    params = three.init(init)
    more_state = more.init(params, three.init_optimizer(optax.sgd(0.1, momentum=0.9), params))
    with pytest.raises(ValueError, match="is of 3 nodes, and the mesh has 2: give it to `rejoin`"):
        rounds(more_state, batches)


def test_trees_that_cannot_be_exchanged(zero, trees):
    phases = zero.init(lambda: {"c": jnp.ones((8, 4), jnp.complex64)})
    with pytest.raises(NotImplementedError, match="cannot exchange the leaf `c` of complex64"):
        zero.local_steps(step, every=2).init(phases, trees[1])
    frozen = zero.shard({"w": np.ones((256, 128), np.float32)}, codec=jz.Int8())
    with pytest.raises(NotImplementedError, match="cannot take the leaf `w`, which is stored enc"):
        zero.local_steps(step, every=2).init(frozen, trees[1])
    factored = optax.adafactor(0.1, min_dim_size_to_factor=2)
    rounds = zero.local_steps(step, every=2, fragments=2, outer=factored)
    with pytest.raises(ValueError, match="`outer` keeps an array of shape .* Take `fragments=1`"):
        rounds.init(*trees)


def test_a_tree_over_all_nodes_is_not_that_of_one(zero, trees):
    def with_frozen(params, opt_state, batch):
        zero.value_and_grad(lambda p, frozen: jnp.sum(p["w"]) * jnp.sum(frozen["odd"]))(
            params, trees[0]
        )
        return params, opt_state, {}

    rounds = zero.local_steps(with_frozen, every=2)
    with pytest.raises(ValueError, match="`odd` is laid out over all nodes, and a step"):
        rounds(rounds.init(*trees), np.ones((2, 8), np.float32))


def test_a_loss_may_not_close_over_arrays_of_the_step(zero, trees):
    def step(params, opt_state, batch, closes=True):
        scale = jnp.mean(batch)
        if closes:
            loss = lambda params, batch: scale * jnp.sum(params["w"])  # noqa: E731
            value, _ = zero.value_and_grad(loss)(params, batch)
        else:
            loss = lambda params, batch, scale: scale * jnp.sum(params["w"])  # noqa: E731
            value, _ = zero.value_and_grad(loss)(params, batch, scale)
        return params, opt_state, {"loss": value}

    batches = np.ones((2, 8), np.float32)
    rounds = zero.local_steps(step, every=2)
    with pytest.raises(ValueError, match="cannot close over arrays of the step.* as an argument"):
        rounds(rounds.init(*trees), batches)
    rounds = zero.local_steps(functools.partial(step, closes=False), every=2)
    rounds(rounds.init(*trees), batches)

    def with_key(params, opt_state, batch):
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(batch).astype(int))
        loss = lambda params, batch: jnp.sum(params["w"]) * jax.random.uniform(key)  # noqa: E731
        zero.value_and_grad(loss)(params, batch)
        return params, opt_state, {}

    rounds = zero.local_steps(with_key, every=2)
    with pytest.raises(ValueError, match="cannot close over arrays of the step.* as an argument"):
        rounds(rounds.init(*trees), batches)


def test_nothing_to_exchange(zero, trees):
    rounds = zero.local_steps(step, every=2)
    for params in ({}, zero.init(lambda: {"count": jnp.arange(8)})):
        with pytest.raises(ValueError, match="`params` has no float array to train"):
            rounds.init(params, trees[1])


def test_a_leaf_that_was_replaced_is_named(zero, trees):
    rounds = zero.local_steps(step, every=2)
    state = rounds.init(trees[0], {"rate": jnp.ones(())})
    state = dataclasses.replace(state, opt_state={"rate": jnp.zeros(())})
    with pytest.raises(ValueError, match=r"`rate` is float32\[\], not float32\[2\], .* 2 no"):
        rounds(state, np.ones((2, 8), np.float32))


def test_a_padded_leaf_is_no_metric(zero, trees):
    rounds = zero.local_steps(lambda p, o, b: (p, o, {"odd": p["odd"]}), every=2)
    with pytest.raises(ValueError, match="the metric `odd` as StoredArray.* `zero.unshard`"):
        rounds(rounds.init(*trees), np.ones((2, 8), np.float32))


def test_an_outer_optimizer_that_counts_padding_warns(zero):
    params = zero.init(lambda: {"odd": jnp.ones((7, 3))})  # padded on two devices in a node
    rounds = zero.local_steps(step, every=2, outer=optax.adafactor(0.1))
    with pytest.warns(
        UserWarning, match=r"`odd` the first, .* Take an `outer` optimizer that upda"
    ):
        rounds.init(params, {"count": jnp.zeros(())})
    rounds = zero.local_steps(step, every=2, outer=optax.adam(0.1))
    rounds.init(params, {"count": jnp.zeros(())})


def test_a_codec_that_sends_more_than_float32_warns():
    """Eight nodes: 7 messages of 2 bytes a number, or 2 * 7 / 8 of 4 bytes by an all-reduce."""
    eight = jz.Zero(jz.make_mesh(8))
    params = eight.init(lambda: {"w": jnp.ones((128, 128))})
    rounds = eight.local_steps(step, every=2, codec=jz.Cast(jnp.bfloat16))
    with pytest.warns(UserWarning, match=r"bfloat16` .* 224.00 KiB into .* 8 nodes .* 112.00 KiB"):
        rounds.init(params, jnp.zeros(()))
    exact = eight.local_steps(step, every=2)
    exact.init(params, jnp.zeros(()))
    assert exact.report().bytes_between_nodes == 112 * 2**10
