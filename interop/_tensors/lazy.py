"""Tensors that stay where they are until somebody asks for a slice of them.

A checkpoint of n bytes on N devices needs n/N bytes on each, so nothing is loaded up front. A
`LazyTensor` knows shape and dtype and reads a box (one slice per dimension) when indexed. What lies
between a checkpoint and a model (transposed, split, fused, stacked, cast tensors) is a *view* of
other lazy tensors: it turns the box that it is asked for into boxes of what it views, so that

    (x.transpose()[box]) == x.read().transpose()[box],  reading no more of x than the box needs

and the same for every operation below. Views nest, hold no bytes, and read nothing when made.

A new kind of source is a subclass with the attributes `shape`, `dtype` and `label`, and a method
`_read_box`; all else is here.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension; never empty, never outside


class LazyTensor(abc.ABC):
    """A tensor that is read slice by slice.

    Attributes:
        shape: of the whole tensor.
        dtype: of what is read.
        label: what it is and where, for messages: `'h.0.weight' in 'model.safetensors'`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str

    @abc.abstractmethod
    def _read_box(self, box: Box) -> np.ndarray:
        """Read one box into an array of its shape and of `dtype`, in whatever memory order."""

    @property
    def collective(self) -> bool:
        """Whether all processes must read it together, in the same order as other such tensors."""
        return False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes when read."""
        return self.size * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Read the whole tensor."""
        return self[(slice(None),) * self.ndim]

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Read one slice per dimension, each with step 1.

        Raises:
            ValueError: there are too many or too few slices, or a step other than 1.
        """
        slices = slices if isinstance(slices, tuple) else (slices,)
        plain = all(isinstance(each, slice) and each.step in (None, 1) for each in slices)
        if len(slices) != self.ndim or not plain:
            raise ValueError(
                f"`slices` of tensor {self.label} must be {self.ndim} slices with step 1, one per "
                f"dimension of {self.shape}; got {slices!r}. Use `read()` and index the array."
            )
        bounds = (each.indices(dim) for each, dim in zip(slices, self.shape, strict=True))
        box = tuple((start, max(start, stop)) for start, stop, _ in bounds)
        shape = _box_shape(box)
        return np.empty(shape, self.dtype) if 0 in shape else self._read_box(box)

    def transpose(self, *dims: int) -> "LazyTensor":
        """Permute the dimensions as `numpy.transpose`; without `dims`, reverse them."""
        dims = dims or tuple(range(self.ndim))[::-1]
        if sorted(dims) != list(range(self.ndim)):
            raise ValueError(
                f"`dims` must name each dimension of {self.shape} once, the shape of {self.label}; "
                f"got {dims}."
            )
        if dims == tuple(range(self.ndim)):
            return self
        return _Transposed(
            tuple(self.shape[dim] for dim in dims), self.dtype, self.label, self, dims
        )

    def astype(self, dtype: np.typing.DTypeLike) -> "LazyTensor":
        """The same tensor as another dtype: what was read is cast."""
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else _Cast(self.shape, dtype, self.label, self)

    def narrow(self, dim: int, start: int, stop: int) -> "LazyTensor":
        """The part from `start` to `stop` of one dimension."""
        if not 0 <= start <= stop <= self.shape[dim]:
            raise ValueError(
                f"`start` and `stop` must lie in dimension {dim} of {self.shape}, the shape of "
                f"{self.label}; got {start} and {stop}."
            )
        if (start, stop) == (0, self.shape[dim]):
            return self
        shape = _replaced(self.shape, dim, stop - start)
        return _Narrowed(shape, self.dtype, self.label, self, dim, start)

    def reshape(self, shape: tuple[int, ...]) -> "LazyTensor":
        """The same elements, in the same order, in another shape."""
        if math.prod(shape) != self.size:
            raise ValueError(
                f"`shape` must hold the {self.size} elements of {self.label}, whose shape is "
                f"{self.shape}; got {shape}."
            )
        return self if shape == self.shape else _Reshaped(shape, self.dtype, self.label, self)


def concatenate(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Lay tensors of one dtype after each other along a dimension.

    Raises:
        ValueError: dtypes or the other dimensions differ.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for other in tensors[1:]:
        same = other.ndim == first.ndim and _replaced(other.shape, dim, 0) == _replaced(
            first.shape, dim, 0
        )
        if not same or other.dtype != first.dtype:
            raise ValueError(
                f"Tensors that are joined along dimension {dim} must agree in all else: "
                f"{first.label} is {first.dtype}{list(first.shape)}, {other.label} is "
                f"{other.dtype}{list(other.shape)}."
            )
    shape = _replaced(first.shape, dim, sum(each.shape[dim] for each in tensors))
    label = f"{first.label} to {tensors[-1].label}"
    return _Concatenated(shape, first.dtype, label, tuple(tensors), dim)


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Lay equal tensors after each other along a new first dimension."""
    return concatenate([each.reshape((1, *each.shape)) for each in tensors], 0)


