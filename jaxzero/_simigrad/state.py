"""Check the arguments of `simigrad` and of its `update`, and define the state of the transform.

All fields of the state except the accumulators and the inner transform's state are scalars, so that
they are replicated under any sharding of the optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, DTypeLike, Float32, Int32

from .._sharding import flatten, path_name, spread_prefix
from .batch_rules import RULES, BatchRule, first_memory
from .similarity import CodecNoise, Moments, Products, new_moments, noise_scale, noise_scale_error

_LARGEST = 2**24  # float32 represents all integers up to here


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `simigrad`, as its docstring explains them; numbers may be traced arrays."""

    target_similarity: Any
    initial: Any
    min_steps: Any
    max_steps: Any
    rule: str | BatchRule
    lr_scaling: str | None
    schedule: Callable[..., Any] | None
    groups: Any
    combine: str
    noise_window: Any

    def __post_init__(self):
        self._check_steps()
        self._check_target()
        if self.lr_scaling not in ("sqrt", "linear", None):
            raise ValueError(
                f'`lr_scaling` must be "sqrt", "linear" or None; got {self.lr_scaling!r}.'
            )
        if self.schedule is not None and not callable(self.schedule):
            raise ValueError(
                "`schedule` must be a function of the weight seen so far, such as an optax "
                f"schedule; got {self.schedule!r}."
            )
        if self.combine not in ("mean", "median", "min"):
            raise ValueError(f'`combine` must be "mean", "median" or "min"; got {self.combine!r}.')
        if not is_traced(self.noise_window) and not self.noise_window > 1:
            raise ValueError(
                "`noise_window` counts updates, and must be more than 1: one measurement has no "
                f"standard error; got {self.noise_window!r}."
            )

    def _check_steps(self) -> None:
        names = ("min_steps", "initial", "max_steps")
        sizes = {name: getattr(self, name) for name in names if not is_traced(getattr(self, name))}
        for name, value in sizes.items():
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not whole or not 1 <= value <= _LARGEST:
                raise ValueError(
                    f"`{name}` is a number of micro-batches, an integer from 1 to {_LARGEST}; "
                    f"got {value!r}."
                )
        if len(sizes) == 3 and not self.min_steps <= self.initial <= self.max_steps:
            raise ValueError(
                "`initial` must lie between `min_steps` and `max_steps`; got "
                f"initial={self.initial}, min_steps={self.min_steps}, max_steps={self.max_steps}."
            )

    def _check_target(self) -> None:
        target = self.target_similarity
        if not is_traced(target):
            real = isinstance(target, int | float | np.number) and not isinstance(target, bool)
            if not real or not 0 <= target < 1:
                raise ValueError(
                    "`target_similarity` is a cosine, at least 0 and less than 1 (which no batch "
                    f"with noise reaches); got {target!r}."
                )

    @property
    def chosen_rule(self) -> BatchRule:
        return RULES[self.rule] if isinstance(self.rule, str) else self.rule

    def labels(self, tree: Any) -> list[str] | None:
        """Return the group label of each leaf of `tree`; None if `groups` is not set."""
        if self.groups is None:
            return None
        if not callable(self.groups):
            return spread_prefix(self.groups, tree, str)
        labels: list[str] = []
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
            label = self.groups(path_name(path))
            if not isinstance(label, str):
                raise ValueError(
                    "`groups` must give each leaf a label, a string; got "
                    f"{label!r} for `{path_name(path)}`."
                )
            labels.append(label)
        return labels


def check_inner(inner: Any) -> None:
    """Raise `TypeError` unless `inner` is an optax transform."""
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            "`inner` must be an optax transform, such as `optax.adamw(1e-3)`; got "
            f"{type(inner).__name__}."
        )


def check_rule(rule: Any) -> None:
    """Raise `ValueError` if `rule` is neither a name nor an object with a rule's methods."""
    known = rule in RULES if isinstance(rule, str) else isinstance(rule, BatchRule)
    if not known or isinstance(rule, type):
        raise ValueError(
            '`rule` must be "walk", "jump", or an instance of a `jaxzero.extend.BatchRule` such as '
            f"`jz.JumpRule(window=3)`; got {rule!r}."
        )


def check_gradients(updates: Any, mean: Any) -> None:
    """Raise `ValueError` unless gradients have the tree and shapes of the parameters of `init`.

    Args:
        updates: gradients.
        mean: accumulator of the state, shaped like the parameters.
    """
    got, wanted = jax.tree.structure(updates), jax.tree.structure(mean)
    if got != wanted:
        raise ValueError(
            "`updates` must be a tree like the parameters that `init` was given, "
            f"{wanted}; got {got}."
        )
    pairs = zip(
        jax.tree_util.tree_flatten_with_path(updates)[0], jax.tree.leaves(mean), strict=True
    )
    for (path, x), m in pairs:
        if jnp.shape(x) != m.shape:
            raise ValueError(
                f"`updates` has shape {jnp.shape(x)} at `{path_name(path)}`, where the parameters "
                f"that `init` was given have {m.shape}."
            )


