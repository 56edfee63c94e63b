"""Counts of the arithmetic of matrix products."""

import jax
import jax.numpy as jnp

from jaxzero._program import matrix_flops


def test_flops_count_loops_and_batches():
    """Three layers of `[16, 64] @ [64, 64]`, and one of `[2, 8, 4] @ [2, 4, 3]`."""

    def f(x, w, a, b):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w)
        return x, jnp.einsum("nij,njk->nik", a, b)

    shapes = [(16, 64), (3, 64, 64), (2, 8, 4), (2, 4, 3)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert matrix_flops(f, *args) == 3 * 2 * 16 * 64 * 64 + 2 * 2 * 8 * 4 * 3


def test_flops_of_groups():
    """Each of 16 rows with one of 4 matrices, forward and in both of backward."""

    def f(rows, matrices):
        return jnp.sum(jax.lax.ragged_dot(rows, matrices, jnp.full(4, 4)) ** 2)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(16, 64), (4, 64, 32)]]
    assert matrix_flops(f, *args) == 2 * 16 * 64 * 32
    assert matrix_flops(jax.grad(f, (0, 1)), *args) == 3 * 2 * 16 * 64 * 32
