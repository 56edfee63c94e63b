"""Attention with grouped heads, windows, softcapping, sinks and rotary embeddings.

    attention(q, k, v) = softmax(cap(scale q k^T) + mask) v,   cap(x) = c tanh(x / c)

A query sees no keys of padding. In a decoder it sees the keys of its own and of earlier positions,
and with a window w only the last w of these. Each of the g key-value heads serves h / g query heads
(GQA, https://arxiv.org/abs/2305.13245).
A sink is a learned logit of each head without a key: it takes a part of the probabilities.

`jax.nn.dot_product_attention` does the work where it can. It has no cap, no sinks and no dropout of
probabilities, and needs keys and values of one size. Its window is a constant, while a scan over
layers with and without a window needs the window as an array. What it lacks is computed here, with
the operations in the same order, and with logits and softmax in float32 too.

Dimensions: b batch, t queries, s keys, d hidden, h heads, g key-value heads, n heads per group,
k size of queries and keys, v size of values.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from .._attention import (
    LONG_ROW,
    Form,
    Implementation,
    attend_heads,
    attend_split,
    back_to_tokens,
    default_scale,
    dot_product_attention,
    exchanged,
    is_library,
    method_for,
)
from .._sums import widened
from ._cache import Slots
from ._decoder_config import DecoderConfig
from ._parts import ScaledLayerNorm, dropout, make_norm
from ._rope import Turns, rotate

Window = int | Int[Array, ""] | None
# True for tokens, False for padding; or the segment of each token, and 0 for padding: tokens see
# those of their own segment.
Mask = Bool[Array, "b s"] | Int[Array, "b s"] | None


class Attention(nnx.Module):
    """Multi-head attention of each token to itself and to the tokens before it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        size = config.head_size
        num_query, num_key = config.num_heads * size, config.num_key_value_heads * size
        bias = config.query_key_value_bias
        self.query = make_linear(config, config.hidden_size, num_query, bias, rngs)
        self.key = make_linear(config, config.hidden_size, num_key, bias, rngs)
        self.value = make_linear(config, config.hidden_size, num_key, bias, rngs)
        self.output = make_linear(
            config, num_query, config.hidden_size, config.attention_output_bias, rngs
        )
        if config.query_key_norm != "none":
            self.query_norm = _norm_of_heads(config, config.num_heads, rngs)
            self.key_norm = _norm_of_heads(config, config.num_key_value_heads, rngs)
        self.sinks = nnx.Param(jnp.zeros(config.num_heads)) if config.attention_sinks else None

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        mask: Mask,
        *,
        window: Window = None,
        turns: Turns | None = None,
        dropout_key: Key[Array, ""] | None = None,
        slots: Slots | None = None,
    ) -> Float[Array, "b t d"]:
        """Mix the tokens by attention, and project the result back to the hidden size.

        Args:
            x_btd: input of the layer.
            mask: True for tokens, False for padding; or, without a cache, the segment of each
                token, 0 for padding; None if there is no padding.
            window: how many positions a token sees, itself included; None for all.
            turns: rotary embedding of queries and keys, as cosines and sines; None for none.
            dropout_key: for dropout of the probabilities.
            slots: where keys and values are stored in a cache. Then the queries also see the keys
                that the cache holds, and `mask` has all columns of the cache.
        """
        config = self.config
        query, key, value = self.query(x_btd), self.key(x_btd), self.value(x_btd)
        if config.query_key_norm == "projection":
            query, key = self.query_norm(query), self.key_norm(key)
        query_bthk, key_bsgk, value_bsgk = (
            each.reshape(*each.shape[:2], -1, config.head_size) for each in (query, key, value)
        )
        if config.query_key_norm in ("head", "each_head"):
            query_bthk, key_bsgk = self.query_norm(query_bthk), self.key_norm(key_bsgk)
        if turns is not None and config.rope is not None:
            query_bthk = rotate(query_bthk, turns, config.rope.pairs)
            key_bsgk = rotate(key_bsgk, turns, config.rope.pairs)
        if slots is not None:
            key_bsgk, value_bsgk = slots.write(key_bsgk, value_bsgk)
        mixed_bthk = attend(
            query_bthk,
            key_bsgk,
            value_bsgk,
            mask,
            start=None if slots is None else slots.start,
            window=window,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks_h=None if self.sinks is None else self.sinks[...],
            dropout_rate=config.attention_dropout,
            dropout_key=dropout_key,
            implementation=config.attention_implementation,
        )
        return self.output(mixed_bthk.reshape(*mixed_bthk.shape[:2], -1))


