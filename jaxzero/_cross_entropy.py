"""Compute cross-entropy over a vocabulary in chunks, so that never all logits exist at once.

    logits = cap(scale hidden head),  cap(x) = c tanh(x / c),  total = log(sum(exp(logits)))
    loss   = total - logits[label] + z total^2

A scan runs over chunks of tokens, so that only the logits of one chunk exist at a time. If the
weights of the losses are given, forward computes the gradients too, while it has a chunk's logits.
Otherwise forward keeps `total`, one number per token, and backward computes the logits again:

    dloss / dlogits = (1 + 2 z total) exp(logits - total) - onehot(label)

With n chunks, a chunk is every n-th token of each row. So each chunk has tokens from all parts of a
row; and where rows or tokens are split over devices, every device works in each iteration.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._mesh import num_token_parts, split_over_tokens
from ._sums import widened


def softmax_cross_entropy(
    hidden: Any,
    head: Any,
    labels: Any,
    weights: Any = None,
    *,
    chunk: int = 1024,
    vocabulary_dim: int = 1,
    scale: float = 1.0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
) -> Any:
    """Compute the loss of each token in chunks of tokens, without the logits of a full row.

    The losses equal `optax.softmax_cross_entropy_with_integer_labels(hidden @ head, labels)`. Optax
    holds the logits of all tokens, `tokens * vocabulary` numbers, and as many for their gradient.
    This function holds the logits and gradients of `chunk` tokens of each row only.

    The head is cast to the dtype of `hidden`. If `hidden` has 16 bits, matrix products are summed
    in float32. The softmax, the losses and the sum of the head's gradient over tokens are float32
    too, and the head's gradient is rounded once, after this sum. Under `jz.Zero` the head is
    gathered at most once in forward and once in backward, and held between chunks.

    With `weights`, the result is what `zero.value_and_grad(..., weighted=True)` expects of a loss,
    and logits are computed once: when differentiated, forward computes the gradients too. Without
    `weights`, only backward knows the cotangent of each loss, so it computes the logits again.

        return jz.softmax_cross_entropy(hidden, params["head"], batch["labels"], batch["weights"])

    Args:
        hidden: vectors that enter the head, `[*rows, tokens, width]`.
        head: `[width, vocabulary]`.
        labels: the right token of each vector, integers `[*rows, tokens]`. The loss of a label that
            is not in the vocabulary, such as -100, is NaN. Give it a weight of 0, or drop it with
            `jnp.where`: a product with 0 stays NaN.
        weights: a factor for each loss, numbers or booleans `[*rows, tokens]`. No gradient passes
            to them. A loss of weight 0 is dropped, whatever its label. None: losses are not summed.
        chunk: tokens of each row whose logits exist at the same time. It does not change losses.
        vocabulary_dim: the dim of `head` that is the vocabulary: 0 for a tied embedding,
            `[vocabulary, width]`, which is not transposed in memory.
        scale: factor of the logits.
        soft_cap: the logits x become `soft_cap * tanh(x / soft_cap)`, as in Gemma 2.
        z_loss: coefficient of the squared logarithm of the softmax's denominator, which is added to
            each loss (PaLM: 1e-4).

    Returns:
        The loss of each token, `[*rows, tokens]`; with `weights`, `(sum, weight)`: the sum of the
        losses times their weights, and the sum of the weights. They are float32 for 16-bit
        `hidden`. Reverse-mode derivatives to `hidden` and `head` are exact; forward-mode ones are
        not defined.

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
    # The cast is outside of the function with a `custom_vjp`, so that `jz.Zero` sees it: it gathers
    # the head and reduces its gradient in the narrower dtype.
    narrow = head.astype(hidden.dtype)
    arrays = (cut(hidden), narrow, cut(labels.astype(jnp.int32)))
    if weights is not None:
        weights = _checked_weights(weights, labels).astype(widened(hidden.dtype))
        return _weighted_sum(form, *arrays, cut(weights)), jnp.sum(weights)
    losses: Any = _losses(form, *arrays)
    losses = jnp.moveaxis(losses, 0, -1)  # [*rows, tokens of a chunk, chunks]
    return losses.reshape(*labels.shape[:-1], -1)[..., :num_tokens]


