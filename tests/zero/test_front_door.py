"""What a new user does first: parts of trees, batches, modules, changed attributes, odd rows.

Each of these gave a wrong number or an unexplained failure once. The oracle is `jax.value_and_grad`
on one device and whole arrays.
"""

from __future__ import annotations

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._sharding.stored_array import StoredArray
from tests import zoo

_ROWS = 16
_MESHES = ("2x4-explicit", "2x3-auto")  # and "2x4-auto", where one mesh is enough
_COMPILES: list[str] = []


def _note_compile(event: str, duration: float, **_):
    if "backend_compile" in event:
        _COMPILES.append(event)


jax.monitoring.register_event_duration_secs_listener(_note_compile)


@pytest.fixture(scope="module", params=_MESHES)
def zero(request):
    return jz.Zero(zoo.make_mesh(request.param))


@pytest.fixture(scope="module")
def auto():
    return jz.Zero(zoo.make_mesh("2x4-auto"))


def _whole():
    key = jax.random.key(0)
    return {
        "body": {"w": zoo.normal(key, 0, 8, 15), "b": zoo.normal(key, 1, 15)},
        "head": zoo.normal(key, 2, 15, 31),  # no dim of it divides
        "table": zoo.normal(key, 3, 24, 31),
    }


def _x(zero, features=8):
    rows = 2 * zero.num_devices
    return zoo.normal(jax.random.key(1), 0, rows, features, scale=1.0)


def _predict(body, head, table, x):
    hidden = jnp.tanh(x @ body["w"] + body["b"][None])
    return jax.nn.logsumexp(hidden @ head @ table.T, axis=-1).mean()


def _loss(params, x):
    return _predict(params["body"], params["head"], params["table"], x)


def _check(zero, got, want):
    loss, grads = got
    want_loss, want_grads = jax.device_get(want)
    zoo.assert_close(jax.device_get(loss), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want_grads, 1e-5, "grads")


# 1. Parts of sharded trees.


def _step(zero, f, argnums=0, **options):
    """The transformed function: under `jit`, or, on explicit meshes, as it is."""
    step = zero.value_and_grad(f, argnums, **options)
    return step if AxisType.Explicit in zero.mesh.axis_types else jax.jit(step)


def _oracle(f, argnums=0):
    """On one device and whole arrays, in one program."""
    return jax.jit(jax.value_and_grad(f, argnums))


def test_a_list_of_the_same_leaves(zero):
    whole, params = _whole(), zero.shard(_whole())

    def loss(leaves, x):
        return _predict({"w": leaves[0], "b": leaves[1]}, leaves[2], leaves[3], x)

    def as_list(tree):
        return [tree["body"]["w"], tree["body"]["b"], tree["head"], tree["table"]]

    want = _oracle(loss)(as_list(whole), _x(zero))
    step = _step(zero, loss)
    _check(zero, step(as_list(params), _x(zero)), want)


def test_sub_trees_as_several_arguments(zero):
    whole, params = _whole(), zero.shard(_whole())

    def loss(body, head, x, table):
        return _predict(body, head, table["t"], x)

    want_loss, want = _oracle(loss, (0, 1))(
        whole["body"], whole["head"], _x(zero), {"t": whole["table"]}
    )
    step = _step(zero, loss, (0, 1), batch_argnums="x")
    got, grads = step(params["body"], params["head"], _x(zero), {"t": params["table"]})
    _check(zero, (got, grads[0]), (want_loss, want[0]))
    _check(zero, (got, grads[1]), (want_loss, want[1]))


def test_frozen_parts_by_keyword_and_a_batch_by_keyword(zero):
    whole, params = _whole(), zero.shard(_whole())

    def loss(body, *, frozen, x):
        return _predict(body, frozen["head"], frozen["more"]["table"], x)

    def frozen(tree):
        return {"head": tree["head"], "more": {"table": tree["table"]}}

    want = _oracle(loss)(whole["body"], frozen=frozen(whole), x=_x(zero))
    step = _step(zero, loss)
    _check(zero, step(params["body"], frozen=frozen(params), x=_x(zero)), want)


