"""Compute attention of tokens that are split over the mesh axis `tokens`, by one of three methods.

    gather    each device has its queries, and gathers the keys and values of all devices
    heads     tokens are exchanged for heads, all-to-all: a device has some heads of all tokens
              (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509)
    ring      each device has its queries; the keys and values of other devices come to it in turn

A method is a set of constraints on how arrays are split; the compiler adds the collectives. With a
causal mask or a window, `gather` and `ring` deal out queries to devices in turn, so that the
queries of all devices see about as many keys (`blocks`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from .._mesh import exchange_over_tokens, num_token_parts, on_token_parts, split_over_tokens
from .._sums import widened
from .blocks import Keys, Queries, attend_in_blocks
from .form import Form

Method = Literal["gather", "heads", "ring"]


def method_for(
    query_bthk: Shaped[Array, "b t h k"],
    key_bsgk: Shaped[Array, "b s g k"],
    value_bsgv: Shaped[Array, "b s g v"],
) -> Method | None:
    """Choose a method by heads and bytes; return None if tokens are not split, or not evenly.

    "heads" is chosen if the devices can share the key-value heads evenly. A device then has all
    queries of its heads, leaves out blocks that a mask hides, and can call a kernel. But "heads"
    sends queries too, which are many bytes if many query heads share a key. If it sends more than
    twice the bytes of keys and values alone, only these are sent: by "ring", so that a device never
    holds the keys of all tokens, or by "gather" if there are not as many keys as queries.
    """
    num = num_token_parts()
    if num == 1 or query_bthk.shape[1] % num or key_bsgk.shape[1] % num:
        return None
    heads, size = query_bthk.shape[2:]
    groups, of_value = value_bsgv.shape[2:]
    of_keys = groups * (size + of_value)
    of_heads = (heads * (size + of_value) + of_keys) / num
    if groups % num == 0 and of_heads <= 2 * of_keys:
        return "heads"
    return "ring" if query_bthk.shape[1] == key_bsgk.shape[1] else "gather"


def attend_split(
    form: Form,
    method: Method | None,
    query_bthk: Float[Array, "b t h k"],
    key_bsgk: Float[Array, "b s g k"],
    value_bsgv: Float[Array, "b s g v"],
    query_marks: Shaped[Array, "b t"] | None = None,
    key_marks: Shaped[Array, "b s"] | None = None,
    reach: Int[Array, ""] | None = None,
    start: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "b t h v"], Float[Array, "b t h"]]:
    """Compute attention in blocks, with tokens split over devices.

    Args:
        form: which keys are seen. This function sets `query_places`, `key_places`, `is_ring` and
            `split_dim` itself.
        method: how queries meet keys of other devices; None: tokens are not split. "ring" cannot be
            combined with `start`.
        query_bthk: queries.
        key_bsgk: keys.
        value_bsgv: values.
        query_marks: the segments of the queries, if `form.marks` is "segments".
        key_marks: the marks of the keys, if `form.marks` is not None.
        reach: a query at position i sees keys at positions j with `|i - j| < reach`.
        start: the position of the first query, as an array; keys start at 0. The loop then visits
            hidden blocks too, and passes over them. None: 0, known when tracing, so that the loop
            leaves hidden blocks out.

    Returns:
        For each query and head, the weighted sum of values, and the logarithm of the softmax's
        denominator.
    """
    if method is not None:
        # This also constrains their gradients. Otherwise the compiler would split backward of the
        # projections before this by heads too.
        arrays = query_bthk, key_bsgk, value_bsgv
        query_bthk, key_bsgk, value_bsgv = (split_over_tokens(x, 1) for x in arrays)
    batch, num_queries, heads, size = query_bthk.shape
    num_keys, groups = key_bsgk.shape[1:3]
    if query_marks is None:
        query_marks = jnp.ones((batch, num_queries), jnp.int32)
    if key_marks is None:
        key_marks = jnp.ones((batch, num_keys), jnp.int32)
    query_btgnk = query_bthk.reshape(batch, num_queries, groups, heads // groups, size)
    # With a mask by distance, tokens are dealt out in turn, if one all-to-all can do that.
    num_parts = num_token_parts() if method in ("gather", "ring") else 1
    in_turn = form.before is not None or form.after is not None
    in_turn = in_turn and num_parts > 1 and num_queries % num_parts**2 == 0
    places = (num_parts, 1) if in_turn else (1, num_queries // num_parts)
    form = dataclasses.replace(
        form,
        query_places=places,
        key_places=places if method == "ring" else (1, 0),
        is_ring=method == "ring",
        split_dim={None: None, "heads": 3}.get(method, 1),
    )
    cut = functools.partial(_parts, num=num_parts, in_turn=in_turn)
    cut_keys = functools.partial(_keys_for_each_part, num=num_parts) if method == "gather" else cut
    arrays = [cut(query_btgnk), cut(query_marks)]
    arrays += [cut_keys(x) for x in (key_bsgk, value_bsgv, key_marks)]
    moves = method == "heads" or in_turn
    of_keys = moves and method != "gather"  # "gather" has placed the keys already
    has_marks = form.marks is not None  # otherwise marks are constants, and not sent
    is_moved = moves, moves and has_marks, of_keys, of_keys, of_keys and has_marks
    padded = [
        form.placed(_padded(x, form.chunk), "all-to-all" if moved else None)
        for x, moved in zip(arrays, is_moved, strict=True)
    ]
    if padded[-1].shape != arrays[-1].shape and form.marks is None:  # marks of padding are 0
        form = dataclasses.replace(form, marks="keys")
    query, query_marks, *keys = padded
    data = (
        None if x is None else jax.lax.stop_gradient(x).astype(jnp.int32) for x in (reach, start)
    )
    results: Any = attend_in_blocks(form, Queries(query, query_marks, *data), Keys(*keys))
    mixed, logarithm = (_joined(x, num_queries, num_parts, in_turn) for x in results)
    mixed = mixed.reshape(batch, num_queries, heads, -1)
    logarithm = logarithm.reshape(batch, num_queries, heads)
    return back_to_tokens(mixed, method, moves), back_to_tokens(logarithm, method, moves)


def exchanged(method: Method, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Split queries, keys and values so that each device can attend over whole rows.

    With "heads", all three are split by heads; otherwise queries are split by tokens, and keys and
    values are gathered. The compiler then splits attention in the same way, however it is computed.
    """
    query, key, value = (split_over_tokens(x, 1) for x in (query, key, value))
    if method == "heads":
        arrays = query, key, value
        return tuple(exchange_over_tokens(x, 2, "all-to-all") for x in arrays)  # pyright: ignore
    key, value = (exchange_over_tokens(x, None, "all-gather") for x in (key, value))
    return query, key, value


