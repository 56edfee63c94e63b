"""Plan what `reshard` does with each array: its move, and the program that the move is part of.

A window is a run of consecutive arrays that one program moves. Small arrays share a program. Only
the arrays of one window are moved at a time, so the size of windows bounds the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._codecs import Codec
from .._mesh import NODE, STAGE
from .._sharding import LeafSpec, axes_of
from .move import Move, Windows
from .steps import Digits, Route, route


@dataclasses.dataclass(frozen=True)
class Options:
    """The options by which arrays are sent.

    Attributes:
        dtype: the dtype that floats are cast to before they are sent; None: they are not cast.
        codec: encodes large arrays of floats; None: they are sent as they are.
        min_quantized_size: arrays with fewer elements are not encoded.
        window_bytes: the most bytes of a window's arrays; a larger array is a window by itself.
    """

    dtype: Any
    codec: Codec | None
    min_quantized_size: int
    window_bytes: int


@dataclasses.dataclass(frozen=True)
class Resharding:
    """The planned moves of several arrays.

    Attributes:
        leaves: the layout of each stored array.
        sources: the sharding of each stored array, in device memory.
        targets: the sharding of each array of the result.
        moves: for each array its move; None: `jax.device_put` moves the array, or it has no
            elements.
        windows: for each program, the indices of the arrays that it moves.
        digits: the devices that send and receive, with coordinates of prime size.
        nodes: the node of each of these devices.
    """

    leaves: tuple[LeafSpec, ...]
    sources: tuple[NamedSharding, ...]
    targets: tuple[NamedSharding, ...]
    moves: tuple[Move | None, ...]
    windows: tuple[tuple[int, ...], ...]
    digits: Digits
    nodes: np.ndarray

    @property
    def programs(self) -> list[tuple[Move, ...]]:
        """The moves that each program makes: for each window, the moves of its arrays."""
        moves = ([self.moves[i] for i in window] for window in self.windows)
        return [tuple(move for move in each if move is not None) for each in moves]


@functools.lru_cache(maxsize=16)
def make_resharding(
    leaves: tuple[LeafSpec, ...],
    sources: tuple[NamedSharding, ...],
    targets: tuple[NamedSharding, ...],
    options: Options,
) -> Resharding:
    """Plan the moves of arrays on one mesh to new shardings, on this mesh or on another one.

    Plans are cached: planning some hundred arrays takes as long as sending a megabyte on a fast
    network.

    Args:
        leaves: the layout of each stored array.
        sources: the sharding of each stored array, in device memory.
        targets: the sharding of each array of the result.
        options: how the arrays are sent.
    """
    mesh, onto = sources[0].mesh, targets[0].mesh
    assert isinstance(mesh, Mesh) and isinstance(onto, Mesh)
    digits = Digits.of(mesh)
    places = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
    nodes = (places.get(STAGE, 0) * mesh.shape[NODE] + places[NODE]).ravel()
    are_same = set(mesh.devices.flat) == set(onto.devices.flat)
    other = digits.over(onto) if are_same else None
    moves = tuple(
        _move(leaf, source, target, digits, other, options)
        if are_same
        and math.prod(leaf.shape)
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        else None
        for leaf, source, target in zip(leaves, sources, targets, strict=True)
    )
    windows = _windows(moves, digits.mesh, options.window_bytes)
    return Resharding(leaves, sources, targets, moves, windows, digits, nodes)


def sent_dtype(leaf: LeafSpec, dtype: Any) -> Any:
    """Return the dtype in which a leaf is sent: `dtype` for floats if given, else its own."""
    is_cast = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.dtype(dtype if is_cast else leaf.dtype)


def plain_spec(leaf: LeafSpec, source: NamedSharding) -> PartitionSpec:
    """Return the spec by which `source` splits the true dims of a leaf.

    It differs from `source.spec` if the leaf is stored as messages: that spec splits their dims.
    """
    if leaf.codec is None or leaf.layout is None:
        return source.spec
    return PartitionSpec(*[None] * leaf.layout.dim, source.spec[leaf.num_lead])


def spec_without_padding(leaf: LeafSpec, source: NamedSharding) -> PartitionSpec:
    """Return a spec that splits a leaf over the devices of `source`, without padding or messages.

    If the devices cannot share the leaf evenly, each has it in full.
    """
    spec = plain_spec(leaf, source)
    is_even = next(uneven_dims(leaf.shape, spec, source.mesh), None) is None
    return spec if is_even else PartitionSpec()


def uneven_dims(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Any
) -> Iterator[tuple[int, int]]:
    """Yield `(dim, parts)` for each dim whose size is no multiple of its number of parts."""
    for dim, entry in enumerate(spec):
        parts = math.prod(mesh.shape[axis] for axis in axes_of(PartitionSpec(entry)))
        if shape[dim] % parts:
            yield dim, parts


def _move(
    leaf: LeafSpec,
    source: NamedSharding,
    target: NamedSharding,
    digits: Digits,
    other: Digits | None,
    options: Options,
) -> Move:
    before = digits.split(plain_spec(leaf, source), len(leaf.shape))
    route, windows, shape = _route(leaf, before, target, digits, other), None, leaf.padded_shape
    if route is None:
        split = [dim for dim, names in enumerate(before) if names]
        dim = leaf.layout.dim if leaf.layout else next(iter(split), 0)
        route, windows, shape = _by_windows(leaf, dim, before, target, digits, options)
    dtype = sent_dtype(leaf, options.dtype)
    sends = any(step.kind != "slice" for step in route.steps)
    return Move(
        leaf,
        source.shard_shape(leaf.stored_shape),
        shape,
        route,
        target.shard_shape(leaf.shape),
        dtype,
        _codec(leaf, dtype, options) if sends else None,
        windows,
    )


def _by_windows(
    leaf: LeafSpec,
    dim: int,
    before: tuple[tuple[str, ...], ...],
    target: NamedSharding,
    digits: Digits,
    options: Options,
) -> tuple[Route, Windows, tuple[int, ...]]:
    """Plan the gathers of windows along `dim` of a leaf; see [Note: windows] in `move`.

    Args:
        leaf: the layout of the stored array.
        dim: the dim of rows.
        before: for each dim, the digits that split it before the move.
        target: the sharding of the result.
        digits: the devices.
        options: how the array is sent.

    Returns:
        The gather of a window, how the windows are cut, and the shape of a gathered window.
    """
    num = math.prod(digits.mesh.shape[name] for name in before[dim])
    rows = height = leaf.padded_shape[dim] // num
    others = leaf.padded_shape[:dim] + leaf.padded_shape[dim + 1 :]
    if any(before):
        of_window = math.prod(others) * sent_dtype(leaf, options.dtype).itemsize * num
        most = max(1, options.window_bytes // max(1, of_window))
        height = math.ceil(rows / math.ceil(rows / min(most, rows)))
    indices = target.devices_indices_map(leaf.shape)
    boxes = [known(indices[device]) for device in digits.mesh.devices.flat]
    starts = tuple(tuple(int(s.start or 0) for s in box) for box in boxes)
    split = (before[dim], *before[:dim], *before[dim + 1 :])
    sizes = dict(digits.mesh.shape)
    gather = route(split, ((),) * len(split), sizes, digits.is_between_nodes)
    assert gather is not None
    return gather, Windows(dim, rows, height, starts), (num * height, *others)


def known(index: tuple[slice, ...] | None) -> tuple[slice, ...]:
    """Return `index`, the slices of a device's part, which JAX types as optional."""
    assert index is not None
    return index


