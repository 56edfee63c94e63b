"""Define `Problem`: a call of a loss to verify, which plain JAX can run on full arrays."""

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

from .._collectives import CommSpec
from .._mesh import AXES, LOCAL, NODE, AnyMesh
from .._sharding import LeafSpec, split_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of a user's function, with its arguments.

    Attributes:
        function: takes a list of full arrays; returns `(loss, weight, aux)`, with a list of arrays
            as `aux`. The weight is None unless the loss is a sum that is to be divided by it.
        arrays: the full arrays of all arguments, on the host.
        specs: for each array, how the step splits its rows over `node` and `local`; parameters have
            no rows.
        leaves: for each array its layout if it is a parameter, otherwise None.
        differentiated: indices of the arrays with respect to which gradients are taken.
        grad_names: the names of the gradients, in the order of `differentiated`.
        aux_names: names of the arrays in `aux`.
        aux_how: for each array in `aux`, how it is combined over devices, as in `aux_reduce`.
        counted: with the option `shares`, which rows the step computes, booleans `[rows]`; None:
            all.
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
        """For each array, the dim of its rows, which is split over all devices; None: no rows."""
        dims = [split_dim(spec) for spec in self.specs]
        pairs = zip(dims, self.specs, strict=True)
        return [dim if dim is not None and spec[dim] == AXES else None for dim, spec in pairs]

    def rows_per_device(self, mesh: AnyMesh) -> int:
        """Return the number of rows of a device; 0 if no array has rows."""
        num = mesh.shape[NODE] * mesh.shape[LOCAL]
        pairs = zip(self.arrays, self.row_dims, strict=True)
        return next((x.shape[dim] // num for x, dim in pairs if dim is not None), 0)

    def permuted(self, mesh: AnyMesh) -> list[Any]:
        """Return the arrays with rows in another order, so that each device gets other rows.

        Rows are dealt out to devices one by one. With `counted`, each computed row takes the place
        of the next computed row instead.
        """
        num = mesh.shape[NODE] * mesh.shape[LOCAL]
        order = np.arange(num * self.rows_per_device(mesh))
        if self.counted is None:
            order = order.reshape(num, -1).T.ravel()
        else:
            order[self.counted] = np.roll(order[self.counted], 1)
        return self.with_rows(order)

    def with_rows(self, numbers: Any) -> list[Any]:
        """Return the arrays with only the rows of the given numbers, in the given order."""
        return [
            x if dim is None else _taken(x, numbers, dim)
            for x, dim in zip(self.arrays, self.row_dims, strict=True)
        ]

    @property
    def of_counted(self) -> Problem:
        """This problem with only the rows that the step computes."""
        if self.counted is None:
            return self
        arrays = self.with_rows(np.flatnonzero(self.counted))
        return dataclasses.replace(self, arrays=arrays, counted=None)

    def loss_and_grads(self, arrays: Sequence[Any], *, divide: bool = True) -> list[Any]:
        """Compute the loss, `aux` and the gradients in one list, by `jax.value_and_grad`.

        If there is a weight and `divide` is false, nothing is divided by the weight: the list has
        the sum of losses, the weight, `aux`, and the gradients of the sum.
        """

        def loss(trained: Sequence[Any]) -> tuple[Any, Any]:
            merged = list(arrays)
            for i, x in zip(self.differentiated, trained, strict=True):
                merged[i] = x
            value, weight, aux = self.function(merged)
            # Without a gradient of the weight, as in a step, which divides gradients of the sum.
            if weight is not None and divide:
                value = value / lax.stop_gradient(weight).astype(value.dtype)
            return value, (value, weight, aux)

        trained = [arrays[i] for i in self.differentiated]
        (_, (value, weight, aux)), grads = jax.value_and_grad(loss, has_aux=True)(trained)
        scalars = [value] if divide or weight is None else [value, weight]
        return [*scalars, *aux, *grads]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfBatches(Problem):
    """A call whose results are inner products of the mean gradients of two halves of the batch.

    The results for a leaf with the gradients `g1` and `g2` on the two halves are `|g1|^2`, `|g2|^2`
    and `g1.g2`.

    Attributes:
        half: how many nodes have the first half; if there is one node, how many devices.
        num: the number of all nodes; if there is one node, of all devices.
    """

    half: int
    num: int

    @classmethod
    def of(cls, problem: Problem, comm: CommSpec) -> HalfBatches:
        fields = {x.name: getattr(problem, x.name) for x in dataclasses.fields(problem)}
        axis = comm.halves_axis
        return cls(**fields, half=comm.first_half_size(axis), num=comm.sizes[axis])

    @property
    def names(self) -> list[str]:
        """Names of the results: `|g1|^2` of all leaves, then `|g2|^2`, `g1.g2`, and "share"."""
        products = [f"{x} {kind}" for kind in ("first", "second", "cross") for x in self.grad_names]
        return [*products, "share"]

    def loss_and_grads(self, arrays: Sequence[Any], *, divide: bool = True) -> list[Any]:
        """Compute the results, in the order of `names`.

        They are the inner products, and the first half's share of the batch's total weight.
        """
        (weight, first), (other, second) = (
            self._means(arrays, part) for part in (range(self.half), range(self.half, self.num))
        )
        share = weight / (weight + other)
        products = ([], [], [])
        for one, two in zip(first, second, strict=True):
            part = share.astype(one.dtype)
            total = part * one + (1 - part) * two
            # A step subtracts the first half from the sum of both. That rounds more than `second`
            # where the second half's share is small, so the same is done here.
            two = (total - part * one) / (1 - part)
            pairs = (one, one), (two, two), (one, two)
            for of_kind, (x, y) in zip(products, pairs, strict=True):
                of_kind.append(jnp.sum(jnp.real(jnp.conj(x) * y)).astype(jnp.float32))
        return [x for kind in products for x in kind] + [share.astype(jnp.float32)]

    def _means(self, arrays: Sequence[Any], part: range) -> tuple[Any, list[Any]]:
        """Return the total weight and the mean gradients of the rows of one half.

        `part` has the numbers of the nodes of this half; if there is one node, of the devices.
        """
        rows = []
        for array, dim in zip(arrays, self.row_dims, strict=True):
            if dim is not None:
                size = array.shape[dim] // self.num
                array = lax.slice_in_dim(array, part.start * size, part.stop * size, axis=dim)
            rows.append(array)
        sums = Problem.loss_and_grads(self, rows, divide=False)
        start = len(sums) - len(self.differentiated)
        if start == 1 + len(self.aux_how):
            return jnp.float32(len(part)), sums[start:]
        weight = sums[1].astype(jnp.float32)
        return weight, [x / weight.astype(x.dtype) for x in sums[start:]]


def _taken(x: Any, numbers: Any, dim: int) -> Any:
    return jnp.take(x, numbers, axis=dim) if is_key(x) else np.take(x, numbers, axis=dim)


def is_key(x: Any) -> bool:
    """Return True if `x` is an array of typed random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def on_host(tree: Any) -> Any:
    """Return the values of a tree of global arrays as NumPy arrays, in every process."""

    def fetched(x: Any) -> Any:
        if isinstance(x, jax.Array):
            if is_key(x):
                x = jax.random.key_data(x)
            if not (x.is_fully_addressable or x.is_fully_replicated):
                x = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(fetched, tree)
