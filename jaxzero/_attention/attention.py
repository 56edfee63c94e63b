"""Define `attention`, with the arguments of `jax.nn.dot_product_attention` and some more."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from .._mesh import num_token_parts
from .form import Form, default_scale
from .split import Method, attend_heads, attend_split, back_to_tokens, exchanged, method_for

# As in `jax.nn.dot_product_attention`; or a function with its arguments, which is called instead.
Implementation = Literal["xla", "cudnn"] | Callable[..., Any] | None
LONG_ROW = 8192  # tokens: the logits of a head take 256 MiB in float32


def attention(
    query: Float[Array, "b t h k"],
    key: Float[Array, "b s g k"],
    value: Float[Array, "b s g v"],
    bias: Shaped[Array, ...] | None = None,
    mask: Bool[Array, ...] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation = None,
    segments: Int[Array, "_ _"] | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    method: Method | None = None,
) -> Float[Array, "b t h v"]:
    """Compute dot-product attention, also of rows whose tokens are split over devices.

    The arguments are those of `jax.nn.dot_product_attention`, and some more. If only JAX's are
    given and the mesh has no axis `tokens`, JAX's function computes rows of up to 8192 tokens. With
    an axis `tokens` (`jz.make_mesh(tokens=...)`), each device computes its part of the work.
    Queries, keys and values may then have any sharding, and the result is split as by
    `jz.split_tokens`. Long rows are computed in blocks of queries and keys: memory is linear in
    tokens, and blocks that a causal mask or a window hides take no time. All ways compute the same
    result, up to rounding.

    Args:
        query: `[rows, tokens, heads, size]`.
        key: `[rows, tokens, groups, size]`; each group serves `heads / groups` heads.
        value: `[rows, tokens, groups, size]`; its size may differ from that of `key`.
        bias: added to logits, broadcast to `[rows, heads, queries, keys]`; all logits then exist at
            once.
        mask: true where a query sees a key, broadcast to `[rows, heads, queries, keys]`. A mask
            `[rows, 1, 1, keys]`, as for padding, costs no more than segments do. With any other
            mask all logits exist at once.
        scale: factor of the logits; by default `1 / sqrt(size)`.
        is_causal: whether a query sees no later keys.
        query_seq_lengths: as in JAX; all logits then exist at once.
        key_value_seq_lengths: as in JAX; all logits then exist at once.
        local_window_size: how many keys before and after its own position a query sees.
        implementation: as in JAX. "cudnn" keeps the logits on the chip, forward and backward; it
            takes 16-bit arrays with heads of a multiple of 8, up to 128 numbers (256 on Hopper).
            Or a function with the arguments of `jax.nn.dot_product_attention` except
            `implementation`, such as `tokamax.dot_product_attention`. cuDNN and a function both
            need whole rows. So on a mesh with `tokens` each device takes some of the heads, as with
            `method="heads"`; if there are fewer key-value heads than devices, each is sent to
            several. On such a mesh both work only inside functions given to `zero`.
        segments: the number of each token's document, `[rows, tokens]`, for queries and keys. A
            query sees keys of its own document only, and no query sees keys of segment 0, which is
            padding (`jaxzero.data.PackedRows`).
        softcap: logits x become `softcap * tanh(x / softcap)`.
        chunk: the number of queries, and of keys, of a block; the logits of a block exist at once.
            None: 1024, and rows of up to 8192 tokens on one device are not computed in blocks.
        method: how queries meet keys of other devices: "gather", "heads" or "ring". None: it is
            chosen by bytes and heads. Without the axis `tokens` it has no effect.

    Returns:
        `[rows, tokens, heads, size of values]`. A query that sees no key gets finite numbers
        without meaning. In blocks, only reverse-mode derivatives are defined.

    Raises:
        ValueError: shapes do not fit each other or the axis `tokens`, an option is out of range,
            or two options exclude each other.
    """
    _check(query, key, value, mask, scale, segments, softcap, chunk)
    key_mask = _as_key_mask(mask)
    without_blocks = {
        "bias": bias,
        "mask": mask if key_mask is None else None,  # a mask that differs between queries or heads
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "implementation": implementation,
    }
    needs_all = [name for name, given in without_blocks.items() if given is not None]
    if needs_all and (chunk is not None or softcap is not None or method == "ring"):
        raise ValueError(
            '`chunk`, `softcap` and `method="ring"` need blocks, which have no '
            f"`{'`, no `'.join(needs_all)}`. Leave out one of the two; `segments`, `is_causal` and "
            "`local_window_size` say most of what masks do."
        )
    chosen = _checked_method(method, query, key, value, implementation, bool(needs_all))
    # JAX computes the softmax in float32, also of 64-bit logits.
    needs_blocks = max(query.shape[1], key.shape[1]) > LONG_ROW or query.dtype.itemsize > 4
    has_marks = segments is not None and key_mask is not None
    if not needs_all and (chosen or chunk or softcap or has_marks or needs_blocks):
        kind = "segments" if segments is not None else None if key_mask is None else "keys"
        scale = default_scale(query.shape[-1]) if scale is None else float(scale)
        form = Form(scale, softcap, *_window(local_window_size, is_causal), kind, chunk or 1024)
        marks = _marks_of_keys(segments, key_mask, key)
        return attend_split(form, chosen, query, key, value, segments, marks)[0]
    if segments is not None:
        same = segments[:, None, :, None] == segments[:, None, None]
        same &= (segments != 0)[:, None, None]
        mask = same if mask is None else mask & same
    others = bias, mask, query_seq_lengths, key_value_seq_lengths
    return _attend_to_all(
        chosen,
        (query, key, value),
        *others,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        implementation=implementation,
    )


def is_library(implementation: Implementation) -> bool:
    """Return True if `implementation` calls a library, which the compiler cannot partition."""
    return implementation == "cudnn" or callable(implementation)


def dot_product_attention(*arrays: Any, implementation: Implementation, **options: Any) -> Any:
    """Call `implementation` if it is a function, otherwise `jax.nn.dot_product_attention`.

    Raises:
        ValueError: the function returns an array of another shape or dtype than JAX's would.
    """
    if callable(implementation):
        query, _, value, *_ = arrays
        result = implementation(*arrays, **options)
        want = (*query.shape[:-1], value.shape[-1]), query.dtype
        got = getattr(result, "shape", None), getattr(result, "dtype", None)
        if got != want:
            raise ValueError(
                f"`implementation` must return an array of shape {want[0]} and dtype {want[1]}, as "
                f"`jax.nn.dot_product_attention` does; got {type(result).__name__} of shape "
                f"{got[0]} and dtype {got[1]}."
            )
        return result
    return jax.nn.dot_product_attention(*arrays, implementation=implementation, **options)


def _attend_to_all(
    method: Method | None, arrays: tuple[Array, Array, Array], *others: Any, **options: Any
) -> Float[Array, "b t h v"]:
    """Call `dot_product_attention` on whole rows, after moving split tokens as `method` says.

    Args:
        method: how queries meet keys of other devices; None: tokens are not split.
        arrays: queries, keys and values.
        others: bias, mask, the lengths of queries, and those of keys; each may be None.
        options: further arguments of `dot_product_attention`.
    """

    def attend(
        query: Any, key: Any, value: Any, bias: Any, mask: Any, of_queries: Any, of_keys: Any
    ) -> Any:
        given = {"query_seq_lengths": of_queries, "key_value_seq_lengths": of_keys, **options}
        return dot_product_attention(query, key, value, bias, mask, **given)

    if method is None:
        return attend(*arrays, *others)
    if is_library(options["implementation"]):
        return attend_heads(attend, *arrays, *others)
    return back_to_tokens(attend(*exchanged(method, *arrays), *others), method)


def _window(size: int | tuple[int, int] | None, is_causal: bool) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own position a query sees; None: all."""
    before, after = size if isinstance(size, tuple) else (size, size)
    if is_causal:
        after = 0
    return before, after


