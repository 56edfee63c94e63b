"""Frozen layers on pipeline stages against one device: gradients, what is computed and sent."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxzero as jz
from tests import zoo

from . import models, test_lists
from .test_stages import _assert_close, _zero


def _frozen(zero: jz.Zero, params: Any, prefix: int = 2, **how: Any) -> tuple[Any, Any, Any]:
    sharded = zero.shard(params)
    freezing = zero.freeze(sharded, prefix, layers="layers", **{"before": "embed", **how})
    return freezing, *freezing.split(sharded)


def _active(tree: Any, prefix: int) -> Any:
    """What is not frozen of a tree of the whole parameters."""
    num = models.LAYERS
    rest = lambda x: None if prefix == num else x[prefix:]  # noqa: E731
    embed = None if prefix else tree["embed"]
    return {**tree, "embed": embed, "layers": jax.tree.map(rest, tree["layers"])}


def _check(zero: jz.Zero, loss: Any, prefix: int = 2, **options: Any) -> None:
    """Compare a step in float64 with that of one device, whose gradients are all computed."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, batch = models.params(dtype=np.float64), models.batch()
        value, grads = jax.jit(jax.value_and_grad(loss, **options))(params, batch)
        freezing, active, frozen = _frozen(zero, params, prefix)
        step = jax.jit(zero.value_and_grad(freezing.wrap(loss), **options))
        found, found_grads = step(active, frozen, batch)
        _assert_close((found, zero.unshard(found_grads)), (value, _active(grads, prefix)))


@pytest.mark.parametrize(
    "name",
    [
        "untied",
        "remat",
        "skip, tied",
        "product with the embedding",
        "stacks changed as a whole",
        "shares a weight",
        "decays in layers",
        "sums a stack by layer",
        "trains the head",
    ],
)
@pytest.mark.one_in(3)
def test_a_step_is_that_of_one_device(name):
    _check(_zero(), models.LOSSES[name])


@pytest.mark.parametrize(
    ("nodes", "num_devices", "microbatches", "stages", "prefix"),
    [
        (4, 8, 2, 2, 2),  # two stages of two nodes
        (2, 4, 4, None, 4),  # the head alone is trained
        (2, 4, 1, None, 0),
    ],
)
@pytest.mark.one_in(2)
def test_meshes_and_prefixes(nodes, num_devices, microbatches, stages, prefix):
    zero = _zero(nodes, num_devices, microbatches, stages=stages)
    _check(zero, models.LOSSES["tied"], prefix)


