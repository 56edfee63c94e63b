"""The state of `simigrad`: its fields, initial values and statistics.

All fields except the accumulators and the inner transform's state are scalars, so that they are
replicated under any sharding of the optimizer state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float32, Int32

from .batch_rules import first_memory
from .settings import Settings
from .similarity import Moments, new_moments, noise_scale, noise_scale_error


class GroupState(NamedTuple):
    """Measurements of one group of parameters."""

    similarity: Float32[Array, ""]  # of the last batch measured; NaN before the first
    moments: Moments


class SimigradState(NamedTuple):
    """State of `simigrad`. Read it with `simigrad_stats`."""

    count: Int32[Array, ""]  # micro-batches in the batch so far
    steps: Int32[Array, ""]  # micro-batches per batch, for the current batch
    weight: Float32[Array, ""]  # weight of the batch so far
    half_weight: Float32[Array, ""]  # weight of its first half, after the first half
    mean: Any  # like the gradients, float32: mean gradient of the batch so far
    half_mean: Any  # like the gradients, float32: mean gradient of its first half
    seen: Float32[Array, ""]  # weight of all earlier batches
    seen_rest: Float32[Array, ""]  # rounding error of `seen` (Kahan summation)
    updates: Int32[Array, ""]  # full batches so far
    similarity: Float32[Array, ""]  # value that the rule last compared; NaN before the first
    moments: Moments  # of the full gradient
    groups: dict[str, GroupState]  # by label; empty without `groups`
    memory: Any  # scalars that the rule keeps
    skipped: Int32[Array, ""]  # batches whose similarity was not finite
    unmeasured: Int32[Array, ""]  # batches of one micro-batch without `halves`
    inner: Any  # state of the inner transform


def new_state(inner_state: Any, params: Any, settings: Settings) -> SimigradState:
    def zero() -> Array:
        return jnp.zeros([], jnp.float32)

    def whole_number(x: Any = 0) -> Array:
        return jnp.asarray(x).astype(jnp.int32)

    def unknown() -> Array:
        return jnp.full([], jnp.nan, jnp.float32)

    def accumulator(x: Any) -> Any:
        return jnp.zeros_like(x, dtype=at_least_float32(jnp.result_type(x)))

    labels = sorted(set(settings.labels(params) or []))
    return SimigradState(
        count=whole_number(),
        steps=whole_number(settings.initial),
        weight=zero(),
        half_weight=zero(),
        mean=jax.tree.map(accumulator, params),
        half_mean=jax.tree.map(accumulator, params),
        seen=zero(),
        seen_rest=zero(),
        updates=whole_number(),
        similarity=unknown(),
        moments=new_moments(),
        groups={label: GroupState(unknown(), new_moments()) for label in labels},
        memory=first_memory(settings.chosen_rule),
        skipped=whole_number(),
        unmeasured=whole_number(),
        inner=inner_state,
    )


def at_least_float32(dtype: DTypeLike) -> DTypeLike:
    """`dtype` if it is at least as wide as float32, otherwise float32."""
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    return dtype if is_wide else jnp.float32


def simigrad_stats(state: Any) -> dict[str, Any]:
    """Return the statistics of `simigrad` for logs, as scalars by name.

    Args:
        state: a `SimigradState`, or any optimizer state that has one inside.

    Returns:
        - `updates`: full batches so far; `seen`: their weight;
        - `steps`: micro-batches in the current batch; `count`: micro-batches accumulated so far,
          0 after a call of `update` that changed the parameters;
        - `similarity`: value that the rule last compared with the target;
        - `noise_scale`: N, in units of weight, and `noise_scale_error`, its standard error;
        - `skipped`: batches whose similarity was not finite; `unmeasured`: batches of one
          micro-batch without `halves`;
        - `groups`: label -> `similarity`, `noise_scale` and `noise_scale_error` of the group.

        Values that have not been measured yet are NaN.

    Raises:
        ValueError: `state` contains no `SimigradState`, or several.
    """

    def is_ours(x: Any) -> bool:
        return isinstance(x, SimigradState)

    found = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    if len(found) != 1:
        raise ValueError(
            f"`state` must hold one state of `simigrad`; got {type(state).__name__} with "
            f"{len(found)}. Pass a single one."
        )
    (own,) = found

    def measured(similarity: Array, moments: Moments) -> dict[str, Array]:
        return {
            "similarity": similarity,
            "noise_scale": noise_scale(moments),
            "noise_scale_error": noise_scale_error(moments),
        }

    return {
        "updates": own.updates,
        "seen": own.seen,
        "steps": own.steps,
        "count": own.count,
        **measured(own.similarity, own.moments),
        "skipped": own.skipped,
        "unmeasured": own.unmeasured,
        "groups": {label: measured(*group) for label, group in own.groups.items()},
    }
