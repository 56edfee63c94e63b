"""What `value_and_grad`, `apply` and their options mean, one at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo

_MESH = "2x4-auto"
_NUM_DEVICES = 8


@pytest.fixture(scope="module")
def zero():
    return jz.Zero(zoo.make_mesh(_MESH))


def _whole():
    return {
        "w": zoo.normal(jax.random.key(0), 0, 8, 4),
        "b": zoo.normal(jax.random.key(0), 1, 4),
    }


@pytest.fixture(scope="module")
def params(zero):
    return zero.shard(_whole())


def _x(n=16, seed=1):
    return zoo.normal(jax.random.key(seed), 0, n, 8, scale=1.0)


def _predict(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def _loss(params, x):
    return jnp.mean(_predict(params, x) ** 2)


def _close(got, want, what="value", tolerance=1e-5):
    zoo.assert_close(jax.device_get(got), jax.device_get(want), tolerance, what)


# Trees in and out.


def test_shard_then_unshard_is_identity(zero):
    tree = {
        "odd": np.arange(15, dtype=np.float32).reshape(3, 5),
        "even": np.arange(32, dtype=np.float16),
        "int": np.arange(9),
        "none": None,
        "scalar": np.float32(3),
        "empty": np.zeros((0, 4), np.float32),
        "bool": np.array([True, False, True]),
        "bfloat16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
    }
    back = zero.unshard(zero.shard(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert got.dtype == jnp.asarray(want).dtype
        np.testing.assert_array_equal(got, want)


def test_init_equals_shard_of_the_same(zero):
    def init(key):
        return {"w": jax.random.normal(key, (8, 6)), "odd": jax.random.normal(key, (5, 3))}

    made = zero.init(init, jax.random.key(3))
    split = zero.shard(jax.device_get(jax.jit(init)(jax.random.key(3))))
    promised = zero.abstract(init, jax.random.key(3))
    for a, b, c in zip(*map(jax.tree.leaves, (made, split, promised)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding == c.sharding
        assert a.shape == c.shape and a.dtype == c.dtype


def test_shard_reads_only_the_slices_it_needs(zero):
    whole = np.arange(64, dtype=np.float32).reshape(16, 4)

    class InAFile:
        shape, dtype = whole.shape, whole.dtype
        largest = 0

        def __getitem__(self, index):
            piece = whole[index]
            InAFile.largest = max(InAFile.largest, piece.size)
            return piece

    stored = zero.shard({"file": InAFile()})
    np.testing.assert_array_equal(zero.unshard(stored)["file"], whole)
    assert InAFile.largest == whole.size // _NUM_DEVICES


def test_shardings_are_those_of_the_arrays(zero, params):
    shardings = zero.shardings(params)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    assert all(isinstance(s, NamedSharding) for s in jax.tree.leaves(shardings))


# Calls.


def test_under_jit_and_without(zero, params):
    want = jax.jit(jax.value_and_grad(_loss))(_whole(), _x())
    step = zero.value_and_grad(_loss)
    for run in (step, jax.jit(step)):
        loss, grads = run(params, _x())
        _close((loss, zero.unshard(grads)), want)
        assert jax.tree.map(lambda g: g.sharding, grads) == zero.shardings(params)


def test_batch_on_the_devices_and_on_the_host_and_split(zero, params):
    want = jax.jit(jax.value_and_grad(_loss))(_whole(), _x())
    split = jax.device_put(_x(), NamedSharding(zero.mesh, zero.batch_spec))
    for x in (_x(), jnp.asarray(_x()), split):
        loss, grads = zero.value_and_grad(_loss)(params, x)
        _close((loss, zero.unshard(grads)), want)


def test_loss_is_the_mean_over_devices_of_each_slice(zero, params):
    def loss(params, x):
        return _loss(params, x) * (1 + lax.axis_index(("node", "local"))).astype(x.dtype)

    got, _ = zero.value_and_grad(loss)(params, _x())
    slices = _x().reshape(_NUM_DEVICES, -1, 8)
    want = np.mean([(i + 1) * _loss(_whole(), x) for i, x in enumerate(slices)])
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_function_objects_methods_and_keywords(zero, params):
    class Model:
        scale = 2.0

        def loss(self, params, x, *, power=2):
            return jnp.mean(_predict(params, x) ** power) * self.scale

    model = Model()
    want = jax.jit(jax.value_and_grad(model.loss))(_whole(), _x())
    loss, grads = zero.value_and_grad(model.loss)(params, _x())
    _close((loss, zero.unshard(grads)), want)
    partial = functools.partial(model.loss, power=4)
    want = jax.jit(jax.value_and_grad(partial))(_whole(), _x())
    loss, grads = zero.value_and_grad(partial)(params, _x())
    _close((loss, zero.unshard(grads)), want)


# Options.


def test_argnums_and_a_frozen_tree(zero):
    key = jax.random.key(5)
    base = {"w": zoo.normal(key, 0, 8, 6), "ids": np.arange(6)[::-1], "none": None}
    update = {"a": zoo.normal(key, 1, 8, 2), "b": zoo.normal(key, 2, 2, 6)}
    head = [zoo.normal(key, 3, 6, 3)]

    def loss(base, update, x, head):
        hidden = x @ (base["w"] + update["a"] @ update["b"])
        return jnp.mean(jnp.tanh(hidden[:, base["ids"]]) @ head[0])

    want, want_grads = jax.value_and_grad(loss, (1, 3))(base, update, _x(), head)
    trees = [zero.shard(tree) for tree in (base, update, head)]
    step = zero.value_and_grad(loss, (1, 3))
    got, grads = step(trees[0], trees[1], _x(), trees[2])
    assert isinstance(grads, tuple)
    _close(got, want)
    _close(tuple(map(zero.unshard, grads)), want_grads, "grads")


def test_allow_int_gives_float0(zero):
    whole = {"w": _whole()["w"], "ids": np.arange(8, dtype=np.int32)}

    def loss(params, x):
        return jnp.mean(x[:, params["ids"]] @ params["w"])

    _, want = jax.value_and_grad(loss, allow_int=True)(whole, _x())
    _, grads = zero.value_and_grad(loss, allow_int=True)(zero.shard(whole), _x())
    _close(grads["w"], want["w"], "w")
    assert grads["ids"].dtype == jax.dtypes.float0 == want["ids"].dtype
    whole_grads = zero.unshard(grads)
    assert whole_grads["ids"].dtype == jax.dtypes.float0
    assert whole_grads["ids"].shape == whole["ids"].shape


def test_aux_reductions(zero, params):
    def loss(params, x):
        index = lax.axis_index(("node", "local"))
        aux = {
            "mean": (x.mean(), _predict(params, x).mean(0)),
            "count": jnp.int32(len(x)),
            "first": index.astype(jnp.int32),
            "each": {"index": index.astype(jnp.int32), "row": x[0]},
            "flag": jnp.bool_(True),
        }
        return _loss(params, x), aux

    reduce = {"mean": "mean", "count": "sum", "first": "first", "each": "stack", "flag": "first"}
    step = zero.value_and_grad(loss, has_aux=True, aux_reduce=reduce)
    for run in (step, jax.jit(step)):
        (_, aux), _ = run(params, _x())
        _close(aux["mean"], (_x().mean(), _predict(_whole(), _x()).mean(0)))
        assert int(aux["count"]) == 16
        assert int(aux["first"]) == 0
        np.testing.assert_array_equal(aux["each"]["index"], np.arange(_NUM_DEVICES))
        np.testing.assert_array_equal(aux["each"]["row"], _x()[::2])
        assert aux["flag"].dtype == bool and bool(aux["flag"])


def test_one_aux_reduction_for_all(zero, params):
    step = zero.value_and_grad(
        lambda p, x: (_loss(p, x), {"rows": jnp.int32(len(x)), "loss": _loss(p, x)}),
        has_aux=True,
        aux_reduce="sum",
    )
    (loss, aux), _ = step(params, _x())
    assert int(aux["rows"]) == 16
    np.testing.assert_allclose(aux["loss"], loss * _NUM_DEVICES, rtol=1e-6)


def test_aux_of_random_state(zero, params):
    def loss(params, x, key):
        return _loss(params, x), jax.random.split(key)[0]

    step = zero.value_and_grad(loss, has_aux=True, aux_reduce="first")
    (_, key), _ = step(params, _x(), jax.random.key(3))
    want = jax.random.split(jax.random.key(3))[0]
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(want))


def test_in_specs(zero, params):
    def loss(params, x, labels, table, scale):
        picked = jnp.take_along_axis(_predict(params, x), labels[:, None], axis=1)
        return scale * jnp.mean(picked) + jnp.sum(table) * jnp.mean(params["b"])

    labels = np.arange(16, dtype=np.int32) % 4
    table = np.ones((16, 2), np.float32)  # as long as the batch, and yet a table
    args = (_x(), labels, table, np.float32(0.5))
    want = jax.jit(jax.value_and_grad(loss))(_whole(), *args)
    specs = (None, zero.batch_spec, zero.batch_spec, P(), None)
    loss_value, grads = zero.value_and_grad(loss, in_specs=specs)(params, *args)
    _close((loss_value, zero.unshard(grads)), want)
    short = zero.value_and_grad(loss, in_specs=(None, zero.batch_spec, zero.batch_spec, P()))
    _close(short(params, *args)[0], want[0])


def test_in_specs_of_trees_and_other_dims(zero, params):
    batch = {"x": np.ascontiguousarray(_x().T), "scale": np.ones(3, np.float32)}

    def loss(params, batch):
        return _loss(params, batch["x"].T) * jnp.mean(batch["scale"])

    want = jax.jit(jax.value_and_grad(loss))(_whole(), batch)
    specs = (None, {"x": P(None, ("node", "local")), "scale": P()})
    got, grads = zero.value_and_grad(loss, in_specs=specs)(params, batch)
    _close((got, zero.unshard(grads)), want)


def test_replicated_arguments_and_keys(zero, params):
    def loss(params, x, extra, key):
        noise = jax.random.normal(key, (8,))
        return _loss(params, x + noise[None]) * extra["temperature"] * extra["table"].mean()

    extra = {"temperature": np.float32(0.7), "table": np.arange(5, dtype=np.float32), "no": None}
    args = (_x(), extra, jax.random.key(9))
    want = jax.jit(jax.value_and_grad(loss))(_whole(), *args)
    got, grads = zero.value_and_grad(loss, batch_argnums=1)(params, *args)
    _close((got, zero.unshard(grads)), want)


def test_fold_in_device_differs_on_every_device(zero, params):
    def loss(params, x, key):
        draw = jax.random.uniform(jz.fold_in_device(key), (2,))
        mask = jax.random.bernoulli(jz.fold_in_device(key), 0.5, x.shape)
        return _loss(params, jnp.where(mask, x, 0.0)), draw

    step = zero.value_and_grad(loss, has_aux=True, aux_reduce="stack")
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        (first, draws), _ = step(params, _x(), key)
        assert draws.shape == (_NUM_DEVICES, 2)
        assert len(np.unique(np.asarray(draws)[:, 0])) == _NUM_DEVICES
        (again, same), _ = step(params, _x(), key)
        np.testing.assert_array_equal(draws, same)
        np.testing.assert_array_equal(first, again)


def test_fold_in_device_outside_says_so():
    with pytest.raises(ValueError, match="fold_in_device.*zero.value_and_grad"):
        jz.fold_in_device(jax.random.key(0))


# Forward only.


def test_apply_joins_rows_and_averages_scalars(zero, params):
    def evaluate(params, x):
        prediction = _predict(params, x)
        return {"prediction": prediction, "argmax": prediction.argmax(-1), "loss": _loss(params, x)}

    want = evaluate(_whole(), _x())
    run = zero.apply(evaluate)
    for out in (run(params, _x()), jax.jit(run)(params, _x())):
        _close(out["prediction"], want["prediction"])
        np.testing.assert_array_equal(out["argmax"], want["argmax"])
        _close(out["loss"], want["loss"])


def test_apply_with_out_reduce(zero, params):
    def evaluate(params, x):
        return jnp.int32(len(x)), jnp.max(x), _predict(params, x).sum(0)

    count, tops, total = zero.apply(evaluate, out_reduce=("sum", "stack", "sum"))(params, _x())
    assert int(count) == 16
    np.testing.assert_array_equal(tops, _x().reshape(_NUM_DEVICES, -1).max(1))
    _close(total, _predict(_whole(), _x()).sum(0))


def test_apply_of_scanned_layers_and_padded_leaves():
    zero = jz.Zero(zoo.make_mesh("2x3-explicit"))
    stack = zoo.normal(jax.random.key(0), 0, 4, 7, 7)

    def evaluate(stack, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    x = zoo.normal(jax.random.key(1), 0, 12, 7)
    _close(zero.apply(evaluate)(zero.shard(stack), x), evaluate(stack, x))


def test_apply_needs_out_reduce_for_an_integer(zero, params):
    with pytest.raises(ValueError, match="(?s)seen.*`out_reduce`"):
        zero.apply(lambda p, x: {"seen": jnp.int32(len(x))})(params, _x())


# Values that are no numbers.


def test_not_a_number_stays_one(zero, params):
    x = _x()
    x[0, 0] = np.nan
    loss, grads = zero.value_and_grad(_loss)(params, x)
    assert np.isnan(loss)
    assert np.isnan(np.asarray(grads["w"])).any()


def test_bfloat16_on_the_wire():
    codec = jz.PerAxis(node=jz.Cast(jnp.bfloat16), local=jz.Cast(jnp.bfloat16))
    zero = jz.Zero(zoo.make_mesh(_MESH), jz.zero3(weights=codec, gradients=codec))
    want = jax.jit(jax.value_and_grad(_loss))(_whole(), _x())
    loss, grads = zero.value_and_grad(_loss)(zero.shard(_whole()), _x())
    assert grads["w"].dtype == jnp.float32
    _close((loss, zero.unshard(grads)), want, tolerance=2.0**-6)
