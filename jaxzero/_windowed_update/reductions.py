"""Reduce values of a leaf to scalars: in a window, over windows, and over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Shaped

from .._program import Operation, full_reduction
from .windows import where_valid


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction of all elements of a leaf to a scalar.

    Attributes:
        name: "sum", "max", "min", or "dot" for the sum of products of two inputs.
        dtype: of the result.
    """

    name: str
    dtype: Any

    @classmethod
    def of(cls, operation: Operation) -> Reduction:
        name = full_reduction(operation)
        assert name is not None
        return cls(name, operation.outputs[0].dtype)

    @property
    def _running_dtype(self) -> Any:
        return jnp.int32 if self.dtype == jnp.bool_ else self.dtype  # devices reduce no booleans

    @property
    def start(self) -> Shaped[Array, ""]:
        """The result for no elements, from which to go on."""
        dtype = self._running_dtype
        if self.name in ("sum", "dot"):
            return jnp.zeros((), dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(-jnp.inf if self.name == "max" else jnp.inf, dtype)
        limits = jnp.iinfo(dtype)
        return jnp.asarray(limits.min if self.name == "max" else limits.max, dtype)

    def add_window(
        self,
        so_far: Shaped[Array, ""],
        windows: Sequence[Shaped[Array, ...]],
        masks: Sequence[Bool[Array, ...] | None],
    ) -> Shaped[Array, ""]:
        """The result after one more window, of which only elements in all `masks` count."""
        values = [x.astype(self._running_dtype) for x in windows]
        value = values[0] if len(values) == 1 else values[0] * values[1]
        value = where_valid(masks, value, self.start)
        match self.name:
            case "max":
                return jnp.maximum(so_far, jnp.max(value))
            case "min":
                return jnp.minimum(so_far, jnp.min(value))
        return so_far + jnp.sum(value, dtype=value.dtype)

    def over_devices(self, x: Shaped[Array, ""], axes: tuple[str, ...]) -> Shaped[Array, ""]:
        """The result over all devices; `axes` are those that split the leaf."""
        if axes:
            reduce = {"max": lax.pmax, "min": lax.pmin}.get(self.name, lax.psum)
            x = reduce(x, axes)
        return x.astype(self.dtype)
