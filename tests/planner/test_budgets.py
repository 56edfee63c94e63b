"""Budgets of activations among the plans: what is expected of them, and which is chosen."""

from __future__ import annotations

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero._planner.bounder import Bounder
from jaxzero._planner.bounds import Bounds
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.estimates import Estimates
from jaxzero._planner.job import Job
from jaxzero._planner.ranking import ranked
from jaxzero._planner.rounds import RoundBounds
from jaxzero._planner.search import Search

from .small_job import CLUSTER, absent
from .test_search import GB, Answer

ROWS, WIDTH, LAYERS = 2**14, 64, 4
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


@pytest.fixture(autouse=True)
def _copies_are_free(monkeypatch):
    """Products of so narrow layers take less time than copies into a stack and out of it."""
    monkeypatch.setattr("jaxzero._activations.min_cut.STACKED", 0.0)


def init():
    wide = jnp.ones((LAYERS, WIDTH, 4 * WIDTH))
    return {"up": wide, "down": jnp.swapaxes(wide, 1, 2)}


def loss(params, batch):
    def layer(x, w):
        return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None

    return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


def bounded(cluster=CLUSTER, microbatches=(1, 2), **options):
    """A search that has bounds of plans with budgets, and no compiler."""
    job = Job({"": loss}, init, BATCH, optax.sgd(1e-3), {})
    search = Search(
        job, cluster, 10 * GB, "step_time", None, math.inf, lambda line: None, tries_budgets=True
    )
    search._bound([*enumerate_candidates(cluster, ("",), microbatches, False, **options)])
    return search


@functools.cache
def of_cluster():
    return bounded()


def budgets_of(search, name):
    """Bounds of the plan of this name by budget."""
    found = {}
    for x, bounds in search.bounds.items():
        plain = dataclasses.replace(x.config, activations=None)
        if x.activation_budget is not None and dataclasses.replace(x, config=plain).name == name:
            found[x.activation_budget] = bounds
    return found


def test_a_budget_says_what_the_plan_of_its_config_keeps():
    """The least is what layers read: 4 of `[rows of a device, 64]`, for each micro-batch."""
    mesh = jz.make_mesh(2, simulate=4)
    for k, name in ((1, "zero3, prefetch 1"), (2, "zero3, prefetch 1, 2 micro-batches")):
        found = budgets_of(of_cluster(), name)
        assert min(found) == 0
        assert found[0].activations.num_bytes == LAYERS * ROWS // 4 // k * WIDTH * 4
        assert len(found) > 1
        for budget, bounds in found.items():
            config = dataclasses.replace(
                jz.zero3(), activations=jz.Activations(budget_bytes=budget)
            )
            zero = jz.Zero(mesh, config)
            plan = zero.plan(loss, zero.abstract(init), BATCH, microbatches=k)
            kept = sum(x.num_bytes for x in plan.residuals if x.action == "keep")
            assert kept == bounds.activations.num_bytes


def test_seconds_to_repeat_are_those_of_all_microbatches_and_of_the_device():
    one, two = (
        budgets_of(of_cluster(), name)[0].activations
        for name in ("zero3, prefetch 1", "zero3, prefetch 1, 2 micro-batches")
    )
    assert two.seconds == pytest.approx(one.seconds, rel=0.02)  # each iteration has its cost
    most = budgets_of(of_cluster(), "zero3, prefetch 1")
    assert most[max(most)].activations.seconds < one.seconds
    cluster = absent(1e9)
    slow = bounded(cluster, (1,))
    found = budgets_of(slow, "zero3, prefetch 1")[0].activations
    slower = CLUSTER.rates.flops / cluster.rates.flops
    assert found.seconds == pytest.approx(slower * one.seconds, rel=0.01)


def test_a_stage_keeps_and_repeats_its_own_layers():
    """In each of 3 ticks it runs 2 of 4 layers on as many rows as a device has without stages."""
    whole, staged = (
        budgets_of(search, name)[0].activations
        for search, name in (
            (of_cluster(), "zero3, prefetch 1"),
            (bounded(layers=("up", "down")), "zero3 in 2 stages, prefetch 1, 2 micro-batches"),
        )
    )
    assert staged.seconds == pytest.approx(1.5 * whole.seconds, rel=0.02)
    assert staged.num_bytes == LAYERS * ROWS // 4 * WIDTH * 4  # of two micro-batches in flight


def test_rounds_have_the_budgets_of_a_node():
    """As many rows as a device has in a step of all nodes, and so as much to keep."""
    search = bounded(microbatches=(1,), local_steps=(jz.diloco(every=10),))
    found = budgets_of(search, "zero3, prefetch 1, local steps 10, float32")
    whole = budgets_of(search, "zero3, prefetch 1")
    assert found[0].activations.num_bytes == whole[0].activations.num_bytes
    assert found[0].memory > 0 and isinstance(found[0], RoundBounds)


