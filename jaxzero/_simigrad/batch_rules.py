"""Compute the size of the next batch from the similarity that was measured on the last one.

`WalkRule` is the rule of the SimiGrad paper: the batch grows by a tenth if the similarity is below
the target, and shrinks by a tenth if it is above.

`JumpRule` uses phi = 1 / (1 + 2N/B), where phi is the similarity of the halves of a batch of size
B, and N the gradient noise scale (see `similarity`). It estimates N from measured similarities, and
chooses the size B* whose similarity is the target phi*:

    B* = 2 N phi* / (1 - phi*),    N = (B/2) (1 - phi) / phi.

`BatchRule` is the base of both rules, and of rules that users define.

References:
    SimiGrad: Qin et al., NeurIPS 2021.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

_NEARLY_ONE = 1 - 2**-20  # a batch without noise would have an infinite signal


@runtime_checkable
class BatchRule(Protocol):
    """A rule that decides how many micro-batches the next batch takes.

    Subclass it and pass an instance: `jz.simigrad(inner, rule=MyRule())`. Any object with these two
    methods is a rule. Both are traced under `jit`, so `wanted` branches with `jnp.where`.
    """

    def init(self) -> Any:
        """Return the rule's memory before the first measurement: a tree of scalars.

        By default it is empty. The memory is part of the optimizer state, which is saved in
        checkpoints. It must be scalars, which are replicated, because arrays of optimizer state are
        split over devices.
        """
        return ()

    @abc.abstractmethod
    def wanted(
        self,
        similarity: Float32[Array, ""],
        steps: Float32[Array, ""],
        weight: Float32[Array, ""],
        target: Float32[Array, ""],
        memory: Any,
    ) -> tuple[Float32[Array, ""], Any]:
        """Return the size of the next batch, in micro-batches, and the new memory.

        `simigrad` rounds and bounds the size. If the size is NaN, the batch keeps its size.

        Args:
            similarity: similarity of equal halves of the last batch, finite.
            steps: number of micro-batches in the last batch.
            weight: summed weight of the last batch, such as its number of examples: what `update`
                was given as `weight`.
            target: similarity to be reached.
            memory: the rule's memory, from `init` or the last call.
        """
        ...


def first_memory(rule: BatchRule) -> Any:
    """Return the memory that a rule's `init` returns, as a tree of scalar arrays.

    Raises:
        ValueError: `init` returns anything but a tree of scalars.
    """
    memory = rule.init()
    for path, leaf in jax.tree_util.tree_flatten_with_path(memory)[0]:
        shape = getattr(leaf, "shape", () if isinstance(leaf, int | float) else None)
        if shape != ():
            raise ValueError(
                f"`init` of the rule {rule!r} must return a tree of scalars; got "
                f"{_described(leaf)} at `{jax.tree_util.keystr(path)}`. Keep several numbers as a "
                "tuple of scalars."
            )
    return jax.tree.map(jnp.asarray, memory)


def next_steps(
    rule: BatchRule,
    similarity: Float32[Array, ""],
    steps: Float32[Array, ""],
    weight: Float32[Array, ""],
    target: Float32[Array, ""],
    memory: Any,
) -> tuple[Float32[Array, ""], Any]:
    """Call `wanted` of a rule, and return its size and memory, checked.

    A size of NaN becomes `steps`. The arguments are those of `BatchRule.wanted`.

    Raises:
        ValueError: the result is not a pair of a real scalar and a memory like that of `init`.
    """
    result = rule.wanted(similarity, steps, weight, target, memory)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"`wanted` of the rule {rule!r} must return `(steps, memory)`; got "
            f"{_described(result)}."
        )
    wanted, new = result
    is_real = isinstance(wanted, jax.Array | np.generic | int | float)
    if not is_real or jnp.shape(wanted) != () or jnp.iscomplexobj(wanted):
        raise ValueError(
            f"`wanted` of the rule {rule!r} must return a real scalar, the number of "
            f"micro-batches; got {_described(wanted)}."
        )
    shapes, old_shapes = (jax.tree.map(jnp.shape, tree) for tree in (new, memory))
    if jax.tree.structure(new) != jax.tree.structure(memory) or shapes != old_shapes:
        raise ValueError(
            f"`wanted` of the rule {rule!r} must return a memory like that of `init`, "
            f"{jax.tree.structure(memory)} of scalars; got {_described(new)}."
        )
    # A state whose dtypes change from one update to the next would be compiled twice, and could not
    # be carried by a `scan`.
    new = jax.tree.map(lambda x, y: jnp.asarray(x).astype(jnp.result_type(y)), new, memory)
    wanted = jnp.asarray(wanted).astype(jnp.float32)
    return jnp.where(jnp.isnan(wanted), steps, wanted), new


def _described(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"an array of shape {jnp.shape(x)} and type {x.dtype}"
    return f"{type(x).__name__} {jax.tree.map(jnp.shape, x) if isinstance(x, tuple) else x!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkRule(BatchRule):
    """The paper's rule: grow by a tenth below the target, shrink by a tenth above it.

    At least one micro-batch is added or taken away.

    Args:
        growth: factor below the target; more than 1.
        shrink: factor above the target; less than 1.
        window: number of measured similarities that are averaged for the comparison; 1, as in
            the paper, compares the last one.
        average: "median", or "ema", an exponential moving average over about `window` values.
    """

    growth: float = 1.1
    shrink: float = 0.9
    window: int = 1
    average: Literal["median", "ema"] = "median"

    def __post_init__(self):
        if not self.growth > 1 or not 0 < self.shrink < 1:
            raise ValueError(
                "`growth` of `WalkRule` must be more than 1 and `shrink` between 0 and 1; got "
                f"{self.growth!r} and {self.shrink!r}."
            )
        _check_average("WalkRule", self.window, self.average)

    def init(self) -> Any:
        return _new_average(self.window, self.average)

    def wanted(
        self,
        similarity: Float32[Array, ""],
        steps: Float32[Array, ""],
        weight: Float32[Array, ""],
        target: Float32[Array, ""],
        memory: Any,
    ) -> tuple[Float32[Array, ""], Any]:
        similarity, memory = _add_to_average(similarity, memory, self.window, self.average)
        up = jnp.maximum(steps + 1, jnp.floor(steps * self.growth))
        down = jnp.minimum(steps - 1, jnp.floor(steps * self.shrink))
        steps = jnp.where(similarity < target, up, jnp.where(similarity > target, down, steps))
        return steps, memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class JumpRule(BatchRule):
    """Jump to the batch size whose estimated similarity is the target.

    The rule averages 1/N over updates rather than N, because a measurement that is all noise
    makes 1/N small or negative, but N infinite. While the average is not positive, the batch
    grows as much as it may.

    Args:
        window: number of measurements that are averaged.
        average: "median", or "ema", an exponential moving average over about `window` values.
        max_change: the largest factor between one batch and the next, either way.
    """

    window: int = 5
    average: Literal["median", "ema"] = "median"
    max_change: float = 4.0

    def __post_init__(self):
        if not self.max_change > 1:
            raise ValueError(
                f"`max_change` of `JumpRule` is a factor of more than 1; got {self.max_change!r}."
            )
        _check_average("JumpRule", self.window, self.average)

    def init(self) -> Any:
        return _new_average(self.window, self.average)

    def wanted(
        self,
        similarity: Float32[Array, ""],
        steps: Float32[Array, ""],
        weight: Float32[Array, ""],
        target: Float32[Array, ""],
        memory: Any,
    ) -> tuple[Float32[Array, ""], Any]:
        similarity = jnp.minimum(similarity, _NEARLY_ONE)
        inverse = 2 * similarity / (1 - similarity) / weight  # 1/N
        inverse, memory = _add_to_average(inverse, memory, self.window, self.average)
        best = 2 * target / (1 - target) / jnp.where(inverse > 0, inverse, 0.0)
        # The target can be 0, which any batch exceeds; 0/0 is then not a number.
        best = jnp.where(jnp.isnan(best), 0.0, best) * steps / weight
        return jnp.round(jnp.clip(best, steps / self.max_change, steps * self.max_change)), memory


def _check_average(rule: str, window: Any, average: Any) -> None:
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"`window` of `{rule}` counts updates, at least 1; got {window!r}.")
    if average not in ("median", "ema"):
        raise ValueError(f'`average` of `{rule}` must be "median" or "ema"; got {average!r}.')


# The memory is a tuple of scalars, not an array, because arrays of optimizer state are split over
# devices.
def _new_average(window: int, average: str) -> tuple[Float32[Array, ""], ...]:
    if average == "ema":
        return (jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32))  # weight, mean
    return tuple(jnp.full([], jnp.nan, jnp.float32) for _ in range(window))  # newest first


def _add_to_average(
    value: Float[Array, ""], memory: tuple[Float32[Array, ""], ...], window: int, average: str
) -> tuple[Float32[Array, ""], tuple[Float32[Array, ""], ...]]:
    if average == "ema":
        # The weights of this average have the mean age of those over the last `window` values.
        weight = (1 - 2 / (window + 1)) * memory[0] + 1
        mean = memory[1] + (value - memory[1]) / weight
        return mean, (weight, mean)
    memory = (value, *memory[:-1])
    return jnp.nanmedian(jnp.stack(memory)), memory


RULES: dict[str, BatchRule] = {"walk": WalkRule(), "jump": JumpRule()}
