"""Lazy tensors: arrays in a file or on devices whose slices are read on demand.

Of a checkpoint of n bytes each of N devices needs n/N bytes, so nothing is loaded up front. A
`LazyTensor` has a shape and a dtype and reads a box (one slice per dimension) when indexed. The
conversions between a checkpoint and a model (transpose, split, merge, stack, cast) are *views* of
other lazy tensors: a view translates a requested box into boxes of the viewed tensors, so that

    (x.transpose()[box]) == x.read().transpose()[box],  reading no more of x than the box needs

and the same holds for every operation below. Views can be nested, hold no data, and read nothing
when they are created.

To add a kind of source, write a subclass with the attributes `shape`, `dtype` and `label` and a
method `_read_box`.
"""

import abc
import dataclasses
import itertools
import math
import mmap
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from jaxzero._raw import raw

from .boxes import Box, box_shape, boxes_by_group, replaced, whole_box, with_places
from .cast import checked_cast


class LazyTensor(abc.ABC):
    """A tensor that is read slice by slice.

    Attributes:
        shape: shape of the full tensor.
        dtype: dtype of the arrays that are read.
        label: name and location for messages: `'h.0.weight' in 'model.safetensors'`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str

    @abc.abstractmethod
    def _read_box(self, box: Box) -> np.ndarray:
        """Read one box into an array of `dtype` with the shape of the box, in any memory order.

        The array may share memory with its source, such as the map of a file (`borrow`).
        """

    def __repr__(self) -> str:
        return f"<LazyTensor {self.dtype}{list(self.shape)} of {self.label}>"

    @property
    def collective(self) -> bool:
        """True if reading is a collective: all processes must read equal boxes in equal order."""
        return False

    @property
    def is_in_file(self) -> bool:
        """True if `borrow` of the whole tensor maps a file, and so copies nothing.

        If so, any thread may call `borrow`.
        """
        return False

    def own(self) -> "LazyTensor":
        """Return a view from which only `own_boxes` may be read; reading it is not collective."""
        return self

    def own_boxes(self) -> list[Box]:
        """Return the boxes of elements that this process holds: `(start, stop)` per dimension.

        The boxes of all processes together make up the tensor. A tensor that is not sharded is one
        box, held by every process that has the array.
        """
        return [whole_box(self.shape)] if self.size else []

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
        """Size in bytes of the full tensor as an array."""
        return self.size * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Read the full tensor."""
        return self[(slice(None),) * self.ndim]

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor, given one slice per dimension, each with step 1.

        The array shares no memory with a file.

        Raises:
            ValueError: there are too many or too few slices, or a step other than 1.
        """
        array = self.borrow(slices)
        return _copied(array) if _is_mapped(array) else array

    def borrow(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor as indexing does, but without a copy if the file can be mapped.

        The values of the array change if the file is overwritten in place, so copy it at once.
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
        shape = box_shape(box)
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
        shape = tuple(self.shape[dim] for dim in dims)
        return _Transposed(shape, self.dtype, self.label, (self,), dims)

    def astype(self, dtype: np.typing.DTypeLike) -> "LazyTensor":
        """View the tensor with another dtype; slices are cast after they are read.

        Values are rounded. Reading a slice raises `ValueError` if a finite number in it would
        become infinite, or if the dtype lacks an integer in it.
        """
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else _Cast(self.shape, dtype, self.label, (self,))

    def narrow(self, dim: int, start: int, stop: int) -> "LazyTensor":
        """View the indices from `start` to `stop` of dimension `dim`."""
        if not 0 <= start <= stop <= self.shape[dim]:
            raise ValueError(
                f"`start` and `stop` must lie in dimension {dim} of {self.shape}, the shape of "
                f"{self.label}; got {start} and {stop}."
            )
        if (start, stop) == (0, self.shape[dim]):
            return self
        shape = replaced(self.shape, dim, stop - start)
        return _Narrowed(shape, self.dtype, self.label, (self,), dim, start)

    def reshape(self, shape: tuple[int, ...]) -> "LazyTensor":
        """View the elements, in row-major order, in another shape."""
        if math.prod(shape) != self.size:
            raise ValueError(
                f"`shape` must hold the {self.size} elements of {self.label}, whose shape is "
                f"{self.shape}; got {shape}."
            )
        return self if shape == self.shape else _Reshaped(shape, self.dtype, self.label, (self,))


def concatenate(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Concatenate tensors along a dimension; their dtypes and other dimensions must be equal."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for other in tensors[1:]:
        same = other.ndim == first.ndim and replaced(other.shape, dim, 0) == replaced(
            first.shape, dim, 0
        )
        if not same or other.dtype != first.dtype:
            raise ValueError(
                f"Tensors concatenated along dimension {dim} must agree in dtype and other dims: "
                f"{first.label} is {first.dtype}{list(first.shape)}, {other.label} is "
                f"{other.dtype}{list(other.shape)}."
            )
    shape = replaced(first.shape, dim, sum(each.shape[dim] for each in tensors))
    label = f"{first.label} to {tensors[-1].label}"
    return _Concatenated(shape, first.dtype, label, tuple(tensors), dim)


def stack(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Stack tensors of equal shape and dtype along a new first dimension."""
    return concatenate([each.reshape((1, *each.shape)) for each in tensors], 0)


@dataclasses.dataclass(frozen=True, repr=False)
class View(LazyTensor):
    """A lazy tensor whose elements are those of the tensors in `viewed`, or computed from them."""

    shape: tuple[int, ...]
    dtype: np.dtype
    label: str
    viewed: tuple[LazyTensor, ...]

    @property
    def collective(self) -> bool:
        """True if reading any of the viewed tensors is a collective."""
        return any(each.collective for each in self.viewed)

    def own(self) -> LazyTensor:
        """Return this view with each viewed tensor replaced by its `own`."""
        return dataclasses.replace(self, viewed=tuple(each.own() for each in self.viewed))


