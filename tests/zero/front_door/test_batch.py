"""Which argument is the batch: found where only one can be, asked for otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo

from .helpers import (
    ROWS,
    assert_equal,
    make_rows,
    mean_loss,
    on_one_device,
    whole_params,
)


def test_a_table_beside_the_batch_is_asked_about(auto):
    params = auto.shard(whole_params())
    weights = np.linspace(0, 3, 32, dtype=np.float32)

    def loss(params, class_weights, batch):
        return mean_loss(params, batch) * jnp.sum(class_weights**2)

    want = on_one_device(loss)(whole_params(), weights, make_rows(auto))
    with pytest.raises(ValueError, match=r"`class_weights`.*`batch`.*`batch_argnums=`"):
        auto.value_and_grad(loss)(params, weights, make_rows(auto))
    for batch_argnums in (2, -1, "batch", (2,)):
        step = auto.value_and_grad(loss, batch_argnums=batch_argnums)
        assert_equal(auto, step(params, weights, make_rows(auto)), want)
    got = auto.apply(loss, batch_argnums="batch")(params, weights, batch=make_rows(auto))
    np.testing.assert_allclose(got, want[0], rtol=1e-5)


def test_several_batches(auto):
    params = auto.shard(whole_params())

    def loss(params, x, y):
        return jnp.mean((x @ params["body"]["w"] - y) ** 2)

    x, y = make_rows(auto), zoo.normal(jax.random.key(4), 0, ROWS, 15)
    want = on_one_device(loss)(whole_params(), x, y)
    assert_equal(auto, auto.value_and_grad(loss, batch_argnums=(1, "y"))(params, x, y=y), want)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_and_numbers_are_no_batch(auto, make_key):
    params = auto.shard(whole_params())

    def loss(params, key, scale, x):
        return mean_loss(params, x) * scale + jax.random.normal(key, ())

    args = (make_key(3), jnp.float32(2), make_rows(auto))
    want = on_one_device(loss)(whole_params(), *args)
    assert_equal(auto, auto.value_and_grad(loss)(params, *args), want)

    def in_the_batch(params, batch):
        return loss(params, batch["key"], batch["scale"], batch["x"])

    batch = dict(zip(("key", "scale", "x"), args, strict=True))
    assert_equal(auto, auto.value_and_grad(in_the_batch)(params, batch), want)


def test_a_closed_over_batch_is_warned_of(auto):
    params, x = auto.shard(whole_params()), make_rows(auto)
    want = on_one_device(mean_loss)(whole_params(), x)
    with pytest.warns(UserWarning, match=r"each of 8 devices computes all of it.*batch_argnums="):
        got = auto.value_and_grad(lambda params: mean_loss(params, x))(params)
    assert_equal(auto, got, want)
    meant = auto.value_and_grad(lambda params: mean_loss(params, x), batch_argnums=())
    assert_equal(auto, meant(params), want)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (7, "names 7, but 2 arguments were given by position"),
        ("rows", "names 'rows'"),
        (0, "by `batch_argnums` and by `argnums`"),
    ],
)
def test_wrong_batch_argnums(auto, asked, match):
    step = auto.value_and_grad(mean_loss, batch_argnums=asked)
    with pytest.raises(ValueError, match=match):
        step(auto.shard(whole_params()), make_rows(auto))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ((12, 32, 32), "`a` has 12 rows and `b` has 32"),
        ((32, 32, 12), "`a` has 32 rows and `c` has 12"),
    ],
)
def test_leaves_of_a_batch_with_different_numbers_of_rows(auto, rows, match):
    batch = {name: np.ones((num, 16), np.float32) for name, num in zip("abc", rows, strict=True)}
    step = auto.value_and_grad(lambda params, batch: mean_loss(params, batch["b"]))
    with pytest.raises(ValueError, match=rf"taken as the batch.*its leaf {match}\. .*`in_specs`"):
        step(auto.shard(whole_params()), batch)


def test_in_specs_and_an_argument_that_they_leave_out(auto):
    def loss(params, x, y):
        return jnp.mean((x @ params["body"]["w"] - y) ** 2)

    y = np.zeros((ROWS, 15), np.float32)
    with pytest.raises(ValueError, match="`in_specs` splits `y`.*says nothing of `x`"):
        auto.value_and_grad(loss, in_specs=(None, None, auto.batch_spec))(
            auto.shard(whole_params()), make_rows(auto), y
        )
    with pytest.raises(ValueError, match="by `batch_argnums` and by `in_specs`"):
        auto.value_and_grad(loss, batch_argnums=2, in_specs=(None, P(), auto.batch_spec))(
            auto.shard(whole_params()), make_rows(auto), y
        )


def test_an_optimizer_state_is_no_batch(auto):
    params = auto.shard(whole_params())
    opt_state = auto.init_optimizer(optax.adam(1e-3), params)

    def loss(params, opt_state):
        return jnp.sum(params["table"] ** 2) + jnp.sum(opt_state[0].mu["table"] ** 2)

    moved = jax.tree.map(lambda x: x + 1 if x.ndim == 2 else x, opt_state)
    for step in (auto.value_and_grad(loss), jax.jit(auto.value_and_grad(loss))):
        with pytest.warns(UserWarning, match="No argument of this function is a batch"):
            got, _ = step(params, moved)
        np.testing.assert_allclose(got, np.sum(whole_params()["table"] ** 2) + 24 * 31, rtol=1e-5)


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_may_be_a_part_of_the_parameters_is_no_batch_unasked(nodes):
    zero = jz.Zero(jz.make_mesh(nodes=nodes))
    params = zero.shard(whole_params())

    def loss(params, anchor):
        return jnp.sum((params["table"] - anchor["t"]) ** 2) / jnp.sum(anchor["t"] ** 2)

    with pytest.warns(UserWarning, match="No argument of this function is a batch"):
        zero.value_and_grad(loss)(params, {"t": params["table"]})
    with pytest.raises(ValueError, match=r"`anchor`.*or a part of the parameters.*batch_argnums="):
        jax.jit(zero.value_and_grad(loss))(params, {"t": params["table"]})
    step = jax.jit(zero.value_and_grad(loss, batch_argnums=()))
    twice = {"t": 2 * params["table"]}
    want = on_one_device(loss)(whole_params(), {"t": 2 * whole_params()["table"]})
    assert_equal(zero, step(params, twice), want)


def test_what_may_be_a_raw_key_or_labels_is_asked_about():
    zero = jz.Zero(jz.make_mesh(nodes=1, devices=jax.devices()[:2]))
    params, x = zero.shard(whole_params()), make_rows(zero)[:2]
    labels = np.array([3, 5], np.uint32)

    def loss(params, x, y):
        return jnp.mean(jnp.mean(x @ params["body"]["w"], axis=-1) * y.astype(jnp.float32))

    with pytest.raises(ValueError, match=r"`x`.*`y`.*batch_argnums="):
        zero.value_and_grad(loss)(params, x, labels)
    want = on_one_device(loss)(whole_params(), x, labels)
    assert_equal(zero, zero.value_and_grad(loss, batch_argnums=(1, 2))(params, x, labels), want)
    batch = {"x": x, "key": jax.random.PRNGKey(0)}
    for act in (
        lambda: zero.value_and_grad(lambda p, b: loss(p, b["x"], b["key"]))(params, batch),
        lambda: jz.pad_batch(batch, zero),
    ):
        with pytest.raises(ValueError, match=r"`key`, uint32\[2\].*raw random key or a number"):
            act()


def test_a_key_for_each_row(auto):
    params, x = auto.shard(whole_params()), make_rows(auto)
    keys = jax.random.split(jax.random.key(0), len(x))

    def loss(params, x, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
        return mean_loss(params, x + noise)

    want = on_one_device(loss)(whole_params(), x, keys)
    assert_equal(auto, auto.value_and_grad(loss, batch_argnums=(1, 2))(params, x, keys), want)


def _square(seed, rows=ROWS):
    return zoo.normal(jax.random.key(seed), 0, rows, ROWS, scale=1.0)


def _table_loss(w, x, table):
    logits = x @ w
    return jnp.mean(table[jnp.argmax(logits, axis=1)] * jax.nn.logsumexp(logits, axis=1))


_ASKED = r"`x`.*`table`.*can be the batch.*`batch_argnums=`"


@pytest.mark.parametrize("kind", ["numpy", "one_device", "split", "whole"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.one_in(2)
def test_a_batch_with_the_shape_of_the_parameters_beside_a_table_is_asked_about(kind, stage):
    """Otherwise every device would get all of `x`, and `table` would be split as the batch."""
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), jz.ZeroConfig(stage=stage))
    whole, rows = np.asarray(_square(0)), np.asarray(_square(1))
    w, table = zero.shard(whole), np.linspace(0.1, 2, ROWS, dtype=np.float32)
    x = {
        "numpy": lambda: rows,
        "one_device": lambda: jnp.asarray(rows),
        "split": lambda: jax.device_put(rows, NamedSharding(zero.mesh, zero.batch_spec)),
        "whole": lambda: jax.device_put(rows, NamedSharding(zero.mesh, P())),
    }[kind]()
    step = zero.value_and_grad(_table_loss)
    for call in (step, jax.jit(step), zero.apply(_table_loss)):
        with pytest.raises(ValueError, match=_ASKED):
            call(w, x, table)
    if kind != "whole" or stage == 3:  # else its sharding is that of parameters
        with pytest.raises(ValueError, match=_ASKED):
            step(w, x, table[:10])
    want = on_one_device(_table_loss)(whole, rows, table)
    told = zero.value_and_grad(_table_loss, batch_argnums="x")
    assert_equal(zero, told(w, x, table), want)
    assert_equal(zero, jax.jit(told)(w, x, table), want)


def test_a_batch_with_the_shape_of_the_parameters_is_found_if_nothing_else_can_be(auto):
    whole, rows = np.asarray(_square(0)), np.asarray(_square(1))
    w = auto.shard(whole)

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    step = auto.value_and_grad(loss)
    for call, x in ((step, rows), (step, jnp.asarray(rows)), (jax.jit(step), rows)):
        assert_equal(auto, call(w, x), on_one_device(loss)(whole, rows))


@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS])
def test_parameters_of_a_teacher_beside_the_batch(auto, rows):
    whole, teacher, x = (np.asarray(x) for x in (_square(0), _square(1), _square(2, rows)))
    w, ema = auto.shard({"w": whole}), auto.shard({"w": teacher})

    def loss(params, teacher, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) - jnp.tanh(x @ teacher["w"])) ** 2)

    want = on_one_device(loss)({"w": whole}, {"w": teacher}, x)
    step = auto.value_and_grad(loss)
    assert_equal(auto, step(w, ema, x), want)
    if rows == ROWS:
        with pytest.raises(ValueError, match=r"`teacher`.*`x`.*`batch_argnums=`"):
            jax.jit(step)(w, ema, x)
        step = auto.value_and_grad(loss, batch_argnums="x")
    assert_equal(auto, jax.jit(step)(w, ema, x), want)
