"""Pipeline stages against one device: losses, gradients, what is sent, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxzero as jz
from tests import zoo

from . import models, test_lists

# Losses and gradients differ from those of one device by the order of sums alone: of 64 tokens, 4
# layers and 16 products, in float64.
_TOLERANCE = 1e-13


def _zero(nodes: int = 2, num_devices: int = 4, microbatches: int = 2, **mesh: Any) -> jz.Zero:
    devices = jax.devices()[:num_devices]
    return jz.Zero(jz.make_mesh(nodes, devices=devices, **mesh), jz.pipeline(microbatches))


def _assert_close(got: Any, want: Any, tolerance: float = _TOLERANCE) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1e-3, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def _check(zero: jz.Zero, loss: Any, **options: Any) -> None:
    """Compare a step in float64 with that of one device."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        params, batch = models.params(dtype=np.float64), models.batch()
        want = jax.jit(jax.value_and_grad(loss, **options))(params, batch)
        step = jax.jit(zero.value_and_grad(loss, **options))
        value, grads = step(zero.shard(params), batch)
        _assert_close((value, zero.unshard(grads)), want)


@pytest.mark.parametrize("name", models.LOSSES)
@pytest.mark.one_in(3)
def test_a_step_is_that_of_one_device(name):
    _check(_zero(), models.LOSSES[name])


