"""How early weights are gathered, in time."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxzero as jz
from jaxzero._plan import schedule
from jaxzero._plan.block_plan import ReduceGroup
from jaxzero._plan.layer_memory import LayerMemory
from jaxzero._plan.lifetimes import Gather
from jaxzero._plan.lookahead import issued_early, latest_issues
from jaxzero._plan.param_uses import ShardedParam
from jaxzero._program import Value
from jaxzero._sharding import layouts_by_preference

LAUNCH = 3_500_000_000  # multiplications that a device does meanwhile
PER_BYTE = {"local": 880, "node": 3520}
LAYERS = st.tuples(st.integers(0, 100), st.integers(1, 60))  # 10**9 multiplications, 10**6 bytes


def _gather(at, num_bytes):
    """The gather of one weight of as many bytes, needed by operation `at`."""
    shape = (num_bytes // 4,)
    layout = layouts_by_preference(shape, 1)[0]
    weight = ShardedParam(at, f"layer {at}", shape, np.dtype(np.float32), layout)
    return Gather(weight, (), "forward", at, at)


def planned(layers, axes):
    """The issues of one group for each layer, which is one operation, by layer."""
    groups = [[_gather(i, size * 10**6)] for i, (_, size) in enumerate(layers)]
    work = np.cumsum([work * 10**9 for work, _ in layers])
    found = latest_issues(groups, [], range(len(layers)), work, len(layers), axes)
    return [found[i] for i in range(len(layers))]


def time_of_last_use(layers, axes, issues):
    """Layers in order; over each axis, messages in the order in which they are sent, one by one.

    All messages share one link, and a layer waits for its own.
    """
    waiting = sorted(
        (issue, i, hop) for i, hops in enumerate(issues) for hop, issue in enumerate(hops)
    )
    time, link, arrived = 0, 0, {}
    for i, (work, _) in enumerate(layers):
        while waiting and waiting[0][0] <= i:
            _, group, hop = waiting.pop(0)
            cost = layers[group][1] * 10**6 * PER_BYTE[axes[hop]] + LAUNCH
            link = max(link, time) + cost
            arrived[group] = link
        time = max(time, arrived[i])
        last, time = time, time + work * 10**9
    return last


@given(st.lists(LAYERS, min_size=1, max_size=12))
def test_no_layer_is_later_than_if_all_were_sent_at_the_start(layers):
    axes = ("local",)
    found = planned(layers, axes)
    at_once = [(0,)] * len(layers)
    assert time_of_last_use(layers, axes, found) == time_of_last_use(layers, axes, at_once)


@given(LAYERS, st.integers(2, 12), st.sampled_from([("local",), ("node", "local")]))
def test_layers_that_are_alike_need_no_more_than_the_layer_before(layer, num, axes):
    for i, issues in enumerate(planned([layer] * num, axes)):
        assert issues[-1] >= i - 1
        assert issues[0] >= i - len(axes)


def test_layers_with_much_weight_are_sent_before_those_with_much_work():
    """Like a U-Net, whose middle layers have most weights and compute least."""
    layers = [(50, 1)] * 6 + [(1, 50)] * 3
    issues = [issue for (issue,) in planned(layers, ("local",))]
    assert issues[6] < 6 - 1 and issues[8] < 8 - 2
    one_before = [(max(i - 1, 0),) for i in range(len(layers))]
    late = time_of_last_use(layers, ("local",), one_before)
    assert time_of_last_use(layers, ("local",), [(x,) for x in issues]) < 0.8 * late


def test_reductions_take_their_turn_on_the_link():
    """Four of them, of a number each, take a launch each: what is sent before them goes earlier."""
    layers = range(6)
    groups = [[_gather(i, 10**6)] for i in layers]
    work = 10**10 * np.arange(1, 7)  # a gather takes less than half of a layer
    number = Value(jax.ShapeDtypeStruct((1,), np.dtype(np.float32)))
    reduces = [ReduceGroup((number,), at=2)] * 4  # sent before the gather of layer 4
    alone = latest_issues(groups, [], layers, work, 6, ("local",))
    beside = latest_issues(groups, reduces, layers, work, 6, ("local",))
    assert alone == {i: (max(i - 1, 0),) for i in layers}
    # Layer 4 is used at 40, in 10**9 multiplications. So the four launches, of 3.5, begin at 21.6,
    # and the gather of layer 3 before them, of 4.4, at 17.2, while layer 1 computes.
    assert beside == alone | {3: (1,)}


@pytest.mark.parametrize("free", [1, 2, 3])
def test_a_group_is_sent_where_there_is_room_and_never_late(free):
    room = types.SimpleNamespace(take=lambda group, issue, stop: free)
    issues, wanted = [(1, 3)], {4: (0, 1)}  # over `node` and `local`: at the latest, and wanted
    early = issued_early([[_gather(4, 8)]], issues, wanted, range(5), 5, room)
    assert early == [(0, free)]


BUSY, HEAVY = 6, 3


def gathers_of(monkeypatch, config):
    """The groups of weights of a program whose last layers have all the weights, by first use."""
    found = []
    original = schedule._plan_block

    def spy(*args):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(schedule, "_plan_block", spy)

    def init():
        busy = [jnp.zeros((1024, 1024)) for _ in range(BUSY)]
        heavy = [(jnp.zeros((1024, 2**13)), jnp.zeros((2**13, 1024))) for _ in range(HEAVY)]
        return busy, heavy

    def loss(params, x):
        for weight in params[0]:
            x = x + jnp.tanh(x @ weight)
        y = x.reshape(-1, 1024, 1024)[:, 0]
        for up, down in params[1]:
            y = y + jnp.tanh(y @ up) @ down
        return jnp.mean(x**2) + jnp.mean(y**2)

    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    zero.plan(loss, zero.abstract(init), jax.ShapeDtypeStruct((2**21, 1024), jnp.float32))
    (plan,) = found
    return plan, [x for x in plan.gather_groups if x.gathers[0].region == "forward"]


def test_a_program_sends_what_would_be_late_where_it_has_room(monkeypatch):
    plan, groups = gathers_of(monkeypatch, jz.zero3())
    starts = [group.at for group in groups]
    heavy = len(groups) - HEAVY
    ahead = [i - starts.index(group.issues[-1]) for i, group in enumerate(groups)]
    assert max(ahead[:2]) <= 1 and min(ahead[heavy:]) > 1, ahead

    held = LayerMemory(plan.block, plan.uses, ()).held_bytes(range(len(plan.block.operations)))
    waiting, used = np.zeros_like(held), np.zeros_like(held)
    for group in groups:
        for gather in group.gathers:
            waiting[group.issues[-1] : group.at] += gather.num_bytes
            used[gather.at : gather.until + 1] += gather.num_bytes
    assert (held + used + waiting).max() <= (held + used).max()


def test_limits_on_weights_keep_to_the_group_before(monkeypatch):
    limited = jz.CommSchedule(live_bytes=2**40)
    _, groups = gathers_of(monkeypatch, dataclasses.replace(jz.zero3(), schedule=limited))
    starts = [group.at for group in groups]
    assert all(i - starts.index(x.issues[-1]) <= 1 for i, x in enumerate(groups))


def exchanging(params, x):
    """Two layers that exchange rows twice, before and behind most of what they compute."""

    def layer(x, w):
        x = x @ w["small"]
        everyone = jax.lax.all_gather(x, "local", tiled=True)
        for _ in range(3):
            everyone = jnp.tanh(everyone @ w["large"])
        return x + jax.lax.psum_scatter(everyone, "local", tiled=True), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def test_messages_of_a_loop_are_sent_behind_its_exchanges():
    """While most is computed before the next exchange: no row waits for a weight or a gradient."""
    zero = jz.Zero(jz.make_mesh(nodes=2))
    sizes = {"small": (2, 256, 256), "large": (2, 256, 256)}
    params = zero.abstract(lambda: {name: jnp.zeros(size) for name, size in sizes.items()})
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32)
    plan = zero.plan(exchanging, params, x).top
    bodies = [loop.body for _, loop in sorted(plan.loops.items())]
    assert len(bodies) == 2
    for body in bodies:
        operations = body.block.operations
        sends = [i for i, x in enumerate(operations) if x.name in ("all_gather", "reduce_scatter")]
        products = [sum(x.products for x in operations[i:]) for i in sends]
        most = products[0] - products[1]
        assert most > sum(x.products for x in operations) / 2
        (group,) = (x for x in body.gather_groups if x.prefetched)
        assert sends[0] < min(group.issues) and max(group.issues) <= sends[1]
    (forward,) = (x for x in bodies[0].gather_groups if x.prefetched)
    operations = bodies[0].block.operations
    gathered = next(i for i, x in enumerate(operations) if x.name == "all_gather")
    assert forward.issues == (gathered + 1,) * 2
    assert forward.ties == (operations[gathered].outputs[0],) * 2