def test_layers_that_stages_do_not_divide():
    """3 of 6 layers on 2 stages: the active part has a padding layer."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, batch = models.params(dtype=np.float64), models.batch()
        params["layers"] = jax.tree.map(lambda x: np.concatenate([x, x[:2]]), params["layers"])
        loss, zero = models.LOSSES["untied"], _zero()
        freezing, active, frozen = _frozen(zero, params, 3)
        step = zero.value_and_grad(freezing.wrap(loss))
        found, grads = jax.jit(step)(active, frozen, batch)
        value, want = jax.jit(jax.value_and_grad(loss))(params, batch)
        want = {**want, "embed": None, "layers": jax.tree.map(lambda x: x[3:], want["layers"])}
        _assert_close((found, zero.unshard(grads)), (value, want))
        for whole, part in zip(
            jax.tree.leaves(zero.unshard(freezing.join(active, frozen))),
            jax.tree.leaves(params),
            strict=True,
        ):
            np.testing.assert_array_equal(whole, part)


def test_outputs_of_frozen_layers_reach_loss_and_aux():
    _check(_zero(2, 4, 4), models.loss_of_each_layer, has_aux=True)


def test_apply_runs_both_parts():
    def logits(params, batch):
        x = params["embed"][batch["ids"]]
        x, _ = lax.scan(lambda x, w: (models.layer(x, w), None), x, params["layers"])
        return x @ params["head"]

    zero, params, batch = _zero(), models.params(), models.batch()
    freezing, active, frozen = _frozen(zero, params)
    found = zero.apply(freezing.wrap(logits))(active, frozen, batch)
    np.testing.assert_allclose(found, jax.jit(logits)(params, batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.one_in(2)
def test_each_layer_prints_once(capfd, microbatches):
    """Also if a stage has no micro-batch in the frozen layers."""

    def layer(x, w):
        jax.debug.print("layer {}", jnp.sum(w["scale"]))
        return models.layer(x, w)

    def loss(params, batch):
        x = params["embed"][batch["ids"]]
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        return models.cross_entropy(x, params["head"], batch)

    zero = _zero(2, 2, microbatches)
    freezing, active, frozen = _frozen(zero, models.params())
    step = zero.value_and_grad(freezing.wrap(loss))
    jax.block_until_ready(step(active, frozen, models.batch()))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("layer") == microbatches * models.LAYERS


def _check_list(zero: jz.Zero, loss: Any, prefix: int, before: Any, is_stack: bool = False) -> None:
    """Compare a step in float64 with that of one device, where a Python loop runs the layers."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        of_models = models.params if is_stack else test_lists._params
        params, batch = of_models(dtype=np.float64), models.batch()
        value, want = jax.jit(jax.value_and_grad(loss))(params, batch)
        sharded = zero.shard(params)
        names = zero.config.stages.names
        freezing = zero.freeze(sharded, prefix, layers=names, before=before)
        step = jax.jit(zero.value_and_grad(freezing.wrap(loss)))
        found, grads = step(*freezing.split(sharded), batch)
        if is_stack:
            want["layers"] = jax.tree.map(lambda x: x[prefix:], want["layers"])
        else:
            want["layers"][:prefix] = [dict.fromkeys(want["layers"][0])] * prefix
        want = {**want, **dict.fromkeys(before)}
        _assert_close((found, zero.unshard(grads)), (value, want))


