"""What is verified: one call of a loss, as a function of full arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from .._mesh import AXES, LOCAL, NODE, AnyMesh
from .._sharding import LeafSpec, split_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of a user's function.

    Attributes:
        function: takes a list of full arrays; returns `(loss, weight, aux)`, with a list of arrays
            as `aux`. The weight is None unless the loss is a sum that is to be divided by it.
        arrays: the full arrays of all arguments, on the host.
        specs: how each is split over `node` and `local`; a parameter is not.
        leaves: the layout of each that is a parameter; None of the others.
        differentiated: the places of what gets gradients.
        grad_names: their names.
        aux_names: those of the arrays in `aux`.
        aux_how: how each is combined over devices.
        counted: with `shares`, which rows are computed, `[rows]`; None: all.
    """

    function: Callable[[Sequence[Any]], tuple[Any, Any, list[Any]]]
    arrays: list[Any]
    specs: list[PartitionSpec]
    leaves: list[LeafSpec | None]
    differentiated: list[int]
    grad_names: list[str]
    aux_names: list[str]
    aux_how: list[str]
    counted: Any = None

    @property
    def names(self) -> list[str]:
        """Names of the results: the loss, `aux` and the gradients."""
        return ["loss", *(f"aux {x}" for x in self.aux_names), *self.grad_names]

    @property
    def row_dims(self) -> list[int | None]:
        """For each array the dim that is split over all devices by rows; None: it is not."""
        dims = [split_dim(spec) for spec in self.specs]
        pairs = zip(dims, self.specs, strict=True)
        return [dim if dim is not None and spec[dim] == AXES else None for dim, spec in pairs]

    def rows_per_device(self, mesh: AnyMesh) -> int:
        """The rows of a device; 0 if no array is split by rows."""
        num = mesh.shape[NODE] * mesh.shape[LOCAL]
        pairs = zip(self.arrays, self.row_dims, strict=True)
        return next((x.shape[dim] // num for x, dim in pairs if dim is not None), 0)

    def permuted(self, mesh: AnyMesh) -> list[Any]:
        """The arrays with their rows dealt out to devices one by one.

        Where only some rows are computed, these are moved by one row.
        """
        num = mesh.shape[NODE] * mesh.shape[LOCAL]
        order = np.arange(num * self.rows_per_device(mesh))
        if self.counted is None:
            order = order.reshape(num, -1).T.ravel()
        else:
            order[self.counted] = np.roll(order[self.counted], 1)
        return self.with_rows(order)

    def with_rows(self, numbers: Any) -> list[Any]:
        """The arrays with the rows of these numbers."""
        return [
            x if dim is None else _taken(x, numbers, dim)
            for x, dim in zip(self.arrays, self.row_dims, strict=True)
        ]

    @property
    def of_counted(self) -> Problem:
        """The problem with only those rows that are computed."""
        if self.counted is None:
            return self
        arrays = self.with_rows(np.flatnonzero(self.counted))
        return dataclasses.replace(self, arrays=arrays, counted=None)

    def loss_and_grads(self, arrays: Sequence[Any], *, divide: bool = True) -> list[Any]:
        """The loss, `aux` and the gradients, by `jax.value_and_grad`.

        With a weight and without `divide`: the sum, the weight, `aux`, and the sum's gradients.
        """

        def loss(trained: Sequence[Any]) -> tuple[Any, Any]:
            merged = list(arrays)
            for i, x in zip(self.differentiated, trained, strict=True):
                merged[i] = x
            value, weight, aux = self.function(merged)
            if weight is not None and divide:
                value = value / lax.stop_gradient(weight).astype(value.dtype)
            return value, (value, weight, aux)

        trained = [arrays[i] for i in self.differentiated]
        (_, (value, weight, aux)), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        scalars = [value] if divide or weight is None else [value, weight]
        return [*scalars, *aux, *grads]


def _taken(x: Any, numbers: Any, dim: int) -> Any:
    return jnp.take(x, numbers, axis=dim) if is_key(x) else np.take(x, numbers, axis=dim)


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def on_host(tree: Any) -> Any:
    """The values of global arrays as NumPy arrays, in every process."""

    def fetched(x: Any) -> Any:
        if isinstance(x, jax.Array):
            if is_key(x):
                x = jax.random.key_data(x)
            if not (x.is_fully_addressable or x.is_fully_replicated):
                x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(fetched, tree)
