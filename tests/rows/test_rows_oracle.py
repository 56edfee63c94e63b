"""A step that sends rows of tables equals `jax.value_and_grad` on one device, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType

import jaxzero as jz

from .models import MODELS, ROWS, Model, head, send_rows


@pytest.fixture(autouse=True)
def _any_saving(monkeypatch):
    send_rows(monkeypatch)
    with jax.enable_x64(True):
        yield


def _check(model: Model, zero: jz.Zero, moves=None, **options) -> None:
    """Compare loss and gradients with those of one device."""
    params, batch = model.init(jax.random.key(0)), model.batch()
    stored = zero.init(model.init, jax.random.key(0))
    state = {}
    if zero.config.needs_wire_state:
        state["wire_state"] = zero.init_wire_state(stored)
    plan = zero.plan(model.loss, stored, batch, **state, **options)
    assert sorted(x.name for x in plan.rows) == sorted(model.moves if moves is None else moves)
    step = jax.jit(zero.value_and_grad(model.loss, **options))
    loss, grads, *_ = step(stored, batch, **state)
    want = jax.jit(jax.value_and_grad(model.loss))(params, batch)
    _equal((loss, zero.unshard(grads)), want)


def _equal(found, wanted, ulps: int = 4 * ROWS * 16) -> None:
    """Up to rounding: of sums of at most 4 ids of each row, whose terms are no larger than 16 times
    the largest element of what they are summed up to."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        atol = ulps * float(jnp.finfo(y.dtype).eps) * float(np.max(np.abs(y)))
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


_ALONE = [
    pytest.param(name, marks=[] if i % 3 == 0 else pytest.mark.exhaustive)
    for i, name in enumerate(name for name in MODELS if name != "mixed")
]


@pytest.mark.parametrize("name", _ALONE)
def test_models(name):
    _check(MODELS[name], jz.Zero(jz.make_mesh(nodes=2)))


def _some(*names: str) -> list:
    """The model with all kinds of lookups, and others in `make test-exhaustive`."""
    return ["all_kinds", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in names)]


EXACT = {"min_quantized_size": 2**20}  # no array is large enough to be encoded
CONFIGS = {
    "hpz": jz.zero3(hpz=jz.HpZ()),
    "hsdp": jz.hsdp(),
    "zeropp": dataclasses.replace(jz.zeropp(), **EXACT),
    "zeropp4": dataclasses.replace(jz.zeropp4(), **EXACT),
}


@pytest.mark.parametrize("name", _some("columns_bag", "scanned"))
@pytest.mark.parametrize("config", CONFIGS)
def test_configs(config, name):
    _check(MODELS[name], jz.Zero(jz.make_mesh(nodes=2), CONFIGS[config]))


def test_a_comparison_with_one_number_is_a_product():
    def loss(params, batch):
        of_step = (jnp.arange(16, dtype=jnp.int32) == batch["step"]).astype(float) @ params["t"]
        return jnp.mean((batch["x"] @ params["w"] + of_step[None]) ** 2)

    random = np.random.default_rng(0)
    params = {"t": random.normal(size=(16, 8)), "w": random.normal(size=(4, 8))}
    batch = {"step": jnp.int32(3), "x": random.normal(size=(ROWS, 4))}
    zero = jz.Zero(jz.make_mesh(nodes=2))
    loss_and_grads = jax.jit(zero.value_and_grad(loss))(zero.shard(params), batch)
    _equal(zero.unshard(loss_and_grads[1]), jax.grad(loss)(params, batch))


MESHES = {
    "one node": lambda: jz.make_mesh(nodes=1),
    "nodes of one": lambda: jz.make_mesh(nodes=8),
    "four devices": lambda: jz.make_mesh(nodes=2, devices=jax.devices()[:4]),
    "explicit": lambda: jz.make_mesh(nodes=2, axis_type=AxisType.Explicit),
    "simulated": lambda: jz.make_mesh(nodes=2, simulate=8),
}


@pytest.mark.parametrize("name", _some("columns", "scanned"))
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh, name):
    _check(MODELS[name], jz.Zero(MESHES[mesh]()))


@pytest.mark.parametrize("name", _some("columns_bag", "checkpointed", "scanned"))
@pytest.mark.parametrize("config", [jz.zero3(), jz.zero3(hpz=jz.HpZ())])
def test_microbatches(name, config):
    _check(MODELS[name], jz.Zero(jz.make_mesh(nodes=2), config), microbatches=2)


def test_halves_gather_tables():
    _check(MODELS["several"], jz.Zero(jz.make_mesh(nodes=2)), moves=(), halves=True)


def test_deterministic_sums_gather_tables():
    config = jz.ZeroConfig(schedule=jz.CommSchedule(deterministic="mesh"))
    _check(MODELS["several"], jz.Zero(jz.make_mesh(nodes=2), config), moves=())


