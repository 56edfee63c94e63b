"""Local steps among the plans: what a round is predicted to take, and how they are searched."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxzero as jz
from jaxzero._hlo import Rates
from jaxzero._planner.bounder import Bounder
from jaxzero._planner.bounds import Bounds
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.job import Job
from jaxzero._planner.plans import Plans
from jaxzero._planner.ranking import ranked
from jaxzero._planner.rounds import RoundBounds, RoundCost
from jaxzero._planner.search import Search

from .small_job import BATCH, CLUSTER, absent, averaged, init, loss
from .test_search import Compiler

WAITING = jz.diloco(every=10)
STREAMING = jz.streaming_diloco(every=20, fragments=2, delay=5)
KEEPING = jz.dasgd(every=8, delay=4)


def job(f=loss, options=()):
    return Job({"": f}, init, BATCH, optax.adamw(1e-3), dict(options))


def walked(method, step, message):
    """Seconds of a round, event by event: steps, and messages that may not have arrived."""
    now = 0.0
    for _ in range(method.fragments):
        now += (method.every // method.fragments - method.delay) * step
        arrival = now + message
        now = max(now + method.delay * step, arrival)
    return now


@pytest.mark.parametrize("method", [WAITING, STREAMING, KEEPING])
@pytest.mark.parametrize("message", [0.0, 3.0, 4.5, 40.0])
def test_a_step_of_a_round_takes_what_a_walk_of_it_says(method, message):
    cost = RoundCost(method, held=0, travelling=0, node_bytes=0.0, message=message, merge=0.7)
    expected = (walked(method, 1.0, message) + 0.7) / method.every
    assert cost.step_seconds(1.0) == pytest.approx(expected, rel=1e-12)
    assert cost.waited(1.0) == pytest.approx(expected - 1.0 - 0.7 / method.every, abs=1e-12)


@functools.cache
def bounded():
    """A search with bounds of plans with local steps, and no compiler."""
    search = Search(job(), CLUSTER, 1e10, "step_time", None, math.inf, lambda line: None)
    methods = (WAITING, STREAMING, KEEPING)
    search._bound(list(enumerate_candidates(CLUSTER, ("",), (1, 2), False, methods)))
    return search


def searched(compiler, limit=1e10):
    known = bounded()
    search = dataclasses.replace(
        known,
        compiler=compiler,
        limit=limit,
        rows=dict(known.rows),
        temporaries={},
        programs={},
        failures=[],
        notes=[],
    )
    search.run([])
    return search, ranked(search)


def bounds_of(preset, method):
    found = bounded().bounds
    key = next(x for x in found if (x.preset, x.local_steps) == (preset, method))
    return found[key]


@pytest.mark.parametrize("method", [WAITING, STREAMING, KEEPING])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_memory_is_that_of_one_node_and_of_the_report(preset, method):
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), getattr(jz, preset)())
    params = zero.abstract(init)
    rounds = zero.local_steps(lambda *args: (*args, {}), method)
    rounds.abstract(params, zero.init_optimizer(optax.adamw(1e-3), params))
    report = rounds.report()

    parts = 2 if preset == "zero3" else 1  # of the parameters, in a node of two devices
    numbers = 4 * 64 * 64 + 64 * 8
    gradients, held = 4 * numbers // parts, sum(report.device_bytes.values())
    assert report.device_bytes["params"] == gradients
    assert report.device_bytes["outer_params"] == 4 * numbers // 2  # split in any case
    kept = 4 * numbers // 2 if method is KEEPING else 0
    assert report.kept_bytes == kept
    travelling = report.message_bytes + kept

    bounds = bounds_of(preset, method)
    assert isinstance(bounds, RoundBounds)
    for temporary in (0, 10**5):
        expected = held + gradients + temporary + travelling
        if method is WAITING:  # a message travels while there are no gradients
            expected = held + max(gradients + temporary, travelling)
        assert bounds.with_temporaries(temporary) == expected
    assert bounds.memory == bounds.with_temporaries(0)
    assert bounds.node_bytes == round(report.bytes_between_nodes / method.every)
    message = report.bytes_between_nodes / method.fragments / CLUSTER.link
    assert bounds.cost.message == pytest.approx(message + Rates().launch, rel=1e-9)


def test_the_bound_of_a_step_has_the_rows_of_one_node():
    of_round = bounds_of("zero3", STREAMING)
    assert isinstance(of_round, RoundBounds)
    inside = of_round.step
    together = next(
        bounds for x, bounds in bounded().bounds.items() if x.name == "zero3, prefetch 1"
    )
    assert isinstance(together, Bounds)
    assert inside.compute == together.compute  # as many rows on each device
    assert (inside.node_bytes, inside.node) == (0, 0.0)
    assert together.node_bytes > 0


@pytest.mark.ci
def test_one_program_serves_all_ways_to_exchange():
    compiler = Compiler({}, other=(1e-9, 0))
    search, rows = searched(compiler)
    with_rounds = [row for row in rows if row.candidate.local_steps is not None]
    known = [row for row in with_rounds if row.stage != "bound"]
    programs = {row.candidate.program for row in known}
    assert known
    assert len(known) == 3 * len(programs)
    asked = [name for name, kind in compiler.asked if kind == "proxy" and "local steps" in name]
    assert len(asked) == len(programs)
    best = rows[0]
    assert best.stage == "compiled"
    plans = Plans(CLUSTER, 1e10, rows, 0, (), search.proxies, search.full)
    assert plans.local_steps is best.candidate.local_steps is not None
    bounds = search.bounds[best.candidate]
    assert isinstance(bounds, RoundBounds)
    step = 1e-9 * 1e-4 + bounds.step.update
    assert (best.seconds, best.waited) == (bounds.cost.step_seconds(step), bounds.cost.waited(step))


def test_a_way_that_does_not_fit_leaves_the_others():
    """With a limit between the two, only the way that keeps its progress needs too much."""
    preset, temporary = "ddp", 10**6
    sizes = {x: bounds_of(preset, x).with_temporaries(temporary) for x in (STREAMING, KEEPING)}
    assert sizes[STREAMING] < sizes[KEEPING]
    limit = (sizes[STREAMING] + sizes[KEEPING]) / 2
    proxies = {
        x.name: (1e-9, temporary / 1e9)
        for x in bounded().rows
        if x.preset == preset and x.local_steps
    }
    _, rows = searched(Compiler(proxies, other=(9.0, 99)), limit)
    found = {
        row.candidate.local_steps: row
        for row in rows
        if row.candidate.preset == preset and row.stage != "bound"
    }
    assert not found[STREAMING].discarded
    assert "needs" in found[KEEPING].discarded


def test_what_is_enumerated():
    cluster = dataclasses.replace(CLUSTER, host_memory=1e12)
    found = list(enumerate_candidates(cluster, ("",), (1,), True, (WAITING, STREAMING)))
    names = [x.name for x in found]
    assert len(set(names)) == len(names)
    inside = [x for x in found if x.local_steps is WAITING]
    assert {x.preset for x in inside} == {"ddp", "stage 2", "zero3", "zeropp"}
    assert not [x for x in inside if x.offload or x.config.needs_wire_state]
    assert f"zeropp, prefetch 1, local steps 20, 2 fragments, delay 5, {STREAMING.codec}" in names


def test_a_loss_that_sums_over_nodes_is_left_out():
    bounder = Bounder(job(averaged), absent(1e9), is_absent=False)
    found = list(enumerate_candidates(CLUSTER, ("",), (1,), False, (WAITING,)))
    bounder.bounds(found[0])
    for candidate in [x for x in found if x.local_steps]:
        with pytest.raises(ValueError, match=r"over the axis `node`, inside `zero.local_steps`"):
            bounder.bounds(candidate)


def test_batches_of_several_leaves_are_those_of_one_node():
    batch = {
        "x": jax.ShapeDtypeStruct((16, 3), jnp.int32),
        "n": jax.ShapeDtypeStruct((), "float32"),
    }
    of_node = dataclasses.replace(job(), batch=batch).of_one_node(2).batch
    assert jax.tree.map(lambda x: (x.shape, x.dtype), of_node) == {
        "x": ((8, 3), jnp.int32),
        "n": ((), jnp.float32),
    }
