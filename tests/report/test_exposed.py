"""A plan as a timeline: where operations are, how long buckets live, and which are exposed."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

import jaxzero as jz

from .printed import spans, waits

_OF_HEAD = (("gather", "forward"), ("reduce", "backward"))


def _init(key):
    return {"head": jnp.ones((16, 8)), "layers": jnp.ones((4, 16, 16)), "table": jnp.ones((8, 16))}


def _loss(params, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ params["table"], params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def _report(config: jz.ZeroConfig):
    zero = jz.Zero(jz.make_mesh(2), config)
    params = zero.abstract(_init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    return zero.report(params, plan=zero.plan(_loss, params, rows))


def test_a_loop_takes_the_operations_of_one_iteration():
    all_spans = spans(_report(jz.zero3()))
    found = {(span.action, span.names[0], span.region.split()[0]): span for span in all_spans}
    of_layers = [span for span in all_spans if span.names == ("layers[i]",)]
    forward = of_layers[0]
    backward = [span for span in of_layers if span.region != forward.region]
    head, its_sum = (found[action, "head", region] for action, region in _OF_HEAD)
    assert found["gather", "table", "forward"].start == 0  # before the first operation
    assert found["gather", "table", "forward"].stop < forward.start <= forward.stop < head.needed
    assert {span.action for span in backward} == {"gather", "reduce"}
    assert its_sum.stop < min(span.start for span in backward)
    assert max(span.stop for span in backward) < found["reduce", "table", "backward"].start


def _exposed(config: jz.ZeroConfig) -> list[tuple[str, str, str, int]]:
    found = waits(_report(config))
    return sorted(
        (wait.action, wait.region.split()[0], wait.names[0], wait.trips) for wait in found
    )


def test_what_begins_and_ends_a_step_is_exposed_and_nothing_else():
    # All else is sent beside a product: layers beside those of the layer before or after.
    ends = [("all-gather", "forward", "table", 1), ("reduce-scatter", "backward", "table", 1)]
    assert _exposed(jz.zero3()) == ends
    hpz = jz.zero3(hpz=jz.HpZ(codec=None))
    assert _exposed(hpz) == ends  # slices are kept as they are gathered, not before the step


def test_slices_that_a_loop_keeps_are_not_gathered_before_the_step():
    def loss(params, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean(x**2)

    zero = jz.Zero(jz.make_mesh(2), jz.zero3(hpz=jz.HpZ(codec=None)))
    params = zero.abstract(lambda: {"layers": jnp.ones((4, 16, 16))})
    plan = zero.plan(loss, params, jax.ShapeDtypeStruct((16, 16), jnp.float32))
    assert plan.slice_bytes > 0
    # What is exposed is the first iteration's gather and the last iteration's reduction.
    found = waits(zero.report(params, plan=plan))
    assert {(x.action, x.region.split()[0], x.names[0]) for x in found} == {
        ("all-gather", "before", "layers[i]"),
        ("reduce-scatter", "after", "layers[i]"),
    }


def test_without_prefetch_every_gather_is_exposed():
    config = jz.zero3()
    config = dataclasses.replace(config, schedule=jz.CommSchedule(prefetch=0))
    gathers = [
        (where, name, trips)
        for action, where, name, trips in _exposed(config)
        if "gather" in action
    ]
    assert gathers == [
        ("backward", "head", 1),
        ("forward", "head", 1),
        ("forward", "table", 1),
        ("loop", "layers[i]", 4),
        ("loop", "layers[i]", 4),
    ]
