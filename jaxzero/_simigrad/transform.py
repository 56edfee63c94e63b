"""SimiGrad: an optax transform that adapts the batch size to the similarity of gradients.

Like `optax.MultiSteps`, it is called with the gradient g (weight w) of each micro-batch, and
updates the parameters when the batch is full:

    m <- m + (g - m) w / W            the mean so far; W is the weight so far
    after half of the micro-batches:  keep a copy m1
    when the batch is full:           phi = cos(m1, mean of the second half)
                                      a rule computes the size of the next batch from phi
                                      the inner transform updates with m

The only communication is the sum over shards of the three inner products of phi, once per update.

References:
    SimiGrad: Qin et al., NeurIPS 2021, "Fine-Grained Adaptive Batching for Large Scale
    Training using Gradient Similarity Measurement".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Bool, Float32

from .batch_rules import BatchRule, next_steps
from .similarity import (
    CodecNoise,
    Halves,
    Products,
    add_to_moments,
    balanced,
    leaf_products,
    without_codec_noise,
)
from .state import (
    GivenHalves,
    GroupState,
    Settings,
    SimigradState,
    at_least_float32,
    check_gradients,
    check_inner,
    check_rule,
    given_codec_noise,
    given_halves,
    new_state,
    scalar_weight,
    sum_by_label,
)

_COMBINE = {"mean": jnp.nanmean, "median": jnp.nanmedian, "min": jnp.nanmin}


def simigrad(
    inner: optax.GradientTransformation,
    *,
    target_similarity: Any,
    initial: Any,
    min_steps: Any = 1,
    max_steps: Any,
    rule: str | BatchRule = "walk",
    lr_scaling: str | None = None,
    schedule: Callable[..., Any] | None = None,
    groups: Any = None,
    combine: str = "mean",
    noise_window: Any = 20,
) -> optax.GradientTransformationExtraArgs:
    """Accumulate gradients over a number of micro-batches that adapts to their similarity.

    Use it like `optax.MultiSteps`: call `update` with the mean gradient of every micro-batch and
    apply the returned updates, which are zero until the batch is full. After each update the
    cosine between the gradients of the two halves of the batch is compared with a target, and the
    next batch becomes larger or smaller. If gradients agree, large batches waste examples; if
    they do not, small batches waste updates.

    Gradients are global arrays, on one device or sharded as `Zero.value_and_grad` returns them.
    (Inside `shard_map` each device would compute a similarity of its own.) There are two float32
    accumulators, sharded like the gradients.

    `update` takes these extra arguments, and passes all others to `inner`:

    - `weight`: scalar weight of this micro-batch (its examples or tokens), if micro-batches
      differ. It sets the unit of `seen` and of the noise scale; the default unit is one
      micro-batch. The gradient of a micro-batch of weight 0 is ignored.
    - `halves`: the result of `zero.value_and_grad(..., halves=True)`; or `(|g1|^2, |g2|^2,
      g1.g2)` of the mean gradients of two halves of this micro-batch, as scalars, or as trees
      like the gradients with a scalar for each leaf (required with `groups`), followed, unless
      the halves are equal, by the fraction of the weight in the first half. It is used only if
      the batch is this single micro-batch. Without it, such a batch cannot be measured: the
      batch size is kept, `unmeasured` counts it, and rules choose at least two micro-batches.
    - `codec_noise`: `zero.codec_noise(grads)`, if gradients are quantized for communication (with
      the `microbatches` of `value_and_grad`). Otherwise codec errors count as gradient noise: for
      gradients with heavy tails on 2 nodes of 4 devices, the noise scale is then too large by 0.2%
      (`Int8`), 4% (`zeropp`; 9% with stochastic rounding) or 18% (`Int4` without rotation) at a
      similarity of 0.5, and by 11% (`zeropp`) at 0.83. With `codec_noise` and `zeropp` the error is
      at most 0.2% at similarities of 0.2 to 0.83 (`benchmarks/training/simigrad_noise.py`). This
      assumes that encoding changes the mean gradient as much as those of the devices, which holds
      for rotated codecs and varying signs; with `Int4` without rotation, 5% or more remain.

    Args:
        inner: any optax transform. It receives the mean gradient, and its schedules count
            updates.
        target_similarity: at least 0, less than 1. A higher target s means a larger batch: with
            noise scale N, the batch of similarity s is 2 N s / (1 - s).
        initial: micro-batches in the first batch.
        min_steps: fewest micro-batches in a batch.
        max_steps: most micro-batches in a batch.
        rule: "walk" (the paper's: 10% up or down), "jump" (directly to the estimated batch size
            of the target similarity), or an instance of a `jaxzero.extend.BatchRule`, such as
            `jz.WalkRule(...)`, `jz.JumpRule(...)` or one of your own.
        lr_scaling: multiply updates by the square root ("sqrt") of the ratio of the batch to the
            initial one, both in micro-batches, or by the ratio itself ("linear").
        schedule: multiply updates by a function of the weight `seen` before the batch: a
            learning rate that counts examples, such as
            `optax.cosine_decay_schedule(1.0, budget)`.
        groups: measure groups of parameters separately. A function from the path of a leaf
            (`layers.0.kernel`) to a label, or a tree prefix of labels.
        combine: how the groups' similarities are combined for the rule: "mean", "median" or
            "min".
        noise_window: number of updates over which the noise scale is averaged.

    Returns:
        The transform. Its state is a `SimigradState`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `inner` is not an optax transform.

    Example:
        >>> tx = jz.simigrad(
        ...     optax.adamw(1e-3), target_similarity=0.3, initial=4, max_steps=64
        ... )

    References:
        SimiGrad: Qin et al., NeurIPS 2021; McCandlish et al. 2018
        (https://arxiv.org/abs/1812.06162) for the noise scale.
    """
    check_inner(inner)
    check_rule(rule)
    settings = Settings(
        target_similarity=target_similarity,
        initial=initial,
        min_steps=min_steps,
        max_steps=max_steps,
        rule=rule,
        lr_scaling=lr_scaling,
        schedule=schedule,
        groups=groups,
        combine=combine,
        noise_window=noise_window,
    )
    wrapped = optax.with_extra_args_support(inner)

    def init(params):
        return new_state(wrapped.init(params), params, settings)

    def update(updates, state, params=None, *, weight=None, halves=None, codec_noise=None, **extra):
        check_gradients(updates, state.mean)
        labels = settings.labels(updates)
        given = given_halves(halves, updates, labels)
        noise = given_codec_noise(codec_noise)
        state = _accumulate(state, updates, scalar_weight(weight))

        def run_inner():
            mean = jax.tree.map(lambda m, g: m.astype(g.dtype), state.mean, updates)
            new, inner_state = wrapped.update(mean, state.inner, params, **extra)
            return _scaled(new, state, settings), _like(inner_state, state.inner)

        # The accumulators are not passed through `cond`, whose branches would copy them.
        def finish(small):
            new, inner_state = run_inner()
            measured = _without_codec_noise(_half_products(state, labels, given), state, noise)
            small = _end_batch(_measure(small, measured, settings))
            return new, small._replace(inner=inner_state)

        def wait(small):
            return _zeros(jax.eval_shape(run_inner)[0], updates), small

        small = state._replace(mean=None, half_mean=None)
        new, small = lax.cond(state.count >= state.steps, finish, wait, small)
        return new, small._replace(mean=state.mean, half_mean=state.half_mean)

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros(new: Any, updates: Any) -> Any:
    """Return zero updates, with the shapes and dtypes of `new`, for micro-batches before the last.

    They are one branch of a `cond`, whose other branch returns the inner transform's updates `new`.
    On explicit mesh axes both branches must have the same shardings, so the zeros are sharded like
    `new`. Otherwise they are sharded like the gradients `updates`. The two differ at stage 1, where
    gradients are replicated and the optimizer's state is split.
    """

    def zeros(x: jax.ShapeDtypeStruct, g: Array) -> Array:
        sharding = x.sharding
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return jnp.zeros(x.shape, x.dtype, out_sharding=sharding)
        return jnp.zeros_like(g, x.dtype)

    return jax.tree.map(zeros, new, updates)


def _accumulate(
    state: SimigradState, gradients: Any, weight: Float32[Array, ""] | None
) -> SimigradState:
    """Add the gradients of one micro-batch to the running mean of the batch."""
    is_first = state.count == 0
    count = state.count + 1
    before = jnp.where(is_first, 0.0, state.weight)
    total = before + (1.0 if weight is None else weight)

    def add(g: Array, m: Array) -> Array:
        m = jnp.where(is_first, jnp.zeros_like(m), m)
        change = g.astype(m.dtype) - m
        if weight is None:  # bitwise equal to `optax.MultiSteps`
            return m + change / count.astype(m.dtype)
        share = weight / jnp.where(total > 0, total, 1.0)
        # The mean over no examples is NaN, and NaN times 0 is NaN, so it must be masked out.
        return jnp.where(weight > 0, m + change * share.astype(m.dtype), m)

    mean = jax.tree.map(add, gradients, state.mean)
    is_half = count == state.steps // 2
    return state._replace(
        count=count,
        weight=total,
        half_weight=jnp.where(is_half, total, state.half_weight),
        mean=mean,
        half_mean=jax.tree.map(lambda m, h: jnp.where(is_half, m, h), mean, state.half_mean),
    )


class _Measurement(NamedTuple):
    """Inner products between the gradients of the two halves of a full batch."""

    halves: Halves  # their weights
    whole: Products
    groups: dict[str, Products]
    is_possible: Bool[Array, ""]  # False for a single micro-batch without `halves`
    fewest: int  # smallest number of micro-batches whose similarity can be measured


def _half_products(
    state: SimigradState,
    labels: list[str] | None,
    given: GivenHalves | None,
) -> _Measurement:
    halves = Halves(state.half_weight, state.weight - state.half_weight)
    by_leaf = leaf_products(state.mean, state.half_mean, halves)
    whole, groups = sum_by_label(by_leaf, labels)
    is_single = state.count == 1
    if given is None:
        return _Measurement(halves, whole, groups, ~is_single, 2)
    first = given.share * state.weight
    halves, whole, groups = jax.tree.map(
        lambda x, y: jnp.where(is_single, x, y),
        (Halves(first, state.weight - first), given.whole, given.groups),
        (halves, whole, groups),
    )
    return _Measurement(halves, whole, groups, jnp.bool_(True), 1)


def _without_codec_noise(
    measured: _Measurement, state: SimigradState, noise: CodecNoise | None
) -> _Measurement:
    if noise is None:
        return measured
    microbatch = state.weight / state.count.astype(jnp.float32)

    def clean(products: Products) -> Products:
        return without_codec_noise(products, measured.halves, noise, microbatch)

    groups = {label: clean(group) for label, group in measured.groups.items()}
    return measured._replace(whole=clean(measured.whole), groups=groups)


def _measure(state: SimigradState, measurement: _Measurement, settings: Settings) -> SimigradState:
    """Record the similarity of a full batch's halves, and set the size of the next batch."""
    halves, whole, groups, is_possible, fewest = measurement
    # With this decay the mean age of a measurement is that of the last `noise_window` ones.
    decay = 1 - 2 / (settings.noise_window + 1)
    similarity, by_group = _similarity(whole, groups, halves, settings.combine)
    moments = add_to_moments(state.moments, whole, halves, decay)
    is_finite = jnp.isfinite(similarity) & jnp.isfinite(moments.signal + moments.noise)
    is_good = is_possible & is_finite

    def only_if(condition: Array, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), new, old)

    new_groups = {}
    for label, old in state.groups.items():
        new = add_to_moments(old.moments, groups[label], halves, decay)
        is_known = is_good & jnp.isfinite(by_group[label])
        new_groups[label] = only_if(is_known, GroupState(by_group[label], new), old)
    wanted, memory = next_steps(
        settings.chosen_rule,
        similarity,
        state.steps.astype(jnp.float32),
        state.weight,
        _float32(settings.target_similarity),
        state.memory,
    )
    high = _float32(settings.max_steps)
    low = jnp.minimum(jnp.maximum(_float32(settings.min_steps), float(fewest)), high)
    return state._replace(
        steps=only_if(is_good, jnp.clip(wanted, low, high).astype(jnp.int32), state.steps),
        similarity=only_if(is_good, similarity, state.similarity),
        moments=only_if(is_good, moments, state.moments),
        groups=new_groups,
        memory=only_if(is_good, memory, state.memory),
        skipped=state.skipped + (is_possible & ~is_finite).astype(jnp.int32),
        unmeasured=state.unmeasured + (~is_possible).astype(jnp.int32),
    )


