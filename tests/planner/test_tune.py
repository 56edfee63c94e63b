"""What `jz.tune` answers where nothing is compiled: plans ranked by bounds, notes and errors."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero import tune

from .small_job import BATCH, CLUSTER, absent, init, loss

SLOW = dataclasses.replace(absent(1e9), link=1.25e6)
WAITING = jz.diloco(every=10)
STREAMING = jz.streaming_diloco(every=20, fragments=2, delay=5)


@pytest.fixture
def annotations_unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users


def test_without_a_compiler_plans_are_ranked_by_bounds():
    device = jz.Device(
        name="mine",
        flops=1e12,
        memory_bandwidth=1e11,
        memory=1e9,
        local_link=1e10,
        host_link=1e10,
    )
    cluster = jz.Cluster(nodes=2, local=2, device=device, link=1e9)
    plans = tune(loss, init, BATCH, cluster, quantized=False, cache=None)
    assert {row.stage for row in plans.rows} == {"bound"}
    assert "XLA has no compiler for mine here" in plans.notes[0]
    assert "ranked by lower bounds alone" in plans.notes[0]
    zero = jz.Zero(jz.make_mesh(2, simulate=4), plans.config)
    params = zero.abstract(init)
    report = zero.report(params, zero.init_optimizer(optax.adamw(1e-4), params))
    assert plans.best.memory == sum(report.device_bytes(kind) for kind in report.kinds)
    with pytest.raises(
        ValueError, match="No plan fits in 1e-06 GB of a device. .* without any activation"
    ):
        _ = tune(loss, init, BATCH, cluster, memory=1e3, quantized=False, cache=None).best


def test_without_a_compiler_no_plan_has_arrays_in_host_memory():
    mine = dataclasses.replace(CLUSTER.kind, name="mine", target=None)
    cluster = dataclasses.replace(CLUSTER, device=mine, host_memory=1e12)
    plans = tune(loss, init, BATCH, cluster, quantized=False, microbatches=(1,), cache=None)
    assert not [row for row in plans.rows if row.candidate.offload]
    assert plans.notes[1] == (
        "8 plans with arrays in host memory were left out: without a compiler they have no bounds"
    )


def test_a_plan_is_made_for_one_kind():
    with pytest.raises(NotImplementedError, match="nodes of different devices"):
        tune(loss, init, BATCH, jz.Cluster(nodes=2, local=2, device=("h100", "a100")))


def test_without_a_compiler_there_are_no_budgets():
    options = {"quantized": False, "microbatches": (1,), "cache": None, "layers": None}
    found = tune(loss, init, BATCH, absent(1e9), **options)
    assert {x.candidate.activation_budget for x in found.rows} == {None}


def test_stages_win_where_links_are_slow():
    options = {"quantized": False, "microbatches": (1, 2, 4), "cache": None}
    plans = tune(loss, init, BATCH, SLOW, **options)
    assert plans.stages == 2
    without = tune(loss, init, BATCH, SLOW, layers=None, **options)
    assert without.stages is None
    assert without.best.seconds > 1.3 * plans.best.seconds
    assert "make_mesh(nodes=2)" in without.code
    # The answer, pasted, is a step.
    code = plans.code.replace("nodes=2,", "nodes=2, simulate=4,")
    names = {"jz": jz, "dataclasses": dataclasses, "loss_fn": loss}
    exec(code, names)
    params = names["zero"].init(init)
    value, _ = names["loss_and_grads"](params, jnp.ones(BATCH.shape))
    np.testing.assert_allclose(value, loss(init(), jnp.ones(BATCH.shape)), rtol=1e-6)


def test_what_stages_refuse_is_left_out_with_the_reason():
    def unrolled(params, batch):
        for w, act in zip(params["layers"], [jnp.tanh, jnp.sin] * 2, strict=True):
            batch = act(batch @ w)
        return jnp.mean((batch @ params["head"]) ** 2)

    options = {"quantized": False, "microbatches": (1, 2), "cache": None}
    plans = tune({"a loop": unrolled, "a scan": loss}, init, BATCH, SLOW, **options)
    assert (plans.stages, plans.loss) == (2, "a scan")
    (note,) = [x for x in plans.notes if "left out" in x]
    assert note.startswith("4 plans, `zero3 in 2 stages, prefetch 1, 2 micro-batches, a loop`")
    assert "The layers of `jz.Stages` are unrolled, and cannot run as one" in note
    plans = tune(loss, init, BATCH, SLOW, layers="blocks", **options)
    assert plans.stages is None
    (note,) = [x for x in plans.notes if "left out" in x]
    assert "No leaf of the parameters is a stack of layers" in note


def test_plans_say_which_local_steps():
    plans = tune(
        loss,
        init,
        BATCH,
        dataclasses.replace(absent(1e9), link=1e6),
        quantized=False,
        microbatches=(1,),
        local_steps=[WAITING, STREAMING],
        cache=None,
    )
    assert plans.local_steps is STREAMING
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), plans.config)
    assert zero.local_steps(lambda *args: (*args, {}), plans.local_steps).method == STREAMING
    together = [row for row in plans.rows if row.candidate.local_steps is None]
    assert together
    assert min(row.seconds for row in together) > plans.best.seconds


def test_by_default_there_are_no_local_steps():
    plans = tune(loss, init, BATCH, absent(1e9), microbatches=(1,), quantized=False, cache=None)
    assert plans.local_steps is None
    assert not [row for row in plans.rows if row.candidate.local_steps is not None]


def test_ctrl_c_before_the_first_bound():
    def stop(line):
        raise KeyboardInterrupt

    plans = tune(loss, init, BATCH, absent(1e9), cache=None, progress=stop)
    with pytest.raises(ValueError, match="There are no plans: the search was interrupted before"):
        _ = plans.best


def test_arguments(annotations_unchecked):
    with pytest.raises(ValueError, match="`batch` has 6 rows, which 4 devices cannot share"):
        tune(loss, init, jax.ShapeDtypeStruct((6, 64), jnp.float32), CLUSTER)
    for argument, value in (("memory", -1.0), ("memory", "80GB"), ("budget", 0), ("budget", "x")):
        with pytest.raises(ValueError, match=f"`{argument}` is a number of .*, above 0; got"):
            tune(loss, init, BATCH, CLUSTER, **{argument: value})
    with pytest.raises(ValueError, match="`microbatches` must be integers above 0; got "):
        tune(loss, init, BATCH, CLUSTER, microbatches=(0, 1))
    with pytest.raises(ValueError, match="`loss_fn` is an empty dict"):
        tune({}, init, BATCH, CLUSTER)


@pytest.mark.parametrize(
    ("cluster", "given", "message"),
    [
        (jz.Cluster(nodes=1, local=2), WAITING, "`local_steps` .* `cluster` has one node"),
        (CLUSTER, 30, "`local_steps` must be a `jz.LocalSteps`, .*; got 30"),
        (CLUSTER, [WAITING, "diloco"], "or a sequence of them; got"),
    ],
)
def test_local_steps_that_are_refused(cluster, given, message, annotations_unchecked):
    with pytest.raises(ValueError, match=message):
        tune(loss, init, BATCH, cluster, local_steps=given)


def test_rows_that_devices_cannot_share():
    few = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    with pytest.raises(ValueError, match="4 rows, which 8 devices cannot share evenly.* need one"):
        tune(loss, init, few, jz.Cluster(nodes=2, local=4, device="mi300x"))