@pytest.mark.parametrize(
    ("nodes", "num_devices", "microbatches"),
    [
        (4, 4, 1),
        (4, 8, 4),
        (3, 6, 2),  # 2, 2 and no layers
        pytest.param(4, 4, 4, marks=pytest.mark.exhaustive),
        pytest.param(2, 8, 1, marks=pytest.mark.exhaustive),
        pytest.param(1, 4, 4, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.one_in(2)
def test_stages_and_microbatches(nodes, num_devices, microbatches):
    zero = _zero(nodes, num_devices, microbatches)
    _check(zero, models.LOSSES["skip, tied"])


def test_weights_gathered_in_every_tick():
    """Gathers and reductions in loops over ticks, and in branches that one stage takes."""
    config = dataclasses.replace(
        jz.pipeline(4), schedule=jz.CommSchedule(loop_constant_bytes=0, prefetch=1)
    )
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), config)
    _check(zero, models.LOSSES["skip, tied"])


@pytest.mark.parametrize(
    ("nodes", "num_devices"), [pytest.param(4, 4, marks=pytest.mark.exhaustive), (3, 6)]
)
def test_aux_of_every_layer(nodes, num_devices):
    zero = _zero(nodes, num_devices, 4)
    _check(zero, models.loss_of_each_layer, has_aux=True)


@pytest.mark.parametrize(("microbatches", "slots"), [(1, 1), (2, 2), (8, 3)])
def test_activations_are_kept_of_microbatches_in_flight_and_read_by_layer(microbatches, slots):
    zero = _zero(2, 4, microbatches)
    step = jax.jit(zero.value_and_grad(models.LOSSES["remat"]))
    lines = step.lower(zero.shard(models.params()), models.batch()).as_text().splitlines()
    rows = models.ROWS // 2 // microbatches  # of a device, in each micro-batch
    of_layer = f"{rows}x{models.TOKENS}x{models.WIDTH}xf32>"
    kept = f"tensor<{slots}x{models.LAYERS // 2}x{of_layer}"
    read = [x.split("->")[-1] for x in lines if "dynamic_slice" in x and f"({kept}" in x]
    assert {f" tensor<1x1x{of_layer}"} == set(read)


@pytest.mark.parametrize("kind", ["explicit", "simulated", "groups"])
@pytest.mark.one_in(2)
def test_meshes(kind):
    if kind == "explicit":
        zero = _zero(axis_type=AxisType.Explicit)
    elif kind == "simulated":
        zero = jz.Zero(jz.make_mesh(2, simulate=4), jz.pipeline(2))
    else:  # two stages of two nodes each, whose gradients are summed
        zero = _zero(4, 8, 2, stages=2)
    _check(zero, models.LOSSES["tied"])


def test_microbatches_of_the_call_come_first():
    """Dropout is that of as many micro-batches without stages, from the same keys."""

    def loss(params, batch, key):
        key = jz.fold_in_device(key)
        start = params["embed"][batch["ids"]]

        def body(x, given):
            w, key = given
            return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), models.layer(x, w), 0), None

        keys = jax.random.split(key, models.LAYERS)
        x, _ = lax.scan(body, start, (params["layers"], keys))
        return models.cross_entropy(x, params["head"], batch)

    zero = _zero(2, 4, 1)
    plain = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:2]))
    key, params = jax.random.key(3), models.params()
    losses = [
        z.value_and_grad(loss, microbatches=4)(z.shard(params), models.batch(), key)[0]
        for z in (zero, plain)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_layers_pass_keys_on():
    def loss(params, batch, key):
        def body(carry, w):
            x, key = carry
            key, here = jax.random.split(key)
            noise = 1 + 0.1 * jax.random.normal(here, (1, 1, models.WIDTH))
            return (models.layer(x, w) * noise, key), None

        start = params["embed"][batch["ids"]], key
        (x, _), _ = lax.scan(body, start, params["layers"])
        return models.cross_entropy(x, params["head"], batch)

    zero, params, key = _zero(4, 4, 2), models.params(), jax.random.key(2)
    with pytest.warns(jz.RowsMixedWarning, match="equal on all devices"):
        got, grads = zero.value_and_grad(loss)(zero.shard(params), models.batch(), key)
    want, want_grads = jax.jit(jax.value_and_grad(loss))(params, models.batch(), key)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    _assert_close(zero.unshard(grads), want_grads, 1e-5)  # of float32


def test_prints_happen_once_for_each_microbatch(capfd):
    def loss(params, batch):
        def body(x, w):
            jax.debug.print("layer {}", w["scale"])
            return models.layer(x, w), None

        start = params["embed"][batch["ids"]]
        jax.debug.print("start {}", start[0, 0, 0])
        x, _ = lax.scan(body, start, params["layers"])
        value = models.cross_entropy(x, params["head"], batch)
        jax.debug.print("loss {}", value)
        return value

    zero = _zero(2, 2, 4)
    jax.block_until_ready(zero.value_and_grad(loss)(zero.shard(models.params()), models.batch()))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    counts = [printed.count(x) for x in ("start", "layer", "loss")]
    assert counts == [4, 4 * models.LAYERS, 4]


def test_weighted_and_narrow():
    """The sum over the sum of weights; a 16-bit model's gradients are 16-bit sums of float32."""

    def loss(params, batch):
        mask = batch["targets"] > 4
        x, _ = lax.scan(
            lambda x, w: (models.layer(x, w), None), params["embed"][batch["ids"]], params["layers"]
        )
        logp = jax.nn.log_softmax((x @ params["head"]).astype(jnp.float32))
        picked = jnp.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
        return -jnp.sum(picked, where=mask), jnp.sum(mask).astype(jnp.float32)

    zero, batch = _zero(), models.batch()
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), models.params())
    value, grads = zero.value_and_grad(loss, weighted=True)(zero.shard(params), batch)

    def mean(params):
        total, weight = loss(params, batch)
        return total / weight

    want, want_grads = jax.value_and_grad(mean)(params)
    # Activations, their cotangents and the gradients are rounded to 8 bits in every layer.
    np.testing.assert_allclose(value, want, rtol=2.0**-6)
    for x, y in zip(*map(jax.tree.leaves, (zero.unshard(grads), want_grads)), strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        scale = float(jnp.abs(y).astype(jnp.float32).max())
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=scale * 2.0**-4)


