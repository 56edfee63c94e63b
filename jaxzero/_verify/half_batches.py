"""The inner products of the gradients of two half-batches, by plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._collectives import CommSpec
from .problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfBatches(Problem):
    """A call whose results are the products `|g1|^2`, `|g2|^2` and `g1.g2` of each leaf.

    Attributes:
        half: the number of nodes, or of devices if there is one node, that have the first half.
        num: the number of all nodes, or of all devices if there is one node.
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
        """The products of all leaves, of each kind in turn; the first half's share."""
        products = [f"{x} {kind}" for kind in ("first", "second", "cross") for x in self.grad_names]
        return [*products, "share"]

    def loss_and_grads(self, arrays: Sequence[Any], *, divide: bool = True) -> list[Any]:
        """The results, in the order of `names`."""
        (weight, first), (other, second) = (
            self._means(arrays, part) for part in (range(self.half), range(self.half, self.num))
        )
        share = weight / (weight + other)
        products = ([], [], [])
        for one, two in zip(first, second, strict=True):
            part = share.astype(one.dtype)
            total = part * one + (1 - part) * two
            # From the sum of both, as a step has it: this rounds more where the second is small.
            two = (total - part * one) / (1 - part)
            for found, (x, y) in zip(products, ((one, one), (two, two), (one, two)), strict=True):
                found.append(jnp.sum(jnp.real(jnp.conj(x) * y)).astype(jnp.float32))
        return [x for kind in products for x in kind] + [share.astype(jnp.float32)]

    def _means(self, arrays: Sequence[Any], part: range) -> tuple[Any, list[Any]]:
        """The weight of some of the nodes or devices, and the mean gradients over their rows."""
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
