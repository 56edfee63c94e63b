"""A traced program is a flat list of operations, in which only loops have a body of their own."""

import jax
import jax.numpy as jnp
import pytest

from jaxzero._program import Loop, is_costly, trace


def test_a_checkpoint_inside_another_is_traced_through():
    """Weights that it scans or casts are seen so; an opaque call would need them in full."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def model(stack, x):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, stack)
        return jnp.sum(x)

    def loss(stack, rows):
        total, _ = jax.lax.scan(
            lambda sum, x: (sum + jax.checkpoint(model)(stack, x), None), 0.0, rows
        )
        return total

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 8, 8), (4, 2, 8))]
    block, _ = trace(jax.value_and_grad(loss), *shapes)
    outer = [operation for operation in block.operations if isinstance(operation, Loop)]
    assert len(outer) == 2
    for loop, num_inner in zip(outer, (1, 2), strict=True):  # forward; recomputation and backward
        names = {operation.name for operation in loop.body.operations}
        assert "eval_jaxpr" not in names and "closed_call" not in names
        assert sum(isinstance(operation, Loop) for operation in loop.body.operations) == num_inner


@jax.custom_jvp
def _with_product(x):
    return jnp.tanh(x @ x)


@_with_product.defjvp
def _(primals, tangents):
    return jax.jvp(lambda x: jnp.tanh(x @ x), primals, tangents)


@pytest.mark.parametrize(
    ("function", "costly"),
    [
        (lambda x, y: x @ y, True),
        (lambda x, y: x @ y[0], False),  # summed with what is around
        (lambda x, y: jnp.einsum("ij,ij->i", x, y), False),
        (lambda x, y: jnp.einsum("bi,bj->bij", x, y), False),  # an outer product
        (lambda x, y: jnp.einsum("bij,bkj->bik", x[None], y[None]), True),
        (lambda x, y: jax.nn.silu(x) + y, False),
        (lambda x, y: _with_product(x) + y, True),
        (lambda x, y: x[jnp.argmax(y, 1)], True),
    ],
)
def test_what_collectives_overlap_with_is_written_to_memory_anyway(function, costly):
    block, _ = trace(function, *[jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 2)
    assert any(is_costly(x) for x in block.operations) == costly


@pytest.mark.parametrize(("groups", "channels"), [(1, 6), (2, 6), (1, 1)])
def test_the_products_of_a_convolution_are_those_that_xla_counts(groups, channels):
    images, kernel = jnp.ones((2, 4, 9, 9)), jnp.ones((channels, 4 // groups, 3, 3))

    def convolve(x, y):
        return jax.lax.conv_general_dilated(x, y, (1, 1), "VALID", feature_group_count=groups)

    block, _ = trace(convolve, images, kernel)
    (products,) = [x.products for x in block.operations if x.products]
    assert 2 * products == jax.jit(convolve).lower(images, kernel).cost_analysis()["flops"]
