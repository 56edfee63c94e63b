"""What a search expects of plans: against formulas, and in which direction programs move it."""

import dataclasses

import pytest

import jaxzero as jz
from jaxzero._planner.bounds import Bounds
from jaxzero._planner.candidates import enumerate_candidates
from jaxzero._planner.estimates import Estimates

CLUSTER = jz.Cluster(nodes=2, local=2, device="h100", link=1e9, host_memory=1e12)
PLANS = list(enumerate_candidates(CLUSTER, ("",), (1, 2, 4), True))
BOUNDS = Bounds(
    memory=1000,
    host_memory=0,
    compute=2.0,
    node=1.0,
    local=1.0,
    update=0.5,
    node_bytes=0,
    host_bytes=0,
    full_gradients=4_000_000,
)


def plan(name):
    return next(each for each in PLANS if each.name == name)


def estimates(*observed):
    """After programs of plans, each with its seconds and bytes of temporaries."""
    found = Estimates(dict.fromkeys(PLANS, BOUNDS), CLUSTER)
    for name, seconds, size in observed:
        found.observe(plan(name), seconds, size)
    return found


def test_one_program_tells_the_activations_of_all():
    """30 MB of them; half of the gradients that a preset splits, and their sums of 0.7 and 1.4."""
    found = estimates(("zero3, prefetch 1", 4.0, 30_500_000))
    for name, expected in [
        ("zero3, prefetch 1, 4 micro-batches", 30 / 4 + 1.2),
        ("hsdp, prefetch 1, 2 micro-batches", 30 / 2 + 2 * 1.2),
        ("zeropp, prefetch 1, 4 micro-batches", 30 / 4 + 2 * 1.9),
        ("ddp, 2 micro-batches", 30 / 2 + 4 * 1.2),
    ]:
        assert found.temporaries(plan(name)) == pytest.approx(1e6 * expected)


def test_programs_move_what_is_expected_of_others():
    other = plan("hsdp, prefetch 1, 2 micro-batches")
    one = "zero3, prefetch 1", 4.0, 50_000_000
    before = estimates(one).temporaries(other)
    more = estimates(one, ("zero3, prefetch 1, 2 micro-batches", 4.0, 50_000_000))
    assert more.temporaries(other) > before > 0


def test_a_form_of_the_loss_without_a_program_may_need_no_temporaries():
    other = dataclasses.replace(plan("zero3, prefetch 1"), loss="other")
    bounds = {**dict.fromkeys(PLANS, BOUNDS), other: BOUNDS}
    found = Estimates(bounds, CLUSTER)
    found.observe(plan("zero3, prefetch 1"), 4.0, 50_000_000)
    assert not found.knows("other") and found.temporaries(other) == 0
    assert found.seconds(other) == found.seconds(plan("zero3, prefetch 1"))


def test_without_prefetch_times_add_up():
    """Products take 2 s at the least, here 3; links 1 s each, with which nothing overlaps."""
    found = estimates(("zero3, prefetch 0", 5.0, 5_000_000))
    assert found.seconds(plan("zeropp, prefetch 0")) == pytest.approx(5.0, rel=0.02)
    # A fifth of the links is exposed with prefetch, and more of quantized messages.
    assert found.seconds(plan("zero3, prefetch 1")) == pytest.approx(3.4, rel=0.02)
    assert found.seconds(plan("zeropp, prefetch 1")) == pytest.approx(3.9, rel=0.02)


def test_full_compiles_tell_how_much_slower_proxies_are():
    found = estimates(("zero3, prefetch 1", 4.0, 1), ("zeropp, prefetch 1", 5.0, 1))
    assert found.full_to_proxy == 1
    expected = found.seconds(plan("ddp"))
    for name, seconds in (("zero3, prefetch 1", 3.6), ("zeropp, prefetch 1", 4.0)):
        found.observe(plan(name), seconds, 1, is_proxy=False)
    assert found.full_to_proxy == pytest.approx((0.9 + 0.8) / 2)
    assert found.seconds(plan("ddp")) == expected  # still that of a proxy


def test_no_step_is_below_its_bound():
    found = estimates(("zero3, prefetch 1", 1e-9, 1))
    assert min(map(found.seconds, PLANS)) >= BOUNDS.gradients
    assert min(map(found.temporaries, PLANS)) >= 0


@pytest.mark.parametrize("name", ["zero3, prefetch 1", "zeropp, prefetch 0, 2 micro-batches"])
def test_which_plans_have_one_program(name):
    one = plan(name)
    same = [each for each in PLANS if each.program == one.program]
    assert [each.offload for each in same] == ["", "optimizer"]
    assert [each.has_host_arrays for each in same] == [False, False]
    assert dataclasses.replace(one, microbatches=3).program != one.program
