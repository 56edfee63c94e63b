"""Loss scaling for float16, as an optax transformation.

Gradients of a loss in float16 underflow. So the loss is multiplied by a scale, and the gradients
are divided by it before they are used. A dynamic scale grows until a gradient is infinite or not a
number; then that step is left out and the scale shrinks (Micikevicius et al. 2018, section 3.2).
When it does either is taken from DeepSpeed (`runtime/fp16/loss_scaler.py`), so that a run goes on
as it was. Flax's `DynamicScale` differentiates by itself, so it cannot be used with `jz.Zero`;
optax has `apply_if_finite`, which leaves steps out and scales nothing.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """A scale that is doubled after `window` good steps and halved when a step overflows.

    Args:
        initial: the first scale.
        window: how many steps without overflow are followed by one that doubles the scale.
        hysteresis: the scale is halved by this overflow and those after it; earlier ones only
            leave their step out.
        consecutive: `hysteresis` counts overflows in a row. Otherwise it counts those since the
            scale last grew.
        minimum: the scale never falls below it.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0

    def __post_init__(self):
        for name in ("initial", "window", "hysteresis", "minimum"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be positive; got {getattr(self, name)!r}.")


class LossScaleState(NamedTuple):
    """State of `scale_loss`."""

    loss_scale: Float32[Array, ""]  # multiply the loss by it
    good_steps: Int32[Array, ""]  # since the last overflow
    patience: Int32[Array, ""]  # overflows until the scale is halved
    inner: Any  # of the transformation inside


def scale_loss(
    inner: optax.GradientTransformation, scale: DynamicScale | float
) -> optax.GradientTransformationExtraArgs:
    """Undo the scale of the loss in its gradients, and leave out steps that overflowed.

    Multiply the loss by `loss_scale_of(opt_state)` before it is differentiated. Gradients are
    divided in float32. Where one is infinite or not a number, updates are zero and the state of
    `inner` stays as it was, its counters included.

    Args:
        inner: sees gradients without the scale.
        scale: a `DynamicScale`, or a number that stays.

    References:
        Mixed Precision Training (https://arxiv.org/abs/1710.03740), section 3.2.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        initial = scale.initial if isinstance(scale, DynamicScale) else scale
        patience = scale.hysteresis if isinstance(scale, DynamicScale) else 1
        return LossScaleState(
            jnp.float32(initial), jnp.int32(0), jnp.int32(patience), inner.init(params)
        )

    def update(updates, state, params=None, **extra_args):
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale, updates)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)]).all()
        made, inner_state = inner.update(unscaled, state.inner, params, **extra_args)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        made = keep(made, jax.tree.map(jnp.zeros_like, made))
        inner_state = keep(inner_state, state.inner)
        if not isinstance(scale, DynamicScale):
            return made, state._replace(inner=inner_state)
        return made, _next(scale, state, finite)._replace(inner=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale_of(opt_state: Any) -> Float32[Array, ""]:
    """What to multiply the loss by: 1 where nothing in `opt_state` scales."""
    found = [state.loss_scale for state in _states(opt_state)]
    if len(found) > 1:
        raise ValueError(f"`opt_state` scales the loss {len(found)} times. Wrap the chain once.")
    return found[0] if found else jnp.float32(1)


def _states(opt_state: Any) -> list[LossScaleState]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LossScaleState))
    return [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]


def _next(scale: DynamicScale, state: LossScaleState, finite: Array) -> LossScaleState:
    full = jnp.int32(scale.hysteresis)
    good, patience = state.good_steps, state.patience
    grows = (good > 0) & (good % scale.window == 0)
    halved = jnp.maximum(state.loss_scale / 2, jnp.float32(scale.minimum))
    refills = jnp.bool_(True) if scale.consecutive else grows
    return LossScaleState(
        loss_scale=jnp.where(
            finite,
            jnp.where(grows, state.loss_scale * 2, state.loss_scale),
            jnp.where(patience == 1, halved, state.loss_scale),
        ),
        good_steps=jnp.where(finite, good + 1, 0),
        patience=jnp.where(
            finite, jnp.where(refills, full, patience), jnp.maximum(patience - 1, 1)
        ),
        inner=state.inner,
    )
