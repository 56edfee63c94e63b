"""The plan as a timeline."""

import dataclasses
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxzero as jz
from jaxzero._plan import Plan
from jaxzero._program import Loop
from jaxzero._report.timeline import Span, activation_bytes, live_bytes, spans
from tests.plan import test_schedule


def test_spans_of_unrolled_layers():
    found = spans(test_schedule._plan("unrolled", "zero3", jz.CommSchedule()))
    gathers = [span for span in found if span.action == "gather"]
    layer = 4 * (2 * test_schedule.WIDTH**2 + test_schedule.WIDTH)
    assert [span.num_bytes for span in gathers[1:5]] == [layer] * test_schedule.LAYERS
    assert all(span.start <= span.needed <= span.stop for span in found)
    for one, other in zip(gathers, gathers[1:], strict=False):
        assert other.start <= one.stop  # sent while the unit before is in use
        assert one.stop < other.stop
    live = live_bytes(test_schedule._plan("unrolled", "zero3", jz.CommSchedule()))
    assert live[0].max() <= 2 * layer
    assert live.min() == 0


def test_what_crosses_iterations_lives_for_the_whole_body():
    found = spans(test_schedule._plan("scanned", "zero3", jz.CommSchedule()))
    late = [span for span in found if span.sent == "in the iteration after"]
    assert len(late) == 1 and late[0].trips == test_schedule.LAYERS
    backward = next(s for s in found if s.region == late[0].region and s.action == "gather")
    assert (late[0].start, late[0].stop) == (backward.start, backward.stop)


@pytest.mark.parametrize("model", ["scanned", "unrolled"])
def test_live_bytes_are_those_of_the_spans(model):
    plan = test_schedule._plan(model, "zero3", jz.CommSchedule())
    held = sum(span.num_bytes * span.alive for span in spans(plan))
    assert live_bytes(plan).sum() == held == sum(x.num_bytes * len(_places(x)) for x in spans(plan))


def _places(span: Span) -> list[int]:
    return [place for place in range(1000) if span.start <= place <= span.stop]


def _budgeted(budget: int | None) -> Plan:
    def loss(params, rows):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), rows, params)
        return jnp.sum(x)

    activations = None if budget is None else jz.Activations(budget_bytes=budget)
    config = dataclasses.replace(jz.zero3(), activations=activations)
    zero = jz.Zero(jz.make_mesh(2, simulate=4), config)
    params = zero.abstract(lambda: jnp.ones((4, 32, 32)))
    return zero.plan(loss, params, jax.ShapeDtypeStruct((64, 32), jnp.float32))


@pytest.mark.parametrize("budget", [None, 0, 10**9])
def test_activations_live_from_the_loop_that_makes_them_to_the_one_that_reads_them(
    budget, monkeypatch
):
    """What crosses from forward to backward is what the plan keeps."""
    # A product of so narrow a layer takes less time than copies into a stack and out of it.
    monkeypatch.setattr("jaxzero._activations.min_cut.STACKED", 0.0)
    plan = _budgeted(budget)
    activations = activation_bytes(plan)
    loops = [i for i, x in enumerate(plan.top.block.operations) if isinstance(x, Loop)]
    assert len(loops) == 2
    first, last = (
        i + (k and len(plan.top.loops[loops[0]].body.block.operations)) for k, i in enumerate(loops)
    )
    last += len(plan.top.loops[loops[1]].body.block.operations)
    held = np.flatnonzero(activations)
    assert (held[0], held[-1]) == (first, last)
    # Of 4 layers `[rows of a device, 32]`: what each reads, its tanh, and the derivative of that,
    # which JAX 0.12 computes of the tanh in backward.
    a_layer = 64 // 4 * 32 * 4
    values = {None: (2, 3), 0: (1,), 10**9: (2,)}[budget]
    assert activations.max() // a_layer in [4 * num for num in values]


def test_the_report_prints_and_holds_it():
    zero = test_schedule._zero("zero3", jz.CommSchedule())
    plan = test_schedule._plan("scanned", "zero3", jz.CommSchedule())
    params = zero.abstract(test_schedule._init, test_schedule.jax.random.key(0))
    report = zero.report(params, plan=plan)
    out = io.StringIO()
    report.print("timeline", console=Console(file=out, width=80))
    assert "  layers (3 leaves)\n" in out.getvalue()
    table = out.getvalue().split("---\n")[1].splitlines()
    assert len(report.as_dict()["timeline"]) == len(spans(plan)) == len(table) // 2


def test_a_picture_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from jaxzero.commands._report import plot_plan

    plan = test_schedule._plan("scanned", "zeropp", jz.CommSchedule())
    plot_plan(plan, tmp_path / "plan.png", title="a step")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
