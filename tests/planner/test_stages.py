"""Pipeline stages among the plans: which there are, what is expected of them, which is best."""

from __future__ import annotations

import dataclasses

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

from .small_job import BATCH, absent, init, loss
from .test_estimates import BOUNDS

SLOW = dataclasses.replace(absent(1e9), link=1.25e6)


def found(cluster, microbatches=(1, 2), quantized=True, **given):
    plans = enumerate_candidates(cluster, ("",), microbatches, quantized, layers="layers", **given)
    return {x.name: x for x in plans}


def test_what_is_enumerated():
    cluster = dataclasses.replace(SLOW, nodes=4, host_memory=1e12)
    plans = found(cluster)
    staged = {name: x for name, x in plans.items() if x.stages > 1}
    assert {(x.stages, x.microbatches) for x in staged.values()} == {(2, 2), (2, 4), (4, 4), (4, 8)}
    presets = {x.preset for x in staged.values()}
    assert presets == {f"{inside} in 2 stages" for inside in ("zero3", "hsdp", "zeropp")} | {
        f"{inside} in 4 stages" for inside in ("zero3", "zeropp")
    }
    assert {x.offload for x in staged.values()} == {"", "optimizer"}
    for x in staged.values():
        assert x.config.stages == jz.Stages(microbatches=x.microbatches)
    assert "zero3 in 4 stages, prefetch 0, 8 micro-batches, optimizer in host memory" in staged
    # One number of micro-batches, 1, says that a loss may be no mean over its rows.
    for none in (found(cluster, (1,)), found(dataclasses.replace(cluster, nodes=1))):
        assert not [x for x in none.values() if x.stages > 1]


def test_the_code_of_a_plan_makes_its_config():
    cluster = dataclasses.replace(SLOW, nodes=4, host_memory=1e12)
    for plan in found(cluster).values():
        assert eval(plan.code, {"jz": jz, "dataclasses": dataclasses}) == plan.config


def test_bounds_count_all_ticks():
    """64 rows in 4 parts: 8 on each of 2 devices; 5 ticks of 2 layers, and 4 of the head."""
    job = Job({"": loss}, init, jax.ShapeDtypeStruct((64, 64), jnp.float32), optax.sgd(1e-3), {})
    bounds = Bounder(job, SLOW, is_absent=False).bounds(
        found(SLOW)["zero3 in 2 stages, prefetch 1, 4 micro-batches"]
    )
    assert isinstance(bounds, Bounds)
    of_layer, of_head = (6 * 8 * 64 * width for width in (64, 8))
    assert bounds.compute == (5 * 2 * of_layer + 4 * of_head) / 1e12
    # In each of 4 micro-batches activations enter one of two nodes, and cotangents the other.
    sent = 4 * 16 * 64 * 4
    assert bounds.node_bytes > sent
    assert bounds.node_bytes < 4 * sent


def test_a_list_of_layers_is_planned():
    """It computes as much as a stack, and sends weights and gradients between stages too."""

    def of_list(params, batch):
        for w in params["layers"]:
            batch = jnp.tanh(batch @ w)
        return jnp.mean((batch @ params["head"]) ** 2)

    stack = found(SLOW)["zero3 in 2 stages, prefetch 1, 4 micro-batches"]
    layers = dataclasses.replace(stack.config.stages, layers="layers.*")
    listed = dataclasses.replace(stack, config=dataclasses.replace(stack.config, stages=layers))
    init_list = lambda: init() | {"layers": list(init()["layers"])}  # noqa: E731
    bounds = [
        Bounder(Job({"": f}, make, BATCH, optax.sgd(1e-3), {}), SLOW, is_absent=False).bounds(plan)
        for f, make, plan in ((loss, init, stack), (of_list, init_list, listed))
    ]
    assert isinstance(bounds[0], Bounds) and isinstance(bounds[1], Bounds)
    assert bounds[1].compute == bounds[0].compute
    # Of weights and of gradients, `[4, 64, 64]` in float32, a node sends a quarter.
    assert bounds[1].node_bytes == bounds[0].node_bytes + 2 * 4 * 64 * 64 * 4 / 4


def test_parameters_that_are_whole_are_gathered_after_the_update():
    """Half of 4 (4 * 64 * 64 + 64 * 8) bytes enter each of two nodes, for 1.25 MB a second."""
    job = Job({"": loss}, init, BATCH, optax.sgd(1e-3), {})
    bounder = Bounder(job, SLOW, is_absent=False)
    work, _ = bounder.work(found(SLOW)["stage 2"])
    gathered = 4 * (4 * 64 * 64 + 64 * 8) / 2
    assert work.gathered_between == work.gathered_inside == gathered
    bounds = work.bounds(SLOW.rates)
    assert bounds.update == pytest.approx(gathered / 1.25e6, rel=1e-3)
    assert bounds.node_bytes == work.node_bytes + gathered
    for other in ("ddp", "zero3, prefetch 1"):
        assert bounder.work(found(SLOW)[other])[0].gathered_between == 0


@pytest.mark.parametrize(("num", "in_flight"), [(16, 7), (4, 4)])
def test_activations_of_the_micro_batches_in_flight_are_expected(num, in_flight):
    """30 MB of all rows: each of 4 stages keeps a quarter, for some parts of 4 times the rows."""
    cluster = dataclasses.replace(SLOW, nodes=4)
    plans = found(cluster, (1, 4), quantized=False)
    small = dataclasses.replace(BOUNDS, full_gradients=4_000)
    estimates = Estimates(dict.fromkeys(plans.values(), small), cluster, 1e8)
    estimates.observe(plans["zero3, prefetch 1"], 30_000_000, 4.0, is_proxy=False)
    (memory,) = np.median(
        estimates.draws([plans[f"zero3 in 4 stages, prefetch 1, {num} micro-batches"]])[0], axis=0
    )
    assert memory == pytest.approx(30e6 * in_flight / num, rel=0.05)
