"""Messages of a loop keep away from where its body holds most."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz
from jaxzero._plan import schedule
from jaxzero._plan.body_memory import NO_PEAK, _held_bytes, find_peak

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="before JAX 0.11 messages stay where they are"
)
LAYERS, WIDTH, ROWS = 4, 16, 8


def bodies(layer, monkeypatch, **shapes):
    """The plans of the bodies of all loops in a step that scans `layer`."""
    found = []
    original = schedule._plan_block

    def spy(block, uses, gradients, boundary, *rest):
        plan = original(block, uses, gradients, boundary, *rest)
        if boundary is None:
            found.append(plan)
        return plan

    monkeypatch.setattr(schedule, "_plan_block", spy)

    def loss(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, params)
        return jnp.mean(x**2)

    zero = jz.Zero(jz.make_mesh(2))
    params = zero.abstract(
        lambda: {name: jnp.zeros((LAYERS, *shape)) for name, shape in shapes.items()}
    )
    zero.plan(loss, params, jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32))
    return found


def wide(x, weights):
    """Its middle is sixteen times as large as its ends."""
    y = x @ weights["first"]
    z = jnp.exp(jnp.tile(y, (1, 16)) * 2.0)
    return (z * z).reshape(ROWS, 16, WIDTH).sum(1) @ weights["last"] @ weights["out"]


SHAPES = {name: (WIDTH, WIDTH) for name in ("first", "last", "out")}


def test_weights_are_gathered_after_the_peak(monkeypatch):
    forward, backward = bodies(wide, monkeypatch, **SHAPES)
    for plan in (forward, backward):
        held = _held_bytes(plan.block, plan.uses)
        at = int(held.argmax())
        assert held[at] >= 16 * ROWS * WIDTH * 4
        (group,) = [group for group in plan.gather_groups if group.prefetched]
        peak = find_peak(plan.block, plan.uses, schedule.COSTLY, plan.gradients.reduces, 0)
        assert peak.gather_after is None or group.issues[-1] >= peak.gather_after > at
        assert group.issues[0] <= group.issues[-1]  # over `node` it still begins early
    assert find_peak(
        forward.block, forward.uses, schedule.COSTLY, forward.gradients.reduces, 0
    ).gather_after


def test_gradients_are_reduced_before_the_peak(monkeypatch):
    _, backward = bodies(wide, monkeypatch, **SHAPES)
    held = _held_bytes(backward.block, backward.uses)
    assert any(group.deferred for group in backward.reduce_groups)
    assert backward.reduce_early is not None
    index, tie = backward.reduce_early
    assert 0 < index <= held.argmax()
    assert tie in backward.block.operations[index - 1].outputs
    find = functools.partial(
        find_peak, backward.block, backward.uses, schedule.COSTLY, backward.gradients.reduces
    )
    early, late = find(0).reduce_before, find(10**12).reduce_before  # too many bytes to hide early
    assert early is not None and late is not None and early[0] <= late[0] <= held.argmax()


def test_gathers_stay_where_no_work_is_counted(monkeypatch):
    """A layer of convolutions has no matrix products, so nothing is known to follow its peak."""

    def layer(x, weights):
        kernels = jnp.ones((1, 1, 3)) * weights["scale"][0, 0]
        y = jax.lax.conv_general_dilated(x[:, None], kernels, (1,), "SAME")
        y = jnp.exp(jnp.tile(y, (1, 1, 16)) * 2.0)
        y = (y * y).reshape(ROWS, 1, 16, WIDTH).sum(2)
        return jax.lax.conv_general_dilated(y, kernels, (1,), "SAME")[:, 0]

    for plan in bodies(layer, monkeypatch, scale=(8, WIDTH)):
        assert _held_bytes(plan.block, plan.uses).any()
        peak = find_peak(plan.block, plan.uses, schedule.COSTLY, plan.gradients.reduces, 0)
        assert peak.gather_after is None


def test_nothing_is_moved_where_nothing_is_made(monkeypatch):
    plans = bodies(lambda x, weights: x, monkeypatch, unused=(1,))
    for plan in plans:
        assert find_peak(plan.block, plan.uses, schedule.COSTLY, {}, 0) == NO_PEAK
