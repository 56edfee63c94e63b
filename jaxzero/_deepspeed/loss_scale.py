"""Loss scaling for float16, as an optax transformation.

Gradients of a float16 loss underflow. So the loss is multiplied by a scale, and the gradients are
divided by it before they are used. A dynamic scale grows until a gradient is infinite or NaN; then
that step is skipped and the scale shrinks (Micikevicius et al. 2018, section 3.2). When the scale
grows and shrinks is decided as in DeepSpeed (`runtime/fp16/loss_scaler.py`), so that a run
continues unchanged. Flax's `DynamicScale` calls `jax.grad` itself, so it cannot be used with
`jz.Zero`; optax's `apply_if_finite` skips steps without scaling.
"""

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from .._mesh import is_traced

_LARGEST = 2.0**126  # so that doubling it stays finite in float32: an infinite scale would stay


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """A scale that is doubled after `window` good steps and halved when a step overflows.

    Args:
        initial: the first scale.
        window: number of consecutive good steps after which the scale is doubled.
        hysteresis: number of the first overflow that halves the scale; earlier overflows only skip
            their step.
        consecutive: if True, `hysteresis` counts overflows in a row; otherwise, overflows since
            the scale last grew.
        minimum: lower bound of the scale.
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
    """The state of `scale_loss`: the scale, its counters, and the state of the inner optimizer."""

    loss_scale: Float32[Array, ""]  # factor of the loss
    good_steps: Int32[Array, ""]  # steps since the last overflow
    patience: Int32[Array, ""]  # overflows until the scale is halved
    inner: Any  # state of the inner transformation


def scale_loss(
    inner: optax.GradientTransformation, scale: DynamicScale | float
) -> optax.GradientTransformationExtraArgs:
    """Divide gradients by the loss scale, and skip steps that overflowed.

    Multiply the loss by `loss_scale_of(opt_state)` before it is differentiated. Gradients are
    divided in float32. If any is infinite or NaN, updates are zero and the state of `inner`,
    counters included, is unchanged.

    Args:
        inner: receives the unscaled gradients.
        scale: a `DynamicScale`, or a positive constant.

    Raises:
        ValueError: a constant `scale` is not positive and finite.

    References:
        Mixed Precision Training (https://arxiv.org/abs/1710.03740), section 3.2.
    """
    is_checked = not isinstance(scale, DynamicScale) and not is_traced(scale)
    is_number = isinstance(scale, numbers.Real | jax.Array)
    if is_checked and not (is_number and 0 < float(scale) < math.inf):
        raise ValueError(
            f"`scale` must be a `DynamicScale`, or positive and finite; got {scale!r}. DeepSpeed's "
            "0, a dynamic scale, is `DynamicScale()`."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params):
        initial = scale.initial if isinstance(scale, DynamicScale) else scale
        patience = scale.hysteresis if isinstance(scale, DynamicScale) else 1
        return LossScaleState(
            jnp.float32(initial), jnp.int32(0), jnp.int32(patience), inner.init(params)
        )

    def update(updates, state, params=None, **extra_args):
        # In float32: float16 would round small gradients to 0, which the scale is to prevent.
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / state.loss_scale, updates)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(unscaled)]).all()
        new_updates, inner_state = inner.update(unscaled, state.inner, params, **extra_args)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

        new_updates = keep(new_updates, jax.tree.map(jnp.zeros_like, new_updates))
        inner_state = keep(inner_state, state.inner)
        if not isinstance(scale, DynamicScale):
            return new_updates, state._replace(inner=inner_state)
        return new_updates, _next(scale, state, finite)._replace(inner=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale_of(opt_state: Any) -> Float32[Array, ""]:
    """Return the factor by which to multiply the loss; 1 if `opt_state` has no loss scaling.

    Args:
        opt_state: state of an optax chain, with `scale_loss` anywhere in it.

    Raises:
        ValueError: `scale_loss` was applied more than once.
    """
    scales = [state.loss_scale for state in _states(opt_state)]
    if len(scales) > 1:
        raise ValueError(f"`opt_state` scales the loss {len(scales)} times. Wrap the chain once.")
    return scales[0] if scales else jnp.float32(1)


def _states(opt_state: Any) -> list[LossScaleState]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, LossScaleState))
    return [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]


def _next(scale: DynamicScale, state: LossScaleState, finite: Array) -> LossScaleState:
    """Return the state after a step, given whether its gradients were finite.

    The state of the inner optimizer is not changed.
    """
    full = jnp.int32(scale.hysteresis)
    # As DeepSpeed does it: whether the scale grows is decided by the good steps before this one.
    good, patience = state.good_steps, state.patience
    grows = (good > 0) & (good % scale.window == 0)
    halved = jnp.maximum(state.loss_scale / 2, jnp.float32(scale.minimum))
    doubled = jnp.minimum(state.loss_scale * 2, jnp.float32(_LARGEST))
    refills = jnp.bool_(True) if scale.consecutive else grows
    return LossScaleState(
        loss_scale=jnp.where(
            finite,
            jnp.where(grows, doubled, state.loss_scale),
            jnp.where(patience == 1, halved, state.loss_scale),
        ),
        good_steps=jnp.where(finite, good + 1, 0),
        patience=jnp.where(
            finite, jnp.where(refills, full, patience), jnp.maximum(patience - 1, 1)
        ),
        inner=state.inner,
    )