def test_a_tree_merged_with_another(zero):
    """As LoRA does: adapters that were laid out apart, in one tree with the weights."""
    key = jax.random.key(2)
    adapters = {"a": zoo.normal(key, 0, 15, 3), "b": zoo.normal(key, 1, 3, 31)}
    whole, params = _whole(), zero.shard(_whole())

    def loss(tree, x):
        head = tree["base"]["head"] + tree["lora"]["a"] @ tree["lora"]["b"]
        return _predict(tree["base"]["body"], head, tree["base"]["table"], x)

    want = _oracle(loss)({"base": whole, "lora": adapters}, _x(zero))
    merged = {"base": params, "lora": zero.shard(adapters)}
    step = _step(zero, loss)
    _check(zero, step(merged, _x(zero)), want)


def test_sharded_arrays_beside_others(zero):
    """In an argument that is not differentiated: statistics, say, that nothing has laid out."""
    whole, params = _whole(), zero.shard(_whole())
    scale = np.linspace(1, 2, 31, dtype=np.float32)

    def loss(body, batch, rest):
        return _predict(body, rest["head"] * rest["scale"][None], rest["table"], batch)

    def rest(tree):
        return {"head": tree["head"], "table": tree["table"], "scale": scale}

    want = _oracle(loss)(whole["body"], _x(zero), rest(whole))
    step = _step(zero, loss)
    _check(zero, step(params["body"], _x(zero), rest(params)), want)


def test_leaves_added_and_removed(zero):
    whole, params = _whole(), zero.shard(_whole())
    more = {**params, "extra": params["head"]}
    want = _oracle(_loss)({**whole, "extra": whole["head"]}, _x(zero))
    _check(zero, zero.value_and_grad(_loss)(more, _x(zero)), want)
    less = {"body": params["body"]}
    want = _oracle(lambda p, x: jnp.mean(x @ p["body"]["w"]))({"body": whole["body"]}, _x(zero))
    step = zero.value_and_grad(lambda p, x: jnp.mean(x @ p["body"]["w"]))
    _check(zero, step(less, _x(zero)), want)


def test_a_part_of_the_optimizer_state_and_of_gradients_is_gathered(zero):
    params = zero.shard(_whole())
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    assert zero.unshard(opt_state[0].mu["head"]).shape == (15, 31)
    _, grads = zero.value_and_grad(_loss)(params, _x(zero))
    want = jax.grad(_loss)(_whole(), _x(zero))["head"]
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
    head = auto.shard(_whole())["head"]
    assert isinstance(head, StoredArray)
    assert (head.shape, head.ndim, head.dtype) == ((15, 31), 2, jnp.float32)
    with pytest.raises(
        (TypeError, AttributeError), match=r"\[15, 31\].*zero\.apply.*zero\.unshard"
    ):
        _USES[name](head, jnp.ones((2, 15)))


def test_a_padded_leaf_that_is_closed_over_says_what_to_do(auto):
    params = auto.shard(_whole())
    with pytest.raises(TypeError, match=r"zero\.apply"):
        auto.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) @ params["head"]))(
            params["body"], _x(auto)
        )


def test_a_split_array_that_is_closed_over_is_warned_of(auto):
    params = auto.shard(_whole())
    table = params["table"]

    def loss(body, x):
        return jnp.mean((x @ body["w"]) ** 2) * jnp.sum(table**2)

    want = _oracle(lambda body, x: loss(body, x))(_whole()["body"], _x(auto))
    with pytest.warns(
        UserWarning, match=r"closes over an array float32\[24, 31\].*holds all of it"
    ):
        got = auto.value_and_grad(loss)(params["body"], _x(auto))
    _check(auto, got, want)


def test_flax_modules_applied_to_padded_leaves_say_what_to_do(auto):
    model = nn.Dense(31)
    variables = auto.init(lambda key: model.init(key, jnp.ones((1, 15))), jax.random.key(0))
    with pytest.raises(TypeError, match=r"flax\.linen.*\[15, 31\].*zero\.apply"):
        model.apply(variables, jnp.ones((2, 15)))
    linear = auto.init(lambda key: nnx.Linear(15, 31, rngs=nnx.Rngs(key)), jax.random.key(0))
    with pytest.raises(TypeError, match=r"zero\.apply"):
        linear(jnp.ones((2, 15)))