def attend(
    query_bthk: Float[Array, "b t h k"],
    key_bsgk: Float[Array, "b s g k"],
    value_bsgv: Float[Array, "b s g v"],
    mask_bs: Mask = None,
    *,
    start: Int[Array, ""] | None = None,
    is_causal: bool = True,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_h: Float[Array, "h"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "b t h v"]:
    """Compute attention by `jax.nn.dot_product_attention`, or by own code if JAX lacks a feature.

    If tokens are split over devices, or rows are long, `attend_split` computes it.

    Args:
        query_bthk, key_bsgk, value_bsgv: queries, keys and values.
        mask_bs: which keys are tokens, or the segments; see `Mask`.
        start: the column of the first query among the keys of a cache. None: there is no cache, and
            there are as many queries as keys.
        is_causal: True if a query sees no later keys.
        window: how many positions a query sees, its own included; if not `is_causal`, it sees the
            positions fewer than `window` away, on both sides.
        scale: multiplies the products of queries and keys; None for `k ** -0.5`.
        softcap: c of `cap`; None for no cap.
        sinks_h: the logit of each head's sink; None for no sinks.
        dropout_rate, dropout_key: dropout of the probabilities; none without a key.
        implementation: as `DecoderConfig.attention_implementation`.

    Raises:
        NotImplementedError: `implementation` lacks a feature that is asked for.
    """
    has_dropout = dropout_key is not None and dropout_rate > 0
    # One query has few logits: where keys are split, each device computes the logits of its keys.
    is_one = start is not None and query_bthk.shape[1] == 1
    method = None if is_one else method_for(query_bthk, key_bsgk, value_bsgv)
    # A ring needs queries at the positions of the keys; with a cache, the first is at `start`.
    if start is not None and method == "ring":
        method = "gather"
    is_long = not is_one and max(query_bthk.shape[1], key_bsgk.shape[1]) > LONG_ROW
    if (method is not None or is_long) and not has_dropout and implementation is None:
        form = _form(query_bthk.shape[-1], is_causal, window, scale, softcap, mask_bs)
        reach = window if isinstance(window, jax.Array) else None
        of_queries = mask_bs if start is None else None
        arrays = query_bthk, key_bsgk, value_bsgv, of_queries, mask_bs
        return _with_sinks(*attend_split(form, method, *arrays, reach, start), sinks_h)
    if method is not None and not is_library(implementation):
        query_bthk, key_bsgk, value_bsgv = exchanged(method, query_bthk, key_bsgk, value_bsgv)
    is_plain = softcap is None and sinks_h is None and key_bsgk.shape == value_bsgv.shape
    if is_plain and not has_dropout and not isinstance(window, jax.Array) and start is None:
        whole = functools.partial(
            dot_product_attention,
            scale=scale,
            is_causal=is_causal,
            local_window_size=_window_size(window, is_causal),
            implementation=implementation,
        )
        mask = None if mask_bs is None else _keys_of_queries(mask_bs, of_heads=True)
        arrays = query_bthk, key_bsgk, value_bsgv, None, mask
        if method is not None and is_library(implementation):
            return attend_heads(whole, *arrays)
        return back_to_tokens(whole(*arrays), method)
    if is_library(implementation):
        raise NotImplementedError(
            '`attention_implementation`, if it is "cudnn" or a function, has no cap on logits, no '
            "sinks, no latent attention, no cache, no dropout of probabilities, and no window that "
            "differs between scanned layers. Leave it None, or set `attention_dropout` to 0, or "
            "`scan_layers` to False."
        )
    seen = _seen(query_bthk.shape[1], key_bsgk.shape[1], start, is_causal, window, mask_bs)
    arrays = query_bthk, key_bsgk, value_bsgv, seen
    mixed = _with_all_logits(*arrays, scale, softcap, sinks_h, dropout_rate, dropout_key)
    return back_to_tokens(mixed, method)


def _with_all_logits(
    query_bthk: Float[Array, "b t h k"],
    key_bsgk: Float[Array, "b s g k"],
    value_bsgv: Float[Array, "b s g v"],
    seen: Bool[Array, "_ t s"],
    scale: float | None,
    softcap: float | None,
    sinks_h: Float[Array, "h"] | None,
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
) -> Float[Array, "b t h v"]:
    num_groups = key_bsgk.shape[2]
    query = query_bthk.reshape(*query_bthk.shape[:2], num_groups, -1, query_bthk.shape[-1])
    wide = widened(query.dtype)
    logits = jnp.einsum("btgnk,bsgk->bgnts", query, key_bsgk, preferred_element_type=wide)
    logits = logits * (default_scale(query.shape[-1]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    # A finite value, as in JAX: a row of padding, with all keys masked, gets a mean and not NaN.
    logits = jnp.where(seen[:, None, None], logits, 0.7 * jnp.finfo(wide).min)
    probabilities = dropout(_softmax(logits, sinks_h), dropout_rate, dropout_key)
    mixed = jnp.einsum("bgnts,bsgv->btgnv", probabilities.astype(value_bsgv.dtype), value_bsgv)
    return mixed.reshape(*query_bthk.shape[:-1], -1)


def _window_size(window: int | None, is_causal: bool) -> tuple[int, int] | None:
    """Return how many positions before and after its own a query sees; None if it sees all.

    In an encoder, which is not causal, the window is on both sides.
    """
    return None if window is None else (window - 1, 0 if is_causal else window - 1)


def _with_sinks(
    mixed_bthv: Float[Array, "b t h v"],
    logarithms_bth: Float[Array, "b t h"],
    sinks_h: Float[Array, "h"] | None,
) -> Float[Array, "b t h v"]:
    """Scale attention's result, computed without sinks, by the share that sinks leave to the keys.

    The probabilities of all keys sum to exp(l) / (exp(l) + exp(sink)) = sigmoid(l - sink), where l
    is the logarithm of the softmax's denominator without sinks, `logarithms_bth`.
    """
    if sinks_h is None:
        return mixed_bthv
    left = jax.nn.sigmoid(logarithms_bth - sinks_h.astype(logarithms_bth.dtype)[None, None])
    return (mixed_bthv * left[..., None]).astype(mixed_bthv.dtype)


def _form(
    size: int,
    is_causal: bool,
    window: Window,
    scale: float | None,
    softcap: float | None,
    mask_bs: Mask,
) -> Form:
    """Describe for `attend_split` which keys queries see, and how logits are computed.

    A window that is an array is not part of it, and goes to `attend_split` as `reach`.
    """
    before = window - 1 if isinstance(window, int) else None
    marks = None if mask_bs is None else "keys" if mask_bs.dtype == jnp.bool_ else "segments"
    scale = default_scale(size) if scale is None else scale
    return Form(scale, softcap, before, 0 if is_causal else before, marks, chunk=1024)


def _softmax(
    logits: Float[Array, "b g n t s"], sinks_h: Float[Array, "h"] | None
) -> Float[Array, "b g n t s"]:
    """Return the probabilities of the keys; with sinks they sum to less than 1."""
    if sinks_h is None:
        return jax.nn.softmax(logits)
    sinks = sinks_h.astype(logits.dtype).reshape(1, *logits.shape[1:3], 1, 1)
    sinks = jnp.broadcast_to(sinks, (*logits.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1))[..., :-1]


def _seen(
    num_queries: int,
    num_keys: int,
    start: Int[Array, ""] | None,
    is_causal: bool,
    window: Window,
    mask_bs: Mask,
) -> Bool[Array, "_ t s"]:
    """Return a mask `[batch or 1, queries, keys]`, True where a query attends to a key."""
    distance = jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)[None]
    distance = distance if start is None else distance + start
    seen = distance >= (0 if is_causal else -num_keys)
    if window is not None:
        seen = seen & (jnp.abs(distance) < window)
    return seen[None] if mask_bs is None else seen[None] & _keys_of_queries(mask_bs)


def _keys_of_queries(mask_bs: Array, *, of_heads: bool = False) -> Bool[Array, "..."]:
    """Return which keys each query may see by `mask_bs`, as booleans `[batch, queries, keys]`.

    A mask of padding is the same for all queries: then the dim of queries has size 1. With
    `of_heads`, the result has a dim of size 1 for heads after the batch.
    """
    dims = (slice(None), *[None] * of_heads)
    if mask_bs.dtype == jnp.bool_:
        return mask_bs[(*dims, None)]
    is_same = mask_bs[(*dims, slice(None), None)] == mask_bs[(*dims, None)]
    return is_same & (mask_bs != 0)[(*dims, None)]


def _norm_of_heads(config: DecoderConfig, num_heads: int, rngs: nnx.Rngs) -> nnx.Module:
    if config.query_key_norm == "each_head":
        return ScaledLayerNorm(num_heads, config.head_size, epsilon=config.norm_epsilon)
    by_head = config.query_key_norm == "head"
    return make_norm(config, config.head_size * (1 if by_head else num_heads), rngs)


def make_linear(
    config: DecoderConfig,
    num_in: int,
    num_out: int,
    bias: bool,
    rngs: nnx.Rngs,
    dtype: jnp.dtype | None = None,
) -> nnx.Linear:
    """Make a linear layer with the initializer of `config`.

    It computes in `dtype`, or else in the compute dtype of `config`.
    """
    return nnx.Linear(
        num_in,
        num_out,
        use_bias=bias,
        kernel_init=nnx.initializers.normal(config.initializer_range),
        dtype=jnp.dtype(config.compute_dtype) if dtype is None else dtype,
        rngs=rngs,
    )


def is_among(numbers: tuple[int, ...], i: int | Array, num_layers: int) -> bool | Array:
    """Return whether the number i of a layer is among `numbers`.

    The result is a Python bool if it is known when tracing. If the layers are scanned (`i` is an
    array) and only some are among `numbers`, it is a boolean array.
    """
    are_among = [number in numbers for number in range(num_layers)]
    if isinstance(i, int):
        return are_among[i]
    is_uniform = all(are_among) or not any(are_among)
    return are_among[0] if is_uniform else jnp.array(are_among)[i]


def window_if(has_window: bool | Array, window: int | None, num_tokens: int) -> Window:
    """Return the window of a layer, in tokens: `window` if `has_window` is true.

    A layer without a window gets None if that is known when tracing, and otherwise `num_tokens`, a
    window that hides no token.
    """
    if window is None or isinstance(has_window, bool):
        return window if has_window is True else None
    return jnp.where(has_window, window, num_tokens)


def turns_if(condition: bool | Array, one: Turns, other: Turns) -> Turns:
    """Choose a layer's rotary embedding: `one` if the condition is true, else `other`.

    Each is the cosines and sines of all tokens' angles (`Turns`), in arrays of the same shapes.
    """
    if isinstance(condition, bool):
        return one if condition else other
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
