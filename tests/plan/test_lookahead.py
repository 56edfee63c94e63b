"""How early weights are gathered, in time."""

from __future__ import annotations

import types

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxzero._plan.lookahead import latest_issues

LAUNCH = 3_500_000_000  # multiplications that a device does meanwhile
PER_BYTE = {"local": 880, "node": 3520}
LAYERS = st.tuples(st.integers(0, 100), st.integers(1, 60))  # 10**9 multiplications, 10**6 bytes


def planned(layers, axes):
    """The issues of one group for each layer, which is one operation, by layer."""
    groups = [
        [types.SimpleNamespace(at=i, num_bytes=size * 10**6)] for i, (_, size) in enumerate(layers)
    ]
    work = np.cumsum([work * 10**9 for work, _ in layers])
    found = latest_issues(groups, [], range(len(layers)), work, axes)
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
    """As the middle of a U-Net: 88 multiplications for each that the link takes."""
    layers = [(50, 1)] * 6 + [(1, 50)] * 3
    issues = [issue for (issue,) in planned(layers, ("local",))]
    assert issues[6] < 6 - 1 and issues[8] < 8 - 2
    one_before = [(max(i - 1, 0),) for i in range(len(layers))]
    late = time_of_last_use(layers, ("local",), one_before)
    assert time_of_last_use(layers, ("local",), [(x,) for x in issues]) < 0.8 * late