def test_optax_and_tree_map_go_through_padded_leaves(zero):
    params = zero.shard(_whole())
    doubled = jax.tree.map(lambda x: 2 * x, params)
    zoo.assert_close(
        jax.device_get(zero.unshard(doubled)), jax.tree.map(lambda x: 2 * x, _whole()), 1e-6, "p"
    )
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert half["head"].dtype == jnp.bfloat16 == zero.unshard(half)["head"].dtype
    norm = jax.jit(optax.tree.norm)(params)
    want = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(_whole())))
    np.testing.assert_allclose(norm, want, rtol=1e-6)
    assert jax.tree.structure(zero.shardings(params)) == jax.tree.structure(params)


def test_encoded_leaves_carry_their_layout_too(zero):
    whole = _whole()
    params, frozen = zero.shard({"body": whole["body"]}), zero.shard(whole, codec=jz.Int8())
    decoded = jax.device_get(zero.unshard(frozen))

    def loss(params, x, frozen):
        return _predict(params["body"], frozen[0], frozen[1], x)

    want = _oracle(loss)({"body": whole["body"]}, _x(zero), [decoded["head"], decoded["table"]])
    step = _step(zero, loss)
    _check(zero, step(params, _x(zero), [frozen["head"], frozen["table"]]), want)


def test_leaves_of_another_mesh_are_refused(auto):
    other = jz.Zero(zoo.make_mesh("2x3-auto"))
    params = other.shard({"head": _whole()["head"]})
    with pytest.raises(ValueError, match=r"`head`.*another mesh or config.*zero\.unshard"):
        auto.value_and_grad(lambda p, x: jnp.mean(x @ p["head"]))(params, _x(auto, 15))
    with pytest.raises(ValueError, match="`w`.* on 6 devices, and the mesh has 8"):
        auto.unshard(other.shard({"w": np.ones((6, 4), np.float32)}))


# 2 and 3. The batch.


def test_a_table_beside_the_batch_is_asked_about(auto):
    params = auto.shard(_whole())
    weights = np.linspace(0, 3, 32, dtype=np.float32)

    def loss(params, class_weights, batch):
        return _loss(params, batch) * jnp.sum(class_weights**2)

    want = _oracle(loss)(_whole(), weights, _x(auto))
    with pytest.raises(ValueError, match=r"`class_weights`.*`batch`.*`batch_argnums=`"):
        auto.value_and_grad(loss)(params, weights, _x(auto))
    for batch_argnums in (2, -1, "batch", (2,)):
        step = auto.value_and_grad(loss, batch_argnums=batch_argnums)
        _check(auto, step(params, weights, _x(auto)), want)
    got = auto.apply(loss, batch_argnums="batch")(params, weights, batch=_x(auto))
    np.testing.assert_allclose(got, want[0], rtol=1e-5)


def test_several_batches(auto):
    params = auto.shard(_whole())

    def loss(params, x, y):
        return jnp.mean((x @ params["body"]["w"] - y) ** 2)

    x, y = _x(auto), zoo.normal(jax.random.key(4), 0, _ROWS, 15)
    want = _oracle(loss)(_whole(), x, y)
    _check(auto, auto.value_and_grad(loss, batch_argnums=(1, "y"))(params, x, y=y), want)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_keys_and_numbers_are_no_batch(auto, make_key):
    params = auto.shard(_whole())

    def loss(params, key, scale, x):
        return _loss(params, x) * scale + jax.random.normal(key, ())

    args = (make_key(3), jnp.float32(2), _x(auto))
    want = _oracle(loss)(_whole(), *args)
    _check(auto, auto.value_and_grad(loss)(params, *args), want)

    def in_the_batch(params, batch):
        return loss(params, batch["key"], batch["scale"], batch["x"])

    batch = dict(zip(("key", "scale", "x"), args, strict=True))
    _check(auto, auto.value_and_grad(in_the_batch)(params, batch), want)


