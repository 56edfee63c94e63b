"""SimiGrad: an optax transform that finds the batch size by how alike gradients are.

It is called with the gradient of each micro-batch, like `optax.MultiSteps`, and updates when
enough of them are in:

    m <- m + (g - m) w / W        the mean so far; W the weight so far
    after half of them:           keep a copy m1
    when all are in:              phi = cos(m1, the mean of the others)
                                  a rule makes of phi how many the next batch takes
                                  the inner transform updates with m

Nothing but the three inner products of phi, as sums over shards of each leaf, travels between
devices, once for an update.

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
from jaxtyping import Array, Bool, Float32

from .batch_rules import BatchRule, next_steps
from .settings import (
    GivenHalves,
    Settings,
    check_gradients,
    check_inner,
    check_rule,
    given_codec_noise,
    given_halves,
    scalar_weight,
    sum_by_label,
)
from .similarity import (
    CodecNoise,
    Halves,
    Products,
    add_to_moments,
    balanced,
    leaf_products,
    without_codec_noise,
)
from .state import GroupState, SimigradState, at_least_float32, new_state

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
    schedule: Callable | None = None,
    groups: Any = None,
    combine: str = "mean",
    noise_window: Any = 20,
) -> optax.GradientTransformationExtraArgs:
    """Accumulate gradients over as many micro-batches as their similarity asks for.

    Use it like `optax.MultiSteps`: call `update` with the mean gradient of every micro-batch
    and apply what it returns, which is zero until the batch is full. After each update the
    cosine between the gradients of the two halves of the batch is compared with a target,
    and the next batch becomes larger or smaller. Where gradients agree, large batches waste
    examples; where they do not, small ones waste updates.

    Gradients are global arrays, on one device or sharded as `Zero.value_and_grad` returns
    them. (Inside `shard_map` each device would see a similarity of its own.) Accumulators
    are two, in float32, sharded likewise.

    `update` takes these extra arguments, and hands all others to `inner`:

    - `weight`: a scalar, of this micro-batch: its examples or tokens, if they differ. All
      weights together are the unit of `seen` and of the noise scale; without it, one
      micro-batch. A micro-batch of weight 0 is left out, whatever its gradient.
    - `halves`: what `zero.value_and_grad(..., halves=True)` returns; or `(|g1|^2, |g2|^2,
      g1.g2)` of the means over two halves of this micro-batch, as scalars, or as trees like
      the gradients with a scalar for each leaf (needed with `groups`), and, unless they are
      equal, the part of the weight that is in the first half. Read where the batch is this one
      micro-batch only. Without it a
      batch of one micro-batch cannot be measured: its size stays, `unmeasured` counts it,
      and no rule goes down to one.
    - `codec_noise`: `zero.codec_noise(grads)`, where gradients are encoded on their way (with the
      `microbatches` that `value_and_grad` has).
      Without it the error of the codecs passes as noise. On gradients with heavy tails, 2
      nodes of 4 devices, a batch of similarity 0.5 then has a noise scale that is too large
      by 0.2% (`Int8`), 4% (`zeropp`; 9% with stochastic rounding) or 18% (`Int4` without
      rotation); at 0.83 by 11% with `zeropp`. With it at most 0.2% are left with `zeropp`, at
      similarities of 0.2 to 0.83 (`benchmarks/training/simigrad_noise.py`). It takes the mean
      gradient to lose as much as those of the devices, which holds for rotated codecs and
      signs that vary; of `Int4` without rotation 5% and more are left.

    Args:
        inner: any optax transform. It sees the mean gradient, and its schedules count
            updates.
        target_similarity: at least 0, less than 1. Higher is a larger batch: with noise
            scale N the batch of that similarity is 2 N s / (1 - s).
        initial: micro-batches in the first batch.
        min_steps: fewest micro-batches in a batch.
        max_steps: most micro-batches in a batch.
        rule: "walk" (the paper's: 10% up or down), "jump" (straight to the batch that has
            the target similarity), or an instance of a `jaxzero.extend.BatchRule`, such as
            `jz.WalkRule(...)`, `jz.JumpRule(...)` or one of your own.
        lr_scaling: multiply updates by the square root ("sqrt") of the batch over the
            initial one, both in micro-batches, or by the ratio itself ("linear").
        schedule: multiply updates by a function of the weight `seen` before the batch: a
            learning rate that counts examples, such as
            `optax.cosine_decay_schedule(1.0, budget)`.
        groups: measure parts of the model by themselves. A function from the path of a leaf
            (`layers.0.kernel`) to a label, or a tree prefix of labels.
        combine: what the rule compares of the groups' similarities: their "mean", "median"
            or "min".
        noise_window: over how many updates the noise scale is averaged.

    Returns:
        The transform. Its state is a `SimigradState`.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: `inner` is no optax transform.

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

        # Accumulators stay out of the branches, which would have to copy what they return.
        def finish(small):
            new, inner_state = run_inner()
            measured = _without_codec_noise(_half_products(state, labels, given), state, noise)
            small = _end_batch(_measure(small, measured, settings))
            return new, small._replace(inner=inner_state)

        def wait(small):
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(run_inner)[0]), small

        small = state._replace(mean=None, half_mean=None)
        new, small = lax.cond(state.count >= state.steps, finish, wait, small)
        return new, small._replace(mean=state.mean, half_mean=state.half_mean)

    return optax.GradientTransformationExtraArgs(init, update)