def test_an_nnx_model():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.silu(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(16, 8, rngs=rngs)
            make = nnx.split_rngs(splits=4)(nnx.vmap(Block, in_axes=0, out_axes=0))
            self.layers = make(rngs)

        def __call__(self, ids):
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.embed.attend(run(self.embed(ids), self.layers))

    def loss(model, batch):
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"]), batch["targets"])
        )

    model, zero, batch = Model(nnx.Rngs(0)), _zero(), models.batch()
    value, grads = zero.value_and_grad(loss)(zero.shard(model), batch)
    want, want_grads = nnx.value_and_grad(loss)(model, batch)
    # Sums of at most 64 tokens and 16 products in float32.
    np.testing.assert_allclose(value, want, rtol=1e-5)
    _assert_close(jax.tree.leaves(zero.unshard(grads)), jax.tree.leaves(want_grads), 1e-5)


def test_each_device_has_its_stage():
    zero = _zero(4, 8)
    params = zero.init(lambda: jax.tree.map(jnp.asarray, models.params()))
    up, scale = params["layers"]["up"], params["layers"]["scale"]
    assert up.sharding.shard_shape(up.shape) == (1, 8, 8)
    assert scale.sharding.shard_shape(scale.shape) == (1,)
    assert params["embed"].sharding.spec == PartitionSpec("stage", ("local", "node"))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(models.params()), strict=True):
        np.testing.assert_array_equal(x, y)


def test_apply_runs_the_stages_forward():
    def logits(params, batch):
        x = params["embed"][batch["ids"]]
        x, _ = lax.scan(lambda x, w: (models.layer(x, w), None), x, params["layers"])
        return x @ params["head"]

    zero, params, batch = _zero(4, 8, 4), models.params(), models.batch()
    got = zero.apply(logits)(zero.shard(params), batch)
    np.testing.assert_allclose(got, jax.jit(logits)(params, batch), rtol=1e-5, atol=1e-6)


def _compiled(zero: jz.Zero) -> str:
    params = zero.shard(models.params())
    step = jax.jit(zero.value_and_grad(models.LOSSES["untied"]))
    text = step.lower(params, models.batch()).compile().as_text()
    assert text is not None
    return text


