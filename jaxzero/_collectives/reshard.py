"""Move the split of a sharded array to another dim; compute shapes of gathered weights."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Shaped

from .._codecs import from_bits, to_bits
from .._mesh import program_axes
from .._sharding import DimSharding, pad, unpad
from .comm_spec import CommSpec
from .primitives import all_to_all


def move_split(
    x: Shaped[Array, ...],
    shape: tuple[int, ...],
    old: DimSharding,
    new: DimSharding,
    axes: tuple[str, ...],
) -> Shaped[Array, ...]:
    """Move the split of a sharded array to another dim, by one all-to-all.

    Args:
        x: this device's shard in the layout `old`.
        shape: true shape of the full array, without padding.
        old: the present layout.
        new: the target layout, on another dim.
        axes: the mesh axes that split the array; each has more than one device.
    """
    assert old.dim != new.dim and shape[new.dim] == new.size
    if not axes:
        return unpad(pad(x, new), old)
    bits = all_to_all(to_bits(pad(x, new)), axes, new.dim, old.dim)
    return unpad(from_bits(bits, x.dtype), old)


def gathered_aval(shard: Any, layout: DimSharding, comm: CommSpec) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the array gathered from `shard`, inside the `shard_map`."""

    def full(x: Array) -> Array:
        for axis in reversed(program_axes(comm.axes)):
            x = lax.all_gather(x, axis, axis=layout.dim, tiled=True)
        return unpad(x, layout)

    return jax.eval_shape(full, shard)