def _accumulate(
    state: SimigradState, gradients: Any, weight: Float32[Array, ""] | None
) -> SimigradState:
    """Take in one micro-batch."""
    is_first = state.count == 0
    count = state.count + 1
    before = jnp.where(is_first, 0.0, state.weight)
    total = before + (1.0 if weight is None else weight)

    def add(g: Array, m: Array) -> Array:
        m = jnp.where(is_first, jnp.zeros_like(m), m)
        change = g.astype(m.dtype) - m
        if weight is None:  # the form of `optax.MultiSteps`, to the bit
            return m + change / count.astype(m.dtype)
        share = weight / jnp.where(total > 0, total, 1.0)
        # A mean over no examples is no number, and must not be multiplied by 0.
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
    """The halves of a full batch."""

    halves: Halves
    whole: Products
    groups: dict[str, Products]
    is_possible: Bool[Array, ""]  # a single micro-batch has halves only if they are given
    fewest: int  # micro-batches that can be measured


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
    """Compare the halves of a full batch, and decide on the next one."""
    halves, whole, groups, is_possible, fewest = measurement
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
    """What the rule compares, and the similarity of each group."""
    if not groups:
        return balanced(whole.cosine(), halves), {}
    by_group = {label: balanced(group.cosine(), halves) for label, group in groups.items()}
    values = jnp.stack(list(by_group.values()))
    # A group without gradients (frozen, or not used by this batch) has no say; any other that
    # is no number makes the whole no number.
    is_absent = jnp.stack([(x.first == 0) & (x.second == 0) for x in groups.values()])
    is_known = jnp.all(jnp.isfinite(values) | is_absent)
    return jnp.where(is_known, _COMBINE[combine](values), jnp.nan), by_group


def _end_batch(state: SimigradState) -> SimigradState:
    """Count what the batch held. `seen` is a sum in two parts, exact up to 2^48 (Kahan)."""
    added = state.weight + state.seen_rest
    seen = state.seen + added
    return state._replace(
        count=jnp.zeros_like(state.count),
        seen=seen,
        seen_rest=added - (seen - state.seen),
        updates=state.updates + 1,
    )


def _scaled(updates: Any, state: SimigradState, settings: Settings) -> Any:
    """Updates at the learning rate of this batch."""
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
    """A transform may return its state in wider types than it was given."""
    return jax.tree.map(lambda x, y: jnp.asarray(x).astype(jnp.result_type(y)), new, old)


def _float32(x: Any) -> Float32[Array, ""]:
    return jnp.asarray(x).astype(jnp.float32)