def _as_key_mask(mask: Any) -> Bool[Array, "b s"] | None:
    """Return a mask `[rows, 1, 1, keys]` as `[rows, keys]`; None for a mask of another shape."""
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] != 1:
        return None
    return mask[:, 0, 0]


def _marks_of_keys(segments: Any, key_mask: Any, key: Any) -> Int[Array, "b s"] | None:
    """Return a mark for each key: its segment, or 1 without segments; 0 if no query sees it.

    None: there are neither segments nor a mask.
    """
    if key_mask is None:
        return segments
    seen = jnp.broadcast_to(key_mask, key.shape[:2])
    return seen.astype(jnp.int32) if segments is None else jnp.where(seen, segments, 0)


def _checked_method(
    method: Any, query: Any, key: Any, value: Any, implementation: Any, needs_all: bool
) -> Any:
    """Check the `method` of `attention`, or choose one; return None if tokens are not split.

    Args:
        method: the argument of `attention`.
        query: the queries.
        key: the keys.
        value: the values.
        implementation: the argument of `attention`.
        needs_all: whether all logits exist at once, for which a ring lacks the keys.
    """
    num = num_token_parts()
    if method not in (None, "gather", "heads", "ring"):
        raise ValueError(f'`method` must be "gather", "heads", "ring" or None; got {method!r}.')
    if is_library(implementation) and method == "gather":
        raise ValueError(
            '`implementation` has `method="heads"` only, unless it is "xla". Leave `method` out.'
        )
    if num == 1:
        return None
    for name, x in (("query", query), ("key", key)):
        if x.shape[1] % num:
            raise ValueError(
                f"`{name}` has {x.shape[1]} tokens, and the mesh axis `tokens` splits them over "
                f"{num} devices. Pad rows to a multiple of {num}."
            )
    if method == "heads" and key.shape[2] % num:
        raise ValueError(
            f'`method="heads"` needs a number of key-value heads that divides by the {num} devices '
            f'along `tokens`; got {key.shape[2]}. Take "ring" or "gather", or leave it out.'
        )
    if method == "ring" and query.shape[1] != key.shape[1]:
        raise ValueError(
            f'`method="ring"` needs as many keys as queries; got {key.shape[1]} keys and '
            f'{query.shape[1]} queries. Take "gather".'
        )
    chosen = method or method_for(query, key, value)
    # A ring has the keys of one device at a time, and options that need all logits need all keys.
    return "gather" if needs_all and chosen == "ring" else chosen


