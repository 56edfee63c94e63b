"""Values that are called uniform are equal on all devices, whatever the batch is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxzero._program import trace
from jaxzero._program.uniform import uniform_values


def _counter(x, same):
    return lax.fori_loop(0, 3, lambda i, c: (i % 2, c[1] + same), (0, same))


def _stacked(x, same):
    def body(carry, i):
        return (jnp.sin(carry[0]), carry[1] + i), (carry[1], i < 2)

    return lax.scan(body, (x, same), jnp.arange(3))[1]


def _random(x, same):
    key = jax.random.fold_in(jax.random.key(3), same)
    return jax.random.bernoulli(key), jax.random.randint(key, (2,), 0, 5)


def _checkpointed(x, same):
    return jax.checkpoint(lambda x, same: jnp.where(same > 2, same, 0))(x, same)


@pytest.mark.parametrize("function", [_counter, _stacked, _random, _checkpointed])
def test_made_of_uniform_values(function):
    block, _ = trace(function, jnp.ones(4), jnp.int32(1))
    uniform = uniform_values(block, block.inputs[1:])
    assert {*block.outputs} <= uniform


def _of_the_batch(x, same):
    return jnp.sum(x), same + jnp.argmax(x)


def _of_a_device(x, same):
    i = lax.axis_index("data")
    return i, same + i, jax.random.bits(jax.random.fold_in(jax.random.key(0), i))


def _of_a_callback(x, same):
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.pure_callback(lambda same: same, shape, same, vmap_method="sequential")


def _in_a_carry(x, same):
    """One carried value takes the place of the other, two iterations later."""

    def body(carry, _):
        a, b, c = carry
        return (b, c, c), a < 3

    carry, stacked = lax.scan(body, (same, same, jnp.argmax(x)), length=4)
    return *carry, stacked


def _product(x, same):
    square = jnp.full((4, 4), same)
    return square @ square


@pytest.mark.parametrize(
    "function", [_of_the_batch, _of_a_device, _of_a_callback, _in_a_carry, _product]
)
def test_others_are_not(function):
    def on_each(x):
        block, _ = trace(function, x, jnp.int32(1))
        found.append(uniform_values(block, block.inputs[1:]) & {*block.outputs})
        return x

    found = []
    jax.make_jaxpr(jax.vmap(on_each, axis_name="data"))(jnp.ones((2, 4)))
    assert found == [set()]
