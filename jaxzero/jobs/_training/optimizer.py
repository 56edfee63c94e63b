"""The optimizer of the job: AdamW on clipped gradients, in batches whose size may adapt.

A step whose gradients are not finite changes nothing, and is counted.

With `adaptive_batch` a step only adds to a batch. The learning rate is then that of the schedule
after as many steps, times the square root of the batch in relation to the first.
"""

import optax

from ..._simigrad import simigrad
from .._settings import Optimization

_INITIAL_STEPS = 2  # in a batch: one for each half that is compared


# The loop ends the run after fewer non-finite steps; at this number optax applies the update.
_NEVER = 2**31 - 1


def make_optimizer(optimization: Optimization) -> optax.GradientTransformation:
    """Build the optimizer, which gets one gradient per step; its state is `ApplyIfFiniteState`."""
    return optax.apply_if_finite(_make_updates(optimization), max_consecutive_errors=_NEVER)


def _make_updates(optimization: Optimization) -> optax.GradientTransformation:
    peak, warmup = optimization.learning_rate, optimization.warmup_steps
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    # Falling to 0 averages out the noise of small batches, which a constant rate would end with.
    fall = optax.linear_schedule(peak, 0, max(optimization.steps - warmup, 1))
    rate = optax.join_schedules([rise, fall], [warmup])
    if optimization.adaptive_batch is None:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    return simigrad(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, weight_decay=0.01)),
        target_similarity=optimization.adaptive_batch,
        initial=_INITIAL_STEPS,
        min_steps=_INITIAL_STEPS,
        max_steps=optimization.largest_batch // optimization.pairs,
        lr_scaling="sqrt",
        schedule=rate,
    )
