"""Values that are known once a share of a loop body's matrix products is done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero._plan.layer_memory import known_after, work_done
from jaxzero._program import Value

LAYERS, WIDTH, ROWS = 4, 16, 8
NAMES = ("first", "second", "third", "fourth")


def backward_body(layer):
    """The plan of the backward loop's body in a step that scans `layer`."""

    def loss(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, params)
        return jnp.mean(x**2)

    zero = jz.Zero(jz.make_mesh(2))
    params = zero.abstract(lambda: {name: jnp.zeros((LAYERS, WIDTH, WIDTH)) for name in NAMES})
    plan = zero.plan(loss, params, jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32))
    return max(plan.top.loops.items())[1].body


def products(x, weights):
    for name in NAMES:
        x = jnp.tanh(x @ weights[name])
    return x


def sums(x, weights):
    return x + sum(w.sum() for w in weights.values())


@pytest.fixture(scope="module")
def body():
    return backward_body(products)


def test_work_is_that_of_all_operations_so_far(body):
    work = work_done(body.block)
    assert list(np.diff(work)) == [op.products for op in body.block.operations[1:]]
    assert work[-1] == sum(op.products for op in body.block.operations)
    # The last product is not computed again; then each has two transposes.
    assert work[-1] >= (3 + 2 * 4) * ROWS * WIDTH**2


def made_at(body, value):
    (index,) = (i for i, op in enumerate(body.block.operations) if value in op.outputs)
    return index


@pytest.mark.parametrize("share", [0.0, 1 / 4, 1 / 2, 5 / 6])
def test_a_value_is_the_first_product_that_is_kept_once_the_share_is_done(body, share):
    value = known_after(body, share)
    at, work = made_at(body, value), work_done(body.block)
    assert work[at] >= share * work[-1]
    reduced, views = body.gradients.reduces, body.uses.views
    between = [
        op.outputs[0]
        for op, done in zip(body.block.operations[:at], work, strict=False)
        if op.products and done >= share * work[-1]
    ]
    assert all(x in reduced or x in views for x in between)
    assert value not in reduced and body.block.operations[at].products


def test_a_larger_share_is_done_later(body):
    places = [made_at(body, known_after(body, share)) for share in (0.0, 1 / 4, 1 / 2, 5 / 6)]
    assert places == sorted(places) and places[0] < places[-1]


def work_behind(body, value):
    """The number of multiplications of the operations that `value` is computed by."""
    waiting, behind = [value], set()
    while waiting:
        value = waiting.pop()
        for index, op in enumerate(body.block.operations):
            if value in op.outputs and index not in behind:
                behind.add(index)
                waiting += [x for x in op.inputs if isinstance(x, Value)]
    return sum(body.block.operations[index].products for index in behind)


@pytest.mark.parametrize("share", [0.0, 1 / 8, 1 / 4, 1 / 2])
def test_in_any_order_only_the_work_behind_a_value_counts(body, share):
    value = known_after(body, share, in_any_order=True)
    total, at = work_done(body.block)[-1], made_at(body, value)
    assert work_behind(body, value) >= share * total
    reduced, views = body.gradients.reduces, body.uses.views
    before = [op.outputs[0] for op in body.block.operations[:at] if op.products]
    kept = [x for x in before if x not in reduced and x not in views]
    assert all(work_behind(body, x) < share * total for x in kept)


def test_no_order_of_a_body_has_all_its_work_behind_one_value(body):
    # The products that make the gradients of weights are behind no other value.
    assert known_after(body, 1.0, in_any_order=True) is None


def test_a_body_without_products_has_no_such_value():
    assert known_after(backward_body(sums), 1 / 4) is None
