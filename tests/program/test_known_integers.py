"""Integers that are known while tracing are those that the program computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxzero._program import trace
from jaxzero._program.uniform import known_integers


def _counters(x):
    i = jnp.arange(2, 8)
    chosen = jnp.where(i < 4, i, i - 10), jnp.clip(i, 3, 5)
    return i[::-1], i[1:5], (-i).reshape(2, 3), jnp.broadcast_to(i[:, None], (6, 2)), *chosen


def _by_columns(x):
    i = jnp.arange(6).reshape(2, 3)
    return i.reshape(6, order="F"), lax.reshape(i, (3, 2), (1, 0))


def _scan(x):
    def body(carry, i):
        x, j = carry
        return (jnp.tanh(x), 2 * j - i), (i + 1, j, i == j, jnp.sum(x))

    return lax.scan(body, (x, jnp.int32(3)), jnp.arange(5))[1][:3]


def _reversed(x):
    return lax.scan(lambda j, i: (j + i, (i, j)), jnp.int32(1), jnp.arange(4), reverse=True)[1]


def _nested(x):
    def outer(j, i):
        return j + 1, lax.scan(lambda k, _: (k + i, k), j, length=3)[1]

    return lax.scan(outer, jnp.int32(0), jnp.arange(4))[1]


def _wraps(x):
    return (jnp.arange(3, dtype=jnp.int32) + np.int32(2**31 - 2),)


def _wraps_in_a_carry(x):
    return (lax.scan(lambda j, _: (j * 1103515245 + 12345, j), jnp.int32(1), length=5)[1],)


def _of_one_layer(x):
    return lax.scan(lambda j, i: (j + i, (i, j)), jnp.int32(1), jnp.arange(2, 3))[1]


FUNCTIONS = [
    *(_counters, _by_columns, _scan, _reversed, _nested),
    *(_wraps, _wraps_in_a_carry, _of_one_layer),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_what_the_program_computes(function):
    x = jnp.ones(4)
    block, _ = trace(function, x)
    known = known_integers(block, {})
    outputs = jax.tree.leaves(jax.jit(function)(x))
    assert len(outputs) == len(block.outputs)
    for value, want in zip(block.outputs, outputs, strict=True):
        assert known[value].dtype == want.dtype
        np.testing.assert_array_equal(known[value], want)


def _of_the_input(x):
    i = jnp.argsort(x)
    return i, i + 1, lax.scan(lambda j, i: (j + i, j), jnp.int32(0), i)[1]


def _of_the_device(x):
    return (lax.axis_index("data") + jnp.arange(3),)


def _too_long(x):
    return lax.scan(lambda j, _: (j + 1, j), jnp.int32(0), length=10**5)


@pytest.mark.parametrize("function", [_of_the_input, _of_the_device, _too_long])
def test_others_are_not_known(function):
    def on_each(x):
        block, _ = trace(function, x[0])
        known.append(known_integers(block, {}).keys() & {*block.outputs})
        return x

    known = []
    jax.make_jaxpr(jax.vmap(on_each, axis_name="data"))(jnp.ones((2, 1, 4)))
    assert known == [set()]
