"""Build the optimizer of the job: AdamW on clipped gradients, with a batch size that may adapt.

A step whose loss or gradients are not finite changes nothing, and is counted.

With `adaptive_batch` a step adds its gradient to a batch, and only the last step of a batch updates
the parameters. The learning rate of the update is that of the schedule at this step, times the
square root of the ratio of this batch's size to that of the first batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._simigrad import simigrad
from ._settings import Optimization

_INITIAL_STEPS = 2  # in a batch: one for each half that is compared


def make_optimizer(optimization: Optimization) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer, which gets one gradient per step; its state is `ApplyIfFiniteState`."""
    return _apply_if_finite(_make_updates(optimization))


def _apply_if_finite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it changes nothing unless loss (`value`) and gradients are finite.

    `optax.apply_if_finite` chooses between old and new state by `cond`, which needs whole leaves.
    This wrapper instead selects the old or the new value element by element, so that leaves in
    host memory can be updated part by part.
    """
    run = optax.with_extra_args_support(inner).update

    def init(params: Any) -> optax.ApplyIfFiniteState:
        zero = jnp.zeros((), jnp.int32)
        return optax.ApplyIfFiniteState(zero, jnp.asarray(True), zero, inner.init(params))

    def update(updates, state, params=None, **extra_args):
        value = extra_args.pop("value")
        leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
        is_finite = jnp.all(jnp.stack([jnp.isfinite(value), *leaves]))

        def only_if_finite(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(is_finite, x, y), new, old)

        changes, inner_state = run(updates, state.inner_state, params, **extra_args)
        is_skipped = 1 - is_finite.astype(jnp.int32)
        new_state = optax.ApplyIfFiniteState(
            notfinite_count=(state.notfinite_count + 1) * is_skipped,
            last_finite=is_finite,
            total_notfinite=state.total_notfinite + is_skipped,
            inner_state=only_if_finite(inner_state, state.inner_state),
        )
        return only_if_finite(changes, jax.tree.map(jnp.zeros_like, changes)), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _make_updates(optimization: Optimization) -> optax.GradientTransformation:
    peak, warmup = optimization.learning_rate, optimization.warmup_steps
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)  # from 0, one step earlier
    # A rate that falls to 0 averages out the noise of small batches.
    fall = optax.linear_schedule(peak, 0, max(optimization.steps - warmup, 1))
    rate = optax.join_schedules([rise, fall], [warmup])
    if optimization.adaptive_batch is None:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    return simigrad(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, weight_decay=0.01)),
        target_similarity=optimization.adaptive_batch,
        initial=_INITIAL_STEPS,
        min_steps=_INITIAL_STEPS,
        max_steps=optimization.largest_batch // optimization.batch_size,
        lr_scaling="sqrt",
        schedule=rate,
    )