def test_a_value_beside_derivatives_is_added_up_whether_rows_move_or_not(monkeypatch):
    """`gradient_reduce` says how a leaf is reduced, and one whose derivatives have a value among
    them is one leaf, moved or not."""

    @jax.custom_vjp
    def scored(x, table):
        return x @ table.T

    def backward(kept, cotangent):
        x, table = kept
        return cotangent @ table, jnp.zeros_like(table) + jnp.abs(x).max()

    scored.defvjp(lambda x, table: (scored(x, table), (x, table)), backward)

    def loss(params, batch):
        return jnp.mean(scored(jnp.tanh(params["t"][batch["ids"]]) + batch["x"], params["t"]) ** 2)

    random = np.random.default_rng(0)
    params = {"t": random.normal(size=(64, 8))}
    batch = {"ids": random.integers(0, 64, ROWS), "x": random.normal(size=(ROWS, 8))}
    zero, found = jz.Zero(jz.make_mesh(nodes=2)), []
    for moves in (True, False):
        send_rows(monkeypatch, moves)
        stored, options = zero.shard(params), {"gradient_reduce": {"t": "mean"}}
        assert [x.name for x in zero.plan(loss, stored, batch, **options).rows] == ["t"] * moves
        step = jax.jit(zero.value_and_grad(lambda *args: loss(*args), **options))
        found.append((step(stored, batch)[0], zero.unshard(step(stored, batch)[1])))
    _equal(*found)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weighted_and_aux(microbatches):
    model, zero = MODELS["several"], jz.Zero(jz.make_mesh(nodes=2))

    def loss(params, batch):
        rows = params["t"][batch["ids"]].sum((1, 2)) * params["w"].sum()
        weight = jnp.abs(batch["x"][:, 0])
        return (jnp.sum(jnp.sin(rows) * weight), jnp.sum(weight)), {"largest": jnp.max(rows)}

    def whole(params, batch):
        (total, weight), aux = loss(params, batch)
        return total / weight, aux

    params, batch = model.init(jax.random.key(0)), model.batch()
    options = {"weighted": True, "has_aux": True, "aux_reduce": "max"}
    step = jax.jit(zero.value_and_grad(loss, microbatches=microbatches, **options))
    value, grads = step(zero.init(model.init, jax.random.key(0)), batch)
    _equal((value, zero.unshard(grads)), jax.value_and_grad(whole, has_aux=True)(params, batch))


def test_forward_only():
    model, zero = MODELS["several"], jz.Zero(jz.make_mesh(nodes=2))

    def rows(params, batch):
        return params["t"][batch["ids"]] * params["bag"][batch["ids"]].sum(1, keepdims=True)

    params = model.init(jax.random.key(0))
    found = jax.jit(zero.apply(rows))(zero.init(model.init, jax.random.key(0)), model.batch())
    _equal(found, rows(params, model.batch()))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("offload", [None, jz.Offload(weights=True, optimizer=True)])