def test_a_closed_over_batch_is_warned_of(auto):
    params, x = auto.shard(_whole()), _x(auto)
    want = _oracle(_loss)(_whole(), x)
    with pytest.warns(UserWarning, match=r"each of 8 devices computes all of it.*batch_argnums="):
        got = auto.value_and_grad(lambda params: _loss(params, x))(params)
    _check(auto, got, want)
    meant = auto.value_and_grad(lambda params: _loss(params, x), batch_argnums=())
    _check(auto, meant(params), want)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (7, "names 7, but 2 arguments were given by position"),
        ("rows", "names 'rows'"),
        (0, "by `batch_argnums` and by `argnums`"),
    ],
)
def test_wrong_batch_argnums(auto, asked, match):
    step = auto.value_and_grad(_loss, batch_argnums=asked)
    with pytest.raises(ValueError, match=match):
        step(auto.shard(_whole()), _x(auto))


def test_in_specs_and_an_argument_that_they_leave_out(auto):
    def loss(params, x, y):
        return jnp.mean((x @ params["body"]["w"] - y) ** 2)

    y = np.zeros((_ROWS, 15), np.float32)
    with pytest.raises(ValueError, match="`in_specs` splits `y`.*says nothing of `x`"):
        auto.value_and_grad(loss, in_specs=(None, None, auto.batch_spec))(
            auto.shard(_whole()), _x(auto), y
        )
    with pytest.raises(ValueError, match="by `batch_argnums` and by `in_specs`"):
        auto.value_and_grad(loss, batch_argnums=2, in_specs=(None, P(), auto.batch_spec))(
            auto.shard(_whole()), _x(auto), y
        )


# 4. Nothing stale.


class _Trainer:
    kl: float = 0.0
    table: jax.Array | None = None

    def loss(self, params, x):
        extra = 0 if self.table is None else jnp.sum(self.table)
        return _loss(params, x) + self.kl * jnp.sum(params["head"] ** 2) + extra


def test_changed_attributes_are_seen(auto):
    trainer, params, x = _Trainer(), auto.shard(_whole()), _x(auto)
    step = auto.value_and_grad(trainer.loss)
    for kl, table in ((0.0, None), (1.0, jnp.ones(3)), (1.0, jnp.full(3, 2.0))):
        trainer.kl, trainer.table = kl, table
        want = _oracle(trainer.loss)(_whole(), x)
        _check(auto, step(params, x), want)
    _check(auto, jax.jit(auto.value_and_grad(trainer.loss))(params, x), want)


def test_a_traced_attribute(auto):
    trainer, params, x = _Trainer(), auto.shard(_whole()), _x(auto)
    step = auto.value_and_grad(trainer.loss)

    @jax.jit
    def with_kl(kl, params, x):
        trainer.kl = kl
        return step(params, x)

    for kl in (0.5, 2.0):
        got = with_kl(kl, params, x)
        trainer.kl = kl
        _check(auto, got, _oracle(trainer.loss)(_whole(), x))
        _check(auto, step(params, x), _oracle(trainer.loss)(_whole(), x))


def test_a_second_call_traces_and_compiles_nothing_new(auto):
    params, traced = auto.shard(_whole()), []

    def loss(params, x):
        traced.append(1)
        return _loss(params, x)

    step = auto.value_and_grad(loss)
    step(params, _x(auto))
    once, compiles = len(traced), len(_COMPILES)
    step(params, 2 * _x(auto))
    assert len(_COMPILES) == compiles
    assert len(traced) > once


def test_what_a_loss_closes_over_is_not_kept_alive(auto):
    params = auto.shard(_whole())

    class Table:
        def __init__(self):
            self.rows = jnp.ones(15)

    table = Table()
    alive = weakref.ref(table)

    def loss(params, x, table=table):
        return jnp.mean(x @ params["body"]["w"] * table.rows[None])

    auto.value_and_grad(loss)(params, _x(auto))
    jax.jit(auto.value_and_grad(loss))(params, _x(auto))
    del table, loss
    gc.collect()
    assert alive() is None


def test_callbacks_are_not_confused(auto):
    params, heard = auto.shard(_whole()), []

    def make(word):
        def loss(params, x):
            jax.debug.callback(lambda: heard.append(word))
            return _loss(params, x)

        return loss

    words = ["first", "second"]

    def loss(params, x):
        return make(words[0])(params, x)

    step = auto.value_and_grad(loss)
    for expected in ("first", "second"):
        heard.clear()
        step(params, _x(auto))
        jax.effects_barrier()
        assert set(heard) == {expected}
        words.pop(0)


# 6. Optimizers that need more than gradients.


