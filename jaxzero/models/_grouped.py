"""Apply each expert to its own rows, in blocks, given rows that are sorted by expert.

    y[i] = weights[i] function(params[e], rows[i])        for the rows i of expert e

A block is a run of rows of one expert. The loop over blocks has a fixed length, which is enough for
groups of any sizes: the full blocks, and at most one more for each of the g groups. Blocks that are
not needed are skipped. So only the chosen experts are computed, on every platform (XLA:CPU and
XLA:GPU multiply every row by every expert in `jax.lax.ragged_dot`), and intermediate results exist
for one block at a time. Backward computes intermediate results again, and adds the gradient of a
block's expert in place, in float32. Backward does not need `y`, so under `jax.checkpoint` no block
is computed a third time.

Legend: m rows, g groups, r rows of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from .._sums import widened

_MOST_ROWS = 2048  # of a block: larger blocks would have more masked rows, of other experts
_FEWEST_ROWS = 16  # of a block

Function = Callable[[Any, Array], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_by_group(
    function: Function,
    params: Any,
    rows: Shaped[Array, "m d"],
    group_sizes: Int[Array, " g"],
    row_weights: Float[Array, " m"],
) -> Shaped[Array, "m o"]:
    """Apply `function` to each expert's parameters and rows, and multiply by the rows' weights.

    `jz.exchange_tokens` can take this function as `compute`. On GPUs and CPUs, unlike
    `jax.lax.ragged_dot`, it does no arithmetic for experts that a row did not choose.

    Args:
        function: takes the parameters of one expert and rows `[r, d]`; returns `[r, o]`, where each
            row depends on its own input row only. It is differentiated with respect to parameters
            and rows, and must not close over traced arrays.
        params: a tree of arrays `[g, ...]`.
        rows: `[m, d]`, sorted by group.
        group_sizes: `[g]`, the number of rows of each group, int32.
        row_weights: `[m]`, factors of the results of rows; products are rounded to the dtype that
            `function` returns.

    Returns:
        `[m, o]`; rows after the last group are 0.
    """
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 0 or len(leaf) != len(group_sizes):
            raise ValueError(
                "`params` must have a part for each group in its first dim; got a leaf of shape "
                f"{leaf.shape} for {len(group_sizes)} groups. If it belongs to experts, name it in "
                "`jz.Ungathered` too (a vector as `[experts, 1]`)."
            )
    blocks = _Blocks.of(len(rows), group_sizes)
    out = jax.eval_shape(function, _expert(params, 0), rows[: blocks.rows])

    def add(y: Array, number: Array) -> Array:
        expert, start, is_own = blocks.block(number)
        x, w = (_cut(x, start, blocks.rows) for x in (rows, row_weights))
        return _written(y, _weighted(function, _expert(params, expert), x, w), start, is_own)

    return blocks.run(add, jnp.zeros((len(rows), *out.shape[1:]), out.dtype))


def _weighted(function: Function, params: Any, rows: Array, weights: Array) -> Array:
    y = function(params, rows)
    wide = max(widened(y.dtype), weights.dtype, key=lambda x: x.itemsize)
    return (y.astype(wide) * weights[:, None].astype(wide)).astype(y.dtype)


def _forward(
    function: Function, params: Any, rows: Array, sizes: Array, weights: Array
) -> tuple[Array, Any]:
    return apply_by_group(function, params, rows, sizes, weights), (params, rows, sizes, weights)


def _backward(function: Function, kept: Any, grad_mo: Array) -> tuple[Any, Array, None, Array]:
    params, rows, sizes, weights = kept
    blocks = _Blocks.of(len(rows), sizes)
    run = functools.partial(_weighted, function)

    def add(sums: tuple[Any, Array, Array], number: Array) -> tuple[Any, Array, Array]:
        of_params, of_rows, of_weights = sums
        expert, start, is_own = blocks.block(number)
        x, w, grad = (_cut(x, start, blocks.rows) for x in (rows, weights, grad_mo))
        # Rows of other experts become 0: results for them might be infinite, and infinity times
        # their gradient of 0 is NaN.
        _, backward = jax.vjp(run, _expert(params, expert), jnp.where(is_own, x, 0), w)
        of_expert, of_x, of_w = backward(jnp.where(is_own, grad, 0))

        def added(x: Array, y: Array) -> Array:
            old = lax.dynamic_index_in_dim(x, expert, keepdims=False)
            return lax.dynamic_update_index_in_dim(x, old + y.astype(x.dtype), expert, 0)

        return (
            jax.tree.map(added, of_params, of_expert),
            _written(of_rows, of_x, start, is_own),
            _written(of_weights, of_w, start, is_own[:, 0]),
        )

    def zeros(x: Array) -> Array:
        return jnp.zeros(x.shape, widened(x.dtype))

    start = jax.tree.map(zeros, params), jnp.zeros_like(rows), jnp.zeros_like(weights)
    of_params, of_rows, of_weights = blocks.run(add, start)
    of_params = jax.tree.map(lambda x, like: x.astype(like.dtype), of_params, params)
    return of_params, of_rows, None, of_weights


apply_by_group.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """The division of the rows of all groups into blocks of equal size."""

    num_rows: int
    rows: int  # of a block
    most: int  # blocks that any sizes need
    starts_g: Int[Array, " g"]  # the first row of each group, and the row after its last
    ends_g: Int[Array, " g"]
    firsts_g: Int[Array, " g"]  # the first block of each group, and the block after its last
    lasts_g: Int[Array, " g"]

    @classmethod
    def of(cls, num_rows: int, sizes: Int[Array, " g"]) -> _Blocks:
        num_groups = len(sizes)
        rows = _FEWEST_ROWS
        # At least two blocks for a group of average size, since its last one is masked in part.
        while rows < _MOST_ROWS and 4 * num_groups * rows <= num_rows:
            rows *= 2
        rows = min(rows, num_rows)
        sizes = sizes.astype(jnp.int32)
        ends, counts = jnp.cumsum(sizes, dtype=jnp.int32), -(-sizes // rows)
        lasts = jnp.cumsum(counts, dtype=jnp.int32)
        most = -(-num_rows // rows) + num_groups - 1
        return cls(num_rows, rows, most, ends - sizes, ends, lasts - counts, lasts)

    def block(
        self, number: Int[Array, ""]
    ) -> tuple[Int[Array, ""], Int[Array, ""], Bool[Array, "r 1"]]:
        """Return a block's expert, its first row, and a mask of those rows that are the expert's.

        A block that would end after the last row begins earlier, with rows of other blocks.
        """
        expert = jnp.sum(self.lasts_g <= number, dtype=jnp.int32)
        first = self.starts_g[expert] + (number - self.firsts_g[expert]) * self.rows
        end = self.ends_g[expert]
        # Rows before `first` belong to other blocks: they are read, and not written.
        start = jnp.minimum(first, self.num_rows - self.rows)
        row_r = start + jnp.arange(self.rows, dtype=jnp.int32)
        return expert, start, ((row_r >= first) & (row_r < end))[:, None]

    def run(self, add: Callable[[Any, Int[Array, ""]], Any], carry: Any) -> Any:
        """Run `carry = add(carry, number)` for the number of each block; return the last `carry`.

        Blocks are numbered from 0, group after group.
        """

        def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, None]:
            is_needed = number < self.lasts_g[-1]
            return lax.cond(is_needed, lambda x: add(x, number), lambda x: x, carry), None

        return lax.scan(step, carry, jnp.arange(self.most, dtype=jnp.int32))[0]


def _expert(params: Any, number: int | Int[Array, ""]) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), params)


def _cut(x: Shaped[Array, "m ..."], start: Int[Array, ""], num: int) -> Shaped[Array, "r ..."]:
    return lax.dynamic_slice_in_dim(x, start, num)


def _written(
    x: Shaped[Array, "m ..."],
    new: Shaped[Array, "r ..."],
    start: Array,
    is_own: Bool[Array, "r ..."],
) -> Shaped[Array, "m ..."]:
    """Write a block's result `new` into `x` from row `start` on, but only the rows in `is_own`."""
    new = jnp.where(is_own, new, _cut(x, start, len(new)))
    return lax.dynamic_update_slice_in_dim(x, new, start, 0)
