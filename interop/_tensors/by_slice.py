"""Lazy tensors whose values are computed from others, slice by slice along one dimension."""

import dataclasses
from collections.abc import Callable

import numpy as np

from .boxes import Box, replaced, whole_box
from .lazy import LazyTensor


@dataclasses.dataclass(frozen=True, repr=False)
class BySlice(LazyTensor):
    """A tensor whose slice along `dim` is a function of the same slices of other tensors.

    Attributes:
        sources: the other tensors. Of each, the whole slice is read, also for a part of the result;
            those that have size 1 along all dimensions, or none, are read whole.
        shape: shape of the result.
        dim: the dimension; None if every element may depend on all others.
        function: makes a slice of the result from those of `sources`.
    """

    sources: tuple[LazyTensor, ...]
    shape: tuple[int, ...]
    dim: int | None
    function: Callable[..., np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        """That of the last source."""
        return self.sources[-1].dtype

    @property
    def label(self) -> str:
        """That of the last source."""
        return self.sources[-1].label

    @property
    def collective(self) -> bool:
        """True if reading any of the sources is a collective."""
        return any(each.collective for each in self.sources)

    def own(self) -> LazyTensor:
        """The same function of what this process holds."""
        return dataclasses.replace(self, sources=tuple(each.own() for each in self.sources))

    def own_boxes(self) -> list[Box]:
        """The slices of the only source that this process holds whole.

        Raises:
            NotImplementedError: it holds a part of a slice, or there are several sources.
        """
        (source, *others) = self.sources
        boxes = source.own_boxes()
        whole = whole_box(source.shape)
        held = [(0, 0) if self.dim is None else box[self.dim] for box in boxes]
        parts = [
            box for box, part in zip(boxes, held, strict=True) if box != self._slice(whole, part)
        ]
        if others or parts:
            raise NotImplementedError(
                f"{self.label} is split over processes along a dimension over which its values are "
                "computed. Pass it whole: `zero.unshard(tree)`."
            )
        return [self._slice(whole_box(self.shape), part) for part in held]

    def _slice(self, box: Box, part: tuple[int, int]) -> Box:
        return box if self.dim is None or not box else replaced(box, self.dim, part)

    def _read_box(self, box: Box) -> np.ndarray:
        part = (0, 0) if self.dim is None else box[self.dim]
        parts = [each._read_box(self._slice(whole_box(each.shape), part)) for each in self.sources]
        inside = [slice(*bounds) for bounds in box]
        if self.dim is not None:
            inside[self.dim] = slice(None)
        return self.function(*parts)[tuple(inside)]
