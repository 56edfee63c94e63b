"""Run plain JAX on each device's own rows, and take the mean over devices, as a right step does.

If the loss is not a mean over rows, this mean differs from what one device computes with all rows.
If the step gives this mean, the step is right, and the loss depends on which rows share a device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from .._mesh import AXES, LOCAL, NODE, AnyMesh, map_devices, microbatch_index, physical
from .._sharding import split_dim
from .problem import Problem, is_key, on_host
from .roundings import moved
from .samples import Samples


class EachDevice:
    """Computes loss and gradients by plain JAX on the rows of each device.

    Args:
        problem: the call to compute.
        mesh: the devices, each of which holds all parameters in full.
        microbatches: the number of micro-batches into which the rows of a device are cut.

    Attributes:
        is_counted: which micro-batches are part of the means over devices, booleans `[devices,
            microbatches]`.
    """

    def __init__(self, problem: Problem, mesh: AnyMesh, microbatches: int):
        self.problem, self.mesh, self.microbatches = problem, mesh, microbatches
        num = mesh.shape[NODE] * mesh.shape[LOCAL]
        self.is_counted = np.ones((num, microbatches), bool)
        if problem.counted is not None:
            self.is_counted = problem.counted.reshape(num, microbatches, -1)[:, :, 0]
        self.arrays = [
            _placed(x, jax.sharding.NamedSharding(physical(mesh), spec))
            for x, spec in zip(problem.arrays, problem.specs, strict=True)
        ]

    def _parts(self, arrays: Sequence[Any], seed: Any = None) -> list[Any]:
        """Compute the results of this device's micro-batches, arrays `[1, microbatches, ...]`.

        Args:
            arrays: this device's arrays of the problem.
            seed: the seed of `moved`, by which each operation's result is moved by its rounding
                error; None: no result is moved.
        """
        function = functools.partial(self.problem.loss_and_grads, divide=False)
        parts = []
        for k in range(self.microbatches):
            with microbatch_index(jnp.array(k) if self.microbatches > 1 else None):
                rows = [
                    self._rows(x, s, k) for x, s in zip(arrays, self.problem.specs, strict=True)
                ]
                parts.append(
                    function(rows) if seed is None else moved(function, (rows,), seed, False)
                )
        return [jnp.stack(x)[None] for x in zip(*parts, strict=True)]

    def _rows(self, x: Any, spec: PartitionSpec, k: int) -> Any:
        dim = split_dim(spec)
        if dim is None or self.microbatches == 1:
            return x
        size = x.shape[dim] // self.microbatches
        return lax.slice_in_dim(x, k * size, (k + 1) * size, axis=dim)

    @functools.cached_property
    def parts(self) -> list[Any]:
        """The results of each device and micro-batch, arrays `[devices, microbatches, ...]`.

        Each is a result of `Problem.loss_and_grads` with `divide=False`, in the same order.
        """
        run = map_devices(self._parts, self.mesh, (list(self.problem.specs),), PartitionSpec(AXES))
        return on_host(jax.jit(run)(self.arrays))

    def combined(self, parts: Sequence[Any]) -> list[Any]:
        """Combine the results of all devices and micro-batches to loss, `aux` and gradients.

        `parts` has the form of the property `parts`.
        """
        parts = [x[self.is_counted][None] for x in parts]
        names = self.problem.names
        num_aux = len(self.problem.aux_how)
        is_weighted = len(parts) > len(names)
        total, rest = parts[0], parts[1 + is_weighted :]
        weight = np.sum(np.asarray(parts[1], np.float64)) if is_weighted else np.float64(total.size)
        aux = [
            _combined(x, how) for x, how in zip(rest[:num_aux], self.problem.aux_how, strict=True)
        ]
        means = [
            (np.sum(np.asarray(x, _wide(x.dtype)), axis=(0, 1)) / weight).astype(x.dtype)
            for x in (total, *rest[num_aux:])
        ]
        return [means[0], *aux, *means[1:]]

    def samples(self, results: Sequence[Any]) -> Samples:
        """Measure how far results change if each operation's value is moved by its rounding error.

        `results` are the unchanged results, those of `combined`.
        """
        specs = list(self.problem.specs), PartitionSpec()
        run = jax.jit(map_devices(self._parts, self.mesh, specs, PartitionSpec(AXES)))
        return Samples.of(lambda seed: self.combined(on_host(run(self.arrays, seed))), results)


def _placed(x: Any, sharding: jax.sharding.NamedSharding) -> Any:
    """Return an array of `sharding`, made from an array that all processes hold in full.

    Random keys are put on the devices as their data, which are made keys again there.
    """
    if is_key(x):
        data = jax.device_put(on_host(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(x, sharding)


def _wide(dtype: Any) -> Any:
    return np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64


def _combined(x: Any, how: str) -> Any:
    """Combine a result `[devices, microbatches, ...]` by `how`, an option of `aux_reduce`."""
    match how:
        case "first":
            return x[0, 0]
        case "stack":
            return x.reshape(-1, *x.shape[2:])
        case "concat":
            return x.reshape(-1, *x.shape[3:])
        case "max":
            return x.max(axis=(0, 1))
    total = np.sum(
        np.asarray(x, _wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.inexact) else x, axis=(0, 1)
    )
    if how == "mean":
        total = total / (x.shape[0] * x.shape[1])
    return total.astype(x.dtype)
