"""Cross-entropy over a vocabulary, whose logits never exist all at once.

    logits = cap(scale hidden head),  cap(x) = c tanh(x / c),  total = log(sum(exp(logits)))
    loss   = total - logits[label] + z total^2

A scan runs over chunks of tokens, forward and backward. Forward keeps `total`, one number per
token, and backward computes the logits of each chunk again:

    dloss / dlogits = (1 + 2 z total) exp(logits - total) - onehot(label)

A chunk takes every n-th token of each row, so that each of n iterations has tokens of all parts of
a row: where rows or tokens are split over devices, all of them work in each iteration.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def softmax_cross_entropy(
    hidden: Float[Array, "..."],
    head: Float[Array, "..."],
    labels: Any,
    *,
    chunk: int = 1024,
    vocabulary_dim: int = 1,
    scale: float = 1.0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> Float[Array, "..."]:
    """Compute the loss of each token in chunks of tokens, without the logits of a full row.

    It equals `optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)`. That holds
    logits of all tokens, tokens times vocabulary, and their gradient; this holds those of `chunk`
    tokens of each row. Its price is that backward computes the logits again.

    The head is cast to the dtype of `hidden`, as in other layers. If that has 16 bits, products are
    summed in float32; the softmax, the losses and the sum of the head's gradient over tokens are
    float32 too, and the gradient is rounded once. Under `jz.Zero` the head is gathered once in
    forward and once in backward, and held.

    With `zero.value_and_grad(..., weighted=True)` the loss of a batch with padding is:

        losses = jz.softmax_cross_entropy(hidden, params["head"], labels)
        return jnp.sum(losses * weights), jnp.sum(weights)

    Args:
        hidden: vectors that enter the head, `[*rows, tokens, width]`.
        head: `[width, vocabulary]`.
        labels: the right token of each vector, integers `[*rows, tokens]`. The loss of a label that
            is not in the vocabulary, such as -100, is NaN; drop it with `jnp.where`, not by a
            factor of 0.
        chunk: tokens of each row whose logits exist at the same time. It does not change losses.
        vocabulary_dim: the dim of `head` that is the vocabulary: 0 for a tied embedding,
            `[vocabulary, width]`, which is not transposed in memory.
        scale: factor of the logits.
        soft_cap: the logits x become `soft_cap * tanh(x / soft_cap)`, as in Gemma 2.
        z_loss: coefficient of the squared logarithm of the softmax's denominator, which is added to
            each loss (PaLM: 1e-4).

    Returns:
        The loss of each token, `[*rows, tokens]`, float32 for 16-bit `hidden`. Reverse-mode
        derivatives to `hidden` and `head` are exact; forward-mode ones are not defined.

    Raises:
        TypeError: `hidden` or `head` is not floating-point, or `labels` are not integers.
        ValueError: shapes do not fit each other, or an option is out of range.
    """
    hidden, head, labels = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(labels)
    _check_options(chunk, vocabulary_dim, scale, soft_cap, z_loss)
    _check_arrays(hidden, head, labels, vocabulary_dim)
    form = _Form(vocabulary_dim, float(scale), soft_cap, float(z_loss))
    tokens_dim, num_tokens = labels.ndim - 1, labels.shape[-1]
    num_chunks = max(1, -(-num_tokens // chunk))
    cut = functools.partial(_cut, dim=tokens_dim, num_chunks=num_chunks)
    # Outside of the function with its own derivative, so that `jz.Zero` sees the head as a weight
    # that is cast: it gathers the head and reduces its gradient in the narrower dtype.
    narrow = head.astype(hidden.dtype)
    losses: Any = _losses(form, cut(hidden), narrow, cut(labels.astype(jnp.int32)))
    losses = jnp.moveaxis(losses, 0, -1)  # [*rows, tokens of a chunk, chunks]
    return losses.reshape(*labels.shape[:-1], -1)[..., :num_tokens]


def _cut(x: Array, dim: int, num_chunks: int) -> Array:
    """Pad a dim of tokens and cut it into chunks: `[chunks, *rows, tokens of a chunk, ...]`."""
    added = -x.shape[dim] % num_chunks
    if added:
        x = jnp.pad(x, [(0, added if i == dim else 0) for i in range(x.ndim)])
    x = x.reshape(*x.shape[:dim], x.shape[dim] // num_chunks, num_chunks, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim + 1, 0)


@dataclasses.dataclass(frozen=True)
class _Form:
    """The formula of the loss, without its arrays."""

    vocabulary_dim: int
    scale: float
    soft_cap: float | None
    z_loss: float

    def logits(self, hidden: Array, head: Array) -> Array:
        logits = _product(hidden, head, 1 - self.vocabulary_dim)
        logits = logits if self.scale == 1 else logits * self.scale
        cap = self.soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def logits_gradient(self, logits: Array, labels: Array, log_totals: Array, g: Array) -> Array:
        """Gradient of `sum(g * losses)` to the product of `hidden` and `head`."""
        shares = jnp.exp(logits - log_totals[..., None])
        gradient = ((1 + 2 * self.z_loss * log_totals) * g)[..., None] * shares
        gradient = gradient - jnp.where(_is_label(logits, labels), g[..., None], 0)
        if self.soft_cap is not None:
            gradient = gradient * (1 - (logits / self.soft_cap) ** 2)
        return gradient if self.scale == 1 else gradient * self.scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(form: _Form, hidden: Array, head: Array, labels: Array) -> Array:
    """Losses of chunks of tokens; `hidden`, `labels` and the result have a leading dim of them."""
    return _forward(form, hidden, head, labels)[0]


def _forward(form: _Form, hidden: Array, head: Array, labels: Array) -> tuple[Array, Any]:
    def losses_of_chunk(carry: None, chunk: Any) -> tuple[None, Any]:
        hidden, labels = chunk
        logits = form.logits(hidden, head)
        log_totals = jax.nn.logsumexp(logits, axis=-1)
        # A sum and not a lookup: it also works where the vocabulary is split over devices.
        chosen = jnp.sum(jnp.where(_is_label(logits, labels), logits, 0), axis=-1)
        losses = log_totals - chosen + form.z_loss * log_totals**2
        is_token = (labels >= 0) & (labels < logits.shape[-1])
        return carry, (jnp.where(is_token, losses, jnp.nan), log_totals)

    _, (losses, log_totals) = jax.lax.scan(losses_of_chunk, None, (hidden, labels))
    return losses, (hidden, head, labels, log_totals)


def _backward(form: _Form, saved: Any, g: Array) -> tuple[Array, Array, None]:
    hidden, head, labels, log_totals = saved

    def gradients_of_chunk(head_gradient: Array, chunk: Any) -> tuple[Array, Array]:
        hidden, labels, log_totals, g = chunk
        logits = form.logits(hidden, head)
        gradient = form.logits_gradient(logits, labels, log_totals, g).astype(hidden.dtype)
        hidden_gradient = _product(gradient, head, form.vocabulary_dim).astype(hidden.dtype)
        pair = (hidden, gradient) if form.vocabulary_dim else (gradient, hidden)
        return head_gradient + _sum_over_tokens(*pair), hidden_gradient

    start = jnp.zeros(head.shape, g.dtype)
    head_gradient, hidden_gradient = jax.lax.scan(
        gradients_of_chunk, start, (hidden, labels, log_totals, g)
    )
    return hidden_gradient, head_gradient.astype(head.dtype), None


_losses.defvjp(_forward, _backward)


def _product(x: Array, matrix: Array, dim: int) -> Array:
    """Product over the last dim of `x` and a dim of a matrix, summed in 32 bits or more."""
    dims = (((x.ndim - 1,), (dim,)), ((), ()))
    return jax.lax.dot_general(x, matrix, dims, preferred_element_type=_wide(x))


def _sum_over_tokens(x: Array, y: Array) -> Array:
    """Sum of the outer products of the vectors of each token, in 32 bits or more."""
    tokens = tuple(range(x.ndim - 1))
    dims = ((tokens, tokens), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=_wide(x))


def _wide(x: Array) -> np.dtype:
    return np.dtype(np.float32) if x.dtype.itemsize < 4 else x.dtype


def _is_label(logits: Array, labels: Array) -> Array:
    """Where the logits of the labels are: a boolean array of the shape of the logits."""
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]


def _check_options(
    chunk: int, vocabulary_dim: int, scale: float, soft_cap: float | None, z_loss: float
) -> None:
    if chunk < 1:
        raise ValueError(f"`chunk` must be a number of tokens, at least 1; got {chunk}.")
    if vocabulary_dim not in (0, 1):
        raise ValueError(
            "`vocabulary_dim` must be 1 for a `head` of [width, vocabulary], or 0 for "
            f"[vocabulary, width]; got {vocabulary_dim}."
        )
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"`soft_cap` must be positive, or None for no cap; got {soft_cap}.")
    for name, value in (("scale", scale), ("z_loss", z_loss)):
        if not np.isfinite(value) or value < 0:
            raise ValueError(f"`{name}` must be a finite number, at least 0; got {value}.")


def _check_arrays(hidden: Array, head: Array, labels: Array, vocabulary_dim: int) -> None:
    for name, x in (("hidden", hidden), ("head", head)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"`{name}` must be floating-point; got {x.dtype}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"`labels` must be integers, the ids of the right tokens; got {labels.dtype}."
        )
    if hidden.ndim < 2 or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            "`hidden` must be [*rows, tokens, width] and `labels` [*rows, tokens]; got shapes "
            f"{hidden.shape} and {labels.shape}."
        )
    if head.ndim != 2 or head.shape[1 - vocabulary_dim] != hidden.shape[-1]:
        order = "[width, vocabulary]" if vocabulary_dim else "[vocabulary, width]"
        raise ValueError(
            f"`head` must be {order} with a width of {hidden.shape[-1]}, that of `hidden`, if "
            f"`vocabulary_dim` is {vocabulary_dim}; got shape {head.shape}. A tied embedding needs "
            "`vocabulary_dim=0`."
        )
