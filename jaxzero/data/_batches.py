"""Global batches, of which each process reads the rows of its own devices.

The dataset is in global order and equal on every process, so batch b of B rows consists of elements
b * B to (b + 1) * B - 1 on any number of hosts. The position is a number of batches: a run that
stops on two hosts can continue on one, and no example is lost or read twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int

from .._mesh import AXES
from .._sharding import path_name
from .._zero import Zero

_UNLIKE = {  # entry of a state -> remedy if it differs from that of the dataset
    "batch_size": "Give the `batch_size` that the run began with",
    "epoch_length": "Give the dataset that the run began with",
    "seeds": "Give the dataset the seeds that the run began with",
}


class Batches(Iterator[Any]):
    """Iterator over global batches of a Grain dataset, and context manager that closes it.

    Every process makes one from the same dataset, and iterates in step with the others. It
    prefetches only the rows of its own devices, in Grain's threads; rows that several processes
    need are read by each of them.

    Args:
        dataset: a `grain.MapDataset` in global order, not split by process and not batched.
            Shuffle and repeat it first; a batch may contain the end of one epoch and the start
            of the next, and an incomplete batch at the very end is not read. Elements are trees
            of numbers or numpy arrays with equal shapes in all elements.
        zero: gives the devices, and the sharding of a batch (`zero.batch_spec`).
        batch_size: rows per batch, over all devices and hosts.
        read_options: number of prefetch threads and elements; by default Grain's (16 and 500).
            For data in memory `grain.ReadOptions(0, 0)` is fastest.

    Yields:
        Trees of global `jax.Array`s: the shape of a leaf is `(batch_size, *element.shape)`.

    Raises:
        TypeError: `dataset` is not a `grain.MapDataset`.
        ValueError: `batch_size` is not a multiple of the number of devices, or the dataset is
            shorter than a batch; while iterating, if shapes of elements differ or a filter removed
            an element.
    """

    def __init__(
        self,
        dataset: Any,
        zero: Zero,
        *,
        batch_size: int,
        read_options: grain.ReadOptions | None = None,
    ):
        _check(dataset, zero, batch_size)
        self._dataset = dataset
        self._sharding = NamedSharding(zero.mesh, zero.batch_spec)
        self._rows = HostRows.of_sharding(self._sharding, batch_size)
        self._read_options = read_options
        self._num_batches = len(dataset) // batch_size
        self._position = 0
        self._elements: grain.DatasetIterator | None = None  # from the position on
        self._origin = {"batch_size": batch_size, **_described(dataset)}

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._position == self._num_batches:
            raise StopIteration
        return self._read(1, lambda rows: self._spread(rows[0]))

    def rounds(self, steps: int) -> Iterator[Any]:
        """Yield the next batches in stacks of `steps`, for `Zero.local_steps`.

        Each stack moves the position by `steps` batches, so single batches and stacks may be mixed.
        An incomplete stack at the very end is not read.

        Yields:
            Trees of global `jax.Array`s, `[steps, batch_size, ...]`: rows are split over all
            devices.

        Raises:
            ValueError: `steps` is less than 1.
        """
        if steps < 1:
            raise ValueError(f"`steps` must be at least 1; got {steps}.")
        while self._position + steps <= self._num_batches:
            yield self._read(steps, self._spread_steps)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the prefetch threads. Iterating again starts new ones at the current position."""
        if self._elements is not None:
            self._elements.close()
        self._elements = None

    def get_state(self) -> dict[str, Any]:
        """Return the position and a description of the dataset, which are equal on all processes.

        All values can be represented in JSON.
        """
        return {"batches": self._position, **self._origin}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`, which any number of processes may have saved.

        Raises:
            ValueError: `state` is not from `get_state`, or the batch size, the number of elements
                per epoch or the seeds differ.
        """
        if not isinstance(state.get("batches"), int):
            raise ValueError(f"`state` must be from `Batches.get_state`; got {state!r}.")
        for name, remedy in _UNLIKE.items():
            if state.get(name) != self._origin[name]:
                raise ValueError(
                    f"`state` was taken with {name} = {state.get(name)!r}, and these batches have "
                    f"{self._origin[name]!r}. {remedy}, or start from the first batch."
                )
        if not 0 <= state["batches"] <= self._num_batches:
            raise ValueError(
                f"`state` is that after {state['batches']} batches; the dataset has "
                f"{self._num_batches}. Repeat it at least as often as the one the run began with."
            )
        self.close()
        self._position = state["batches"]

    def _read(self, steps: int, spread: Callable[[np.ndarray], jax.Array]) -> Any:
        """Read this process's rows of the next `steps` batches, and move the position.

        Args:
            steps: number of batches.
            spread: makes a global array from this process's rows of a leaf, `[steps, rows, ...]`.

        Returns:
            A tree of global arrays.
        """
        if self._elements is None:
            self._elements = self._read_on()
        shape = (steps, len(self._rows))
        try:
            rows = _stacked(list(itertools.islice(self._elements, steps * len(self._rows))))
            arrays = jax.tree.map(lambda x: spread(x.reshape(*shape, *x.shape[1:])), rows)
        except BaseException:
            self.close()  # a part of a batch may have been read: the next call begins it again
            raise
        self._position += steps
        return arrays

    def _read_on(self) -> grain.DatasetIterator:
        """Return an iterator that prefetches this process's elements from the position on."""
        first, after = (n * len(self._rows) for n in (self._position, self._num_batches))
        turns = grain.MapDataset.range(first, after).map(self._element)
        return iter(turns.to_iter_dataset(self._read_options))

    def _element(self, turn: int) -> Any:
        number = self._rows.element(turn)
        element = self._dataset[number]
        if element is None:
            raise ValueError(
                f"The dataset has no element {number}: a filter removed it, which would shift the "
                "rows of other processes. Filter the source before it becomes a dataset."
            )
        return element

    def _spread(self, rows: np.ndarray) -> jax.Array:
        """Make a global array `[batch, ...]` from the rows of this process, `[rows, ...]`."""
        shape = (self._rows.batch_size, *rows.shape[1:])

        def held(index: Any) -> np.ndarray:
            return rows[self._rows.place(index[0])]

        return jax.make_array_from_callback(shape, self._sharding, held)

    def _spread_steps(self, rows: np.ndarray) -> jax.Array:
        """Make a global array `[steps, batch, ...]` from this process's rows of each step."""
        shape = (rows.shape[0], self._rows.batch_size, *rows.shape[2:])

        def held(index: Any) -> np.ndarray:
            return rows[:, self._rows.place(index[1])]

        spec = PartitionSpec(None, *self._sharding.spec)
        sharding = NamedSharding(self._sharding.mesh, spec)
        return jax.make_array_from_callback(shape, sharding, held)


def _check(dataset: Any, zero: Zero, batch_size: int) -> None:
    if not isinstance(dataset, grain.MapDataset):
        raise TypeError(
            f"`dataset` must be a `grain.MapDataset`, which has random access; got "
            f"{type(dataset).__name__}. Make one with `grain.MapDataset.source(...)`."
        )
    num_devices = math.prod(zero.mesh.shape[axis] for axis in AXES)
    if not isinstance(batch_size, int) or batch_size < 1 or batch_size % num_devices:
        raise ValueError(
            f"`batch_size` must be a multiple of the number of devices, {num_devices}; got "
            f"{batch_size!r}."
        )
    if len(dataset) < batch_size:
        raise ValueError(
            f"`dataset` has {len(dataset)} elements, fewer than one batch of {batch_size}. Give a "
            "smaller `batch_size`, or repeat it: `dataset.repeat()`."
        )
    if jax.process_index() not in {device.process_index for device in zero.mesh.devices.flat}:
        raise ValueError(
            f"Process {jax.process_index()} has none of the devices of the mesh, so there are no "
            "rows for it to read. Make the mesh of devices of all processes."
        )


def _stacked(rows: Sequence[Any]) -> Any:
    """Stack elements, which are trees of equal structure, along a new leading dim of each leaf."""
    leaves, treedef = jax.tree.flatten(rows[0])
    columns = [[np.asarray(leaf)] for leaf in leaves]
    for row in rows[1:]:
        others, other = jax.tree.flatten(row)
        if other != treedef:
            raise ValueError(f"Elements differ: one is a tree {treedef}, another {other}.")
        for column, leaf in zip(columns, others, strict=True):
            column.append(np.asarray(leaf))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(rows[0])[0]]
    for path, column in zip(paths, columns, strict=True):
        _check_column(path_name(path), column)
    return jax.tree.unflatten(treedef, [np.stack(column) for column in columns])


def _check_column(path: str, column: Sequence[np.ndarray]) -> None:
    shapes = {x.shape for x in column}
    if len(shapes) > 1:
        raise ValueError(
            f"Elements differ in the shape of leaf `{path}`: {' and '.join(map(str, shapes))}. "
            "Pad or cut them to one length with `dataset.map`."
        )
    if column[0].dtype.kind in "OSUMm":
        raise ValueError(
            f"Leaf `{path}` of an element has dtype {column[0].dtype}, which JAX does not support. "
            "Drop it, or convert it to numbers, with `dataset.map`."
        )


def _described(dataset: grain.MapDataset) -> dict[str, Any]:
    """Describe the order of a dataset, to compare it on resuming: epoch length and seeds."""
    nodes, visited = [dataset], []
    while nodes:
        node = nodes.pop()
        visited.append(node)
        nodes += getattr(node, "parents", ())  # a user-defined dataset may have no parents
    # The epoch before `repeat` is described, so that a run may continue with more repeats. Grain
    # exports neither the class of `repeat` nor the seeds.
    repeats = (node for node in visited if type(node).__name__ == "RepeatMapDataset")
    repeated = next(repeats, None)
    epoch = dataset if repeated is None else repeated.parents[0]
    seeds = [getattr(node, "_seed", None) for node in visited]
    return {
        "epoch_length": len(epoch),
        "seeds": [int(seed) for seed in seeds if isinstance(seed, int | np.integer)],
    }


@dataclasses.dataclass(frozen=True)
class HostRows:
    """The rows that one process reads of every batch.

    Attributes:
        batch_size: rows of a global batch.
        numbers: indices of the rows, ascending and unique.
    """

    batch_size: int
    numbers: Int[np.ndarray, " rows"]

    @classmethod
    def of_sharding(cls, sharding: Sharding, batch_size: int) -> HostRows:
        """Return the rows of this process, for global batches whose dim 0 has this sharding."""
        held = sharding.addressable_devices_indices_map((batch_size,))
        return cls.of_pieces([index[0] for index in held.values() if index], batch_size)

    @classmethod
    def of_pieces(cls, pieces: Iterable[slice], batch_size: int) -> HostRows:
        """Return the rows of a process whose devices hold these slices, which may overlap."""
        ranges = [np.arange(batch_size)[piece] for piece in pieces]
        return cls(batch_size, np.unique(np.concatenate([np.arange(0), *ranges])))

    def __len__(self) -> int:
        return len(self.numbers)

    def element(self, turn: int) -> int:
        """Return the dataset's index of the element that this process reads as number `turn`.

        The number counts from 0, over the rows of all batches.
        """
        batch, place = divmod(turn, len(self.numbers))
        return batch * self.batch_size + int(self.numbers[place])

    def place(self, piece: slice) -> slice:
        """Convert a slice of a batch's rows to a slice of the rows that this process reads."""
        start, stop, _ = piece.indices(self.batch_size)
        first = int(np.searchsorted(self.numbers, start))
        return slice(first, first + stop - start)
