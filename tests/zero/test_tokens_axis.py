"""Rows whose tokens are split over a third mesh axis: `jz.make_mesh(tokens=...)`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo

WIDTH, TOKENS, LAYERS, WORDS = 256, 16, 2, 40


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def init(key):
    keys = iter(jax.random.split(key, 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / 16

    return {
        "table": normal(WORDS, WIDTH),
        "layers": {
            "mix": normal(LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(LAYERS, WIDTH, WIDTH),
            "gain": 1 + normal(LAYERS, WIDTH),
        },
        "head": normal(WIDTH, WORDS),
    }


def written_out(query, key, value):
    """Causal attention of the oracle, in the dtype of its arguments throughout."""
    logits = jnp.einsum("bthk,bshk->bhts", query, key) / np.sqrt(query.shape[-1])
    powers = jnp.exp(logits) * np.tri(TOKENS)[None, None]
    return jnp.einsum("bhts,bshk->bthk", powers / powers.sum(-1, keepdims=True), value)


def whole(x):
    return x


def logits(params, ids, split, method):
    """A small model that mixes tokens; `split` says how activations lie."""
    way = {"implementation": "xla"} if method == "xla" else {"method": method}
    attend = functools.partial(jz.attention, is_causal=True, **way)
    attend = written_out if split is whole else attend

    @jax.checkpoint
    def layer(x, weights):
        x = split(x)
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * weights["gain"][None, None]
        mixed = (normed @ weights["mix"]).reshape(*x.shape[:2], 3, 4, -1)
        mixed = attend(*jnp.moveaxis(mixed, 2, 0))
        return split(x + mixed.reshape(x.shape) @ weights["out"]), None

    x, _ = jax.lax.scan(layer, split(params["table"][ids]), params["layers"])
    return x @ params["head"]


def losses(params, batch, split, method=None):
    found = logits(params, batch["ids"], split, method)
    return optax.softmax_cross_entropy_with_integer_labels(found, batch["labels"])


def mean(params, batch, split=jz.split_tokens, method=None):
    return losses(params, batch, split, method).mean()


def total_and_weight(params, batch, split=jz.split_tokens):
    weights = batch["weights"]
    return jnp.sum(losses(params, batch, split) * weights), jnp.sum(weights)


def make_batch(rows=8):
    random = np.random.default_rng(0)
    ids = random.integers(0, WORDS, (rows, TOKENS + 1)).astype(np.int32)
    weights = random.random((rows, TOKENS))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:], "weights": weights}


@functools.cache
def one_device():
    """Loss, gradients, and the same with weights, without any mesh."""
    params, batch = init(jax.random.key(0)), make_batch()

    def weighted(params):
        total, weight = total_and_weight(params, batch, whole)
        return total / weight

    means = jax.jit(jax.value_and_grad(lambda p: mean(p, batch, whole)))(params)
    return jax.device_get((means, jax.jit(jax.value_and_grad(weighted))(params)))


def assert_equal(found, want, limit=1e-12):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=limit, atol=limit * np.abs(y).max())


def make_zero(tokens=2, config=None, **options):
    return jz.Zero(jz.make_mesh(nodes=2, tokens=tokens, **options), config)


def test_the_axis_is_of_neighbours_in_a_node():
    mesh = jz.make_mesh(nodes=2, tokens=2)
    assert dict(mesh.shape) == {"node": 2, "local": 2, "tokens": 2}
    assert [x.id for x in mesh.devices[0, 1]] == [2, 3]
    assert mesh.axis_types == (AxisType.Auto,) * 3
    kinds = jz.make_mesh(nodes=2, tokens=2, axis_type=AxisType.Explicit).axis_types
    assert kinds == (AxisType.Explicit, AxisType.Explicit, AxisType.Auto)


@pytest.mark.parametrize("tokens", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_each_device_holds_its_part_of_matrices(tokens):
    zero = make_zero(tokens)
    params = zero.init(init, jax.random.key(0))
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    grads = jax.jit(zero.value_and_grad(mean))(params, make_batch())[1]
    for tree in (params, opt_state[0].mu, grads):
        for name in ("mix", "out"):
            x = tree["layers"][name]
            assert x.addressable_shards[0].data.size * 8 == x.size
    report = zero.report(params, opt_state)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert report.device_bytes("parameters") == held


@pytest.mark.parametrize(
    ("tokens", "kind", "config"),
    [
        (2, AxisType.Auto, jz.zero3()),
        (4, AxisType.Auto, jz.zero3()),
        pytest.param(2, AxisType.Explicit, jz.zero3(), marks=pytest.mark.exhaustive),
        (4, AxisType.Explicit, jz.ZeroConfig(stage=2)),
        (2, AxisType.Auto, jz.hsdp()),
        pytest.param(4, AxisType.Auto, jz.ddp(), marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.one_in(2)
def test_loss_and_gradients_equal_those_of_one_device(tokens, kind, config):
    (want, want_grads), (weighted, weighted_grads) = one_device()
    zero = make_zero(tokens, config, axis_type=kind)
    params, batch = zero.init(init, jax.random.key(0)), make_batch()
    loss, grads = jax.jit(zero.value_and_grad(mean))(params, batch)
    assert_equal((loss, zero.unshard(grads)), (want, want_grads))
    step = zero.value_and_grad(total_and_weight, weighted=True, microbatches=2)
    loss, grads = jax.jit(step)(params, batch)
    assert_equal((loss, zero.unshard(grads)), (weighted, weighted_grads))
    assert_equal(jax.jit(zero.apply(mean))(params, batch), want)


def test_the_batch_may_be_split_over_tokens():
    (want, want_grads), _ = one_device()
    zero = make_zero()
    params = zero.init(init, jax.random.key(0))
    for spec in (P(("node", "local"), "tokens"), P(("node", "local"))):
        batch = jax.device_put(make_batch(), NamedSharding(zero.mesh, spec))
        loss, grads = jax.jit(zero.value_and_grad(mean))(params, batch)
        assert_equal((loss, zero.unshard(grads)), (want, want_grads))


@pytest.mark.parametrize("hpz", [None, pytest.param(jz.HpZ(), marks=pytest.mark.exhaustive)])
@pytest.mark.ci
def test_quantized_messages_of_parts(hpz):
    """Messages are of parts, so they round otherwise, by as much as a codec does."""
    (_, want), _ = one_device()
    config = dataclasses.replace(jz.zeropp(), min_quantized_size=1, hpz=hpz)
    errors = {}
    for name, mesh in {
        "parts": jz.make_mesh(nodes=2, tokens=2),
        "whole": jz.make_mesh(nodes=2, devices=jax.devices()[:4]),
    }.items():
        zero = jz.Zero(mesh, config)
        params = zero.init(init, jax.random.key(0))
        _, grads = jax.jit(zero.value_and_grad(mean))(params, make_batch())
        pairs = zip(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want), strict=True)
        errors[name] = [float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs]
    for parts, whole in zip(errors["parts"], errors["whole"], strict=True):
        assert 0 < parts < 1.2 * whole < 0.4


def test_a_device_computes_and_holds_its_part_of_the_tokens():
    zero = make_zero(4)
    params, batch = zero.init(init, jax.random.key(0)), make_batch(2)

    def compiled(split):
        step = zero.value_and_grad(functools.partial(mean, split=split))
        return jax.jit(step).lower(params, batch).compile()

    split, alike = compiled(jz.split_tokens), compiled(whole)
    assert split.cost_analysis()["flops"] < 0.5 * alike.cost_analysis()["flops"]
    text = split.as_text() or ""
    assert f"f64[1,{TOKENS // 4},{3 * WIDTH}]" in text
    assert f"f64[1,{TOKENS},{3 * WIDTH}]" not in text


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("xla", marks=pytest.mark.standard_promotion),
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("ring", "heads", "gather")),
    ],
)
def test_the_report_counts_what_the_program_sends(method):
    """Weights, gradients, and what attention exchanges in forward, again for backward, and back."""
    zero = make_zero(2)
    params, batch = zero.init(init, jax.random.key(0)), make_batch()
    loss = functools.partial(mean, method=method)
    traffic = zero.report(params, plan=zero.plan(loss, params, batch)).traffic
    text = jax.jit(zero.value_and_grad(loss)).lower(params, batch).compile().as_text()
    assert traffic is not None
    sent = zoo.hlo.collectives(text)
    over_tokens = [x for x in sent if {0, 1} in map(set, x.groups)]

    def counted(op):
        return sum(x.entering_bytes * x.trips for x in over_tokens if x.op == op)

    def found(collective):
        chosen = traffic.amount(lambda x: x.axis == "tokens" and x.collective == collective)
        return chosen.device_bytes

    for op, name in {"all-gather": "all-gather", "collective-permute": "permute"}.items():
        assert counted(op) == found(name)
    assert counted("all-to-all") == found("all-to-all") > 0
    # XLA on CPUs has no reduce-scatter. The last 8 bytes are the loss.
    sums = counted("all-reduce") - found("all-reduce") - 2 * found("reduce-scatter")
    assert 0 <= sums <= 8
    assert (found("permute") > 0, found("reduce-scatter") > 0) == (
        method == "ring",
        method == "gather",
    )
    # All devices of a node receive parts of their own.
    assert sum(4 * x.node_bytes(4) * x.trips for x in sent) == traffic.node_bytes
    of_groups = sum(traffic.of_group(x, "tokens").device_bytes for x in traffic.groups)
    of_leaves = traffic.amount(lambda x: x.axis == "tokens" and x.purpose != "activations")
    assert of_groups == of_leaves.device_bytes
    assert {x["axis"] for x in traffic.as_dict()["groups"]} == {"node", "local", "tokens"}


IN_HOST = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=1)


@pytest.mark.standard_promotion  # optax
@pytest.mark.parametrize("offload", [pytest.param(None, marks=pytest.mark.exhaustive), IN_HOST])
def test_updates_in_the_step_and_after_it_equal_those_of_optax(offload):
    plain, zero = make_zero(), make_zero(2, dataclasses.replace(jz.zero3(), offload=offload))
    tx, batch = optax.adamw(1e-2), make_batch()
    params = plain.init(init, jax.random.key(0))
    _, grads = jax.jit(plain.value_and_grad(mean))(params, batch)
    updates, _ = jax.jit(tx.update)(grads, plain.init_optimizer(tx, params), params)
    want = plain.unshard(optax.apply_updates(params, updates))

    def step(params, opt_state, batch):
        _, grads = zero.value_and_grad(mean)(params, batch)
        return zero.apply_gradients(tx, grads, opt_state, params)

    params = zero.init(init, jax.random.key(0))
    opt_state = zero.init_optimizer(tx, params)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((params, opt_state))}
    assert ("pinned_host" in kinds) == (offload is not None)
    assert_equal(zero.unshard(jax.jit(step)(params, opt_state, batch)[0]), want)
    made = jax.jit(zero.value_and_update(mean, tx))(params, opt_state, batch)
    assert_equal(zero.unshard(made[1]), want)


def test_checkpoints_cross_meshes(tmp_path):
    zero, other = make_zero(), jz.Zero(jz.make_mesh(nodes=2))
    params = zero.init(init, jax.random.key(0))
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"params": params})
        same = checkpoints.restore({"params": params}).state["params"]
    assert jax.tree.map(lambda x: x.sharding, same) == jax.tree.map(lambda x: x.sharding, params)
    with jz.Checkpoints(tmp_path, other) as checkpoints:
        target = {"params": other.abstract(init, jax.random.key(0))}
        moved = checkpoints.restore(target).state["params"]
    assert_equal(other.unshard(moved), zero.unshard(params), 0)
    assert_equal(jz.reshard(params, zero, specs=P()), zero.unshard(params), 0)


def test_verify_compares_with_one_device():
    zero = make_zero()
    params = zero.init(init, jax.random.key(0))
    assert zero.verify(mean, params, make_batch(), variations=False).ok


def test_the_constraint_is_nothing_without_the_axis():
    x = jnp.ones((2, 3))
    assert jz.split_tokens(x) is x
    step = jz.Zero(jz.make_mesh(nodes=2)).value_and_grad(mean)
    params = jz.Zero(jz.make_mesh(nodes=2)).init(init, jax.random.key(0))
    assert "sharding_constraint" not in str(jax.make_jaxpr(step)(params, make_batch()))


def test_mistakes():
    with pytest.raises(ValueError, match="`tokens` must divide .* of a node, 4; got 3"):
        jz.make_mesh(nodes=2, tokens=3)
    with pytest.raises(ValueError, match="simulated mesh has no axis `tokens`.*got 2"):
        jz.make_mesh(nodes=2, tokens=2, simulate=8)
    explicit = jax.make_mesh((2, 2, 2), ("node", "local", "tokens"), (AxisType.Explicit,) * 3)
    with pytest.raises(NotImplementedError, match="`tokens` must be of type Auto; got Explicit"):
        jz.Zero(explicit)
    with pytest.raises(NotImplementedError, match="`stages` cannot have the mesh axis `tokens`"):
        jz.Zero(jz.make_mesh(nodes=2, tokens=2), jz.pipeline(microbatches=2))
    zero = make_zero(4)
    params = zero.shard({"w": jnp.ones((WIDTH, WIDTH))})
    with pytest.raises(ValueError, match="has 6 tokens in dim 1.* over 4 devices. Pad"):
        zero.apply(lambda p, x: jz.split_tokens(x) @ p["w"])(params, jnp.ones((2, 6, WIDTH)))
    with pytest.raises(ValueError, match=r"`dim` must be a dim of `x`.*\(2, 3\); got 2"):
        jz.split_tokens(jnp.ones((2, 3)), dim=2)
    with pytest.raises(ValueError, match="`specs` cannot be had on a mesh with the axis `tokens`"):
        names = ("node", "local", "tokens", "tensor")
        mesh = jax.make_mesh((2, 1, 2, 2), names, (AxisType.Auto,) * 4)
        jz.Zero(mesh).shard({"w": jnp.ones((8, 8))}, specs=P(None, "tensor"))