def _similarity(
    whole: Products, groups: dict[str, Products], halves: Halves, combine: str
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """Return the similarity that the rule compares, and the similarity of each group."""
    if not groups:
        return balanced(whole.cosine(), halves), {}
    by_group = {label: balanced(group.cosine(), halves) for label, group in groups.items()}
    values = jnp.stack(list(by_group.values()))
    # A group without gradients (frozen, or not used by this batch) is ignored; any other group
    # with a NaN makes the result NaN.
    is_absent = jnp.stack([(x.first == 0) & (x.second == 0) for x in groups.values()])
    is_known = jnp.all(jnp.isfinite(values) | is_absent)
    return jnp.where(is_known, _COMBINE[combine](values), jnp.nan), by_group


def _end_batch(state: SimigradState) -> SimigradState:
    """Update the counters after a batch; `seen` is a Kahan sum of two floats, exact up to 2^48."""
    added = state.weight + state.seen_rest
    seen = state.seen + added
    return state._replace(
        count=jnp.zeros_like(state.count),
        seen=seen,
        seen_rest=added - (seen - state.seen),
        updates=state.updates + 1,
    )


def _scaled(updates: Any, state: SimigradState, settings: Settings) -> Any:
    """Multiply updates by the learning rate factor of this batch."""
    if settings.lr_scaling is None and settings.schedule is None:
        return updates
    factor = jnp.ones([], jnp.float32)
    if settings.lr_scaling is not None:
        factor = state.steps.astype(jnp.float32) / _float32(settings.initial)
    if settings.lr_scaling == "sqrt":
        factor = jnp.sqrt(factor)
    if settings.schedule is not None:
        factor *= _float32(settings.schedule(state.seen))

    def scale(x: Array) -> Array:
        wide = at_least_float32(x.dtype)
        return (x.astype(wide) * factor.astype(wide)).astype(x.dtype)

    return jax.tree.map(scale, updates)


def _like(new: Any, old: Any) -> Any:
    """Cast a new state to the dtypes of the old one, since a transform may return wider dtypes."""
    return jax.tree.map(lambda x, y: jnp.asarray(x).astype(jnp.result_type(y)), new, old)


def _float32(x: Any) -> Float32[Array, ""]:
    return jnp.asarray(x).astype(jnp.float32)
