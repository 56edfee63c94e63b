"""Messages keep away from where a layer holds most, in loops and in unrolled programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxzero as jz
from jaxzero._plan import BlockPlan, schedule
from jaxzero._plan.layer_memory import NO_PEAK, LayerMemory, Peak

LAYERS, WIDTH, ROWS = 4, 16, 8


def plan_of(layer, shapes, monkeypatch, *, scanned: bool, config: Any = None, **mesh):
    """The plans of all blocks in a step that runs `layer` for each of the layers."""
    found = []
    original = schedule._plan_block

    def spy(block, uses, gradients, boundary, *rest):
        found.append(original(block, uses, gradients, boundary, *rest))
        return found[-1]

    monkeypatch.setattr(schedule, "_plan_block", spy)
    remat = jax.checkpoint(lambda x, w: (layer(x, w), None))

    def loss(params, x):
        if scanned:
            x, _ = jax.lax.scan(remat, x, params)
        else:
            for layer in params:
                x, _ = remat(x, layer)
        return jnp.mean(x**2)

    def init():
        if scanned:
            return {name: jnp.zeros((LAYERS, *shape)) for name, shape in shapes.items()}
        return [{name: jnp.zeros(x) for name, x in shapes.items()} for _ in range(LAYERS)]

    zero = jz.Zero(jz.make_mesh(**mesh or {"nodes": 2}), config or jz.zero3())
    batch = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    zero.plan(loss, zero.abstract(init), batch)
    return found


def bodies(layer, shapes, monkeypatch) -> list[BlockPlan]:
    """The plans of the bodies of all loops in a step that scans `layer`."""
    plans = plan_of(layer, shapes, monkeypatch, scanned=True)
    return [plan for plan in plans if plan.last_forward is None]


def memory_of(plan: BlockPlan, gradients: Container[Any] | None = None) -> LayerMemory:
    reduces = plan.gradients.reduces if gradients is None else gradients
    return LayerMemory(plan.block, plan.uses, reduces)


def peak_of(plan: BlockPlan, needed: int = 0) -> Peak:
    return memory_of(plan).find_peak(whole(plan), needed)


def whole(plan: BlockPlan) -> range:
    return range(len(plan.block.operations))


def wide(x, weights):
    """Its middle is sixteen times as large as its ends."""
    y = x @ weights["first"]
    z = jnp.exp(jnp.tile(y, (1, 16)) * 2.0)
    return (z * z).reshape(ROWS, 16, WIDTH).sum(1) @ weights["last"] @ weights["out"]


SHAPES = {name: (WIDTH, WIDTH) for name in ("first", "last", "out")}
# In an unrolled program a layer is what repeats, so its weights must differ.
UNROLLED = {"first": (WIDTH, WIDTH), "last": (WIDTH, 2 * WIDTH), "out": (2 * WIDTH, WIDTH)}


def test_weights_are_gathered_after_the_peak(monkeypatch):
    forward, backward = bodies(wide, SHAPES, monkeypatch)
    for plan in (forward, backward):
        held = memory_of(plan).held_bytes(whole(plan))
        at = int(held.argmax())
        assert held[at] >= 16 * ROWS * WIDTH * 4
        (group,) = [group for group in plan.gather_groups if group.prefetched]
        after = peak_of(plan).gather_after
        assert after is None or group.issues[-1] >= after > at
        assert group.issues[0] <= group.issues[-1]  # over `node` it still begins early
    assert peak_of(forward).gather_after


def test_gradients_are_reduced_before_the_peak(monkeypatch):
    _, backward = bodies(wide, SHAPES, monkeypatch)
    held = memory_of(backward).held_bytes(whole(backward))
    assert any(group.deferred for group in backward.reduce_groups)
    ((index, tie),) = backward.reduce_early.items()
    assert 0 < index <= held.argmax()
    assert tie in backward.block.operations[index - 1].outputs
    early = peak_of(backward).reduce_before
    late = peak_of(backward, 10**12).reduce_before  # more than is computed early
    assert early is not None and late is not None and early[0] <= late[0] <= held.argmax()


@pytest.mark.parametrize(("rows", "is_early"), [(10_000, False), (11_000, True)])
def test_gradients_are_reduced_early_only_if_that_is_hidden(rows, is_early, monkeypatch):
    """An H200 does 350 T multiplications and receives 400 GB in a second, inside its node.

    The first product of a layer has `rows` for each element of a weight, and the gradients of three
    weights are 12 bytes for each: it hides them from 10,500 rows on.
    """
    monkeypatch.setattr(f"{__name__}.ROWS", rows)
    _, backward = bodies(wide, SHAPES, monkeypatch)
    ((index, _),) = backward.reduce_early.items()
    products = [x for x in backward.block.operations[:index] if x.name == "dot_general"]
    assert (len(products) == 1) == is_early


@pytest.mark.parametrize("nodes", [1, 2])
def test_so_they_do_in_unrolled_layers(nodes, monkeypatch):
    (plan,) = plan_of(wide, UNROLLED, monkeypatch, scanned=False, nodes=nodes)
    boundary = plan.last_forward
    assert boundary is not None
    memory, starts = memory_of(plan), sorted(group.at for group in plan.gather_groups)
    assert len(starts) == 2 * LAYERS - 1  # the last layer is held from forward to backward
    layers = [range(a, b) for a, b in itertools.pairwise((*starts, len(plan.block.operations)))]
    peaks = {x.start: x.start + int(memory.held_bytes(x).argmax()) for x in layers}
    moved = 0
    for group in plan.gather_groups[1:]:
        (layer,) = [x for x in layers if x.stop == group.at]
        after = memory.find_peak(layer, 0).gather_after
        assert group.issues[-1] in (layer.start, *plan.reduce_early, after)
        moved += group.issues[-1] > peaks[layer.start]
    assert moved >= LAYERS - 1
    # The gradients of all layers but the last in backward, before the peak of the layer after.
    early = [x for x in layers if not set(plan.reduce_early).isdisjoint(x)]
    assert early == layers[-len(early) :] and len(early) == LAYERS - 1
    for layer, (index, tie) in zip(early, sorted(plan.reduce_early.items()), strict=True):
        assert layer.start < index <= peaks[layer.start]
        assert tie in plan.block.operations[index - 1].outputs
    if nodes == 2:  # a gather between nodes begins after these reductions
        first = {group.issues[0] for group in plan.gather_groups if group.issues[0] > boundary}
        assert first and first <= {*plan.reduce_early, *starts}
        assert first & set(plan.reduce_early)


def test_without_work_after_the_peak_gathers_follow_the_gradients(monkeypatch):
    def layer(x, weights):
        y = x @ weights["first"]
        z = jnp.exp(jnp.tile(y, (1, 16)) * 2.0)
        y = (z * z).reshape(ROWS, 16, WIDTH).sum(1)
        for _ in range(6):
            y = y @ weights["last"] @ weights["out"]
        return y

    (plan,) = plan_of(layer, UNROLLED, monkeypatch, scanned=False)
    memory, starts = memory_of(plan), sorted(group.at for group in plan.gather_groups)
    assert plan.reduce_early
    for index in plan.reduce_early:
        start = max(x for x in starts if x < index)
        stop = min((x for x in starts if x > index), default=len(plan.block.operations))
        assert memory.find_peak(range(start, stop), 0).gather_after is None
        for group in plan.gather_groups:
            if group.at == stop:  # full weights
                assert group.issues[-1] == index
            if group.issues[0] in range(start, stop):
                assert group.issues[0] == index


def test_nothing_is_moved_without_prefetch(monkeypatch):
    config = dataclasses.replace(jz.zero3(), schedule=jz.CommSchedule(prefetch=0))
    (plan,) = plan_of(wide, UNROLLED, monkeypatch, scanned=False, config=config)
    assert all(set(group.issues) == {group.at} for group in plan.gather_groups)


def test_gathers_stay_where_no_work_is_counted(monkeypatch):
    """A layer that sorts has no matrix products, so nothing is known to follow its peak."""

    def layer(x, weights):
        y = jnp.sort(x * weights["scale"][0, 0])
        y = jnp.exp(jnp.tile(y, (1, 16)) * 2.0)
        return jnp.sort((y * y).reshape(ROWS, 16, WIDTH).sum(1))

    for plan in bodies(layer, {"scale": (8, WIDTH)}, monkeypatch):
        assert memory_of(plan).held_bytes(whole(plan)).any()
        assert peak_of(plan).gather_after is None


def test_nothing_is_moved_where_nothing_is_made(monkeypatch):
    plans = bodies(lambda x, weights: x, {"unused": (1,)}, monkeypatch)
    for plan in plans:
        assert memory_of(plan, {}).find_peak(whole(plan), 0) == NO_PEAK