def _check(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scale: Any,
    segments: Any,
    softcap: Any,
    chunk: Any,
) -> None:
    shapes = f"{query.shape}, {key.shape} and {value.shape}"
    if {query.ndim, key.ndim, value.ndim} != {4}:
        raise ValueError(
            f"`query`, `key` and `value` must be `[rows, tokens, heads, size]`; got {shapes}."
        )
    fits = query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not fits or key.shape[:3] != value.shape[:3] or query.shape[2] % key.shape[2]:
        raise ValueError(
            "`query` and `key` must have the same rows and sizes, `key` and `value` the same rows, "
            f"tokens and heads, of which `query` must have a multiple; got {shapes}."
        )
    if mask is not None and mask.dtype != bool:
        raise ValueError(
            f"`mask` must be boolean, True where a query sees a key; got {mask.dtype}. Give what "
            "is added to logits as `bias`."
        )
    if segments is not None and not segments.shape == query.shape[:2] == key.shape[:2]:
        raise ValueError(
            "`segments` must have the rows and tokens of `query` and of `key`; got "
            f"{segments.shape} for {shapes}."
        )
    if isinstance(scale, jax.Array):
        raise ValueError(
            f"`scale` must be a number; got an array of {scale.dtype}. Multiply `query` by it, and "
            "give `scale=1.0`."
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"`softcap` must be positive and finite, or None for no cap; got {softcap}."
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"`chunk` must be a number of tokens, at least 1; got {chunk}.")