def whole_and_least():
    """`zero3` without a budget, and with the least, and the bounds of each."""
    of_all = of_cluster().bounds.items()
    found = {x.name: (x, bounds) for x, bounds in of_all if isinstance(bounds, Bounds)}
    return [found[f"zero3, prefetch 1{end}"] for end in ("", ", least activations")]


def test_temporaries_are_what_is_kept_and_what_a_layer_reads():
    search = of_cluster()
    estimates = Estimates(search.bounds, CLUSTER, 10 * GB)
    (whole, _), (least, bounds) = whole_and_least()
    point = bounds.activations

    def expected(plan):
        memory, seconds = estimates.draws([plan])
        return np.median(memory), np.median(seconds)

    held = bounds.memory + point.num_bytes + point.working
    assert expected(least)[0] == pytest.approx(held, rel=0.1)
    # What a program keeps by itself says nothing of what is kept under a budget.
    estimates.observe(whole, 200_000_000, 4 * bounds.compute, is_proxy=False)
    assert expected(least)[0] == pytest.approx(held, rel=0.1)
    assert expected(whole)[0] == pytest.approx(2e8, rel=0.1)
    # One budget tells what layers work with, and so of the others.
    most = next(x for x in search.bounds if x.name.startswith("zero3, prefetch 1, 0"))
    before = expected(most)[0]
    estimates.observe(
        least, point.num_bytes + 2 * point.working, 4 * bounds.compute, is_proxy=False
    )
    assert expected(least)[0] == pytest.approx(held + point.working, rel=0.1)
    assert expected(most)[0] > before + point.working / 2


def test_seconds_grow_with_what_is_repeated():
    search = of_cluster()
    slow = {
        x: dataclasses.replace(
            bounds,
            activations=bounds.activations and bounds.activations._replace(seconds=bounds.compute),
        )
        for x, bounds in search.bounds.items()
        if isinstance(bounds, Bounds)
    }
    _, (least, bounds) = whole_and_least()
    seconds = [
        np.median(Estimates(found, CLUSTER, 10 * GB).draws([least])[1])
        for found in (search.bounds, slow)
    ]
    repeated = bounds.compute - bounds.activations.seconds
    assert seconds[1] - seconds[0] == pytest.approx(repeated, rel=0.2)


class Compiler:
    """Programs that hold what is kept and twice a layer; of all rows 16 GB without a budget.

    Repeating takes what the cost model says; without a budget a third more is written and read.
    """

    def __init__(self, search):
        self.bounds = search.bounds
        self.asked = []

    def key(self, candidate):
        return candidate.name

    def compile(self, candidate, *, is_proxy):
        self.asked.append(candidate.name)
        seconds, size = self.answer(candidate)
        return Answer("", int(size), 0, 0.0, seconds)

    def answer(self, candidate):
        bounds = self.bounds[candidate]
        slower = 1 + 0.1 * math.log2(candidate.microbatches)
        slower += 0.3 * (1 - candidate.config.schedule.prefetch)
        if bounds.activations is None:
            return 1.6 * slower * bounds.gradients, 16 * GB / candidate.microbatches
        kept, repeated, working = bounds.activations
        return 1.2 * slower * bounds.gradients + repeated, kept + 2 * working


@pytest.mark.parametrize("limit", [30.0, 0.055, 0.04])
def test_the_fastest_budget_that_fits_is_chosen(limit):
    """With most memory the largest budget, with less one between, or the least; within 2%."""
    known = of_cluster()
    compiler = Compiler(known)
    search = dataclasses.replace(
        known,
        compiler=compiler,
        limit=limit * GB,
        deadline=time.monotonic() + 60.0,
        rows={x: dataclasses.replace(row, discarded="") for x, row in known.rows.items()},
        programs={},
        failures=[],
        notes=[],
    )
    search.run([])
    best = ranked(search)[0]
    assert best.stage == "compiled" and not best.discarded
    seconds = {}
    for x, bounds in known.bounds.items():
        step, size = compiler.answer(x)
        if bounds.with_temporaries(int(size)) <= limit * GB:
            seconds[x] = bounds.predicted(step, 0.0)[0]
    assert seconds[best.candidate] <= 1.02 * min(seconds.values())
    assert best.candidate.activation_budget is not None


def test_what_the_bounder_holds_is_let_go():
    """A plan has the whole program: it is held until its budgets are known."""
    job = Job({"": loss}, init, BATCH, optax.sgd(1e-3), {})
    bounder = Bounder(job, CLUSTER, is_absent=False)
    for candidate in enumerate_candidates(CLUSTER, ("",), (1,), False):
        bounds = bounder.bounds(candidate)
        assert [*bounder.with_budgets(candidate, bounds)]
    assert not bounder._plans