@pytest.mark.parametrize(
    ("name", "prefix", "before"),
    [
        ("reads all layers", 1, ["embed"]),  # 2 active layers and 1
        pytest.param("remat, tied, skip", 2, (), marks=pytest.mark.exhaustive),
        pytest.param("decay", 2, ["embed"], marks=pytest.mark.exhaustive),
        pytest.param("untied", 4, ["embed"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_list_of_layers(name, prefix, before):
    _check_list(test_lists._zero(2, 4), test_lists.LOSSES[name], prefix, before)


@pytest.mark.filterwarnings("error:.*uses the whole stack")
def test_a_python_loop_over_stacks():
    def loss(p, rows):
        x = p["embed"][rows["ids"]]
        for w in zip(*p["layers"].values(), strict=True):
            x = models.layer(x, dict(zip(p["layers"], w, strict=True)))
        return models.cross_entropy(x, p["head"], rows)

    zero = test_lists._zero(2, 4, "layers", axis_type=AxisType.Explicit)
    _check_list(zero, loss, 2, ["embed"], is_stack=True)


def test_a_frozen_list_is_computed_by_shares_and_gathered_once():
    zero, params, loss = test_lists._zero(2, 4), test_lists._params(), test_lists.LOSSES["untied"]
    sharded = zero.shard(params)
    freezing = zero.freeze(sharded, 2, layers="layers.*", before="embed")
    plan = zero.plan(freezing.wrap(loss), *freezing.split(sharded), models.batch())
    assert "2 frozen layers, of which each stage computes all for 1 micro-batches" in str(plan)
    # Of a device's half of each matrix, `[2 layers, 8, 16]`, the other stage has a half.
    sent = [x for x in plan.transfers if (x.purpose, x.axis) == ("weights", "stage")]
    gathered = [x for x in sent if x.collective == "all-gather" and x.name.startswith("layers")]
    found = {x.name: x.node_bytes * x.trips for x in gathered}
    assert found == dict.fromkeys(["layers.*.down", "layers.*.up"], 2 * 8 * 16 * 4 / 2 / 2)


def test_frozen_layers_of_two_trees_are_refused():
    """Such as a second tree for a moving average: which layers go with the active ones is open."""
    zero, params, loss = test_lists._zero(2, 4), test_lists._params(), test_lists.LOSSES["untied"]
    sharded = zero.shard(params)
    freezing = zero.freeze(sharded, 2, layers="layers.*", before="embed")
    active, frozen = freezing.split(sharded)

    def with_another(active: Any, frozen: Any, another: Any, batch: Any) -> Any:
        return freezing.wrap(loss)(active, frozen, batch) + 0 * another["embed"].sum()

    step = zero.value_and_grad(with_another, batch_argnums=3)
    with pytest.raises(ValueError, match=r"Two arguments hold frozen layers of .*layers\.\*\.up"):
        step(active, frozen, frozen, models.batch())


def _wide() -> Any:
    """Parameters whose products can be counted: 12 layers of `[64, 64]`, no other weight."""
    return {"embed": np.ones((16, 64), np.float32), "layers": np.ones((12, 64, 64), np.float32)}


def _products(params: Any, batch: Any) -> Any:
    x = params["embed"][batch["ids"]]
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean(x**2)


@pytest.mark.parametrize("name", ["skip, tied", "shares a weight"])
@pytest.mark.one_in(2)
def test_gradients_pass_through_frozen_layers(name):
    """To an embedding before them, which is trained."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, batch, zero = models.params(dtype=np.float64), models.batch(), _zero(2, 4, 4)
        loss = models.LOSSES[name]
        freezing, active, frozen = _frozen(zero, params, before=())
        found, grads = jax.jit(zero.value_and_grad(freezing.wrap(loss)))(active, frozen, batch)
        value, want = jax.jit(jax.value_and_grad(loss))(params, batch)
        want = {**want, "layers": jax.tree.map(lambda x: x[2:], want["layers"])}
        _assert_close((found, zero.unshard(grads)), (value, want))


@pytest.mark.parametrize("prefix", [0, 4, 6])
def test_what_frozen_layers_cost(prefix):
    """A product in a quarter of 8 micro-batches; others of 12 layers three in each of 11 ticks."""
    zero = _zero(4, 4, 8)
    freezing, active, frozen = _frozen(zero, _wide(), prefix)
    batch = {"ids": np.zeros((16, 4), np.int32)}
    step = zero.value_and_grad(freezing.wrap(_products))
    found = zoo.flops(step, active, frozen, batch) / 4
    rows, ticks = 2 * 4, 8 + 3
    product = 2 * rows * 64 * 64
    assert found == 2 * prefix * product + ticks * -(-(12 - prefix) // 4) * 3 * product
    lines = str(zero.plan(freezing.wrap(_products), active, frozen, batch))
    said = f"{prefix} frozen layers, of which each stage computes all for 2 micro-batches"
    assert (said in lines) == (prefix > 0)


def test_frozen_layers_send_their_result_once():
    zero, batch = _zero(2, 4, 4), models.batch()
    freezing, active, frozen = _frozen(zero, models.params())
    loss = freezing.wrap(models.LOSSES["untied"])
    plan = zero.plan(loss, active, frozen, batch)
    sent = [x for x in plan.transfers if x.purpose == "activations"]
    message = 2 * models.TOKENS * models.WIDTH * 4  # of 16 rows, on 2 devices in 4 micro-batches
    # To the next stage in 5 ticks, cotangents in 5, and before them half of 4 micro-batches.
    assert sum(x.node_bytes * x.trips for x in sent) == 12 * message
    step = jax.jit(zero.value_and_grad(loss))
    text = step.lower(active, frozen, batch).compile().as_text()
    assert text is not None
    inside = [x for x in zoo.hlo.collectives(text) if x.trips > 1 and x.op != "collective-permute"]
    assert all(len({device // 2 for device in group}) == 1 for x in inside for group in x.groups)


def test_what_freezing_refuses_with_stages():
    zero, params = _zero(), models.params()
    with pytest.raises(NotImplementedError, match="`codec` of `zero.freeze` .* `stages`"):
        _frozen(zero, params, codec=jz.Int8())
    with pytest.raises(ValueError, match=r"`layers.down` \[1, .* at least 2 layers.* fewer stages"):
        _frozen(zero, params, 3)
    with pytest.raises(NotImplementedError, match="`params` are stacks of layers and nothing else"):
        _frozen(zero, {"layers": params["layers"]}, before=())
    freezing, _, frozen = _frozen(zero, params)
    with pytest.raises(NotImplementedError, match="`freezing.cache` does not work with `stages`"):
        freezing.cache(models.LOSSES["untied"], frozen)


@pytest.mark.ci
def test_a_pipeline_shrinks_as_layers_freeze(tmp_path):
    """Four stages, then two of two nodes each, then none; each epoch is that of one device."""
    tx, loss = optax.adam(1e-2), models.LOSSES["tied"]
    schedule = jz.freeze_schedule(models.LAYERS, 0.4)
    prefixes = [schedule(epoch) for epoch in range(3)]
    assert prefixes == [0, 2, 3]
    devices = jax.devices()[:8]
    zeros = {
        0: jz.Zero(jz.make_mesh(4, devices=devices), jz.pipeline(4)),
        2: jz.Zero(jz.make_mesh(4, devices=devices, stages=2), jz.pipeline(2)),
        3: jz.Zero(jz.make_mesh(4, devices=devices)),
    }
    batches = [models.batch(seed) for seed in range(3)]
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params = models.params(dtype=np.float64)
        whole = zeros[0].shard(params)
        state = zeros[0].init_optimizer(tx, whole)
        want, want_state = params, tx.init(params)
        before = zeros[0]
        for epoch, prefix in enumerate(prefixes):
            zero = zeros[prefix]
            if zero is not before:
                whole, state = _moved(tmp_path / str(epoch), before, zero, tx, whole, state)
            before = zero
            freezing = zero.freeze(whole, prefix, layers="layers", before="embed")
            active, frozen = freezing.split(whole)
            active_state, frozen_state = freezing.split_optimizer(tx, state)
            step = jax.jit(zero.value_and_grad(freezing.wrap(loss)))
            reference = jax.jit(functools.partial(_reference, loss, tx, prefix))
            for batch in batches:
                value, grads = step(active, frozen, batch)
                with jax.numpy_dtype_promotion("standard"):  # for optax
                    active, active_state = zero.apply_gradients(tx, grads, active_state, active)
                    want, want_state, expected = reference(want, want_state, batch)
                np.testing.assert_allclose(value, expected, rtol=1e-9)
            whole = freezing.join(active, frozen)
            state = freezing.join_optimizer(tx, active_state, frozen_state)
        # Adam divides by the root of small second moments, which magnifies roundings.
        _assert_close(zero.unshard(whole), want, 1e-7)


def _moved(
    folder: Any, old: jz.Zero, new: jz.Zero, tx: Any, params: Any, state: Any
) -> tuple[Any, Any]:
    """Parameters and optimizer state on another mesh."""
    params_there = new.shard(jz.reshard(params, old, specs=jax.sharding.PartitionSpec()))
    with jz.Checkpoints(folder, old) as checkpoints:
        checkpoints.save(0, {"state": state})
    with jz.Checkpoints(folder, new) as checkpoints:
        like = {"state": new.init_optimizer(tx, params_there)}
        return params_there, checkpoints.restore(like)[1]["state"]


def _reference(loss: Any, tx: Any, prefix: int, params: Any, state: Any, batch: Any) -> Any:
    """A step on one device, in which frozen rows keep their values and moments."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, new_state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)

    def kept(old: Any, new: Any) -> Any:
        def rows(path: Any, x: Any, y: Any) -> Any:
            names = jax.tree_util.keystr(path)
            if "embed" in names:
                return x if prefix else y
            return jnp.concatenate([x[:prefix], y[prefix:]]) if "layers" in names else y

        return jax.tree_util.tree_map_with_path(rows, old, new)

    return kept(params, new), kept(state, new_state), value
