"""Sum over devices in one order, however the devices are arranged in nodes.

A reduce-scatter adds in an order of its own, which depends on the mesh and the platform. Here each
device receives the addends of its peers, by an all-to-all or an all-gather, and adds them up in a
tree over the devices in the order of the batch's rows: first neighbours in pairs, then pairs of
pairs,

    ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)).

For each odd prime factor p of the number of devices, after all pairs, p neighbours are added from
left to right. A node is a run of neighbours. If its sum is a subtree, the sum over `local` and then
over `node` is this tree on every mesh. With powers of two it always is. In general no prime factor
of the number of devices in a node may be larger than a prime factor of the number of nodes.

Partial sums are in `accumulator_dtype`, on each axis, and rounded nowhere else.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from jax import lax
from jaxtyping import Array, Shaped

from .._codecs import join_columns, rows_of, split_columns
from .._mesh import AXES, LOCAL, NODE, REDUCTION_HOPS, AnyMesh
from .._sharding import DimSharding, pad, unpad
from .comm_spec import CommSpec, accumulator_dtype
from .primitives import all_gather, all_reduce, all_to_all

_FEW = 2**10  # elements that all devices send to all, in one collective rather than two


def check_tree(mesh: AnyMesh) -> None:
    """Raise `ValueError` unless the sum over a node of `mesh` is a subtree of the sum over all."""
    nodes, local = mesh.shape[NODE], mesh.shape[LOCAL]
    if nodes == 1 or local == 1 or max(_prime_factors(local)) <= min(_prime_factors(nodes)):
        return
    raise ValueError(
        f'`deterministic="mesh"` adds in one order on all meshes of {nodes * local} devices, in '
        f"which {local} neighbours that form a node are not added up first, on a mesh of {nodes} "
        f"nodes of {local} devices. A prime factor of {local} is larger than one of {nodes}: make "
        'nodes of 2, 4 or 8 devices, or leave out `deterministic="mesh"`.'
    )


def add_in_tree(rows: Shaped[Array, "devices ..."]) -> Shaped[Array, ...]:
    """Sum `rows` over dim 0, which counts devices, in the order of the tree.

    Sums are in `accumulator_dtype`.
    """
    rows = rows.astype(accumulator_dtype(rows.dtype))
    for factor in _prime_factors(len(rows)):
        groups = rows.reshape(len(rows) // factor, factor, *rows.shape[1:])
        parts = [lax.index_in_dim(groups, i, 1, keepdims=False) for i in range(factor)]
        rows = functools.reduce(operator.add, parts)
    return rows.reshape(rows.shape[1:])


def scatter_in_tree(
    x: Shaped[Array, ...], axis: str, dim: int, num: int, shares: tuple[int, ...] = ()
) -> Shaped[Array, ...]:
    """Reduce-scatter `x` over the `num` devices of `axis`, adding in the order of the tree.

    Device i keeps part i along `dim`. `shares` is for the ledger, as in `primitives`.
    """
    received = all_to_all(rows_of(x, dim, num), axis, shares=shares)
    shape = (*x.shape[:dim], x.shape[dim] // num, *x.shape[dim + 1 :])
    return add_in_tree(received).reshape(shape)


def reduce_in_tree(
    arrays: Sequence[Shaped[Array, ...]], axis: str, num: int
) -> list[Shaped[Array, ...]]:
    """Sum each array over the `num` devices of `axis`, in one or two collectives for each dtype."""
    # Fused with the sum, a product could be added without being rounded first, and narrow floats
    # could keep bits that they do not have. What XLA fuses depends on the mesh.
    arrays = lax.optimization_barrier(list(arrays))
    sums: dict[int, Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        chosen = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        row = join_columns([arrays[i].reshape(1, arrays[i].size) for i in chosen])
        total = _reduce_row(row, axis, num)[None]
        parts = split_columns(total, [(arrays[i].size, total.dtype) for i in chosen])
        sums.update((i, x.reshape(arrays[i].shape)) for i, x in zip(chosen, parts, strict=True))
    return [sums[i] for i in range(len(arrays))]


def sum_over_devices(x: Shaped[Array, ...], comm: CommSpec) -> Shaped[Array, ...]:
    """All-reduce `x` over all devices; in the order of the tree, if `comm.sums_in_tree`."""
    if not comm.sums_in_tree:
        return all_reduce(x, AXES)
    dtype = x.dtype
    for axis in comm.axes_with_peers(REDUCTION_HOPS):
        (x,) = reduce_in_tree([x], axis, comm.sizes[axis])
    return x.astype(dtype)


def _reduce_row(row: Shaped[Array, "1 m"], axis: str, num: int) -> Shaped[Array, " m"]:
    if row.size <= _FEW:
        return add_in_tree(all_gather(row, axis, 0))
    layout = DimSharding(0, row.size, num)
    shard = scatter_in_tree(pad(row.reshape(-1), layout), axis, 0, num)
    return unpad(all_gather(shard, axis, 0), layout)


@functools.cache
def _prime_factors(num: int) -> tuple[int, ...]:
    """Return the prime factors of `num`, in ascending order; none for 1."""
    factors, factor = [], 2
    while num > 1:
        while num % factor == 0:
            factors.append(factor)
            num //= factor
        factor += 1
    return tuple(factors)