def back_to_tokens(x: Array, method: Method | None, moves: bool | None = None) -> Array:
    """Split a result of attention over its tokens, dim 1; return `x` unchanged if `method` is None.

    `moves` says whether `x` is split by heads now, so that devices exchange data. By default this
    is so for the method "heads".
    """
    if method is None:
        return x
    moves = method == "heads" if moves is None else moves
    if not moves:
        return split_over_tokens(x, 1)
    # The inner constraint, to a split by heads, is for backward: there it comes after the exchange,
    # and keeps the cotangent split by heads. Otherwise the compiler would add exchanges.
    return exchange_over_tokens(split_over_tokens(x, 2), 1, "all-to-all")


def attend_heads(
    attend: Callable[..., Float[Array, "b t h v"]],
    query: Float[Array, "b t h k"],
    key: Float[Array, "b s g k"],
    value: Float[Array, "b s g v"],
    *others: Shaped[Array, ...] | None,
) -> Float[Array, "b t h v"]:
    """Compute attention over whole rows by a library, on each device for some of the heads.

    `attend` runs on the arrays of one device, since the compiler cannot partition a call of a
    library. If there are fewer key-value heads than devices along `tokens`, each is copied to
    several.

    Args:
        attend: computes `attend(query, key, value, *others)`.
        query: queries; the devices must divide their heads.
        key: keys.
        value: values.
        others: further arguments of `attend`, such as a bias. If dim 1 of one has the size of the
            heads, it is split by heads; otherwise each device gets all of it.

    Raises:
        ValueError: the devices do not divide the heads.
    """
    num, heads = num_token_parts(), query.shape[2]
    if heads % num:
        raise ValueError(
            f"`implementation` needs whole rows, so that each of the {num} devices along `tokens` "
            f"has some of the heads; got {heads} heads. Leave it out, or make the mesh with "
            f"`tokens` that divides {heads}."
        )
    query, key, value = (split_over_tokens(x, 1) for x in (query, key, value))
    copies = num // math.gcd(key.shape[2], num)
    if copies > 1:
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    dims = [1 if x is not None and x.ndim > 2 and x.shape[1] == heads else None for x in others]
    attend = on_token_parts(attend, (2, 2, 2, *dims), 2)
    mixed = attend(*exchanged("heads", query, key, value), *others)
    return back_to_tokens(mixed, "heads")


def _parts(x: Shaped[Array, "b t *_"], num: int, in_turn: bool) -> Shaped[Array, "b p u *_"]:
    """Cut dim 1 into `num` parts: of consecutive tokens, or of every `num`-th if `in_turn`."""
    if in_turn:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, num, *x.shape[2:]), 2, 1)
    return x.reshape(x.shape[0], num, -1, *x.shape[2:])


def _joined(
    x: Shaped[Array, "b p t *_"], num_tokens: int, num: int, in_turn: bool
) -> Shaped[Array, "b u *_"]:
    """Undo `_padded` and `_parts`: join the parts to rows of `num_tokens`."""
    x = x[:, :, : num_tokens // num]
    x = jnp.moveaxis(x, 1, 2) if in_turn else x
    return x.reshape(x.shape[0], num_tokens, *x.shape[3:])


def _padded(x: Shaped[Array, "b p t *_"], chunk: int) -> Shaped[Array, "b p u *_"]:
    """Pad the tokens of each part to whole blocks."""
    added = -x.shape[2] % min(x.shape[2], chunk)
    return jnp.pad(x, [(0, added if i == 2 else 0) for i in range(x.ndim)]) if added else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _keys_for_each_part(x: Shaped[Array, "b s *_"], num: int) -> Shaped[Array, "b p s *_"]:
    """Give each part the keys of all tokens, by an all-gather; backward is a reduce-scatter."""
    whole = exchange_over_tokens(x, None, "all-gather")
    copies = jnp.broadcast_to(whole[:, None], (x.shape[0], num, *x.shape[1:]))
    return split_over_tokens(copies, 1)


def _keys_for_each_part_forward(x: Array, num: int) -> tuple[Array, None]:
    return _keys_for_each_part(x, num), None


def _keys_for_each_part_backward(num: int, _: None, gradient: Array) -> tuple[Any]:
    del num
    if gradient.dtype == jax.dtypes.float0:  # of marks, which are integers
        return (np.zeros((gradient.shape[0], *gradient.shape[2:]), gradient.dtype),)
    wide = gradient.astype(widened(gradient.dtype))
    # Summed over parts in 32 bits or more, and rounded once.
    total = exchange_over_tokens(jnp.sum(wide, axis=1), 1, "reduce-scatter")
    return (total.astype(gradient.dtype),)


_keys_for_each_part.defvjp(_keys_for_each_part_forward, _keys_for_each_part_backward)
