"""Loops stack mean gradients, with the bits that the step would have divided at its end."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._execute import program_plan
from jaxzero._execute.mean_gradients import mean_of_one_microbatch

LAYERS, WIDTH, ROWS = 5, 24, 48
SCHEDULES = {
    "pipelined": jz.CommSchedule(),
    "ends apart": jz.CommSchedule(separate_ends=True),
    "one group a weight": jz.CommSchedule(bucket_bytes=0),
    "plain": jz.CommSchedule(prefetch=0),
}
PRESETS = {
    "zero3": jz.zero3(),
    "zeropp": dataclasses.replace(jz.zeropp(), min_quantized_size=WIDTH),
    "stage 2": jz.ZeroConfig(stage=2),
    "hsdp": jz.hsdp(),
}

NUM_DEVICES = (6, 8)  # by six quotients are rounded


def _init(key):
    up, down = (jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) for k in jax.random.split(key))
    return {"up": up.astype(jnp.bfloat16) * WIDTH**-0.5, "down": down * WIDTH**-0.5}


@functools.cache
def _whole(init=_init):
    return jax.device_get(jax.jit(init)(jax.random.key(0)))


def _loss(params, x):
    def layer(x, weights):
        y = jnp.tanh(x.astype(jnp.bfloat16) @ weights["up"])
        return x + y.astype(jnp.float32) @ weights["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    return jnp.mean(x**2)


def _zero(preset, schedule, nodes=2, devices=None):
    config = dataclasses.replace(PRESETS[preset], schedule=SCHEDULES[schedule])
    return jz.Zero(jz.make_mesh(nodes, devices=devices), config)


def _rows():
    return np.linspace(-1, 2, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


@pytest.mark.parametrize(  # a quarter of the cases; all of them in `make test-exhaustive`
    ("preset", "schedule", "num_devices"),
    [
        pytest.param(*case, marks=[] if (i + j + k) % 4 == 0 else pytest.mark.exhaustive)
        for i, preset in enumerate(PRESETS)
        for j, schedule in enumerate(SCHEDULES)
        for k, num_devices in enumerate(NUM_DEVICES)
        for case in [(preset, schedule, num_devices)]
    ],
)
@pytest.mark.one_in(2)
def test_bits_are_those_of_sums_divided_at_the_end(preset, schedule, num_devices, monkeypatch):
    zero = _zero(preset, schedule, devices=jax.devices()[:num_devices])
    params = zero.shard(_whole())
    plan = zero.plan(_loss, params, _rows())
    means = [leaf for loop in plan.top.loops.values() for leaf in loop.means.values()]
    assert len(means) == 2
    loss, gradients = jax.jit(zero.value_and_grad(_loss))(params, _rows())
    monkeypatch.setattr(program_plan, "mark_final_gradients", lambda plan, *rest: plan)
    plan = zero.plan(_loss, params, _rows())
    assert not any(loop.means for loop in plan.top.loops.values())
    old_loss, old_gradients = jax.jit(zero.value_and_grad(_loss))(params, _rows())
    np.testing.assert_array_equal(loss, old_loss)
    assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, params)
    jax.tree.map(np.testing.assert_array_equal, gradients, old_gradients)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_sums_are_stacked_in_float32(schedule):
    """The stack of a leaf in bfloat16 has 16 bits in the loop, too."""
    zero = _zero("zero3", schedule)
    params = {"up": zero.abstract(_init, jax.random.key(0))["up"]}

    def loss(params, x):
        return _loss({**params, "down": jnp.zeros((LAYERS, WIDTH, WIDTH))}, x)

    text = jax.jit(zero.value_and_grad(loss)).lower(params, _rows()).as_text()
    shard = f"{LAYERS}x{WIDTH // 8}x{WIDTH}"
    stacks = set(re.findall(rf"tensor<{shard}x(\w+)>", text))
    assert stacks == {"bf16"}


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"weighted": True}, {"halves": True}])
def test_where_sums_are_needed_loops_stack_sums(options):
    def loss(params, x):
        return (_loss(params, x), jnp.float32(2)) if "weighted" in options else _loss(params, x)

    zero = _zero("zero3", "pipelined")
    plan = zero.plan(loss, zero.abstract(_init, jax.random.key(0)), _rows(), **options)
    assert plan.top.loops
    assert not any(loop.means for loop in plan.top.loops.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_mean_is_rounded_once(dtype):
    """Also where it is subnormal: below 6e-5 in float16."""
    sums = np.float32([3.3e-7, 1.1e-5, 0.7, -5.2e-6, 81.3, 0])
    means = jax.jit(lambda x: mean_of_one_microbatch(x, dtype, 8))(sums)
    np.testing.assert_array_equal(means, np.asarray(sums / 8).astype(dtype))
    assert np.count_nonzero(means) == 5


def _layers(key):
    stacks = _init(key)
    return [{name: x[i] for name, x in stacks.items()} for i in range(LAYERS)]


def _unrolled_loss(layers, x):
    for weights in layers:
        y = jnp.tanh(x.astype(jnp.bfloat16) @ weights["up"])
        x = x + y.astype(jnp.float32) @ weights["down"]
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("preset", "num_devices"),
    [
        ("zero3", 8),
        ("zeropp", 6),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in itertools.product(PRESETS, (6, 8))
            if case not in (("zero3", 8), ("zeropp", 6))
        ),
    ],
)
def test_unrolled_buckets_are_divided_with_the_bits_of_the_end(preset, num_devices, monkeypatch):
    zero = _zero(preset, "pipelined", devices=jax.devices()[:num_devices])
    params = zero.shard(_whole(_layers))
    assert len(zero.plan(_unrolled_loss, params, _rows()).top.means) == 2 * LAYERS
    loss, gradients = jax.jit(zero.value_and_grad(_unrolled_loss))(params, _rows())
    monkeypatch.setattr(program_plan, "mark_final_gradients", lambda plan, *rest: plan)
    assert not zero.plan(_unrolled_loss, params, _rows()).top.means
    old_loss, old_gradients = jax.jit(zero.value_and_grad(_unrolled_loss))(params, _rows())
    np.testing.assert_array_equal(loss, old_loss)
    assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, params)
    jax.tree.map(np.testing.assert_array_equal, gradients, old_gradients)


def test_a_tied_weight_is_divided_once():
    """What its two uses give is added before it is reduced."""

    def loss(params, x):
        y = jnp.tanh(x @ params["tied"])
        return jnp.mean((y @ params["tied"] + x @ params["once"]) ** 2)

    def init(key):
        return {name: jax.random.normal(key, (WIDTH, WIDTH)) for name in ("tied", "once")}

    zero = _zero("zero3", "one group a weight")
    params = zero.init(init, jax.random.key(0))
    divided = zero.plan(loss, params, _rows()).top.means.values()
    assert len(divided) == len({leaf.path for leaf in divided}) == 2
    got = jax.jit(zero.value_and_grad(loss))(params, _rows())[1]
    whole = jax.device_get(params)
    expected = jax.jit(jax.grad(loss))(whole, _rows())
    # Some 32 roundings in float32 (2**-24 each) lie between an input and a gradient.
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=float(jnp.abs(x).max()) * 2e-6)
