"""An optimizer that needs more of a leaf than a window is refused before anything compiles."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from tests.windowed_update.updates import (
    ALL,
    OVERLAPPING,
    RATE,
    Updater,
    assert_equal_but_for_sums,
    gradient,
    reference,
)

pytestmark = pytest.mark.standard_promotion


def shampoo_like():
    """Preconditioned by the rows' second moments: a matrix product with the gradient."""

    def init(params):
        return jax.tree.map(lambda x: jnp.zeros((x.shape[0],) * 2 if x.ndim == 2 else ()), params)

    def precondition(x, moment):
        return -RATE * (moment + x @ x.T) @ x if x.ndim == 2 else x

    def update(updates, state, params=None):
        return jax.tree.map(precondition, updates, state), state

    return optax.GradientTransformation(init, update)


def refusal(tx, place="all", **extra_args):
    updater = Updater(tx, "2x2", place, ALL)
    grads = updater.of_gradients.shard(gradient(0))
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(lambda *x: updater.update(*x, **extra_args), *_structs(updater, grads))
    return str(error.value)


def _structs(updater, grads):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        (updater.params, updater.state, grads),
    )


REFUSED = {
    "shampoo": (shampoo_like(), "matrix", "`transpose`", "test_refusals.py"),
    "muon": (optax.contrib.muon(RATE), "matrix", "optax/contrib/_muon.py"),
    "adafactor": (
        optax.adafactor(RATE, min_dim_size_to_factor=4),
        "`reduce_sum`",
        "optax/_src/factorized.py",
    ),
    "multi_steps": (
        optax.MultiSteps(optax.adam(RATE), 2),
        "`cond`",
        "optax/transforms/_accumulation.py",
    ),
    "add_noise": (
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(RATE)),
        "array of shape [8, 12], made by `random_bits`",
        "optax/tree_utils/_random.py",
    ),
    "adaptive_grad_clip": (
        optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE)),
        "needs more than one element of it at a time",
        "optax/transforms/_clipping.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_leaf_operation_line_and_remedy(name):
    tx, *said = REFUSED[name]
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    message = refusal(tx)
    for fragment in ("the leaf `", *said, "leave it out of the patterns of `jz.Offload("):
        assert fragment in message, message


def _of_updates(change):
    return optax.GradientTransformation(
        lambda _: optax.EmptyState(), lambda updates, state, params=None: (change(updates), state)
    )


def test_two_leaves_cannot_be_combined():
    shapes_differ = _of_updates(lambda tree: tree | {"odd": tree["odd"] * tree["stack"]["odd"][0]})
    assert "`stack.odd`" in refusal(shapes_differ)


def test_a_leaf_cannot_be_replaced_by_another_array():
    table = jnp.arange(96.0).reshape(8, 12)
    assert "array of shape [8, 12]" in refusal(_of_updates(lambda tree: tree | {"matrix": table}))


def test_a_dtype_cannot_change():
    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    assert "changes the dtype of `matrix` from float32 to bfloat16" in refusal(tx)


def test_a_leaf_in_device_memory_may_have_any_optimizer():
    """Muon for what is not offloaded, Adam for the rest: the remedy that the errors name."""
    tx = optax.multi_transform(
        {"muon": optax.contrib.muon(RATE), "adam": optax.adam(RATE)},
        {"stack": "adam", "matrix": "muon", "odd": "muon", "bias": "muon", "scale": "muon"},
    )
    found = Updater(tx, "2x2", "one_stack", OVERLAPPING).run()
    assert_equal_but_for_sums(found, reference(tx))


def test_state_in_host_memory_belongs_to_a_parameter():
    def init(params):
        return {"table": jnp.zeros((16, 16))}

    def update(updates, state, params=None):
        return updates, state

    updater = Updater(optax.GradientTransformation(init, update), "2x2", "weights", OVERLAPPING)
    sharding = updater.state["table"].sharding.with_memory_kind("pinned_host")
    updater.state = jax.device_put(updater.state, {"table": sharding})
    with pytest.raises(ValueError, match="`table` is an array in host memory that does not belong"):
        updater.run()
