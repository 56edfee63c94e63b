"""Constants of loops: held in full from the first iteration to the last, or gathered in each.

The main case is a loss that adds up micro-batches in a scan of its own: its loop has the full model
as constants, and the sum of all gradients in its carry.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from tests import zoo
from tests.report.printed import live_bytes, spans

WIDTH, LAYERS = 16, 4
LAYER = 2 * WIDTH * WIDTH * 4  # bytes
MODEL = LAYERS * LAYER + 2 * WIDTH * WIDTH * 4  # with embedding and head


_STACKED = {"first": (), "up": (LAYERS,), "down": (LAYERS,), "last": ()}


def _init(key):
    return {
        name: zoo.normal(key, i, *lead, WIDTH, WIDTH)
        for i, (name, lead) in enumerate(_STACKED.items())
    }


def _zeros(width, key):
    return {name: jnp.zeros((*lead, width, width)) for name, lead in _STACKED.items()}


def _layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def _layers(params):
    return {name: params[name] for name in ("up", "down")}


def _scanned(params, x):
    x, _ = jax.lax.scan(jax.checkpoint(_layer), x @ params["first"], _layers(params))
    return jnp.mean((x @ params["last"]) ** 2)


def _unrolled(params, x):
    x = x @ params["first"]
    for i in range(LAYERS):
        x, _ = jax.checkpoint(_layer)(x, jax.tree.map(lambda w, i=i: w[i], _layers(params)))
    return jnp.mean((x @ params["last"]) ** 2)


def _narrow(params, x):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    return _scanned(half, x.astype(jnp.bfloat16)).astype(jnp.float32)


def _summed(model, remat=True, size=1):
    """The mean of a model's loss over micro-batches of `size` rows, in a scan."""
    model = jax.checkpoint(model) if remat else model

    def loss(params, x):
        parts = x.reshape(-1, size, x.shape[-1])
        total, _ = jax.lax.scan(lambda sum, x: (sum + model(params, x), None), 0.0, parts)
        return total / len(parts)

    return loss


def _config(preset="zero3", **schedule):
    config = jz.zero3() if preset == "zero3" else zoo.PRESETS[preset]
    return dataclasses.replace(config, schedule=jz.CommSchedule(**schedule))


def _report(loss, rows=32, width=WIDTH, **schedule):
    zero = jz.Zero(jz.make_mesh(2), _config(**schedule))
    params = zero.abstract(functools.partial(_zeros, width), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return zero.report(params, plan=zero.plan(loss, params, batch))


def _plan(*args, **options):
    return _report(*args, **options).plan


def _most_held(report):
    """Bytes of full weights, and of gradients that are not yet sent."""
    return [live_bytes(spans(report), action) for action in ("gather", "reduce")]


def _loops(plan):
    return [loop for _, loop in sorted(plan.top.loops.items())]


def _trips(plan, action):
    """How often each weight is gathered, or its gradient reduced."""
    found = {}
    for step in plan.steps:
        if step.action == action:
            name = step.name.removesuffix("[i]")
            elements = step.trips * int(np.prod(step.shape))
            found[name] = found.get(name, 0) + elements
    return found


CASES = [
    ("scanned", "zero3", True, "2x4-auto"),
    ("scanned", "zeropp", True, "2x4-explicit"),
    ("scanned", "zeropp4", False, "2x4-auto"),
    ("unrolled", "zero3", True, "2x3-explicit"),
    ("unrolled", "zero3", False, "8x1-auto"),
    ("unrolled", "zeropp", False, "2x4-auto"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "preset", "remat", "mesh"), CASES)
@pytest.mark.one_in(2)
def test_gradients_equal_the_oracle(name, preset, remat, mesh):
    loss = _summed({"scanned": _scanned, "unrolled": _unrolled}[name], remat)
    case = zoo.Case(
        name=name,
        loss=loss,
        init=lambda key: (_init(key),),
        batch=lambda key, num: zoo.normal(key, 0, num, WIDTH, scale=1.0),
        oracle=loss,
    )
    zero = jz.Zero(zoo.make_mesh(mesh), _config(preset, loop_constant_bytes=0))
    (zoo.check if preset == "zero3" else zoo.check_quantised)(case, zero)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_gradients_equal_the_oracle_with_microbatches(prefetch):
    params, x = _init(jax.random.key(0)), zoo.normal(jax.random.key(1), 0, 32, WIDTH, scale=1.0)
    zero = jz.Zero(jz.make_mesh(2), _config(loop_constant_bytes=0, prefetch=prefetch))
    step = zero.value_and_grad(_summed(_scanned), microbatches=2)
    loss, grads = jax.jit(step)(zero.shard(params), x)
    want, want_grads = jax.jit(jax.value_and_grad(_scanned))(params, x)
    zoo.assert_close(jax.device_get(loss), jax.device_get(want), 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want_grads), 1e-5, "grads")


