"""Sub-trees, lists, renamed and merged trees, and padded leaves outside of the function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxzero as jz
from tests import zoo

from .helpers import (
    assert_equal,
    make_rows,
    mean_loss,
    on_one_device,
    predict,
    transformed,
    whole_params,
)


@pytest.mark.one_in(2)
def test_a_list_of_the_same_leaves(zero):
    whole, params = whole_params(), zero.shard(whole_params())

    def loss(leaves, x):
        return predict({"w": leaves[0], "b": leaves[1]}, leaves[2], leaves[3], x)

    def as_list(tree):
        return [tree["body"]["w"], tree["body"]["b"], tree["head"], tree["table"]]

    want = on_one_device(loss)(as_list(whole), make_rows(zero))
    step = transformed(zero, loss)
    assert_equal(zero, step(as_list(params), make_rows(zero)), want)


@pytest.mark.one_in(2)
def test_sub_trees_as_several_arguments(zero):
    whole, params = whole_params(), zero.shard(whole_params())

    def loss(body, head, x, table):
        return predict(body, head, table["t"], x)

    want_loss, want = on_one_device(loss, (0, 1))(
        whole["body"], whole["head"], make_rows(zero), {"t": whole["table"]}
    )
    step = transformed(zero, loss, (0, 1), batch_argnums="x")
    got, grads = step(params["body"], params["head"], make_rows(zero), {"t": params["table"]})
    assert_equal(zero, (got, grads[0]), (want_loss, want[0]))
    assert_equal(zero, (got, grads[1]), (want_loss, want[1]))


@pytest.mark.one_in(2)
def test_frozen_parts_by_keyword_and_a_batch_by_keyword(zero):
    whole, params = whole_params(), zero.shard(whole_params())

    def loss(body, *, frozen, x):
        return predict(body, frozen["head"], frozen["more"]["table"], x)

    def frozen(tree):
        return {"head": tree["head"], "more": {"table": tree["table"]}}

    want = on_one_device(loss)(whole["body"], frozen=frozen(whole), x=make_rows(zero))
    step = transformed(zero, loss)
    assert_equal(zero, step(params["body"], frozen=frozen(params), x=make_rows(zero)), want)


@pytest.mark.one_in(2)
def test_a_tree_merged_with_another(zero):
    """As LoRA does: adapters that were laid out apart, in one tree with the weights."""
    key = jax.random.key(2)
    adapters = {"a": zoo.normal(key, 0, 15, 3), "b": zoo.normal(key, 1, 3, 31)}
    whole, params = whole_params(), zero.shard(whole_params())

    def loss(tree, x):
        head = tree["base"]["head"] + tree["lora"]["a"] @ tree["lora"]["b"]
        return predict(tree["base"]["body"], head, tree["base"]["table"], x)

    want = on_one_device(loss)({"base": whole, "lora": adapters}, make_rows(zero))
    merged = {"base": params, "lora": zero.shard(adapters)}
    step = transformed(zero, loss)
    assert_equal(zero, step(merged, make_rows(zero)), want)


def test_sharded_arrays_beside_others(zero):
    """In an argument that is not differentiated: statistics, say, that nothing has laid out."""
    whole, params = whole_params(), zero.shard(whole_params())
    scale = np.linspace(1, 2, 31, dtype=np.float32)

    def loss(body, batch, rest):
        return predict(body, rest["head"] * rest["scale"][None], rest["table"], batch)

    def rest(tree):
        return {"head": tree["head"], "table": tree["table"], "scale": scale}

    want = on_one_device(loss)(whole["body"], make_rows(zero), rest(whole))
    step = transformed(zero, loss)
    assert_equal(zero, step(params["body"], make_rows(zero), rest(params)), want)


@pytest.mark.one_in(2)
def test_leaves_added_and_removed(zero):
    whole, params = whole_params(), zero.shard(whole_params())
    more = {**params, "extra": params["head"]}
    want = on_one_device(mean_loss)({**whole, "extra": whole["head"]}, make_rows(zero))
    assert_equal(zero, zero.value_and_grad(mean_loss)(more, make_rows(zero)), want)
    less = {"body": params["body"]}
    want = on_one_device(lambda p, x: jnp.mean(x @ p["body"]["w"]))(
        {"body": whole["body"]}, make_rows(zero)
    )
    step = zero.value_and_grad(lambda p, x: jnp.mean(x @ p["body"]["w"]))
    assert_equal(zero, step(less, make_rows(zero)), want)


@pytest.mark.one_in(2)
def test_a_part_of_the_optimizer_state_and_of_gradients_is_gathered(zero):
    params = zero.shard(whole_params())
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    assert zero.unshard(opt_state[0].mu["head"]).shape == (15, 31)
    _, grads = zero.value_and_grad(mean_loss)(params, make_rows(zero))
    want = jax.grad(mean_loss)(whole_params(), make_rows(zero))["head"]
    np.testing.assert_allclose(zero.unshard(grads["head"]), want, rtol=1e-4, atol=1e-6)


_USES = {
    "matmul": lambda head, x: x @ head,
    "numpy_matmul": lambda head, x: np.ones((2, 15), np.float32) @ head,
    "asarray": lambda head, x: jnp.asarray(head),
    "numpy": lambda head, x: np.asarray(head),
    "sum": lambda head, x: jnp.sum(head),
    "index": lambda head, x: head[0],
    "method": lambda head, x: head.sum(),
    "times": lambda head, x: 2 * head,
    "under_jit": lambda head, x: jax.jit(lambda head: x @ head)(head),
    "einsum": lambda head, x: jnp.einsum("bi,io->bo", x, head),
    "compare": lambda head, x: head == 0,
}


@pytest.mark.parametrize("name", _USES)
def test_computing_with_a_padded_leaf_says_what_to_do(auto, name):
    head = auto.shard(whole_params())["head"]
    assert not isinstance(head, jax.Array)
    assert (head.shape, head.ndim, head.dtype) == ((15, 31), 2, jnp.float32)
    with pytest.raises(
        (TypeError, AttributeError), match=r"\[15, 31\].*zero\.apply.*zero\.unshard"
    ):
        _USES[name](head, jnp.ones((2, 15)))


def test_a_padded_leaf_that_is_closed_over_says_what_to_do(auto):
    params = auto.shard(whole_params())
    with pytest.raises(TypeError, match=r"zero\.apply"):
        auto.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) @ params["head"]))(
            params["body"], make_rows(auto)
        )


def test_a_split_array_that_is_closed_over_is_warned_of(auto):
    params = auto.shard(whole_params())
    table = params["table"]

    def loss(body, x):
        return jnp.mean((x @ body["w"]) ** 2) * jnp.sum(table**2)

    want = on_one_device(lambda body, x: loss(body, x))(whole_params()["body"], make_rows(auto))
    with pytest.warns(
        UserWarning, match=r"closes over an array float32\[24, 31\].*holds all of it"
    ):
        got = auto.value_and_grad(loss)(params["body"], make_rows(auto))
    assert_equal(auto, got, want)


def test_flax_modules_applied_to_padded_leaves_say_what_to_do(auto):
    model = nn.Dense(31)
    variables = auto.init(lambda key: model.init(key, jnp.ones((1, 15))), jax.random.key(0))
    with pytest.raises(TypeError, match=r"flax\.linen.*\[15, 31\].*zero\.apply"):
        model.apply(variables, jnp.ones((2, 15)))
    linear = auto.init(lambda key: nnx.Linear(15, 31, rngs=nnx.Rngs(key)), jax.random.key(0))
    with pytest.raises(TypeError, match=r"zero\.apply"):
        linear(jnp.ones((2, 15)))


@pytest.mark.one_in(2)
def test_optax_and_tree_map_go_through_padded_leaves(zero):
    params = zero.shard(whole_params())
    doubled = jax.tree.map(lambda x: 2 * x, params)
    zoo.assert_close(
        jax.device_get(zero.unshard(doubled)),
        jax.tree.map(lambda x: 2 * x, whole_params()),
        1e-6,
        "p",
    )
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert half["head"].dtype == jnp.bfloat16 == zero.unshard(half)["head"].dtype
    norm = jax.jit(optax.tree.norm)(params)
    want = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(whole_params())))
    np.testing.assert_allclose(norm, want, rtol=1e-6)
    assert jax.tree.structure(zero.shardings(params)) == jax.tree.structure(params)


def test_encoded_leaves_carry_their_layout_too(zero):
    whole = whole_params()
    params, frozen = zero.shard({"body": whole["body"]}), zero.shard(whole, codec=jz.Int8())
    decoded = jax.device_get(zero.unshard(frozen))

    def loss(params, x, frozen):
        return predict(params["body"], frozen[0], frozen[1], x)

    want = on_one_device(loss)(
        {"body": whole["body"]}, make_rows(zero), [decoded["head"], decoded["table"]]
    )
    step = transformed(zero, loss)
    assert_equal(zero, step(params, make_rows(zero), [frozen["head"], frozen["table"]]), want)


def test_leaves_of_another_mesh_are_refused(auto):
    other = jz.Zero(zoo.make_mesh("2x3-auto"))
    params = other.shard({"head": whole_params()["head"]})
    with pytest.raises(
        ValueError, match=r"`head`.*another mesh or config.*jz\.reshard\(tree, other"
    ):
        auto.value_and_grad(lambda p, x: jnp.mean(x @ p["head"]))(params, make_rows(auto, 15))
    with pytest.raises(ValueError, match="`w`.* on 6 devices, and must be split over the 8"):
        auto.unshard(other.shard({"w": np.ones((6, 4), np.float32)}))