@pytest.mark.standard_promotion
def test_an_optimizer_that_asks_for_functions_is_tried_with_them(auto):
    params = auto.shard(_whole())
    tx = optax.contrib.sam(optax.sgd(0.1), optax.adam(1e-2), sync_period=2, opaque_mode=True)
    opt_state = auto.init_optimizer(tx, params)  # warnings are errors here

    def one_step(grad, params, opt_state, x):
        def gradient(params, _):
            return grad(params, x)[1]

        grads = gradient(params, 0)
        updates, opt_state = tx.update(grads, opt_state, params, grad_fn=gradient)
        return optax.apply_updates(params, updates), opt_state

    whole = _whole()
    want, _ = one_step(_oracle(_loss), whole, tx.init(whole), _x(auto))
    got, _ = one_step(auto.value_and_grad(_loss), params, opt_state, _x(auto))
    zoo.assert_close(jax.device_get(auto.unshard(got)), jax.device_get(want), 1e-4, "params")


def test_an_optimizer_that_cannot_be_tried_is_warned_of(auto):
    def update(updates, state, params=None, *, curvature):
        return updates, state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    with pytest.warns(UserWarning, match=r"could not be tried.*curvature.*zero\.optimizer"):
        auto.init_optimizer(tx, auto.shard(_whole()))


def test_statistics_that_do_not_fit_a_padded_leaf_ask_for_true_shapes(auto):
    params = auto.shard({"head": _whole()["head"]})
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

    state = auto.init(create, {"head": _whole()["head"]})
    want = auto.init_optimizer(tx, state["params"])
    assert jax.tree.structure(state["opt_state"]) == jax.tree.structure(want)
    pairs = zip(jax.tree.leaves(state["opt_state"]), jax.tree.leaves(want), strict=True)
    for got, expected in pairs:
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
        np.testing.assert_array_equal(got, expected)


# Modules.


def _mlp(key):
    return eqx.nn.MLP(8, 3, 31, 2, activation=jax.nn.gelu, key=key)


def _module_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.standard_promotion
def test_an_equinox_module_is_a_tree(zero):
    model = zero.init(_mlp, jax.random.key(0))
    whole = jax.device_get(zero.unshard(model))
    assert type(model) is type(whole) is eqx.nn.MLP
    want_loss, want = eqx.filter_value_and_grad(_module_loss)(whole, _x(zero))
    loss, grads = eqx.filter_jit(zero.value_and_grad(_module_loss))(model, _x(zero))
    _check(zero, (loss, grads), (want_loss, want))
    tx = optax.adamw(1e-2)
    opt_state = zero.init_optimizer(tx, model)
    params = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(opt_state[0].mu) == jax.tree.structure(params)
    updates, _ = tx.update(grads, opt_state, params)
    stepped = eqx.apply_updates(model, updates)
    assert zero.value_and_grad(_module_loss)(stepped, _x(zero))[0] < want_loss


class _Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 31, rngs=rngs)
        self.norm = nnx.BatchNorm(31, rngs=rngs)
        self.outer = nnx.Linear(31, 5, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))


def _net(key):
    return _Net(nnx.Rngs(key))


@pytest.mark.standard_promotion
def test_an_nnx_module_is_a_tree(zero):
    model = zero.init(_net, jax.random.key(0))
    model.eval()
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    whole = jax.device_get(zero.unshard(model))
    want_loss, want = nnx.value_and_grad(loss_fn)(whole, _x(zero))
    loss, grads = zero.value_and_grad(loss_fn)(model, _x(zero))
    _check(zero, (loss, nnx.state(grads, nnx.Param)), (want_loss, want))
    assert grads.norm.mean.get_value() is None
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, grads)
    assert zero.value_and_grad(loss_fn)(model, _x(zero))[0] < loss