@dataclasses.dataclass(frozen=True, repr=False)
class _ViewOfOne(View):
    copies_nothing: ClassVar[bool] = False  # True if a read box shares the memory of the source

    @property
    def source(self) -> LazyTensor:
        """The viewed tensor."""
        return self.viewed[0]

    @property
    def is_in_file(self) -> bool:
        """True if the viewed tensor is in a file and this view copies nothing."""
        return self.copies_nothing and self.source.is_in_file

    def own_boxes(self) -> list[Box]:
        """Return the boxes of this view whose elements this process holds in the viewed tensor."""
        return [mine for box in self.source.own_boxes() for mine in self._boxes_of(box)]

    def _boxes_of(self, box: Box) -> list[Box]:
        """Return the boxes of this view that show the elements of a box of the viewed tensor."""
        return [box]


@dataclasses.dataclass(frozen=True, repr=False)
class _Cast(_ViewOfOne):
    def _read_box(self, box: Box) -> np.ndarray:
        return checked_cast(self.source._read_box(box), self.dtype, self.label)


@dataclasses.dataclass(frozen=True, repr=False)
class _Transposed(_ViewOfOne):
    dims: tuple[int, ...]
    copies_nothing = True

    def _read_box(self, box: Box) -> np.ndarray:
        theirs = tuple(box[self.dims.index(dim)] for dim in range(self.ndim))
        return self.source._read_box(theirs).transpose(self.dims)

    def _boxes_of(self, box: Box) -> list[Box]:
        return [tuple(box[dim] for dim in self.dims)]


@dataclasses.dataclass(frozen=True, repr=False)
class _Narrowed(_ViewOfOne):
    dim: int
    start: int
    copies_nothing = True

    def _read_box(self, box: Box) -> np.ndarray:
        start, stop = box[self.dim]
        theirs = replaced(box, self.dim, (start + self.start, stop + self.start))
        return self.source._read_box(theirs)

    def _boxes_of(self, box: Box) -> list[Box]:
        start, stop = box[self.dim]
        start, stop = max(start - self.start, 0), min(stop - self.start, self.shape[self.dim])
        return [replaced(box, self.dim, (start, stop))] if start < stop else []


@dataclasses.dataclass(frozen=True, repr=False)
class _Concatenated(View):
    dim: int

    def own_boxes(self) -> list[Box]:
        """Return the boxes that this process holds of all tensors, shifted to their places here."""
        boxes, end = [], 0
        for part in self.viewed:
            for box in part.own_boxes():
                start, stop = box[self.dim]
                boxes.append(replaced(box, self.dim, (start + end, stop + end)))
            end += part.shape[self.dim]
        return boxes

    def _read_box(self, box: Box) -> np.ndarray:
        start, stop = box[self.dim]
        parts, end = [], 0
        for tensor in self.viewed:
            begin, end = end, end + tensor.shape[self.dim]
            inside = (max(start, begin) - begin, min(stop, end) - begin)
            if inside[0] < inside[1]:
                parts.append((tensor, replaced(box, self.dim, inside)))
        if len(parts) == 1:
            return parts[0][0]._read_box(parts[0][1])
        whole, filled = None, 0
        for tensor, part in parts:  # one at a time, so that memory never holds all parts twice
            size = part[self.dim][1] - part[self.dim][0]
            target = (slice(None),) * self.dim + (slice(filled, filled + size),)
            data = tensor._read_box(part)
            if whole is None:  # in the memory order of the parts, so that long runs are copied
                whole = np.empty_like(data, shape=box_shape(box))
            raw(whole)[target] = raw(data)
            filled += size
        assert whole is not None
        return whole


@dataclasses.dataclass(frozen=True, repr=False)
class _Reshaped(_ViewOfOne):
    """A view of a tensor in another shape.

    The dimensions of both shapes are divided into groups with equal products. A box of a group's
    new dimensions is a set of runs in the group's row-major order; each run is divided into boxes
    of the group's old dimensions. So `[heads * size, d] -> [heads, size, d]` and its inverse read
    only the elements of the box.
    """

    def _read_box(self, box: Box) -> np.ndarray:
        per_group = boxes_by_group(box, self.shape, self.source.shape)
        if all(len(parts) == 1 for parts in per_group):
            theirs = tuple(bound for (part,) in per_group for bound in part)
            return self.source._read_box(theirs).reshape(box_shape(box))
        return self._assembled(box, per_group)

    def _boxes_of(self, box: Box) -> list[Box]:
        per_group = boxes_by_group(box, self.source.shape, self.shape)
        return [tuple(itertools.chain(*parts)) for parts in itertools.product(*per_group)]

    def _assembled(self, box: Box, per_group: list[list[Box]]) -> np.ndarray:
        # The result has one flat dimension per group, filled by the group's parts in order.
        places = [with_places(parts) for parts in per_group]
        whole = np.empty([parts[-1][1].stop for parts in places], self.dtype)
        for parts in itertools.product(*places):
            theirs = tuple(bound for part, _ in parts for bound in part)
            target = tuple(place for _, place in parts)
            shape = [place.stop - place.start for place in target]
            raw(whole)[target] = raw(self.source._read_box(theirs)).reshape(shape)
        return whole.reshape(box_shape(box))


def _is_mapped(array: np.ndarray) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def _copied(array: np.ndarray) -> np.ndarray:
    return raw(array).copy(order="K").view(array.dtype)
