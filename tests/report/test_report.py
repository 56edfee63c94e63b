"""The report's bytes are those that the arrays take; its text fits 80 columns, with whole names."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import optax
import pytest

import jaxzero as jz
from jaxzero import cli
from tests.plan import test_schedule

from .printed import printed, readable, spans, waits

pytestmark = pytest.mark.standard_promotion  # optax
_NEED_A_PLAN = ["gathers", "reductions", "waits", "traffic", "parts", "host", "timeline"]
DETAILS = ["leaves", "state", *_NEED_A_PLAN]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_those_of_the_arrays(stage):
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:6]), jz.ZeroConfig(stage=stage))
    tree = {"w": np.ones((7, 5), np.float32), "b": np.ones(12, np.float32), "s": np.float32(1)}
    params = zero.shard(tree)
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    report = zero.report(params, opt_state)
    for kind, arrays in (("parameters", params), ("optimizer state", opt_state)):
        leaves = jax.tree.leaves(arrays)
        held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert report.device_bytes(kind) == held
    assert report.total_bytes("parameters") == sum(x.nbytes for x in tree.values())
    assert report.as_dict()["bytes"]["parameters"]["per_device"] == report.device_bytes(
        "parameters"
    )


@functools.cache
def _report(model="scanned", config="zeropp", prefetch=1):
    zero = test_schedule._zero(config, jz.CommSchedule(prefetch=prefetch))
    params = zero.init(test_schedule._init, jax.random.key(0))
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    tokens = np.zeros((16, 8), np.int32)
    return zero.report(params, opt_state, zero.plan(test_schedule.MODELS[model], params, tokens))


def test_five_lines_answer_the_questions():
    report = _report()
    device, node, whole, wait, details = printed(report)
    for kind in ("parameters", "gradients", "optimizer state"):
        assert f"{readable(report.device_bytes(kind))} {kind}" in device
    traffic = report.traffic
    assert f"{readable(traffic.node_bytes)} per step" in node
    parts = {purpose: traffic.node_bytes_for(purpose) for purpose in ("weights", "gradients")}
    for purpose, size in parts.items():
        assert f"{readable(size)} {purpose}" in node
    assert sum(parts.values()) + traffic.node_bytes_for("other") == traffic.node_bytes
    layer = readable(4 * (2 * test_schedule.WIDTH**2 + test_schedule.WIDTH))
    assert layer == "8.12 KiB"
    assert re.search(r"16\.12 KiB at most; largest layers \(3 leaves\), for 6 of \d+ ops", whole)
    assert "all-gather of embedding, 8.00 KiB, nothing to overlap with; 1 more" in wait
    assert details.split(maxsplit=1) == ["Details", " ".join(DETAILS)]
    assert repr(report).splitlines() == str(report).splitlines() == printed(report)


def test_one_node_says_what_enters_a_device():
    zero = jz.Zero(jz.make_mesh(1))
    params = zero.shard({"kernel": np.ones((7, 5), np.float32)})
    plan = zero.plan(lambda p, x: (x @ p["kernel"]).mean(), params, np.ones((8, 7), np.float32))
    report = zero.report(params, plan=plan)
    size = readable(report.traffic.amount().device_bytes)
    assert printed(report)[1].startswith(f"Into device   {size} per step: ")


def test_leaves_that_are_never_split_are_named_as_such():
    report = _report(config="stage 2")
    size = readable(report.device_bytes("parameters"))
    assert printed(report)[2] == f"Whole         {size} always (5 leaves)"


def test_without_a_plan_it_says_what_to_pass():
    zero = jz.Zero(jz.make_mesh(2))
    report = zero.report(zero.shard({"kernel": np.ones((7, 5), np.float32)}))
    lines = printed(report)
    assert len(lines) == 5 and lines[4].split(maxsplit=1) == ["Details", "leaves state"]
    assert all("plan=zero.plan(loss_fn, params, batch)" in lines[i] for i in (1, 3))
    with pytest.raises(ValueError, match="'gathers' .* no plan .* Pass `plan=zero.plan"):
        report.print("gathers")
    assert any("dim 0" in line for line in printed(report, "leaves"))


def test_an_unknown_detail_lists_those_there_are():
    with pytest.raises(ValueError, match=f"one of {', '.join(DETAILS)}, .* got 'leafs'"):
        _report().print(["leaves", "leafs"])


def test_the_command_knows_all_details(capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", "--help"])
    assert f"{{{','.join(DETAILS)}}}" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("model", ["scanned", "unrolled"])
def test_every_line_fits_and_every_name_is_whole(model, width):
    report = _report(model)
    lines = printed(report, DETAILS, width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    text = " ".join(line.strip() for line in lines)
    for row in report.rows:
        if row.kind == "parameters":
            assert f" {row.path} " in text
    tables = [printed(report, name, width)[5:] for name in DETAILS]
    assert list(itertools.chain(*tables)) == lines[5:]  # each detail is a table of its own


def test_long_names_take_their_own_lines():
    zero = jz.Zero(jz.make_mesh(2))
    name = "a_rather_long_name_of_a_module." * 2 + "kernel"
    longer = "_".join(["very"] * 30)
    tree = {name: np.ones((8, 8), np.float32), longer: np.ones((8, 9), np.float32)}
    params = zero.shard(tree)
    plan = zero.plan(
        lambda p, x: (x @ p[name] @ p[longer]).mean(), params, np.ones((8, 8), np.float32)
    )
    lines = printed(zero.report(params, plan=plan), DETAILS)
    assert len([line for line in lines[:5] if line]) == 5
    assert max(map(len, lines)) <= 80
    assert name in lines
    assert longer in "".join(lines)


def test_buckets_hold_the_bytes_of_the_plan():
    report = _report("unrolled", "zero3")
    lines = printed(report, "gathers")
    some = [step for step in report.plan.steps if step.action == "gather"]
    total = readable(sum(step.num_bytes * step.trips for step in some))
    num = len({(step.path, step.group) for step in some})
    assert lines[6] == f"All-gathers: {num} buckets, {total} whole in a run."


def test_a_plan_without_prefetch_waits_for_everything():
    report = _report(prefetch=0)
    gathers = [x for x in waits(report) if x.action == "all-gather"]
    found = [(x.region, x.names, x.trips, x.size) for x in gathers]
    assert sorted(found) == sorted(
        (x.region, x.names, x.trips, readable(x.num_bytes))
        for x in spans(report)
        if x.action == "gather"
    )
    assert len(waits(_report())) < len(waits(report))


def test_what_is_prefetched_waits_for_nothing():
    exposed = {(wait.action, wait.names) for wait in waits(_report())}
    assert exposed == {("all-gather", ("embedding",)), ("reduce-scatter", ("embedding",))}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_slices_made_before_the_program_are_exposed(prefetch):
    """Without prefetch; with it, the first micro-batch makes them, layer by layer."""
    zero = test_schedule._zero("hpz", jz.CommSchedule(prefetch=prefetch))
    params = zero.init(test_schedule._init, jax.random.key(0))
    tokens = np.zeros((16, 8), np.int32)
    plan = zero.plan(test_schedule.MODELS["scanned"], params, tokens, microbatches=2)
    report = zero.report(params, plan=plan)
    before = [wait.size for wait in waits(report) if wait.region == "before forward"]
    assert before == ([] if prefetch else [readable(plan.slice_bytes)])
    lines = printed(report, "gathers")
    first = "In the first of 2 micro-batches; the others gather from node slices (hpZ)."
    assert (first if prefetch else "In each of 2 micro-batches.") in lines
    assert ("in each later micro-batch" in str(plan)) == bool(prefetch)


def test_rows_stay_plain_data():
    report = _report()
    keys = {"num_devices", "bytes", "leaves", "traffic", "host_traffic", "timeline"}
    assert set(report.as_dict()) == keys
    assert dataclasses.asdict(report.rows[0]) == report.as_dict()["leaves"][0]
