"""Layers that a Python loop unrolls, as one scan over their stack."""

import jax
import jax.numpy as jnp

from jaxzero._program import StackPart, with_rolled_layers


def test_forward_saves_no_weights():
    """Backward scans them again: what a loop makes of a layer of a stack is its gradient alone."""

    def loss(x, stack):
        for w in stack:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def rolled(stack, x):
        return with_rolled_layers(lambda given: loss(x, given[0]), {0: StackPart(0)})([stack])

    stack, x = jnp.ones((3, 8, 8)), jnp.ones((2, 8))
    closed = jax.make_jaxpr(jax.value_and_grad(rolled))(stack, x)
    loops = [x for x in closed.jaxpr.eqns if x.primitive.name == "scan"]
    made = [out.aval.shape for loop in loops for out in loop.outvars]
    assert len(loops) == 2
    assert made.count((3, 8, 8)) == 1
