"""Leaves that stay split over `local` are exact, and layouts, gathers and reports know them."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._program import exchanges

from . import mixtures


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def _zero(nodes: int = 2, config: jz.ZeroConfig | None = None, **options) -> jz.Zero:
    config = dataclasses.replace(config or jz.zero3(), ungathered=mixtures.UNGATHERED)
    return jz.Zero(jz.make_mesh(nodes, **options), config)


@functools.cache
def _wanted(choices: int):
    with jax.enable_x64(True):
        loss = functools.partial(mixtures.dense_loss, choices=choices)
        return jax.jit(jax.value_and_grad(loss))(mixtures.init(None), mixtures.batch())


def _check(zero: jz.Zero, choices: int = mixtures.CHOICES, atol: float = 1e-13, **options) -> None:
    loss_fn = functools.partial(mixtures.loss, choices=choices, **options.pop("of_loss", {}))
    params = zero.init(mixtures.init, jax.random.key(0))
    loss, grads = jax.jit(zero.value_and_grad(loss_fn, **options))(params, mixtures.batch())
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    _equal((loss, zero.unshard(grads)), _wanted(choices), atol)


def _equal(found, wanted, atol: float) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        size = atol * float(np.max(np.abs(y)))
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=size)


@pytest.mark.parametrize(
    ("nodes", "form"),
    [
        pytest.param(nodes, form, marks=[] if (i + j) % 3 == 0 else pytest.mark.exhaustive)
        for i, nodes in enumerate((2, 4, 1, 8))
        for j, form in enumerate(("scan", "unrolled", "remat"))
    ],
)
@pytest.mark.one_in(2)
def test_gradients(nodes: int, form: str):
    """Of one device, with 4, 2, 8 and 1 devices in a node."""
    _check(_zero(nodes), of_loss={"form": form})


@pytest.mark.parametrize("choices", [1, 2, 8])
@pytest.mark.one_in(2)
def test_choices(choices: int):
    """With fewer experts on a device than choices, as many, and more."""
    _check(_zero(), choices)
    _check(_zero(4), choices)


EXACT = {"min_quantized_size": 2**20}  # no array is large enough to be encoded
CONFIGS = {
    "hpz": jz.zero3(hpz=jz.HpZ(codec=None)),
    "hsdp": jz.hsdp(),
    "zeropp": dataclasses.replace(jz.zeropp(), **EXACT),
    "no prefetch": jz.ZeroConfig(schedule=jz.CommSchedule(prefetch=0, bucket_bytes=0)),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.one_in(2)
def test_configs(config: str):
    _check(_zero(2, CONFIGS[config]), microbatches=2 if config in ("hpz", "zeropp") else 1)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, None])
@pytest.mark.one_in(2)
def test_other_meshes(axis_type: AxisType | None):
    options = {"simulate": 8} if axis_type is None else {"axis_type": axis_type}
    _check(_zero(2, **options), of_loss={"by_blocks": True})  # no `ragged_dot` under `vmap`


def test_weighted():
    zero, batch = _zero(), mixtures.batch()
    weights = jnp.arange(16.0)

    def loss(params, batch):
        x, weights = batch
        return mixtures.loss(params, x) * weights.sum(), weights.sum()

    def wanted(params):
        parts = [mixtures.dense_loss(params, x) for x in jnp.split(batch, 8)]
        return jnp.sum(jnp.stack(parts) * weights.reshape(8, 2).sum(1)) / weights.sum()

    params = zero.init(mixtures.init, jax.random.key(0))
    found = zero.value_and_grad(loss, weighted=True)(params, (batch, weights))
    want = jax.value_and_grad(wanted)(mixtures.init(None))
    _equal((found[0], zero.unshard(found[1])), want, 1e-13)


def test_codecs_are_near():
    config = dataclasses.replace(jz.zeropp(), min_quantized_size=2)
    zero = _zero(2, config)
    params = zero.init(mixtures.init, jax.random.key(0))
    loss, grads = jax.jit(zero.value_and_grad(mixtures.loss))(params, mixtures.batch())
    want_loss, want = _wanted(mixtures.CHOICES)
    assert abs(float(loss / want_loss) - 1) < 0.05
    for x, y in zip(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want), strict=True):
        assert float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) < 0.3


def test_layout_and_bytes():
    zero = _zero()
    params = zero.init(mixtures.init, jax.random.key(0))
    up, bias = params["experts"]["up"], params["experts"]["up_bias"]
    assert up.sharding.spec == P(None, "local", None, "node")
    assert up.shape == (2, 8, 6, 10) and up.addressable_shards[0].data.shape == (2, 2, 6, 5)
    assert bias.sharding.spec == P(None, "local", "node")
    plan = zero.plan(mixtures.loss, params, mixtures.batch())
    sent = [x for x in plan.transfers if "experts" in x.name]
    assert sent and {x.axis for x in sent} == {"node"}
    rows = {row.path: row for row in zero.report(params).rows if row.kind == "parameters"}
    assert rows["experts.up"].device_bytes == up.nbytes // 8


@pytest.mark.parametrize("by_blocks", [False, True])
def test_messages_are_sent_behind_tokens(by_blocks):
    """Weights while experts compute; gradients of experts once no token is left to send."""
    zero, loss = _zero(), functools.partial(mixtures.loss, by_blocks=by_blocks)
    plan = zero.plan(loss, zero.abstract(mixtures.init, None), mixtures.batch()).top
    forward, backward = (plan.loops[i].body for i in sorted(plan.loops))
    (group,) = forward.gather_groups
    sent = _exchanges_of(forward)
    assert group.prefetched and sent[0] < min(group.issues) <= sent[-1]
    (group,) = (x for x in backward.reduce_groups if x.axes == ("node",))
    if by_blocks:  # else a product of backward is left, in which they are sent
        assert group.after in backward.block.operations[_exchanges_of(backward)[-1]].outputs


def _exchanges_of(body):
    return [i for i, x in enumerate(body.block.operations) if any(exchanges(x))]


@pytest.mark.standard_promotion
def test_trees_and_updates(tmp_path):
    zero, tx = _zero(), optax.adam(1e-2)
    full = mixtures.init(None)
    params = zero.shard(full)
    _equal(zero.unshard(params), full, 0)
    assert float(zero.apply(mixtures.loss)(params, mixtures.batch())) > 0
    opt_state = zero.init_optimizer(tx, params)
    assert opt_state[0].mu["experts"]["up"].sharding == params["experts"]["up"].sharding
    step = jax.jit(zero.value_and_update(mixtures.loss, tx))
    want_state, want = tx.init(full), full
    for _ in range(2):
        _, params, opt_state = step(params, opt_state, mixtures.batch())
        grads = jax.grad(mixtures.dense_loss)(want, mixtures.batch())
        updates, want_state = tx.update(grads, want_state, want)
        want = optax.apply_updates(want, updates)
    _equal(zero.unshard(params), want, 1e-11)  # Adam divides small gradients by their size
    with jz.Checkpoints(tmp_path / "run", zero) as checkpoints:
        checkpoints.save(1, {"params": params, "opt_state": opt_state})
    other = jz.Zero(jz.make_mesh(nodes=4), zero.config)
    like = {"params": other.abstract(mixtures.init, jax.random.key(0))}
    like["opt_state"] = other.init_optimizer(tx, other.shard(full))
    with jz.Checkpoints(tmp_path / "run", other) as checkpoints:
        _, restored, _ = checkpoints.restore(like)
    _equal(other.unshard(restored["params"]), zero.unshard(params), 0)


REFUSED = {
    "stage": (dict(stage=2), "stage=3"),
    "stages": (dict(stages=jz.Stages(microbatches=2)), "stages"),
    "deterministic": (dict(schedule=jz.CommSchedule(deterministic="mesh")), "order"),
    "offload": (dict(offload=jz.Offload(optimizer=True)), "host memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs(name: str):
    fields, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        jz.ZeroConfig(ungathered=mixtures.UNGATHERED, **fields)


def test_refused():
    with pytest.raises(ValueError, match="from step to step"):
        dataclasses.replace(jz.zeropp4(), ungathered=mixtures.UNGATHERED)
    with pytest.raises(ValueError, match="pattern"):
        jz.Ungathered((), dim=0)
    with pytest.raises(ValueError, match="`dim`"):
        jz.Ungathered("x", dim=-1)
    # A `TypeError` where annotations are checked.
    with pytest.raises((ValueError, TypeError), match=r"jz.Ungathered\(...\)|ungathered"):
        jz.ZeroConfig(ungathered="experts.*")  # pyright: ignore[reportArgumentType]

    def zero(leaves, dim):
        return jz.Zero(jz.make_mesh(2), jz.ZeroConfig(ungathered=jz.Ungathered(leaves, dim=dim)))

    params = mixtures.init(None)
    with pytest.raises(ValueError, match="matches no leaf"):
        zero("layers.*", 1).shard(params)
    with pytest.raises(ValueError, match=r"`experts.down`.*10 in dim 2"):
        zero("experts.*", 2).shard(params)
    with pytest.raises(ValueError, match="no dim 3"):
        zero("router", 3).shard(params)
    with pytest.raises(NotImplementedError, match="`ungathered` leaves are encoded"):
        _zero().codec_noise(_zero().shard(params))
    with pytest.raises(NotImplementedError, match="`local_steps` does not work with `ungathered`"):
        _zero().local_steps(lambda params, opt_state, batch: (params, opt_state, {}), jz.diloco())
    with pytest.raises(NotImplementedError, match="halves"):
        step = _zero().value_and_grad(mixtures.loss, halves=True)
        step(_zero().shard(params), mixtures.batch())


def test_frozen_layers():
    ungathered = jz.Ungathered("layers.experts.*", dim=1)
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(ungathered=ungathered))
    params = zero.shard({"layers": mixtures.init(None)})
    freezing = zero.freeze(params, 1, layers="layers", before=())
    active, frozen = freezing.split(params)

    def loss(params, batch):
        return mixtures.loss(params["layers"], batch)

    value, grads = jax.jit(zero.value_and_grad(freezing.wrap(loss)))(
        active, frozen, mixtures.batch()
    )
    want, want_grads = _wanted(mixtures.CHOICES)
    rest = jax.tree.map(lambda x: x[1:], want_grads)
    _equal((value, zero.unshard(grads)), (want, rest), 1e-13)


def test_what_else_reads_experts_is_added_up_over_the_node():
    def squares(params):
        return sum(jnp.sum(w**2) for w in jax.tree.leaves(params["experts"]))

    def loss(params, batch):
        return mixtures.loss(params, batch) + 0.1 * jax.lax.psum(squares(params), "local")

    def wanted(params, batch):
        return mixtures.dense_loss(params, batch) + 0.1 * squares(params)

    zero = _zero()
    params = zero.init(mixtures.init, jax.random.key(0))
    value, grads = jax.jit(zero.value_and_grad(loss))(params, mixtures.batch())
    want = jax.value_and_grad(wanted)(mixtures.init(None), mixtures.batch())
    _equal((value, zero.unshard(grads)), want, 1e-13)


@pytest.mark.parametrize("form", ["scan", "unrolled"])
def test_the_plan_says_where_tokens_would_be_fewer_bytes(form):
    """As many as a step with `Ungathered` sends of arrays `[tokens, features]`."""
    loss = functools.partial(mixtures.loss, form=form)
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.abstract(mixtures.init, jax.random.key(0))
    plan = zero.plan(loss, params, mixtures.batch())
    (found,) = plan.gathered_experts
    assert {*found.names} == {"experts.up", "experts.up_bias", "experts.down"}
    sent = [x for each in plan.transfers for x in each.by_leaf() if "experts" in x.name]
    assert found.weights == sum(x.trips * x.entering_bytes for x in sent if x.axis == "local")
    assert f"{found.weights / 2**10:.2f} KiB over local" in str(plan)

    split = _zero()
    params = split.abstract(mixtures.init, jax.random.key(0))
    step = jax.jit(split.value_and_grad(loss)).lower(params, mixtures.batch())
    text = step.compile().as_text()
    arrays = r"= (?:\(f64\[8,6\]|f64\[32,6\]).* (?:all-gather|all-to-all)\("
    exchanges = len(re.findall(arrays, text))
    if form == "scan":
        exchanges *= mixtures.LAYERS
    else:
        exchanges += 1  # no gradient needs the cotangents of the batch
    assert found.tokens == exchanges * 24 * 6 * 8  # of 3 other devices 8 tokens each
    assert not split.plan(loss, params, mixtures.batch()).gathered_experts
    assert not zero.plan(
        loss, zero.abstract(mixtures.init, jax.random.key(0)), mixtures.batch(512)
    ).gathered_experts
