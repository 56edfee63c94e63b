"""XLA keeps what a barrier waits for, also where it rewrites who reads it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxzero._execute.buckets import tied

_KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander,optimization-barrier-expander"}


def barriers(tie, rows: int) -> list[str]:
    """For each barrier left after compiling, the types of its operands.

    The program makes an array wait for a matrix product, by `tie`.
    """

    def function(array, x, first, second):
        product = jnp.einsum("bsd,df->bsf", x, first)
        array, _ = tie(jnp.sin(array), product)
        return jnp.cos(array), jnp.einsum("bsd,df->bsf", x, second) + product

    weights = jnp.zeros((8, 6))
    lowered = jax.jit(function).lower(jnp.zeros(16), jnp.zeros((rows, 4, 8)), weights, weights)
    text = lowered.compile(compiler_options=_KEEP_BARRIERS).as_text()
    assert text is not None
    return [line.split(" opt-barrier(")[0] for line in text.splitlines() if "opt-barrier(" in line]


@pytest.mark.parametrize("rows", [1, 2])
def test_an_array_waits_for_a_product(rows):
    found = barriers(tied, rows)
    assert found and all(f"f32[{rows},4,6]" in types for types in found)


def test_one_barrier_does_not_wait_where_there_is_one_row():
    """If this fails, XLA keeps the operands of barriers, and one barrier is enough."""
    (types,) = barriers(lambda array, value: lax.optimization_barrier((array, value)), 1)
    assert "f32[1,4,6]" not in types