def _route(
    leaf: LeafSpec,
    before: tuple[tuple[str, ...], ...],
    target: NamedSharding,
    digits: Digits,
    other: Digits | None,
) -> Route | None:
    """Return the collectives of a move; None if the old and the new split do not fit each other.

    Args:
        leaf: the layout of the stored array.
        before: for each dim, the digits that split it before the move.
        target: the sharding of the result.
        digits: the devices.
        other: the digits of the target's mesh on `digits.mesh`; None: it has no such digits.
    """
    if all(size == 1 for size in _parts(target, leaf)):
        after = ((),) * len(leaf.shape)
    elif other is None:
        return None
    else:
        after = other.split(target.spec, len(leaf.shape))
    if any(after[padded.dim] for padded in leaf.padded_dims):
        return None
    sizes = dict(digits.mesh.shape)
    return route(before, after, sizes, digits.is_between_nodes)


def _parts(target: NamedSharding, leaf: LeafSpec) -> list[int]:
    """Return the number of parts into which a sharding splits each dim of a leaf."""
    shape = target.shard_shape(leaf.shape)
    return [full // part if part else 1 for full, part in zip(leaf.shape, shape, strict=True)]


def _codec(leaf: LeafSpec, dtype: Any, options: Options) -> Codec | None:
    codec = options.codec
    if codec is None or not jnp.issubdtype(dtype, jnp.floating):
        return None
    is_used = codec.is_used_for(leaf.layer_size, dtype, options.min_quantized_size)
    return codec if is_used and codec.bits < 8 * jnp.dtype(dtype).itemsize else None


def _windows(
    moves: Sequence[Move | None], mesh: Mesh, window_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Group the indices of consecutive moves into windows that hold at most `window_bytes`.

    A window has at least one move.
    """
    windows: list[list[int]] = []
    held = 0
    for i, move in enumerate(moves):
        if move is None:
            continue
        size = math.prod(move.target_block) * move.dtype.itemsize + held_bytes(move, mesh)
        if not windows or held + size > window_bytes:
            windows.append([])
            held = 0
        windows[-1].append(i)
        held += size
    return tuple(map(tuple, windows))


def held_bytes(move: Move, mesh: Mesh) -> int:
    """Bound the bytes that a move's program holds at once, besides its argument and result."""
    itemsize, leaf = np.dtype(move.dtype).itemsize, move.leaf
    result = math.prod(move.target_block) * itemsize
    decoded = 0  # the shard in the type that is sent, where it is not sent as it is stored
    if leaf.codec is not None or move.codec is not None or move.dtype != leaf.dtype:
        parts = leaf.layout.num_shards if leaf.layout else 1
        decoded = math.prod(leaf.padded_shape) // parts * itemsize
    # Tests hold these sums against the memory that the compiler reports.
    if move.windows is not None:
        return 2 * result + 3 * math.prod(move.shape) * itemsize + decoded
    if not move.route.steps:
        return decoded
    held = move.message.size * move.message.dtype.itemsize
    held *= math.prod(move.grid(move.route.source))
    most = held + result
    for step in move.route.steps:
        before, held = held, step.held_after(held, mesh)
        most = max(most, before + held)
    return most + decoded