def test_loops_send_nothing_between_nodes_but_messages():
    """Gathers and reductions in loops stay inside a node; each message crosses once in a tick."""
    zero = _zero(2, 8, 4)
    config = dataclasses.replace(zero.config, schedule=jz.CommSchedule(loop_constant_bytes=0))
    text = _compiled(jz.Zero(zero.mesh, config))
    found = [x for x in zoo.hlo.collectives(text) if x.trips > 1]
    permutes = [x for x in found if x.op == "collective-permute"]
    others = [x for x in found if x.op != "collective-permute"]
    assert others and permutes
    assert all(len({device // 4 for device in group}) == 1 for x in others for group in x.groups)
    # 4 ticks have both messages, of `[1 row, tokens, width]`.
    assert sum(x.trips for x in permutes) == 8


def test_memory_does_not_grow_with_microbatches():
    loss = models.LOSSES["remat"]

    def temporaries(microbatches: int) -> int:
        zero = _zero(2, 4, microbatches)
        rows = {k: np.tile(x, (2 * microbatches, 1)) for k, x in models.batch().items()}
        step = jax.jit(zero.value_and_grad(loss)).lower(zero.shard(models.params()), rows)
        return step.compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(4), temporaries(16)
    # The micro-batches' ids, targets and losses.
    assert many - few < 12 * 32 * (2 * models.TOKENS * 4 + 4) * 2


def test_plan_and_report_name_the_messages_and_the_users_lines():
    zero, batch = _zero(2, 4, 4), models.batch()
    params = zero.shard(models.params())
    plan = zero.plan(models.LOSSES["untied"], params, batch)
    sent = [x for x in plan.transfers if x.purpose == "activations"]
    message = 2 * models.TOKENS * models.WIDTH * 4  # of 16 rows, on 2 devices in 4 micro-batches
    # Activations in the first 5 ticks, cotangents in the last 5.
    assert sum(x.node_bytes * x.trips for x in sent) == 10 * message
    assert "activations" in str(zero.report(params, plan=plan))
    assert "models.py" in str(plan)
    assert "ticks.py" not in str(plan)


@pytest.mark.parametrize(
    ("nodes", "num_devices"), [pytest.param(2, 4, marks=pytest.mark.exhaustive), (3, 6)]
)
def test_verify_finds_a_step_of_stages_right(nodes, num_devices):
    zero = _zero(nodes, num_devices)
    report = zero.verify(models.LOSSES["tied"], zero.shard(models.params()), models.batch())
    assert report.ok


def _weighted(params, batch):
    """Sums over rows, which have weights from 1 to 3."""
    logp = jax.nn.log_softmax(models._end(params, batch) @ params["embed"].T)
    of_rows = jnp.mean(jnp.take_along_axis(logp, batch["targets"][..., None], -1), (1, 2))
    weight = (1 + batch["ids"][:, 0] % 3).astype(logp.dtype)
    return -jnp.sum(weight * of_rows), jnp.sum(weight)


@pytest.mark.parametrize(
    ("layers", "loss", "mesh", "weighted"),
    [
        pytest.param(
            "layers",
            models.LOSSES["skip, tied"],
            {"nodes": 4, "num_devices": 8, "stages": 2},
            False,
            marks=pytest.mark.exhaustive,
        ),
        ("layers.*", test_lists.LOSSES["reads all layers"], {"nodes": 3, "num_devices": 6}, False),
        ("layers", _weighted, {"axis_type": AxisType.Explicit}, True),
    ],
)
def test_gradients_of_two_half_batches(layers, loss, mesh, weighted):
    """Of a leaf outside of the layers both ends of the pipeline have a part."""
    config = jz.pipeline(2, layers=layers)
    zero = jz.Zero(_zero(**mesh).mesh, config)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        of_models = models.params if layers == "layers" else test_lists._params
        params, batch = of_models(dtype=np.float64), models.batch()
        options = {"halves": True, "weighted": weighted}
        step = jax.jit(zero.value_and_grad(loss, **options))
        _, grads, found = step(zero.shard(params), batch)
        means = []
        for half in (slice(0, models.ROWS // 2), slice(models.ROWS // 2, None)):
            # In parts, of which a weighted loss returns sums.
            parts = jax.tree.map(lambda x, half=half: x[half].reshape(4, 2, *x.shape[1:]), batch)
            one = jax.value_and_grad(loss, has_aux=weighted)
            losses, of_parts = jax.jit(jax.vmap(one, (None, 0)))(params, parts)
            total = float(sum(losses[1])) if weighted else 4.0
            means.append((total, jax.tree.map(lambda g, t=total: np.sum(g, 0) / t, of_parts)))
        (weight, first), (rest, second) = means
        share = weight / (weight + rest)
        want = jax.tree.map(lambda x, y: share * x + (1 - share) * y, first, second)
        _assert_close(zero.unshard(grads), want)
        # Products are added up in float32.
        np.testing.assert_allclose(found.share, share, rtol=1e-6)
        for made, x, y in (
            (found.first, first, first),
            (found.second, second, second),
            (found.cross, first, second),
        ):
            product = jax.tree.map(np.vdot, x, y)
            size = jax.tree.map(lambda x, y: np.linalg.norm(x) * np.linalg.norm(y), x, y)
            for a, b, scale in zip(*map(jax.tree.leaves, (made, product, size)), strict=True):
                assert abs(float(a) - b) <= 3e-6 * scale


@pytest.mark.parametrize(
    ("name", "masks"),
    [("divides by a norm", 0), ("remat", 0), ("shares a weight", 0), ("decays in layers", 1)],
)
def test_only_gradients_without_cotangents_are_masked(name, masks):
    """Those of weights that the loss reads of each layer are not zero without a micro-batch."""
    zero, params = _zero(), models.params()
    step = jax.jit(zero.value_and_grad(models.LOSSES[name]))
    program = str(step.trace(zero.abstract(models.params), models.batch()).jaxpr)
    of_layers = [x.shape[1:] for x in params["layers"].values() if x.ndim > 1]
    types = {f"f32[{','.join(map(str, shape))}]" for shape in of_layers}
    assert len(types & {*re.findall(r"(f32\[[\d,]+\]) = select_n", program)}) == masks
