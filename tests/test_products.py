"""Products that are only transposed, with their factors exchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxzero._products import in_wanted_order
from jaxzero._program import Constant, Loop, trace

LEFT, RIGHT = (2, 3, 4, 5), (3, 5, 6, 2)
DIMS = (((1,), (0,)), ((0,), (3,)))  # a sum over 3, for each of 2: [2, 4, 5, 5, 6]
EXCHANGED = (0, 3, 4, 1, 2)


def run(block, *args):
    """The outputs of a block without loops."""
    values = dict(zip(block.inputs, args, strict=True))
    for operation in block.operations:
        inputs = [x.value if isinstance(x, Constant) else values[x] for x in operation.inputs]
        values.update(zip(operation.outputs, operation.bind(inputs), strict=True))
    return [values[x] for x in block.outputs]


def names(block):
    return [operation.name for operation in block.operations]


def numbers(shape, seed):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def both(function):
    """Its operations as they were traced, and as they are then; both do the same."""
    left, right = numbers(LEFT, 0), numbers(RIGHT, 1)
    block, _ = trace(function, left, right)
    changed = in_wanted_order(block)
    for want, got in zip(run(block, left, right), run(changed, left, right), strict=True):
        np.testing.assert_array_equal(want, got)  # sums of small integers are exact
    return block, changed


@pytest.mark.parametrize("precision", [None, ("default", "highest")])
def test_factors_are_exchanged(precision):
    def function(left, right):
        product = lax.dot_general(left, right, DIMS, precision=precision)
        return lax.transpose(product, EXCHANGED)

    block, changed = both(function)
    assert names(block) == ["dot_general", "transpose"] and names(changed) == ["dot_general"]
    left, right = numbers(LEFT, 0), numbers(RIGHT, 1)
    want = np.einsum("bkij,kmnb->bmnij", left, right)
    np.testing.assert_array_equal(run(changed, left, right)[0], want)
    before, after = (x.operations[0].equation.params["precision"] for x in (block, changed))
    assert after == (before and before[::-1])


@pytest.mark.parametrize("order", [(0, 1, 2, 4, 3), (0, 4, 3, 1, 2), (0, 4, 1, 2, 3)])
def test_other_orders_stay(order):
    block, changed = both(lambda x, y: lax.transpose(lax.dot_general(x, y, DIMS), order))
    assert names(changed) == names(block) == ["dot_general", "transpose"]


def test_what_is_also_used_as_it_is_stays():
    def function(left, right):
        product = lax.dot_general(left, right, DIMS)
        return product, lax.transpose(product, EXCHANGED)

    block, changed = both(function)
    assert names(changed) == names(block) == ["dot_general", "transpose"]


def test_algorithms_stay_which_name_a_type_for_each_side():
    def function(left, right):
        algorithm = lax.DotAlgorithm(jnp.bfloat16, jnp.float32, jnp.float32)
        return lax.transpose(lax.dot_general(left, right, DIMS, precision=algorithm), EXCHANGED)

    block, _ = trace(function, numbers(LEFT, 0), numbers(RIGHT, 1))
    assert names(in_wanted_order(block)) == ["dot_general", "transpose"]


def test_no_gradient_of_a_weight_is_a_transposed_product_in_loops_either():
    def loss(stack, head, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        return jnp.sum(x @ head)

    gradients = jax.grad(loss, argnums=(0, 1))
    block, _ = trace(gradients, jnp.ones((3, 8, 8)), jnp.ones((8, 4)), jnp.ones((2, 8)))

    def transposed(block):
        made = {op.outputs[0] for op in block.operations if op.name == "dot_general"}
        here = sum(op.name == "transpose" and op.source in made for op in block.operations)
        return here + sum(transposed(op.body) for op in block.operations if isinstance(op, Loop))

    assert transposed(block) == 2 and transposed(in_wanted_order(block)) == 0