def test_updates(offload):
    """A step of AdamW, as on one device; state of tables is split as they are."""
    model, tx = MODELS["all_kinds"], optax.adamw(1e-2)
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.ZeroConfig(offload=offload))
    params, batch = model.init(jax.random.key(0)), model.batch()
    stored = zero.init(model.init, jax.random.key(0))
    state = zero.init_optimizer(tx, stored)
    mu = state[0].mu["t"]
    assert mu.sharding.shard_shape(mu.shape) == (64 // 8, 8)
    loss, stored, state = jax.jit(zero.value_and_update(model.loss, tx))(stored, state, batch)
    wanted, grads = jax.value_and_grad(model.loss)(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params)
    _equal((loss, zero.unshard(stored)), (wanted, optax.apply_updates(params, updates)))


def test_only_some_leaves_are_differentiated():
    model, zero = MODELS["all_kinds"], jz.Zero(jz.make_mesh(nodes=2))
    tables = {"t", "u", "bag"}

    def loss(trained, frozen, batch):
        return model.loss({**trained, **frozen}, batch)

    params = model.init(jax.random.key(0))
    parts = {k: params[k] for k in ("t", "w")}, {k: params[k] for k in ("u", "bag")}
    stored = tuple(map(zero.shard, parts))
    assert {x.name for x in zero.plan(loss, *stored, model.batch()).rows} == tables
    value, grads = jax.jit(zero.value_and_grad(loss))(*stored, model.batch())
    _equal((value, zero.unshard(grads)), jax.value_and_grad(loss)(*parts, model.batch()))


def test_16_bits():
    """Rows that are read in 16 bits are sent so, and their gradients are summed in float32."""
    model, zero = MODELS["mixed"], jz.Zero(jz.make_mesh(nodes=2))
    params, batch = model.init(jax.random.key(0), jnp.float32), model.batch()
    batch["x"] = batch["x"].astype(np.float32)
    stored = zero.shard(params)
    plan = zero.plan(model.loss, stored, batch)
    assert [x.name for x in plan.rows] == ["t", "u"]
    sent = [x for x in plan.transfers if x.name in ("t", "u") and "int" not in x.dtype]
    assert {x.dtype for x in sent} == {"bfloat16"}
    value, grads = jax.jit(zero.value_and_grad(model.loss))(stored, batch)
    want_value, want = jax.value_and_grad(model.loss)(params, batch)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(value, want_value, rtol=6 * 2.0**-9)  # of 3 roundings, squared
    for name in ("t", "u"):  # one device adds up to 5 duplicates in 16 bits
        atol = 5 * eps * float(np.max(np.abs(want[name])))
        np.testing.assert_allclose(zero.unshard(grads)[name], want[name], rtol=0, atol=atol)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax(library):
    ids = MODELS["index"].batch()["ids"]
    zero = jz.Zero(jz.make_mesh(nodes=2))
    x = np.ones((ROWS, 1))
    if library == "linen":
        module = linen.Embed(64, 8, param_dtype=jnp.float64, dtype=jnp.float64)
        params = {**module.init(jax.random.key(0), ids), "w": jnp.eye(8)}

        def loss(params, batch):
            rows = module.apply({"params": params["params"]}, batch["ids"])
            return head(params, rows, batch["x"])

    else:
        module = nnx.Embed(64, 8, param_dtype=jnp.float64, dtype=jnp.float64, rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)
        treedef = jax.tree.structure(state)
        params = {"params": nnx.to_pure_dict(state), "w": jnp.eye(8)}

        def loss(params, batch):
            filled = jax.tree.unflatten(treedef, jax.tree.leaves(params["params"]))
            return head(params, nnx.merge(graph, filled)(batch["ids"]), batch["x"])

    batch = {"ids": np.abs(ids), "x": x}
    stored = zero.shard(params)
    assert ["embedding" in x.name for x in zero.plan(loss, stored, batch).rows] == [True]
    value, grads = jax.jit(zero.value_and_grad(loss))(stored, batch)
    _equal((value, zero.unshard(grads)), jax.value_and_grad(loss)(params, batch))


def test_an_embedding_that_is_stored_encoded():
    """A frozen table in 8 bits: a device decodes its shard, and sends rows."""
    model, zero = MODELS["index"], jz.Zero(jz.make_mesh(nodes=2))
    params, batch = model.init(jax.random.key(0)), model.batch()
    frozen = zero.shard({"t": params["t"]}, codec=jz.Int8())

    def loss(trained, frozen, batch):
        return model.loss({**trained, **frozen}, batch)

    trained = {"w": params["w"]}
    stored = zero.shard(trained)
    assert [x.name for x in zero.plan(loss, stored, frozen, batch).rows] == ["t"]
    value, grads = jax.jit(zero.value_and_grad(loss))(stored, frozen, batch)
    decoded = {"t": jnp.asarray(zero.unshard(frozen)["t"], jnp.float64)}
    want = jax.value_and_grad(loss)(trained, decoded, batch)
    _equal((value, zero.unshard(grads)), want)


@pytest.mark.parametrize("name", _some("columns_bag", "scanned"))
def test_local_steps(name):
    """Nodes step alone: the devices of a node exchange rows, and none between nodes."""
    model, lr = MODELS[name], 0.1
    zero = jz.Zero(jz.make_mesh(nodes=2))

    def descend(params, grads):
        return jax.tree.map(lambda x, g: x - lr * g, params, grads)

    def step(params, opt_state, batch):
        loss, grads = zero.value_and_grad(model.loss)(params, batch)
        return descend(params, grads), opt_state, {"loss": loss}

    params, batch = model.init(jax.random.key(0)), model.batch()
    rounds = zero.local_steps(step, every=2)
    batches = jax.tree.map(lambda x: np.stack([x, x[::-1]]), batch)
    _, metrics = jax.jit(rounds)(rounds.init(zero.shard(params), ()), batches)
    half = ROWS // 2
    for node in range(2):
        alone = params
        for i in range(2):
            own = jax.tree.map(lambda x, i=i, node=node: x[i, node * half :][:half], batches)
            loss, grads = jax.value_and_grad(model.loss)(alone, own)
            alone = descend(alone, grads)
            _equal(metrics["loss"][i, node], loss)


@pytest.mark.parametrize("name", _some("scanned", "columns"))
def test_derivatives_of_gradients(name):
    model, zero = MODELS[name], jz.Zero(jz.make_mesh(nodes=2))
    params, batch = model.init(jax.random.key(0)), model.batch()
    vector = model.init(jax.random.key(1))

    def derivative(step, params, vector):
        return jax.jvp(lambda p: step(p, batch), (params,), (vector,))

    step = zero.value_and_grad(model.loss)
    got = jax.jit(lambda p, v: derivative(step, p, v))(zero.shard(params), zero.shard(vector))
    want = derivative(jax.value_and_grad(model.loss), params, vector)
    _equal(zero.unshard(got[0][1]), want[0][1])
    _equal((got[1][0], zero.unshard(got[1][1])), want[1])


def test_ensembles():
    model, zero = MODELS["all_kinds"], jz.Zero(jz.make_mesh(nodes=2))
    members = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 2))
    batch = jax.tree.map(lambda x: np.stack([x, x[::-1]]), model.batch())
    params = jax.vmap(zero.shard)(members)
    loss, grads = jax.jit(jax.vmap(zero.value_and_grad(model.loss)))(params, batch)
    want = jax.vmap(jax.value_and_grad(model.loss))(members, batch)
    _equal((loss, jax.vmap(zero.unshard)(grads)), want)