def _cut(x: Array, dim: int, num_chunks: int) -> Array:
    """Split the tokens of an array into chunks: `[chunks, *rows, tokens of a chunk, ...]`.

    `x` is `[*rows, tokens, ...]`, and `dim` is the dim of tokens, which is padded with zeros first.
    So padding tokens have label 0. The caller drops their losses, or gives them the weight 0.
    """
    added = -x.shape[dim] % num_chunks
    if added:
        x = jnp.pad(x, [(0, added if i == dim else 0) for i in range(x.ndim)])
    x = x.reshape(*x.shape[:dim], x.shape[dim] // num_chunks, num_chunks, *x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim + 1, 0)


@dataclasses.dataclass(frozen=True)
class _Form:
    """The options that define the loss; methods compute it and its gradients for one chunk.

    In a chunk, `hidden` is `[*rows, tokens, width]` and `labels` is `[*rows, tokens]`.
    """

    vocabulary_dim: int
    scale: float
    soft_cap: float | None
    z_loss: float

    def losses(self, hidden: Array, head: Array, labels: Array) -> tuple[Array, Array, Array]:
        """Return the loss, the logits and `total` (see the module) of each token of a chunk."""
        logits = _product(hidden, head, 1 - self.vocabulary_dim)
        logits = logits if self.scale == 1 else logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        totals = jax.nn.logsumexp(logits, axis=-1)
        # A sum and not a lookup: it also works where the vocabulary is split over devices.
        chosen = jnp.sum(jnp.where(_is_label(logits, labels), logits, 0), axis=-1)
        losses = totals - chosen + self.z_loss * totals**2
        is_token = (labels >= 0) & (labels < logits.shape[-1])
        return jnp.where(is_token, losses, jnp.nan), logits, totals

    def gradients(
        self, hidden: Array, head: Array, labels: Array, logits: Array, totals: Array, g: Array
    ) -> tuple[Array, Array]:
        """Return the gradients of `sum(g * losses)` with respect to `hidden` and `head`.

        `logits` and `totals` are those that `losses` returned. The gradient of `head` has at least
        32 bits, and the form of `_sum_over_tokens`.
        """
        gradient = ((1 + 2 * self.z_loss * totals) * g)[..., None] * jnp.exp(
            logits - totals[..., None]
        )
        gradient = gradient - jnp.where(_is_label(logits, labels), g[..., None], 0)
        if self.soft_cap is not None:  # `logits` are capped: tanh' = 1 - tanh^2
            gradient = gradient * (1 - (logits / self.soft_cap) ** 2)
        gradient = gradient if self.scale == 1 else gradient * self.scale
        gradient = gradient.astype(hidden.dtype)
        pair = (hidden, gradient) if self.vocabulary_dim else (gradient, hidden)
        hidden_gradient = _product(gradient, head, self.vocabulary_dim).astype(hidden.dtype)
        return hidden_gradient, _sum_over_tokens(*pair)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(form: _Form, hidden: Array, head: Array, labels: Array) -> Array:
    """Return the losses of all tokens; `hidden`, `labels` and the result are `[chunks, ...]`."""
    return _losses_forward(form, hidden, head, labels)[0]


def _losses_forward(form: _Form, hidden: Array, head: Array, labels: Array) -> tuple[Array, Any]:
    def step(carry: None, chunk: Any) -> tuple[None, Any]:
        hidden, labels = chunk
        losses, _, totals = form.losses(hidden, head, labels)
        return carry, (losses, totals)

    _, (losses, totals) = jax.lax.scan(step, None, (hidden, labels))
    return losses, (hidden, head, labels, totals)


def _losses_backward(form: _Form, saved: Any, g: Array) -> tuple[Array, Array, None]:
    hidden, head, labels, totals = saved

    def step(head_gradient: Array, chunk: Any) -> tuple[Array, Array]:
        hidden, labels, totals, g = chunk
        _, logits, _ = form.losses(hidden, head, labels)
        hidden_gradient, added = form.gradients(hidden, head, labels, logits, totals, g)
        return head_gradient + added, hidden_gradient

    start = _zeros_of_parts(head, hidden, g.dtype)
    head_gradient, hidden_gradient = jax.lax.scan(step, start, (hidden, labels, totals, g))
    return hidden_gradient, _sum_of_parts(head_gradient, head).astype(head.dtype), None


_losses.defvjp(_losses_forward, _losses_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(form: _Form, hidden: Array, head: Array, labels: Array, weights: Array) -> Array:
    """Return the sum over all tokens of their losses times `weights`, which have no gradient.

    All arrays but `head` have a leading dim of chunks.
    """
    return _sum(_losses(form, hidden, head, labels), weights)


def _weighted_sum_forward(
    form: _Form, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Array, Any]:
    """Return the weighted sum, and its gradients with respect to `hidden` and `head` for backward.

    All are computed from the same logits. Backward multiplies the gradients by the cotangent of the
    sum.
    """

    def step(head_gradient: Array, chunk: Any) -> tuple[Array, Any]:
        hidden, labels, weights = chunk
        losses, logits, totals = form.losses(hidden, head, labels)
        hidden_gradient, added = form.gradients(hidden, head, labels, logits, totals, weights)
        return head_gradient + added, (losses, hidden_gradient)

    start = _zeros_of_parts(head, hidden, weights.dtype)
    head_gradient, rows = jax.lax.scan(step, start, (hidden, labels, weights))
    head_gradient = _sum_of_parts(head_gradient, head)
    losses, hidden_gradient = rows
    return _sum(losses, weights), (hidden_gradient, head_gradient.astype(head.dtype))


def _weighted_sum_backward(
    form: _Form, saved: tuple[Array, Array], g: Array
) -> tuple[Array, Array, None, None]:
    del form
    hidden_gradient, head_gradient = ((x.astype(g.dtype) * g).astype(x.dtype) for x in saved)
    return hidden_gradient, head_gradient, None, None


_weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


def _sum(losses: Array, weights: Array) -> Array:
    return jnp.sum(jnp.where(weights == 0, 0, losses) * weights)


def _product(x: Array, matrix: Array, dim: int) -> Array:
    """Contract the last dim of `x` with dim `dim` of `matrix`, with sums in 32 bits or more."""
    dims = (((x.ndim - 1,), (dim,)), ((), ()))
    return jax.lax.dot_general(x, matrix, dims, preferred_element_type=widened(x.dtype))


def _sum_over_tokens(x: Array, y: Array) -> Array:
    """Return the sum over tokens of the outer products of their vectors, in 32 bits or more.

    A token has a vector in `x` and one in `y`, both `[*rows, tokens, features]`. Where tokens are
    split over devices, each device keeps its own sum, and the result is `[devices, *sum]`. These
    sums are added up once, after the last chunk (`_sum_of_parts`), and not by a collective in each
    chunk.
    """
    num = _num_parts(x)
    if num > 1:
        x, y = (a.reshape(*a.shape[:-2], num, -1, a.shape[-1]) for a in (x, y))
    tokens = tuple(range(x.ndim - 1))
    parts = tokens[-2:-1] if num > 1 else ()
    summed = tuple(i for i in tokens if i not in parts)
    dims = ((summed, summed), (parts, parts))
    sums = jax.lax.dot_general(x, y, dims, preferred_element_type=widened(x.dtype))
    return split_over_tokens(sums, 0) if num > 1 else sums


def _zeros_of_parts(head: Array, hidden: Array, dtype: np.dtype) -> Array:
    """Return zeros in the shape and sharding of the head's gradient by `_sum_over_tokens`."""
    num = _num_parts(hidden)
    if num == 1:
        return jnp.zeros(head.shape, dtype)
    return split_over_tokens(jnp.zeros((num, *head.shape), dtype), 0)


def _sum_of_parts(x: Array, head: Array) -> Array:
    return x if x.ndim == head.ndim else jnp.sum(x, axis=0)


def _num_parts(hidden: Array) -> int:
    """Return the number of devices that split a chunk's tokens; 1 if no even split is possible."""
    num = num_token_parts()
    return num if hidden.shape[-2] % num == 0 else 1


def _is_label(logits: Array, labels: Array) -> Array:
    """Return a boolean array of the shape of `logits`, true at the logit of each token's label."""
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
    if soft_cap is not None and not 0 < soft_cap < np.inf:
        raise ValueError(
            f"`soft_cap` must be positive and finite, or None for no cap; got {soft_cap}."
        )
    for name, value in (("scale", scale), ("z_loss", z_loss)):
        if not np.isfinite(value) or value < 0:
            raise ValueError(f"`{name}` must be a finite number, at least 0; got {value}.")


def _checked_weights(weights: Any, labels: Array) -> Array:
    weights = jnp.asarray(weights)
    if weights.shape != labels.shape:
        raise ValueError(
            f"`weights` must have the shape of `labels`, {labels.shape}; got {weights.shape}."
        )
    return jax.lax.stop_gradient(weights)


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
