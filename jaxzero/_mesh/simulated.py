"""Simulate many devices on one: a mesh whose devices are batch dims of arrays.

The function that `shard_map` would run on every device runs under one `vmap` for each mesh axis
instead, with the same axis names, so that collectives have the same meaning. A global array is an
ordinary array on one device. This reproduces the arithmetic of many devices (rounding of codecs,
noise of small batches), but not their memory or speed.

A few collectives are wrong under `vmap` (JAX 0.10 to 0.12): `all_gather`, `psum_scatter` and
`ppermute` over several axes at once, and `all_to_all` of a value that is equal on all devices. The
replacements in this module run over one axis after the other.
"""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Shaped

# The axes of the simulated mesh whose program is being traced.
_axis_names: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "jaxzero_simulated_axes", default=()
)


@dataclasses.dataclass(frozen=True)
class SimulatedMesh:
    """A stand-in for `Mesh`, of shape `sizes`, whose simulated devices all run on `device`."""

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    device: Any

    @property
    def shape(self) -> Mapping[str, int]:
        return dict(zip(self.axis_names, self.sizes, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def physical(self) -> Mesh:
        """A mesh of the one real device, with the same axis names, for shardings."""
        grid = np.array([self.device]).reshape((1,) * len(self.sizes))
        return Mesh(grid, self.axis_names, axis_types=(AxisType.Auto,) * len(self.sizes))

    def map(
        self,
        function: Callable,
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None = None,
    ) -> Callable:
        """Run `function` on every device's shards of global arrays, as `jax.shard_map` does.

        Args:
            function: takes and returns trees of arrays.
            in_specs: a tuple of tree prefixes of `PartitionSpec`s, one for each argument.
            out_specs: a tree prefix of `PartitionSpec`s; for an output that is not split, the
                first device's value is returned.
            axes: the mesh axes to run over, which are all that specs may name; by default all.
        """
        names = self.axis_names if axes is None else axes

        def on_device(*args):
            token = _axis_names.set(self.axis_names)
            try:
                return function(*args)
            finally:
                _axis_names.reset(token)

        def run(*args):
            mapped = on_device
            for axis in reversed(names):
                in_axes = _map_prefix(
                    lambda x, spec, axis=axis: 0 if _splits(spec, axis) else None, in_specs, args
                )
                mapped = jax.vmap(mapped, in_axes, axis_name=axis, axis_size=self.shape[axis])
            shards = mapped(*_map_prefix(self._cut, in_specs, args))
            return _map_prefix(lambda x, spec: self._join(x, spec, names), out_specs, shards)

        return run

    def _cut(self, x: Array, spec: PartitionSpec) -> Array:
        """Cut a global array into shards: a new leading dim for each mesh axis that splits it."""
        shape: list[int] = []
        for size, axes in zip(x.shape, _axes_of_dims(spec, x.ndim), strict=True):
            counts = [self.shape[axis] for axis in axes]
            shape += [*counts, size // math.prod(counts)]
        dims = self._axis_dims(spec, x.ndim)
        return jnp.moveaxis(x.reshape(shape), dims, range(len(dims)))

    def _join(self, x: Array, spec: PartitionSpec, names: tuple[str, ...]) -> Array:
        """Join shards, which `x` has on a leading dim for each of `names`, to the global array."""
        x = x[tuple(slice(None) if _splits(spec, axis) else 0 for axis in names)]
        ndim = x.ndim - sum(_splits(spec, axis) for axis in names)
        dims = self._axis_dims(spec, ndim)
        shape = [
            size * math.prod(self.shape[axis] for axis in axes)
            for size, axes in zip(x.shape[len(dims) :], _axes_of_dims(spec, ndim), strict=True)
        ]
        return jnp.moveaxis(x, range(len(dims)), dims).reshape(shape)

    def _axis_dims(self, spec: PartitionSpec, ndim: int) -> list[int]:
        """The dim of each mesh axis once every split dim is reshaped to `(*axes, shard)`."""
        order = [name for axes in _axes_of_dims(spec, ndim) for name in (*axes, None)]
        return [order.index(axis) for axis in self.axis_names if axis in order]


def _axes_of_dims(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """For each dim, the mesh axes that split it, major first."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return entries + [()] * (ndim - len(entries))


def _splits(spec: PartitionSpec, axis: str) -> bool:
    return any(axis in axes for axes in _axes_of_dims(spec, 0))


def _map_prefix(function: Callable, specs: Any, tree: Any) -> Any:
    """Apply `function(leaf, spec)` to every leaf of `tree`; `specs` is a tree prefix of it."""
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda x: function(x, spec), subtree),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


# Collectives. They are correct under `shard_map` too, but may cost more there.


def is_simulating() -> bool:
    """Whether the program being traced runs on simulated devices."""
    return bool(_axis_names.get())


def varying(x: Shaped[Array, ...], axes: str | tuple[str, ...]) -> Shaped[Array, ...]:
    """Give `x` a batch dim for `axes` under simulation, even if it is equal on all devices.

    Without one, `vmap` gives an `all_to_all` a wrong shape. On real devices this returns `x`.
    """
    return jnp.where(lax.axis_index(axes) >= 0, x, x) if is_simulating() else x


def gather_in_turn(
    x: Shaped[Array, ...], axes: tuple[str, ...], dim: int, tiled: bool
) -> Shaped[Array, ...]:
    """`lax.all_gather` over one axis after the other, minor first."""
    x = x if tiled else jnp.expand_dims(x, dim)
    for axis in reversed(axes):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def scatter_in_turn(
    x: Shaped[Array, ...], axes: tuple[str, ...], dim: int, tiled: bool
) -> Shaped[Array, ...]:
    """`lax.psum_scatter` over one axis after the other, major first."""
    for axis in axes:
        x = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x if tiled else jnp.squeeze(x, dim)


def permute(
    x: Shaped[Array, ...], axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> Shaped[Array, ...]:
    """`lax.ppermute`, by a gather: each device picks the value of its source, or zeros.

    As in `lax.ppermute`, devices are numbered in the mesh's order, whatever the order of `axes`.
    """
    axes = tuple(axis for axis in _axis_names.get() if axis in axes)
    source = np.full(math.prod(lax.axis_size(axis) for axis in axes), -1)
    for start, end in pairs:
        source[end] = start
    mine = jnp.asarray(source, jnp.int32)[lax.axis_index(axes)]
    everyone = gather_in_turn(x, axes, 0, tiled=False)
    picked = lax.dynamic_index_in_dim(everyone, jnp.maximum(mine, 0), keepdims=False)
    return jnp.where(mine >= 0, picked, jnp.zeros_like(picked))