@pytest.mark.standard_promotion
def test_what_an_nnx_module_writes_is_returned_or_refused(auto):
    model = auto.init(_net, jax.random.key(0))
    whole = auto.unshard(model)

    def lost(model, x):
        return jnp.mean(model(x) ** 2)

    with pytest.raises(ValueError, match=r"norm\.mean.*would be lost.*nnx\.state"):
        auto.value_and_grad(lost)(model, _x(auto))

    def returned(model, x):
        return lost(model, x), nnx.state(model, nnx.BatchStat)

    (_, stats), _ = auto.value_and_grad(returned, has_aux=True)(model, _x(auto))
    slices = np.split(_x(auto), 8)
    means = []
    for rows in slices:
        each = nnx.clone(whole)
        each(rows)
        means.append(each.norm.mean[...])
    np.testing.assert_allclose(stats["norm"]["mean"][...], np.mean(means, 0), rtol=1e-5, atol=1e-7)
    nnx.update(model, stats)


@pytest.mark.standard_promotion
def test_keys_that_nnx_rngs_draw_are_returned_or_refused(auto):
    """A counter that did not advance would give the same dropout in every step."""
    model, rngs = auto.init(_net, jax.random.key(0)), nnx.Rngs(0)
    model.eval()

    def lost(model, rngs, x):
        return jnp.mean(model(x + jax.random.normal(rngs(), x.shape)) ** 2)

    with pytest.raises(ValueError, match=r"`rngs`.*default\.count.*would be lost.*key = rngs\."):
        auto.value_and_grad(lost)(model, rngs, _x(auto))
    step = auto.value_and_grad(lambda *args: (lost(*args), nnx.state(args[1])), has_aux=True)
    losses = []
    for _ in range(2):
        (loss, drawn), _ = step(model, rngs, _x(auto))
        nnx.update(rngs, drawn)
        losses.append(float(loss))
    assert rngs.default.count[...] == 2 and losses[0] != losses[1]


def test_an_nnx_module_that_shares_a_variable_is_refused(auto):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    setattr(model, "again", model.kernel)  # noqa: B010
    with pytest.raises(ValueError, match=r"one variable as `again` and as `kernel`.*nnx\.split"):
        auto.shard(model)


# Rows that do not divide.