@pytest.mark.slow
def test_halves_of_the_devices_are_summed_in_the_loop():
    params, x = _init(jax.random.key(0)), zoo.normal(jax.random.key(1), 0, 32, WIDTH, scale=1.0)

    def run(limit):
        zero = jz.Zero(jz.make_mesh(2), _config(loop_constant_bytes=limit))
        _, _, halves = zero.value_and_grad(_summed(_scanned), halves=True)(zero.shard(params), x)
        return jax.device_get(halves[:3])

    zoo.assert_close(run(0), run(None), 1e-5, "halves")


@pytest.mark.slow
def test_weights_gathered_in_a_loop_do_not_change_the_bits():
    """Neither losses nor, where their sums are held, gradients."""
    params, x = _init(jax.random.key(0)), zoo.normal(jax.random.key(1), 0, 32, WIDTH, scale=1.0)

    def run(limit):
        zero = jz.Zero(jz.make_mesh(2), _config(loop_constant_bytes=limit))
        frozen = {name: params[name] for name in ("up", "down", "first")}
        head = {"last": params["last"]}
        step = zero.value_and_grad(lambda head, frozen, x: _summed(_scanned)(frozen | head, x))
        loss, grads = jax.jit(step)(zero.shard(head), zero.shard(frozen), x)
        return jax.device_get((loss, zero.unshard(grads)))

    jax.tree.map(np.testing.assert_array_equal, run(0), run(None))


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("model", [_scanned, _unrolled])
def test_a_loop_over_microbatches_holds_a_layer_or_two(model, remat):
    inside, held = (
        _most_held(_report(_summed(model, remat), loop_constant_bytes=x)) for x in (0, None)
    )
    assert held[0] >= MODEL and held[1] >= MODEL
    # Two buckets of a layer, one in use and one in flight; and one of another loop.
    assert inside[0] <= 3 * LAYER
    assert inside[1] <= 2 * LAYER


def test_what_is_sent_in_each_iteration():
    held, inside = (_plan(_summed(_scanned), loop_constant_bytes=x) for x in (None, 0))
    num = 4  # rows of a device
    for action in ("gather", "reduce"):
        once, often = _trips(held, action), _trips(inside, action)
        assert once.keys() == often.keys() == {"first", "up", "down", "last"}
        for name, elements in once.items():
            is_stack = name in ("up", "down")
            size = WIDTH * WIDTH * (LAYERS if is_stack else 1)
            assert elements == size  # held between forward and backward too
            # In forward and, recomputed, in backward; the stack again in the loop over layers.
            times = 1 if action == "reduce" else 3 if is_stack else 2
            assert often[name] == num * times * size


def test_a_loop_in_a_loop_scans_the_stack():
    """It gathers layer by layer, in the narrow dtype, and reduces so."""
    plan = _plan(_summed(_narrow), loop_constant_bytes=0)
    stacks = [step for step in plan.steps if step.name.startswith(("up", "down"))]
    assert {step.name for step in stacks} == {"up[i]", "down[i]"}
    assert {step.dtype for step in stacks} == {"bfloat16"}
    assert {len(step.path) for step in stacks} == {2}


def test_the_limit_is_in_bytes_of_full_weights():
    constants = MODEL  # in float32
    for limit, is_inside in ((constants, False), (constants - 1, True)):
        loops = _loops(_plan(_summed(_scanned), loop_constant_bytes=limit))
        assert [bool(loop.body.gather_groups) for loop in loops] == [is_inside] * 2
        assert bool(loops[1].body.gradients.sums) == is_inside


