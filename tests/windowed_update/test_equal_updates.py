"""Updates by windows are those of optax on one device: bit for bit if nothing is reduced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.windowed_update.updates import (
    ALL,
    LAYER,
    MESHES,
    OF_GRADIENTS,
    OVERLAPPING,
    PLACES,
    RATE,
    ROW,
    SIZE,
    STEPS,
    Updater,
    assert_equal_but_for_sums,
    memory_kinds,
    reference,
)

# optax mixes dtypes and ranks, as JAX does by default.
pytestmark = pytest.mark.standard_promotion

SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, RATE, 2, STEPS)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return {
        key: "slow" if key == "odd" else "frozen" if key == "bias" else "fast" for key in params
    }


ELEMENTWISE = {
    "adam": optax.adam(RATE),
    "adam_bfloat16": optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "adamw_masked": optax.adamw(SCHEDULE, mask=is_matrix),
    "amsgrad": optax.amsgrad(RATE),
    "clip": optax.chain(optax.clip(0.5), optax.adamw(RATE)),
    "ema": optax.chain(optax.ema(0.9), optax.zero_nans(), optax.sgd(RATE)),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, b1=0.8),
    "lion": optax.lion(RATE, weight_decay=0.1),
    "masked": optax.chain(optax.masked(optax.adam(1.0), is_matrix), optax.scale(-RATE)),
    "multi_transform": optax.multi_transform(
        {
            "slow": optax.sgd(RATE),
            "fast": optax.adam(SCHEDULE),
            "frozen": optax.set_to_zero(),
        },
        labels,
    ),
    "nadamw": optax.nadamw(RATE),
    "radam": optax.radam(RATE, threshold=1.5),
    "rmsprop": optax.rmsprop(RATE, momentum=0.9, centered=True),
    "rprop": optax.rprop(RATE),
    "schedule_free": optax.contrib.schedule_free_adamw(RATE),
    "sgd_momentum": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "yogi": optax.yogi(RATE),
}
REDUCING = {
    "block_rms": optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(RATE)),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE)),
    "lamb": optax.lamb(RATE, weight_decay=0.1),
    "lars": optax.lars(RATE),
    "normalize": optax.chain(optax.contrib.normalize(), optax.sgd(RATE)),
    "twice": optax.chain(  # a reduction of what a reduction has changed
        optax.clip_by_global_norm(0.5), optax.scale_by_trust_ratio(), optax.sgd(RATE)
    ),
}


@functools.cache
def of_optax(name):
    return reference(ELEMENTWISE[name])


def assert_bits_equal(found, expected):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), str(path))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if i % 2 == 0 else pytest.mark.exhaustive)
        for i, name in enumerate(ELEMENTWISE)
    ],
)
@pytest.mark.one_in(3)
def test_elementwise_optimizers_are_equal_bit_for_bit(name):
    tx = ELEMENTWISE[name]
    updater = Updater(tx, "2x2", "all", OVERLAPPING)
    assert "pinned_host" in memory_kinds(updater.state)
    assert_bits_equal(updater.run(), of_optax(name))


# Each mesh and each placement once or twice; the other pairs are for `make test-exhaustive`.
@pytest.mark.parametrize(
    ("mesh", "place"),
    [
        pytest.param(mesh, place, marks=[] if (i - j) % 3 == 0 else pytest.mark.exhaustive)
        for i, mesh in enumerate(MESHES)
        for j, place in enumerate(PLACES)
    ],
)
@pytest.mark.one_in(3)
def test_every_mesh_and_placement(mesh, place):
    updater = Updater(ELEMENTWISE["adamw_masked"], mesh, place, OVERLAPPING)
    assert_bits_equal(updater.run(), of_optax("adamw_masked"))


@pytest.mark.parametrize("place", ["all", "but_gradients"])  # with and without a late write
@pytest.mark.parametrize("window_bytes", [ROW, OVERLAPPING, LAYER, ALL])
@pytest.mark.one_in(2)
def test_every_size_of_window(window_bytes, place):
    updater = Updater(ELEMENTWISE["sgd_momentum"], "1x3", place, window_bytes)
    assert_bits_equal(updater.run(), of_optax("sgd_momentum"))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("clip_by_global_norm", "1x3"),
        ("lamb", "1x3"),
        ("twice", "1x3"),
        ("twice", "2x4-explicit"),
        pytest.param("twice", "2x2", marks=pytest.mark.ci),
        *(pytest.param(x, "1x3", marks=pytest.mark.ci) for x in ("block_rms", "lars", "normalize")),
    ],
)
@pytest.mark.one_in(3)
def test_reductions_are_those_of_full_leaves(name, mesh):
    tx = REDUCING[name]
    found, expected = Updater(tx, mesh, "all", OF_GRADIENTS).run(), reference(tx)
    assert_equal_but_for_sums(found, expected)


@pytest.mark.parametrize(
    ("place", "window_bytes"),
    [
        ("gradients", ROW),
        ("one_stack", OF_GRADIENTS),
        pytest.param("state", OVERLAPPING, marks=pytest.mark.ci),
        pytest.param("all", ALL, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.one_in(2)
def test_a_global_norm_of_leaves_in_both_memories(place, window_bytes):
    tx = REDUCING["clip_by_global_norm"]
    found = Updater(tx, "1x3", place, window_bytes).run()
    assert_equal_but_for_sums(found, reference(tx))


def test_padding_does_not_count():
    """Where zeros would change a reduction, and where an update of zeros is not zero."""

    def update(updates, state, params=None):
        least = jnp.stack([jnp.min(x * x) for x in jax.tree.leaves(updates)]).min()
        most = jnp.stack([jnp.max(-x * x) for x in jax.tree.leaves(updates)]).max()
        every = jnp.asarray([jnp.all(x > -100.0) for x in jax.tree.leaves(updates)]).all()
        total = sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(updates))
        step = jnp.where(every, least + most + total / SIZE, jnp.nan)
        return jax.tree.map(lambda x: RATE * (step - x), updates), state

    shift = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    updater = Updater(shift, "1x3", "all", OF_GRADIENTS)
    assert_equal_but_for_sums(updater.run(), reference(shift))
    padded = updater.params["odd"]
    assert padded.data.shape == (9, 5)
    np.testing.assert_array_equal(np.asarray(padded.data)[7:], 0)


def test_an_extra_argument_may_be_a_scalar_array():
    rate = jnp.asarray([RATE])  # an array that the optimizer closes over

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda x: -rate[0] * value * x, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    value = jnp.float32(0.3)
    found = Updater(tx, "2x2", "all", OVERLAPPING).run(value=value, other="text")
    assert_bits_equal(found, reference(tx, value=value, other="text"))
