"""Measure the similarity of the gradients of two half-batches, and the gradient noise scale.

A batch of weight W (examples, tokens, micro-batches) is divided into halves of weights w1 and w2
with mean gradients g1 and g2. If one unit of weight has the gradient G and a covariance of
trace T, then a half has E|g|^2 = |G|^2 + T/w, and the errors of g1 and g2 are independent:

    phi = g1.g2 / (|g1| |g2|)  is about  1 / sqrt((1 + N/w1) (1 + N/w2)),    N = T / |G|^2,

up to fluctuations that shrink with the number of parameters. N is the gradient noise scale.
For equal halves phi = 1 / (1 + 2N/W). Unequal halves of f1 W and f2 W increase the angle between
the gradients, arccos(phi): its tangent grows by 1 / sqrt(4 f1 f2), which `balanced` corrects.

N is estimated from unbiased estimates of |G|^2 and T, for any division into halves:

    |G|^2: g1.g2        T: |g1 - g2|^2 w1 w2 / W

averaged separately over updates and divided at the end. With e = T - N |G|^2 of one update and
averages by weights v (sum V1, of squares V2), q = V2 / V1^2, the standard error of N is that of
a ratio (delta method):

    se(N)^2 = mean(e^2) * q / (1 - q) / mean(|G|^2)^2.

References:
    SimiGrad: Qin et al., NeurIPS 2021 (the similarity);
    McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162), section 2 and appendix A (the
    noise scale, and why numerator and denominator are averaged apart).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32


class Products(NamedTuple):
    """Inner products of the mean gradients of two halves of a batch."""

    first: Float32[Array, ""]  # |g1|^2
    second: Float32[Array, ""]  # |g2|^2
    cross: Float32[Array, ""]  # g1.g2

    def cosine(self) -> Float32[Array, ""]:
        """Return the cosine of g1 and g2; NaN if one of them is 0 or a product is not finite."""
        cosine = self.cross / (jnp.sqrt(self.first) * jnp.sqrt(self.second))
        return jnp.clip(jnp.where(jnp.isfinite(cosine), cosine, jnp.nan), -1.0, 1.0)


class Halves(NamedTuple):
    """The weights of two halves of a batch."""

    first: Float32[Array, ""]
    second: Float32[Array, ""]

    @property
    def total(self) -> Float32[Array, ""]:
        return self.first + self.second


class GradientHalves(NamedTuple):
    """Inner products of the halves of one micro-batch, from `Zero.value_and_grad(halves=True)`.

    `first`, `second` and `cross` are trees like the gradients, with a float32 scalar for each leaf;
    it is 0 for a leaf without a gradient.
    """

    first: Any  # |g1|^2 of the mean over the first half
    second: Any  # |g2|^2
    cross: Any  # g1.g2
    share: Float32[Array, ""]  # fraction of the micro-batch's weight that is in the first half


class CodecNoise(NamedTuple):
    """The expected squared norm of the error that codecs add to the gradient of one micro-batch.

    It is `of_noise * T + of_signal * |G|^2`, where G is the expectation of the gradient and T the
    trace of its covariance.
    """

    of_noise: Float32[Array, ""]  # in units of T
    of_signal: Float32[Array, ""]  # in units of |G|^2


class Moments(NamedTuple):
    """Exponential moving averages of the estimates of |G|^2 and T, and of their deviations.

    G is the gradient of one unit of weight and T the trace of its covariance (see the module). All
    fields are zero before the first update.
    """

    weight: Float32[Array, ""]  # V1: sum of the weights of updates
    weight_squares: Float32[Array, ""]  # V2: sum of their squares
    signal: Float32[Array, ""]  # mean of |G|^2
    noise: Float32[Array, ""]  # mean of T
    signal_squares: Float32[Array, ""]  # weighted sum of squared deviations of |G|^2
    noise_squares: Float32[Array, ""]  # weighted sum of squared deviations of T
    cross: Float32[Array, ""]  # weighted sum of the products of the two deviations


def leaf_products(mean: Any, first_mean: Any, halves: Halves) -> tuple[list[Array], ...]:
    """Compute the inner products of the two halves' mean gradients, for each leaf.

    `mean` is the mean gradient of the batch, and `first_mean` that of its first half. The mean of
    the second half is derived from these two. Leaves may be sharded: each product is a sum over
    shards, so only scalars are communicated.

    Returns:
        |g1|^2, |g2|^2 and g1.g2, each a list with a float32 scalar for each leaf.
    """
    first, second, cross = [], [], []
    pairs = zip(jax.tree.leaves(mean), jax.tree.leaves(first_mean), strict=True)
    for whole, one in pairs:
        # The mean of the second half, from whole = (w1 one + w2 other) / (w1 + w2); so that it need
        # not be accumulated too.
        share = (halves.first / halves.second).astype(whole.dtype)
        other = whole + share * (whole - one)
        first.append(dot(one, one))
        second.append(dot(other, other))
        cross.append(dot(one, other))
    return first, second, cross


def dot(x: Array, y: Array) -> Float32[Array, ""]:
    """Return the real inner product as float32, summed in the dtype of `x` (float32 or wider)."""
    product = x * y if not jnp.iscomplexobj(x) else jnp.real(jnp.conj(x) * y)
    return jnp.sum(product).astype(jnp.float32)


def without_codec_noise(
    products: Products, halves: Halves, noise: CodecNoise, microbatch: Float32[Array, ""]
) -> Products:
    """Subtract the expected contribution of codec errors from inner products.

    Args:
        products: inner products of decoded gradients.
        halves: weights of the two halves.
        noise: codec noise of one micro-batch.
        microbatch: weight of one micro-batch.
    """

    # The expected |g|^2 of a half of weight w is |G|^2 + T/w without codecs, and with codecs
    #     |G|^2 + (1 + of_noise) T/w + of_signal |G|^2 m/w,
    # where m is the weight of a micro-batch, and T that of one unit of weight. The expected g1.g2
    # stays |G|^2, since the codec errors of the two halves are independent.
    def corrected(square: Array, weight: Array) -> Array:
        added = noise.of_signal * microbatch / weight * products.cross
        return products.cross + (square - products.cross - added) / (1 + noise.of_noise)

    return Products(
        corrected(products.first, halves.first),
        corrected(products.second, halves.second),
        products.cross,
    )


def balanced(cosine: Float32[Array, ""], halves: Halves) -> Float32[Array, ""]:
    """Convert the cosine of unequal halves to that of equal halves of the same batch."""
    ratio = 4 * (halves.first / halves.total) * (halves.second / halves.total)
    return cosine / jnp.sqrt(cosine**2 + ratio * (1 - cosine**2))


def new_moments() -> Moments:
    return Moments(*(jnp.zeros([], jnp.float32) for _ in Moments._fields))


def add_to_moments(moments: Moments, products: Products, halves: Halves, decay: Any) -> Moments:
    """Add the estimates of |G|^2 and T from one update to their moving averages.

    Args:
        moments: averages over the earlier updates, whose weights are multiplied by `decay`.
        products: inner products of the mean gradients of the two halves of the batch.
        halves: weights of the two halves.
        decay: scalar between 0 and 1. The new update has weight 1.
    """
    signal = products.cross
    distance = products.first + products.second - 2 * products.cross
    noise = jnp.maximum(distance, 0.0) * halves.first * halves.second / halves.total
    weight = decay * moments.weight + 1
    # Welford's update, with deviations from the old and from the new mean, avoids the cancellation
    # in a difference of large squares.
    from_old = signal - moments.signal, noise - moments.noise
    mean_signal = moments.signal + from_old[0] / weight
    mean_noise = moments.noise + from_old[1] / weight
    return Moments(
        weight=weight,
        weight_squares=decay**2 * moments.weight_squares + 1,
        signal=mean_signal,
        noise=mean_noise,
        signal_squares=decay * moments.signal_squares + from_old[0] * (signal - mean_signal),
        noise_squares=decay * moments.noise_squares + from_old[1] * (noise - mean_noise),
        cross=decay * moments.cross + from_old[0] * (noise - mean_noise),
    )


def noise_scale(moments: Moments) -> Float32[Array, ""]:
    """Return N = T / |G|^2; NaN before the first update, infinite if the mean |G|^2 is not > 0."""
    ratio = jnp.where(moments.signal > 0, moments.noise / moments.signal, jnp.inf)
    return jnp.where(moments.weight > 0, ratio, jnp.nan)


def noise_scale_error(moments: Moments) -> Float32[Array, ""]:
    """Return the standard error of `noise_scale`; NaN with fewer than two measurements."""
    scale = noise_scale(moments)
    squares = moments.noise_squares - 2 * scale * moments.cross + scale**2 * moments.signal_squares
    mean_square = jnp.maximum(squares, 0.0) / moments.weight
    q = moments.weight_squares / moments.weight**2
    # A single measurement has q = 1 and gives no estimate of the variance.
    factor = jnp.where(q < 1 - 1e-6, q / (1 - q), jnp.nan)
    return jnp.sqrt(mean_square * factor) / jnp.abs(moments.signal)