def test_a_limit_holds_weights_from_use_to_use():
    """The head and the last layers, which backward needs first."""
    reports = [_report(_summed(_unrolled), loop_constant_bytes=x) for x in (0, 2 * LAYER)]
    least, some = (sum(_trips(x.plan, "gather").values()) for x in reports)
    assert some < least
    assert _most_held(reports[1])[0] <= 2 * LAYER + 3 * LAYER


@pytest.mark.parametrize("excess", [0, 1])
def test_no_loop_over_layers_holds_a_large_weight_of_the_next_iteration(excess):
    """Forward's loop over layers does not hold the embedding of the next micro-batch, in full."""

    def loss(params, x):  # nothing else is gathered between the layers and the next micro-batch
        x, _ = jax.lax.scan(jax.checkpoint(_layer), x @ params["first"], _layers(params))
        return jnp.mean(x**2)

    embedding = WIDTH * WIDTH * 4
    plan = _plan(_summed(loss), loop_constant_bytes=embedding - excess)
    body = _loops(plan)[0].body
    (ahead,) = (group for group in body.gather_groups if group.prefetched)
    assert [x.num_bytes for x in ahead.gathers] == [embedding]
    (layers,) = (i for i, loop in body.loops.items() if loop.body.gather_groups)
    assert (ahead.issues[-1] > layers) == bool(excess)


def test_one_weight_is_held_under_any_limit():
    """A recurrent cell of one weight would be in use all the time."""

    def loss(params, x):
        def cell(state, _):
            return jnp.tanh(state @ params["first"] + x), None

        state, _ = jax.lax.scan(cell, jnp.zeros_like(x), length=8)
        return jnp.mean((state @ params["last"]) ** 2)

    plans = [_plan(loss, loop_constant_bytes=x) for x in (0, None)]
    assert str(plans[0]) == str(plans[1])
    assert all(step.trips == 1 for step in plans[0].steps)


def test_one_device_holds_its_weights():
    config = _config(loop_constant_bytes=0)
    zero = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:1]), config)
    params = zero.abstract(functools.partial(_zeros, WIDTH), jax.random.key(0))
    plan = zero.plan(_summed(_scanned), params, jax.ShapeDtypeStruct((4, WIDTH), jnp.float32))
    assert all(not loop.body.gather_groups for loop in _loops(plan))


@pytest.mark.parametrize(("rows", "is_inside"), [(4096, True), (64, False)])
def test_the_default_is_by_bytes_and_by_work(rows, is_inside):
    """2.5 GiB are gathered inside, if enough is computed that it can overlap with."""
    plan = _plan(_summed(_scanned, size=rows), rows=8 * 2 * rows, width=2**13)
    loops = _loops(plan)
    assert [bool(loop.body.gather_groups) for loop in loops] == [is_inside] * 2
    assert bool(loops[1].body.gradients.sums) == is_inside


def test_gathers_wait_for_what_changes_in_the_loop():
    """XLA moves a gather that depends on nothing but constants in front of the loop."""

    def loss(params, x):
        scale = jnp.sum(x) * jnp.ones((64, 64))  # the largest input of the body, always the same

        def body(state, x):
            return state + _unrolled(params, x) * jnp.mean(scale), None

        total, _ = jax.lax.scan(body, 0.0, x[:, None])
        return total

    for loop in _loops(_plan(loss, loop_constant_bytes=0, prefetch=0)):
        block, groups = loop.body.block, loop.body.gather_groups
        assert groups
        for group in groups:
            assert all(tie is not None and tie.shape != (64, 64) for tie in group.ties)
            first = block.inputs.index(group.ties[0]) if group.ties[0] in block.inputs else None
            assert first is None or first >= 1


@pytest.mark.parametrize("value", [-1, True])
def test_what_is_no_count_is_refused(value):
    with pytest.raises(ValueError, match="`loop_constant_bytes` of `CommSchedule` must be"):
        jz.CommSchedule(loop_constant_bytes=value)
