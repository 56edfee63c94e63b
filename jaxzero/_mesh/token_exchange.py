"""Send tokens to the devices of a node that have their experts, and send the results back.

A node of n devices divides its E experts among them: device i has E / n experts, from number i E /
n on (`Ungathered`). Each token x has chosen k experts e with weights w, and its result is

    y = sum over the k experts that a token chose of w_e expert_e(x).

Without a capacity the result is exact. Every device of a node receives all tokens of the node, once
each, with their choices. It sums the results of its own experts for each token and returns these
partial sums. Each device adds up the n partial sums of each of its own tokens. With T tokens on
each device that is `n T` rows, as many as could at most be routed to one device. With a capacity,
pairs of token and expert are sent: up to `factor` times as many as a device would get if choices
were even. The other pairs are dropped.

Within a device, rows are sorted by expert. Every permutation is a gather in backward as in forward:
no scatter adds rows in an order of its own.

Legend: t = tokens of a device, n = all tokens that a device has received, k = choices of a token, d
= features, m = rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from .._sums import widened
from .mesh import LOCAL
from .mesh_kinds import is_simulating, varying

Compute = Callable[[Array, Array, Array], Array]
# The scope of operations along rows that the analysis of mixed rows (`_program.row_mixing`) passes
# over: a sort that is undone, and places in messages of limited capacity, a limit for each device.
ROWS_APART = "jaxzero_rows_apart"
# The scope of operations that use gathered experts, followed by the number of experts, and by the
# bytes that enter a device each time the call's tokens are sent (`_plan.gathered_experts`).
GATHERED_EXPERTS = "jaxzero_gathered_experts"


def exchange_tokens(
    compute: Compute,
    tokens: Any,
    experts: Any,
    weights: Any,
    *,
    num_experts: int,
    num_local: int,
    capacity_factor: float | None = None,
) -> tuple[Any, Any]:
    """Send tokens to the devices that have their experts, compute there, and combine the results.

    Call it inside a loss for `zero.value_and_grad` or `zero.apply`, where a leaf of `jz.Ungathered`
    has the experts of this device only. If all experts are on this device (one device, or experts
    that are gathered), nothing is sent, so that the same loss runs anywhere. Forward and backward
    are exact. Each device of a node runs `compute` for all tokens of the node.

    Args:
        compute: a function `compute(rows, group_sizes, row_weights)`. `rows` is `[m, d]`, sorted by
            expert: the first `group_sizes[0]` rows are for this device's first expert, and so on.
            `group_sizes` is `[num_local]`, int32, as `jax.lax.ragged_dot` takes it, and
            `row_weights` is `[m]`. The function returns the experts' results for the rows, times
            `row_weights`, as `[m, d_out]`. Rows after the last group are 0, and their results are
            not read. `models.apply_by_group` computes this.
        tokens: `[t, d]`, the tokens of this device.
        experts: `[t, k]`, integers: the experts that each token chose, from 0 to `num_experts - 1`.
            Any other number, such as -1, is no choice, and adds 0 to the result.
        weights: `[t, k]`, floats: the weight of each choice. Results are added in float32, or in a
            wider dtype of their own, and sent in the dtype that `compute` returns.
        num_experts: the number of experts of all devices together, from the model's config. If the
            number on this device were given, nothing would be sent, and choices beyond it would add
            0.
        num_local: the number of experts of this device: the size of the leaf's dim of experts.
        capacity_factor: None sends all tokens. A number limits the rows that a device sends to each
            device to this number times `t k / n`, the rows if choices were even among n devices.
            Choices of the last tokens that exceed the limit are dropped, and add 0 to the result.
            The limit also bounds computation: `m` is the limit times n; without one, it is `min(k,
            num_local)` for each token of the node.

    Returns:
        `(results, dropped)`: `[t, d_out]` in the dtype that `compute` returns, and the number of
        this device's choices that were dropped, int32.

    Raises:
        ValueError: shapes or dtypes do not fit, `num_local` times the devices of a node is not
            `num_experts`, or experts are missing outside of a step.

    Example:
        >>> def compute(rows, group_sizes, row_weights):
        ...     h = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], group_sizes))
        ...     return jax.lax.ragged_dot(h, params["down"], group_sizes) * row_weights[:, None]
        >>> weights, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        >>> y, _ = jz.exchange_tokens(
        ...     compute, x, experts, weights, num_experts=8, num_local=len(params["up"])
        ... )
    """
    _check(tokens, experts, weights, num_experts, num_local, capacity_factor)
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, -1).astype(jnp.int32)
    none = jnp.zeros((), jnp.int32)
    if num_local == num_experts:
        experts = jnp.where(experts < 0, num_local, experts)
        with jax.named_scope(f"{GATHERED_EXPERTS}_{num_local}_{_entering_bytes(tokens)}"):
            return _grouped(compute, tokens, experts, weights, num_local), none
    _check_devices(num_experts, num_local)
    if capacity_factor is not None:
        return _with_capacity(compute, tokens, experts, weights, num_local, capacity_factor)
    gathered, summed = (_gathered, _summed)
    if is_simulating():  # `vmap` knows no `all_to_all` inside of a `custom_vjp`
        gathered, summed = _all_rows, _sum_over_devices
    tokens_nd, weights_nk = (gathered(varying(x, LOCAL)) for x in (tokens, weights))
    experts_nk = _all_rows(varying(experts, LOCAL))
    first = lax.axis_index(LOCAL).astype(jnp.int32) * num_local
    mine, weights_nk = _own_choices(experts_nk - first, weights_nk, num_local)
    return summed(_grouped(compute, tokens_nd, mine, weights_nk, num_local)), none


def _check(
    tokens: Any, experts: Any, weights: Any, num_experts: int, num_local: int, factor: float | None
) -> None:
    if tokens.ndim != 2 or experts.ndim != 2 or len(tokens) != len(experts):
        raise ValueError(
            "`tokens` must be [tokens, features] and `experts` [tokens, choices]; got "
            f"{tokens.shape} and {experts.shape}. Reshape a batch of rows first."
        )
    if weights.shape != experts.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            "`weights` must be floats, one for each of `experts`, of the same shape; got "
            f"{weights.dtype}{list(weights.shape)} for {list(experts.shape)}."
        )
    if not experts.size:
        raise ValueError(
            f"`tokens` and `experts` must not be empty; got {tokens.shape} and {experts.shape}. "
            "Call it only where there are tokens."
        )
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"`experts` must be integers; got {experts.dtype}. Take `jax.lax.top_k`.")
    if not 1 <= num_local <= num_experts:
        raise ValueError(
            f"`num_local` must be from 1 to `num_experts`, {num_experts}; got {num_local}. "
            "Give the size of the leaf's dim of experts, as the function sees it."
        )
    if factor is not None and not factor > 0:
        raise ValueError(f"`capacity_factor` must be above 0, or None; got {factor!r}.")


def _check_devices(num_experts: int, num_local: int) -> None:
    try:
        num = lax.axis_size(LOCAL)
    except NameError as error:
        raise ValueError(
            f"`num_local` is {num_local} and `num_experts` is {num_experts}: experts of other "
            "devices are reached only inside a function given to `zero.value_and_grad` or "
            "`zero.apply`. Outside, give all experts."
        ) from error
    if num * num_local != num_experts:
        raise ValueError(
            f"`num_local` must be `num_experts`, or that divided by the {num} devices of a node; "
            f"got {num_local} of {num_experts}. Split the leaf by `jz.Ungathered`, along its dim "
            "of experts."
        )


def _entering_bytes(tokens: Any) -> int:
    """Return the bytes that enter a device if all tokens of its node are sent to it."""
    try:
        return tokens.nbytes * (lax.axis_size(LOCAL) - 1)
    except NameError:  # outside of a step
        return 0


def _own_choices(
    choices_nk: Int[Array, "n k"], weights_nk: Float[Array, "n k"], num_local: int
) -> tuple[Int[Array, "n m"], Float[Array, "n m"]]:
    """Reduce the choices of the node's tokens to choices of this device's experts.

    A token chooses at most `num_local` of this device's experts, so `m = min(k, num_local)`.

    Args:
        choices_nk: the chosen experts, counted from this device's first expert.
        weights_nk: the weights of these choices.
        num_local: the number of this device's experts.

    Returns:
        The choices, where `num_local` stands for an expert of another device; and their weights.
    """
    if num_local > choices_nk.shape[1]:
        is_here = (choices_nk >= 0) & (choices_nk < num_local)
        return jnp.where(is_here, choices_nk, num_local), weights_nk
    own_e = jnp.arange(num_local, dtype=choices_nk.dtype)
    is_chosen_nke = choices_nk[:, :, None] == own_e[None, None]
    weights_ne = jnp.where(is_chosen_nke, weights_nk[:, :, None], 0).sum(axis=1)
    return jnp.where(is_chosen_nke.any(axis=1), own_e[None], num_local), weights_ne


def _grouped(
    compute: Compute,
    tokens_nd: Array,
    choices_nk: Int[Array, "n k"],
    weights_nk: Float[Array, "n k"],
    num_local: int,
) -> Shaped[Array, "n d"]:
    """Sum, for each token, the weighted results of the experts on this device that it chose.

    A choice of `num_local`, which is no expert of this device, adds 0.
    """
    num, k = choices_nk.shape
    choices_m = choices_nk.reshape(-1)
    with jax.named_scope(ROWS_APART):
        number_m = jnp.arange(num * k, dtype=jnp.int32)
        _, order_m = lax.sort((choices_m, number_m), num_keys=1)  # stable
        sizes_e = jnp.bincount(choices_m, length=num_local).astype(jnp.int32)
        is_here_m1 = (number_m < sizes_e.sum(dtype=jnp.int32))[:, None]
    inverse_m = jnp.zeros_like(order_m).at[order_m].set(number_m, unique_indices=True)
    rows_md: Any = _rows(tokens_nd, order_m, inverse_m, k)
    rows_md = jnp.where(is_here_m1, rows_md, 0)
    weights_m1: Any = _rows(weights_nk.reshape(-1, 1), order_m, inverse_m, 1)
    results_md = compute(rows_md, sizes_e, jnp.where(is_here_m1, weights_m1, 0)[:, 0])
    if results_md.ndim != 2 or len(results_md) != num * k:
        raise ValueError(
            f"`compute` must return [rows, features] for {num * k} rows; got {results_md.shape}."
        )
    return _sums(jnp.where(is_here_m1, results_md, 0), order_m, inverse_m, k)


def _with_capacity(
    compute: Compute,
    tokens_td: Array,
    experts_tk: Int[Array, "t k"],
    weights_tk: Float[Array, "t k"],
    num_local: int,
    factor: float,
) -> tuple[Shaped[Array, "t d"], Int[Array, ""]]:
    num_devices, (num, k) = lax.axis_size(LOCAL), experts_tk.shape
    pairs = num * k
    room = min(math.ceil(factor * pairs / num_devices), pairs)  # for pairs, on each device
    chosen_p = experts_tk.reshape(-1)
    is_sent_pn = (chosen_p // num_local)[:, None] == jnp.arange(num_devices, dtype=jnp.int32)[None]
    to_p = jnp.maximum(chosen_p, 0) // num_local
    with jax.named_scope(ROWS_APART):
        place_pn = lax.cumsum(is_sent_pn.astype(jnp.int32)) - 1
    place_p = jnp.take_along_axis(place_pn, to_p[:, None], axis=1)[:, 0]
    fits_p = (place_p < room) & (chosen_p >= 0)
    slots = num_devices * room
    pair_p = jnp.arange(pairs, dtype=jnp.int32)
    # A pair without a slot gets an index out of bounds of its own, so that indices are unique.
    slot_p = jnp.where(fits_p, to_p * room + place_p, slots + pair_p)
    pair_s = (
        jnp.full(slots, pairs, jnp.int32).at[slot_p].set(pair_p, mode="drop", unique_indices=True)
    )
    rows_sd: Any = _sent(tokens_td, pair_s, slot_p, k)
    choices_s = jnp.where(pair_s < pairs, chosen_p[jnp.minimum(pair_s, pairs - 1)], -1)
    choices_s = jnp.where(choices_s < 0, num_local, choices_s % num_local)
    weights_s1: Any = _sent(weights_tk.reshape(-1, 1), pair_s, slot_p, 1)
    rows_sd, choices_s1, weights_s1 = map(_exchanged, (rows_sd, choices_s[:, None], weights_s1))
    results_sd = _exchanged(_grouped(compute, rows_sd, choices_s1, weights_s1, num_local))
    results_pd: Any = _sent(results_sd, slot_p, pair_s, 1)
    dropped = jnp.sum(~fits_p & (chosen_p >= 0), dtype=jnp.int32)
    return _sum_of_copies(results_pd, k), dropped


def _exchanged(x: Shaped[Array, "s ..."]) -> Shaped[Array, "s ..."]:
    """Send part i of the rows to device i; return the received parts, in order of senders."""
    return lax.all_to_all(varying(x, LOCAL), LOCAL, 0, 0, tiled=True)


# Gathers of rows whose derivatives are written as gathers too. JAX would derive scatter-adds.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows(
    x: Shaped[Array, "n d"], order_m: Int[Array, " m"], inverse_m: Int[Array, " m"], k: int
) -> Shaped[Array, "m d"]:
    """Copy each row of `x` `k` times, and permute the copies: return rows `order // k`.

    The derivative reads rows by `inverse_m`, the inverse of the permutation `order_m`.
    """
    return x[order_m // k]


def _rows_forward(x: Array, order_m: Array, inverse_m: Array, k: int) -> tuple[Array, Array]:
    return x[order_m // k], inverse_m


def _rows_backward(k: int, inverse_m: Array, grad_md: Array) -> tuple[Array, None, None]:
    return _sum_of_copies(grad_md[inverse_m], k), None, None


_rows.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sums(
    x: Shaped[Array, "m d"], order_m: Int[Array, " m"], inverse_m: Int[Array, " m"], k: int
) -> Shaped[Array, "n d"]:
    """Sum the `k` rows that belong to each token; `x` has the rows in the order of `_rows`."""
    return _sum_of_copies(x[inverse_m], k)


def _sums_forward(x: Array, order_m: Array, inverse_m: Array, k: int) -> tuple[Array, Array]:
    return _sums(x, order_m, inverse_m, k), order_m


def _sums_backward(k: int, order_m: Array, grad_nd: Array) -> tuple[Array, None, None]:
    return grad_nd[order_m // k], None, None


_sums.defvjp(_sums_forward, _sums_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sent(
    x: Shaped[Array, "n d"], pair_s: Int[Array, " s"], slot_p: Int[Array, " p"], k: int
) -> Shaped[Array, "s d"]:
    """Fill each slot with row `pair // k` of `x`, or with 0 if its `pair` is out of range.

    `pair_s` is the pair in each slot. `slot_p` is the slot of each pair, out of range if the pair
    has no slot; the derivative reads rows by it.
    """
    return _read(x, pair_s, k)


def _sent_forward(x: Array, pair_s: Array, slot_p: Array, k: int) -> tuple[Array, Array]:
    return _read(x, pair_s, k), slot_p


def _sent_backward(k: int, slot_p: Array, grad_sd: Array) -> tuple[Array, None, None]:
    return _sum_of_copies(_read(grad_sd, slot_p, 1), k), None, None


_sent.defvjp(_sent_forward, _sent_backward)


def _read(x: Array, index: Array, k: int) -> Array:
    return x.at[index // k].get(mode="fill", fill_value=0)


def _sum_of_copies(x: Shaped[Array, "m d"], k: int) -> Shaped[Array, "n d"]:
    """Sum each `k` neighbouring rows, in float32 or wider, and round once."""
    if k == 1:
        return x
    copies = x.reshape(len(x) // k, k, x.shape[1])
    return copies.sum(axis=1, dtype=widened(x.dtype)).astype(x.dtype)


# `_gathered` and `_summed` are each other's derivative. Sums of 16-bit numbers are rounded once, on
# the device that receives them; a reduce-scatter would round after each of its steps.


@jax.custom_vjp
def _gathered(x: Shaped[Array, "t d"]) -> Shaped[Array, "n d"]:
    """All-gather the rows of all devices of the node."""
    return _all_rows(x)


@jax.custom_vjp
def _summed(x: Shaped[Array, "n d"]) -> Shaped[Array, "t d"]:
    """Reduce-scatter over the devices of the node: return the sums for this device's own tokens."""
    return _sum_over_devices(x)


def _all_rows(x: Array) -> Array:
    return lax.all_gather(x, LOCAL, tiled=True)


def _sum_over_devices(x: Array) -> Array:
    num = lax.axis_size(LOCAL)
    parts = _exchanged(x).reshape(num, len(x) // num, *x.shape[1:])
    return parts.sum(axis=0, dtype=widened(x.dtype)).astype(x.dtype)


_gathered.defvjp(lambda x: (_gathered(x), None), lambda _, grad: (_sum_over_devices(grad),))
_summed.defvjp(lambda x: (_summed(x), None), lambda _, grad: (_gathered(varying(grad, LOCAL)),))