@pytest.mark.parametrize("num_rows", [1, 13, 16, 21])
def test_a_padded_batch_counts_every_row_once(zero, num_rows):
    params, x = zero.shard(_whole()), zoo.normal(jax.random.key(5), 0, num_rows, 8)

    def row_losses(params, x):
        hidden = jnp.tanh(x @ params["body"]["w"]) @ params["head"]
        return jnp.log(jnp.sum(hidden**2, axis=-1))  # not finite for a row of zeros

    def loss(params, batch):
        rows, weights = batch
        return jnp.sum(weights * row_losses(params, rows["x"])), jnp.sum(weights)

    want = _oracle(lambda p, x: jnp.mean(row_losses(p, x)))(_whole(), x)
    rows, weights = jz.pad_batch({"x": x, "key": jax.random.key(0)}, zero)
    assert len(weights) == len(rows["x"]) == -(-num_rows // zero.num_devices) * zero.num_devices
    _check(zero, zero.value_and_grad(loss, weighted=True)(params, (rows, weights)), want)


def test_pad_batch_to_a_number_of_rows(auto):
    x = np.arange(5, dtype=np.float32)
    rows, weights = jz.pad_batch(x, auto, rows=24)
    np.testing.assert_array_equal(rows, [0, 1, 2, 3, *[4] * 20])
    np.testing.assert_array_equal(weights, [*[1] * 5, *[0] * 19])
    assert len(jz.pad_batch(x, auto, microbatches=3)[1]) == 24
    for bad in (4, 12):
        with pytest.raises(ValueError, match="`rows` must be a multiple of 8"):
            jz.pad_batch(x, auto, rows=bad)
    with pytest.raises(ValueError, match="at least one row"):
        jz.pad_batch(x[:0], auto)


def test_evaluation_over_all_rows(auto):
    params = auto.shard(_whole())
    data = zoo.normal(jax.random.key(6), 0, 53, 8)

    def score(params, batch):
        x, weights = batch
        return jnp.sum(weights * jnp.sum(x @ params["body"]["w"], axis=-1)), jnp.sum(weights)

    evaluate = jax.jit(auto.apply(score, out_reduce="sum"))
    batches = (jz.pad_batch(data[i : i + 16], auto, rows=16) for i in range(0, 53, 16))
    total, num = map(sum, zip(*(evaluate(params, batch) for batch in batches), strict=True))
    assert num == 53
    want = np.mean(np.sum(data.astype(np.float64) @ _whole()["body"]["w"], axis=-1))
    np.testing.assert_allclose(total / num, want, rtol=1e-4)


# Auxiliary outputs.


@pytest.mark.parametrize(
    ("leaf", "proposal"),
    [
        (lambda x: jnp.int32(len(x)), "'sum' for a number of examples, 'first' for a counter"),
        (lambda x: jax.random.key(0), "'first' for a random key"),
        (lambda x: jax.random.PRNGKey(0), "'first' for a random key"),
        (lambda x: jnp.bool_(True), "'first' if it is the same on every device"),
        (lambda x: jnp.argmax(x, axis=-1), "'concat' if its dim 0 is the rows"),
    ],
)
def test_aux_without_a_mean_gets_a_proposal(auto, leaf, proposal):
    step = auto.value_and_grad(lambda p, x: (_loss(p, x), {"seen": leaf(x)}), has_aux=True)
    with pytest.raises(ValueError, match=f"`seen`.*`aux_reduce`.*{proposal}"):
        step(auto.shard(_whole()), _x(auto))


# What is less ordinary, and was wrong once.


def test_an_optimizer_state_is_no_batch(auto):
    params = auto.shard(_whole())
    opt_state = auto.init_optimizer(optax.adam(1e-3), params)

    def loss(params, opt_state):
        return jnp.sum(params["table"] ** 2) + jnp.sum(opt_state[0].mu["table"] ** 2)

    moved = jax.tree.map(lambda x: x + 1 if x.ndim == 2 else x, opt_state)
    for step in (auto.value_and_grad(loss), jax.jit(auto.value_and_grad(loss))):
        with pytest.warns(UserWarning, match="No argument of this function is a batch"):
            got, _ = step(params, moved)
        np.testing.assert_allclose(got, np.sum(_whole()["table"] ** 2) + 24 * 31, rtol=1e-5)


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_may_be_a_part_of_the_parameters_is_no_batch_unasked(nodes):
    zero = jz.Zero(jz.make_mesh(nodes=nodes))
    params = zero.shard(_whole())

    def loss(params, anchor):
        return jnp.sum((params["table"] - anchor["t"]) ** 2) / jnp.sum(anchor["t"] ** 2)

    with pytest.warns(UserWarning, match="No argument of this function is a batch"):
        zero.value_and_grad(loss)(params, {"t": params["table"]})
    with pytest.raises(ValueError, match=r"`anchor`.*or a part of the parameters.*batch_argnums="):
        jax.jit(zero.value_and_grad(loss))(params, {"t": params["table"]})
    step = jax.jit(zero.value_and_grad(loss, batch_argnums=()))
    twice = {"t": 2 * params["table"]}
    want = _oracle(loss)(_whole(), {"t": 2 * _whole()["table"]})
    _check(zero, step(params, twice), want)


def test_what_may_be_a_raw_key_or_labels_is_asked_about():
    zero = jz.Zero(jz.make_mesh(nodes=1, devices=jax.devices()[:2]))
    params, x = zero.shard(_whole()), _x(zero)[:2]
    labels = np.array([3, 5], np.uint32)

    def loss(params, x, y):
        return jnp.mean(jnp.mean(x @ params["body"]["w"], axis=-1) * y.astype(jnp.float32))

    with pytest.raises(ValueError, match=r"`x`.*`y`.*batch_argnums="):
        zero.value_and_grad(loss)(params, x, labels)
    want = _oracle(loss)(_whole(), x, labels)
    _check(zero, zero.value_and_grad(loss, batch_argnums=(1, 2))(params, x, labels), want)
    batch = {"x": x, "key": jax.random.PRNGKey(0)}
    for act in (
        lambda: zero.value_and_grad(lambda p, b: loss(p, b["x"], b["key"]))(params, batch),
        lambda: jz.pad_batch(batch, zero),
    ):
        with pytest.raises(ValueError, match=r"`key`, uint32\[2\].*raw random key or a number"):
            act()


def test_a_key_for_each_row(auto):
    params, x = auto.shard(_whole()), _x(auto)
    keys = jax.random.split(jax.random.key(0), len(x))

    def loss(params, x, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys)
        return _loss(params, x + noise)

    want = _oracle(loss)(_whole(), x, keys)
    _check(auto, auto.value_and_grad(loss, batch_argnums=(1, 2))(params, x, keys), want)


@pytest.mark.parametrize(
    "change", [lambda x: x.T, lambda x: x.ravel(), lambda x: jnp.concatenate([x, x])]
)
def test_data_that_no_longer_fit_their_layout_are_refused(auto, change):
    params = jax.tree.map(change, auto.shard({"head": _whole()["head"]}))
    match = r"`head` of shape \(15, 31\).*zero\.unshard"
    with pytest.raises(ValueError, match=match):
        auto.value_and_grad(lambda p, x: jnp.sum(p["head"]) + jnp.mean(x))(params, _x(auto))
    with pytest.raises(ValueError, match=match):
        auto.unshard(params)


def test_sizes_are_true_sizes(auto):
    params = auto.shard(_whole())
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, StoredArray))
    assert sum(x.size for x in leaves) == sum(x.size for x in jax.tree.leaves(_whole()))
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
def test_masked_optimizers(auto, name, tx, is_warned_of):
    params, whole = auto.shard(_whole()), _whole()
    if is_warned_of:
        with pytest.warns(UserWarning, match=r"zero\.optimizer\(tx\)"):
            auto.init_optimizer(tx, params)
        tx = auto.optimizer(tx)

    def two_steps(grad, params, opt_state):
        for _ in range(2):
            updates, opt_state = tx.update(grad(params, _x(auto))[1], opt_state, params)
            params = optax.apply_updates(params, updates)
        return params

    got = two_steps(auto.value_and_grad(_loss), params, auto.init_optimizer(tx, params))
    tx = tx.inner if is_warned_of else tx
    want = two_steps(_oracle(_loss), whole, tx.init(whole))
    zoo.assert_close(jax.device_get(auto.unshard(got)), jax.device_get(want), 1e-4, name)