@dataclasses.dataclass(frozen=True)
class ArrayTensor(LazyTensor):
    """An array in memory, as a lazy tensor."""

    array: np.ndarray
    label: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the array."""
        return self.array.dtype

    def _read_box(self, box: Box) -> np.ndarray:
        return np.asarray(self.array[tuple(slice(start, stop) for start, stop in box)])


@dataclasses.dataclass(frozen=True)
class _View(LazyTensor):
    shape: tuple[int, ...]
    dtype: np.dtype
    label: str
    viewed: LazyTensor

    @property
    def collective(self) -> bool:
        """As what is viewed."""
        return self.viewed.collective


@dataclasses.dataclass(frozen=True)
class _Cast(_View):
    def _read_box(self, box: Box) -> np.ndarray:
        return self.viewed._read_box(box).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _Transposed(_View):
    dims: tuple[int, ...]

    def _read_box(self, box: Box) -> np.ndarray:
        theirs = tuple(box[self.dims.index(dim)] for dim in range(self.ndim))
        return self.viewed._read_box(theirs).transpose(self.dims)


@dataclasses.dataclass(frozen=True)
class _Narrowed(_View):
    dim: int
    start: int

    def _read_box(self, box: Box) -> np.ndarray:
        start, stop = box[self.dim]
        return self.viewed._read_box(
            _replaced(box, self.dim, (start + self.start, stop + self.start))
        )


@dataclasses.dataclass(frozen=True)
class _Concatenated(LazyTensor):
    shape: tuple[int, ...]
    dtype: np.dtype
    label: str
    viewed: tuple[LazyTensor, ...]
    dim: int

    @property
    def collective(self) -> bool:
        """As any of what is viewed."""
        return any(each.collective for each in self.viewed)

    def _read_box(self, box: Box) -> np.ndarray:
        start, stop = box[self.dim]
        parts, end = [], 0
        for each in self.viewed:
            begin, end = end, end + each.shape[self.dim]
            inside = (max(start, begin) - begin, min(stop, end) - begin)
            if inside[0] < inside[1]:
                parts.append((each, _replaced(box, self.dim, inside)))
        if len(parts) == 1:
            return parts[0][0]._read_box(parts[0][1])
        whole, filled = np.empty(_box_shape(box), self.dtype), 0
        for each, part in parts:  # into place one by one: never all parts and the whole at once
            size = part[self.dim][1] - part[self.dim][0]
            target = (slice(None),) * self.dim + (slice(filled, filled + size),)
            whole[target] = each._read_box(part)
            filled += size
        return whole


@dataclasses.dataclass(frozen=True)
class _Reshaped(_View):
    """Dimensions fall into groups that hold the same elements before and after.

    A box of a group's new dimensions is a set of runs in the group's row-major order; each run is
    cut into boxes of its old dimensions. With the groups that keep their one dimension as they are,
    this covers `[heads * size, d] -> [heads, size, d]` and its inverse without reading around.
    """

    def _read_box(self, box: Box) -> np.ndarray:
        groups = _groups(self.viewed.shape, self.shape)
        per_group = []
        for old, new in groups:
            sizes = [self.viewed.shape[dim] for dim in old]
            inside = [box[dim] for dim in new]
            runs = _runs([self.shape[dim] for dim in new], inside)
            per_group.append([part for run in runs for part in _boxes_of_run(sizes, run)])
        if all(len(parts) == 1 for parts in per_group):
            theirs = tuple(bound for (part,) in per_group for bound in part)
            return self.viewed._read_box(theirs).reshape(_box_shape(box))
        return self._assembled(box, groups, per_group)

    def _assembled(
        self, box: Box, groups: list[tuple[list[int], list[int]]], per_group: list[list[Box]]
    ) -> np.ndarray:
        # One flat dimension per group; the parts of a group follow each other in it.
        flat = [math.prod(box[dim][1] - box[dim][0] for dim in new) for _, new in groups]
        whole = np.empty(flat, self.dtype)
        places = [_with_places(parts) for parts in per_group]
        for parts in itertools.product(*places):
            theirs = tuple(bound for part, _ in parts for bound in part)
            target = tuple(place for _, place in parts)
            shape = [place.stop - place.start for place in target]
            whole[target] = self.viewed._read_box(theirs).reshape(shape)
        return whole.reshape(_box_shape(box))


def _with_places(parts: list[Box]) -> list[tuple[Box, slice]]:
    ends = list(itertools.accumulate(math.prod(_box_shape(part)) for part in parts))
    starts = [0, *ends[:-1]]
    return [(part, slice(start, end)) for part, start, end in zip(parts, starts, ends, strict=True)]


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The finest division of both shapes into groups of neighbours with equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        group: tuple[list[int], list[int]] = ([], [])
        left = right = 1
        while True:
            if left <= right and i < len(old) and (left < right or not group[0]):
                group[0].append(i)
                left, i = left * old[i], i + 1
            elif j < len(new) and (right < left or not group[1]):
                group[1].append(j)
                right, j = right * new[j], j + 1
            else:
                break
        groups.append(group)
    return groups


def _runs(sizes: list[int], box: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The box's elements as (start, stop) in row-major order of `sizes`, neighbours joined."""
    whole = len(sizes)  # from here on, all of every dimension is asked for
    while whole and box[whole - 1] == (0, sizes[whole - 1]):
        whole -= 1
    inner = math.prod(sizes[whole:])
    if not whole:
        yield (0, inner)
        return
    *outer, (start, stop) = box[:whole]
    for index in itertools.product(*(range(*bounds) for bounds in outer)):
        offset = 0
        for number, size in zip(index, sizes[: whole - 1], strict=True):
            offset = offset * size + number
        offset = offset * sizes[whole - 1]
        yield ((offset + start) * inner, (offset + stop) * inner)


def _boxes_of_run(sizes: list[int], run: tuple[int, int]) -> Iterator[Box]:
    """Boxes of `sizes` that hold a run of its row-major order, in that order."""
    start, stop = run
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner  # rows that are whole
    if first > last:  # inside one row
        row = start // inner
        for part in _boxes_of_run(sizes[1:], (start - row * inner, stop - row * inner)):
            yield ((row, row + 1), *part)
        return
    if start < first * inner:
        for part in _boxes_of_run(sizes[1:], (start - (first - 1) * inner, inner)):
            yield ((first - 1, first), *part)
    if first < last:
        yield ((first, last), *((0, size) for size in sizes[1:]))
    if last * inner < stop:
        for part in _boxes_of_run(sizes[1:], (0, stop - last * inner)):
            yield ((last, last + 1), *part)


def _box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _replaced(entries: tuple, position: int, entry: object) -> tuple:
    return (*entries[:position], entry, *entries[position + 1 :])
