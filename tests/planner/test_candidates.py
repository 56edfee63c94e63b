"""Which plans there are, and which are compiled at the same time."""

import dataclasses

import jaxzero as jz
from jaxzero._activations import Point
from jaxzero._planner.candidates import enumerate_candidates, tells_more, with_budgets

CLUSTER = jz.Cluster(nodes=2, local=2, device="h200", link=25e9)


def test_each_form_of_the_loss_has_a_program_before_one_has_two():
    plans = {x.name: x for x in enumerate_candidates(CLUSTER, ("",), (1,), False)}
    first, second = plans["zero3, prefetch 1"], plans["hsdp, prefetch 1"]
    other = dataclasses.replace(second, loss="other")
    assert tells_more(second, [first], [], {""})
    assert not tells_more(first, [first], [], {""})  # its program is being compiled
    assert not tells_more(second, [first], [], {"", "other"})
    assert tells_more(other, [first], [], {"", "other"})
    assert tells_more(second, [first], [other], {"", "other"})
    assert tells_more(second, [], [first], {"", "other"})


def test_a_plan_with_budgets():
    """From the least to the most; without prefetch only the least is tried."""
    points = [Point(10**6, 2.0, 5), Point(3 * 10**8, 1.0, 5), Point(2 * 10**9, 0.0, 5)]
    plans = {x.name: x for x in enumerate_candidates(CLUSTER, ("",), (2,), False)}
    plan = plans["zero3, prefetch 1, 2 micro-batches"]
    found = dict(with_budgets(plan, points))
    assert [x.activation_budget for x in found] == [0, 3 * 10**8, 2 * 10**9]
    assert [*found.values()] == points
    assert [x.name.removeprefix(plan.name) for x in found] == [
        ", least activations",
        ", 0.3 GB of activations",
        ", 2 GB of activations",
    ]
    for each in found:
        assert eval(each.code, {"jz": jz, "dataclasses": dataclasses}) == each.config
        assert len({each.family, plan.family}) == 2
    waits = plans["zero3, prefetch 0, 2 micro-batches"]
    assert [x.activation_budget for x, _ in with_budgets(waits, points)] == [0]