@pytest.mark.standard_promotion
def test_frozen_parts_of_an_equinox_module(auto):
    model = auto.init(_mlp, jax.random.key(0))
    is_trained = jax.tree.map(eqx.is_inexact_array, model)
    is_trained = eqx.tree_at(lambda m: m.layers[0], is_trained, False)
    trained, frozen = eqx.partition(model, is_trained)

    def loss(trained, frozen, x):
        return _module_loss(eqx.combine(trained, frozen), x)

    whole = jax.device_get(auto.unshard(model))
    want_loss, want = eqx.filter_value_and_grad(_module_loss)(whole, _x(auto))
    got, grads = auto.value_and_grad(loss)(trained, frozen, _x(auto))
    np.testing.assert_allclose(got, want_loss, rtol=1e-5)
    assert jax.tree.leaves(grads.layers[0]) == []
    zoo.assert_close(
        jax.device_get(auto.unshard(grads.layers[1:])),
        jax.device_get(want.layers[1:]),
        1e-5,
        "grads",
    )
    tx = optax.adam(1e-3)
    opt_state = auto.init_optimizer(tx, trained)
    updates, _ = tx.update(grads, opt_state, eqx.filter(trained, eqx.is_inexact_array))
    assert auto.value_and_grad(loss)(eqx.apply_updates(trained, updates), frozen, _x(auto))[0] < got


@pytest.mark.standard_promotion
def test_a_checkpoint_of_modules_and_parts(auto, tmp_path):
    model = auto.init(_mlp, jax.random.key(0))
    params = auto.shard(_whole())
    state = {"model": model, "part": {"again": params["head"]}}
    with jz.Checkpoints(tmp_path, auto) as checkpoints:
        checkpoints.save(1, state)
    other = jz.Zero(zoo.make_mesh("2x3-auto"))
    like = {
        "model": other.init(_mlp, jax.random.key(1)),
        "part": {"again": other.shard({"head": np.zeros((15, 31), np.float32)})["head"]},
    }
    with jz.Checkpoints(tmp_path, other) as checkpoints:
        restored = checkpoints.restore(like).state
    assert restored["model"].activation is like["model"].activation
    for got, want in ((restored["model"], model), (restored["part"], state["part"])):
        trees = (other.unshard(got), auto.unshard(want))
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            if isinstance(a, jax.Array):
                np.testing.assert_array_equal(a, b)