def scalar_weight(weight: Any) -> Float32[Array, ""] | None:
    """Convert the weight of a micro-batch to float32; None stays None."""
    if weight is None:
        return None
    if jnp.shape(weight) != () or jnp.iscomplexobj(weight):
        raise ValueError(
            "`weight` must be a real scalar, the examples or tokens of this micro-batch; got "
            f"shape {jnp.shape(weight)}, dtype {jnp.result_type(weight)}."
        )
    return jnp.asarray(weight).astype(jnp.float32)


def sum_by_label(
    products: Sequence[list[Array]], labels: list[str] | None
) -> tuple[Products, dict[str, Products]]:
    """Sum inner products over all leaves, and over the leaves of each label.

    Args:
        products: one list for each field of `Products`, with a scalar for each leaf.
        labels: label of each leaf, or None.
    """

    def total(chosen: Sequence[int]) -> Products:
        return Products(*(sum((part[i] for i in chosen), jnp.float32(0)) for part in products))

    chosen: dict[str, list[int]] = {}
    for i, label in enumerate(labels or []):
        chosen.setdefault(label, []).append(i)
    groups = {label: total(leaves) for label, leaves in chosen.items()}
    return total(range(len(products[0]))), groups


class GivenHalves(NamedTuple):
    """The argument `halves`, checked: inner products of the gradients of a micro-batch's halves."""

    share: Float32[Array, ""]  # fraction of the micro-batch's weight that is in the first half
    whole: Products  # of the full gradient
    groups: dict[str, Products]  # by label


def given_halves(halves: Any, updates: Any, labels: list[str] | None) -> GivenHalves | None:
    """Check the argument `halves`, and sum it over all leaves and over each group.

    `updates` are the gradients, and `labels` has the group of each leaf. None stays None.
    """
    if halves is None:
        return None
    is_tuple = isinstance(halves, tuple | list)
    if not is_tuple or len(halves) not in (3, 4):
        raise ValueError(
            "`halves` must be from `zero.value_and_grad(..., halves=True)`, or (|g1|^2, |g2|^2, "
            "g1.g2) of the mean gradients of two halves of this micro-batch, followed, if they "
            "are not equal, by the fraction of its weight in the first; got "
            f"{type(halves).__name__}{f' of {len(halves)}' if is_tuple else ''}."
        )
    parts, share = halves[:3], _scalar(halves[3] if len(halves) == 4 else 0.5)
    treedef = flatten(updates)[2]  # in this tree, a padded array is a single leaf
    if all(jax.tree.structure(part) == treedef for part in parts):
        by_leaf = [[_scalar(x) for x in jax.tree.leaves(part)] for part in parts]
        return GivenHalves(share, *sum_by_label(by_leaf, labels))
    if labels is not None:
        raise ValueError(
            "`halves` must be three trees like the gradients, with a scalar for each leaf, if "
            f"`groups` are measured; got {[type(part).__name__ for part in parts]}. Take what "
            "`zero.value_and_grad(..., halves=True)` returns, or leave out `groups`."
        )
    return GivenHalves(share, Products(*(_scalar(part) for part in parts)), {})


def given_codec_noise(noise: Any) -> CodecNoise | None:
    """Convert the argument `codec_noise` to float32 scalars; None stays None."""
    if noise is None:
        return None
    if not isinstance(noise, tuple | list) or len(noise) != 2 or any(map(jnp.shape, noise)):
        raise ValueError(
            "`codec_noise` must be from `zero.codec_noise(grads)`, or two scalars: the codecs' "
            f"noise relative to the gradient noise and to |G|^2; got {noise!r}."
        )
    return CodecNoise(*(jnp.asarray(x).astype(jnp.float32) for x in noise))


def _scalar(x: Any) -> Float32[Array, ""]:
    if not isinstance(x, jax.Array | np.ndarray | np.generic | float | int) or jnp.shape(x) != ():
        raise ValueError(
            "`halves` must be three scalars, or three trees like the gradients with a scalar for "
            f"each leaf; got {jax.tree.map(jnp.shape, x)}."
        )
    return jnp.asarray(x).astype(jnp.float32)


def is_traced(x: Any) -> bool:
    """Return True if `x` is a JAX array, whose value may be traced and so cannot be checked."""
    return isinstance(x, jax.Array)


class GroupState(NamedTuple):
    """The measurements of one group of parameters: its last similarity, and its moving averages."""

    similarity: Float32[Array, ""]  # of the last batch measured; NaN before the first
    moments: Moments


class SimigradState(NamedTuple):
    """The state of the transform `simigrad`. Read it with `simigrad_stats`."""

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
    """Return `dtype` if it is a float at least as wide as float32, otherwise float32."""
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

    states = [x for x in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(x)]
    if len(states) != 1:
        raise ValueError(
            f"`state` must hold one state of `simigrad`; got {type(state).__name__} with "
            f"{len(states)}. Pass a single one."
        )
    (own,) = states

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
