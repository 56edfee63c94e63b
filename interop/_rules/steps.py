"""Invertible steps that convert tensors of a checkpoint into parameters.

A step maps a tuple of lazy tensors to a tuple of lazy tensors. Rules list steps in the direction
of *reading*; writing runs their inverses in reverse order, so that both directions agree.
"""

import abc
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any, ClassVar

from jaxzero.interop._tensors import LazyTensor, concatenate

Tensors = tuple[LazyTensor, ...]


class Step(abc.ABC):
    """One invertible step from a checkpoint towards parameters."""

    computes: ClassVar[bool] = False  # whether it changes values; others only move elements

    @abc.abstractmethod
    def __call__(self, tensors: Tensors) -> Tensors:
        """Return views of `tensors`, without reading them.

        Raises:
            ValueError: the step does not support their number or their shapes.
        """

    @property
    @abc.abstractmethod
    def inverse(self) -> "Step":
        """The step that undoes this one."""


@dataclasses.dataclass(frozen=True)
class Transpose(Step):
    """Permute the dimensions of each tensor, as `numpy.transpose`; without `dims`, reverse them.

    `Transpose()` converts a weight of `torch.nn.Linear` to a kernel `[in, out]`, and
    `Transpose(2, 3, 1, 0)` a weight of `torch.nn.Conv2d` (OIHW) to a kernel HWIO. Negative numbers
    count from the end.
    """

    dims: tuple[int, ...]

    def __init__(self, *dims: int):
        count = len(dims)
        numbers = [_integer(dim) for dim in dims]
        places = tuple(i + count * (i < 0) for i in numbers if i is not None)
        if sorted(places) != list(range(count)):
            raise ValueError(
                f"`dims` must name each dimension once, as in `Transpose(2, 0, 1)`; got {dims}."
            )
        object.__setattr__(self, "dims", places)

    def __call__(self, tensors: Tensors) -> Tensors:
        return tuple(each.transpose(*self.dims) for each in tensors)

    @property
    def inverse(self) -> "Transpose":
        """The inverse permutation."""
        return Transpose(*sorted(range(len(self.dims)), key=self.dims.__getitem__))

    def __repr__(self) -> str:
        return f"Transpose{self.dims}" if len(self.dims) != 1 else f"Transpose({self.dims[0]})"


class _Sized(Step):
    """Base class of steps with `sizes` along a dimension `dim`; checks and normalizes both."""

    may_count: ClassVar[bool] = False  # whether `sizes` may be the number of equal parts
    dim: int
    sizes: tuple[int, ...] | int

    def __post_init__(self):
        dim, number, given = _integer(self.dim), _integer(self.sizes), self.sizes
        if dim is None or dim < 0:
            raise ValueError(
                "`dim` must be an integer from 0 on: in the other direction, the tensor has another"
                f" number of dimensions to count from its end. Got {self}."
            )
        sizes = tuple(_integer(x) for x in given) if isinstance(given, Iterable) else ()
        if number is None:
            fits = all(x is not None and x >= 0 for x in sizes) and isinstance(given, Iterable)
            fits = fits and bool(sizes or not self.may_count)
        else:
            fits = self.may_count and number >= 1
        if not fits:
            count = ", or the number of equal parts" if self.may_count else ""
            raise ValueError(f"`sizes` must be a tuple of integers from 0 on{count}; got {self}.")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "sizes", sizes if number is None else number)


class _Parts(_Sized):
    """Base class of steps that split a tensor along a dimension, or concatenate tensors along it.

    The dimension consists of `num_heads` equal blocks, and a step splits or concatenates block by
    block.
    """

    may_count = True
    num_heads: int = 1
    undone_by: ClassVar[type["_Parts"]]

    @property
    def inverse(self) -> "_Parts":
        """The step that concatenates what this one splits, or splits what it concatenates."""
        return self.undone_by(**vars(self))


class _Dividing(_Parts):
    """Base class of steps that split one tensor into several."""

    def __call__(self, tensors: Tensors) -> Tensors:
        num_heads = self.num_heads
        (whole,) = _count(self, tensors, 1)
        _check_dim(self, whole, self.dim)
        total, sizes = whole.shape[self.dim], self.sizes
        if isinstance(sizes, int):
            sizes = (total // (num_heads * sizes),) * sizes
        if num_heads * sum(sizes) != total:
            raise ValueError(
                f"{self} does not fit {whole.label}, which has {total} along dimension "
                f"{self.dim} of its shape {whole.shape}."
            )
        blocks = _in_heads(whole, self.dim, num_heads)
        inner = blocks.ndim - whole.ndim + self.dim  # one later if heads have their own dimension
        ends = list(itertools.accumulate(sizes))
        parts = [
            blocks.narrow(inner, end - size, end) for size, end in zip(sizes, ends, strict=True)
        ]
        return tuple(_without_heads(part, self.dim, num_heads) for part in parts)


class _Joining(_Parts):
    """Base class of steps that concatenate several tensors; each undoes a step of `_Dividing`."""

    def __call__(self, tensors: Tensors) -> Tensors:
        num_heads, wanted = self.num_heads, self.sizes
        _count(self, tensors, wanted if isinstance(wanted, int) else len(wanted))
        for tensor in tensors:
            _check_dim(self, tensor, self.dim)
        given = tuple(tensor.shape[self.dim] for tensor in tensors)
        sizes = tuple(total // num_heads for total in given)
        whole = all(total % num_heads == 0 for total in given)
        if not whole or (len(set(sizes)) != 1 if isinstance(wanted, int) else sizes != wanted):
            raise ValueError(
                f"{self} does not fit {tensors[0].label} and the other tensors of the rule, which "
                f"have {given} along dimension {self.dim}."
            )
        blocks = tuple(_in_heads(tensor, self.dim, num_heads) for tensor in tensors)
        fused = concatenate(blocks, blocks[0].ndim - tensors[0].ndim + self.dim)
        return (_without_heads(fused, self.dim, num_heads),)


class _HeadParts(_Parts):
    """Base class of steps that split or concatenate head by head; checks `num_heads`."""

    def __post_init__(self):
        super().__post_init__()
        sizes = self.sizes if isinstance(self.sizes, tuple) else (self.sizes,)
        num_heads = _integer(self.num_heads)
        if num_heads is None or not all(x >= 1 for x in (num_heads, *sizes)):
            raise ValueError(f"`num_heads` and `sizes` must be positive integers; got {self}.")
        object.__setattr__(self, "num_heads", num_heads)


@dataclasses.dataclass(frozen=True)
class Split(_Dividing):
    """Split one tensor of the checkpoint along `dim` into several parameters.

    Attributes:
        dim: dimension of the tensor.
        sizes: size of each part along `dim`; or the number of equal parts.
    """

    dim: int
    sizes: tuple[int, ...] | int


@dataclasses.dataclass(frozen=True)
class Merge(_Joining):
    """Concatenate several tensors of the checkpoint along `dim` into one parameter.

    Attributes:
        dim: dimension of the tensors.
        sizes: size of each tensor along `dim`; or the number of tensors, if sizes are equal.
    """

    dim: int
    sizes: tuple[int, ...] | int


@dataclasses.dataclass(frozen=True)
class SplitHeads(_HeadParts, _Dividing):
    """Split one tensor that is fused head by head into several parameters, as query, key and value.

    Along `dim` the tensor has `num_heads` blocks, one for each head: the head's rows of the first
    part, then those of the second, and so on. Each parameter gets its rows of all heads. `Split`
    is for the other layout, in which the parts are whole: all heads of the query, then all of the
    key. Shapes are the same in both layouts, so the wrong step gives wrong numbers and no error.

    `SplitHeads(0, h)` is `Unflatten(0, (h, 3 * k)), Split(1, 3), Flatten(0, (h, k))` for heads of
    size `k`.

    Attributes:
        dim: dimension of the tensor.
        num_heads: number of blocks: attention heads, or groups of heads that share a key and a
            value.
        sizes: elements along `dim` of each part within a block; or the number of equal parts.
    """

    dim: int
    num_heads: int
    sizes: tuple[int, ...] | int = 3


@dataclasses.dataclass(frozen=True)
class MergeHeads(_HeadParts, _Joining):
    """Fuse several tensors of the checkpoint head by head into one parameter.

    Attributes:
        dim: dimension of the tensors.
        num_heads: number of blocks that each tensor has along `dim`.
        sizes: elements along `dim` of each tensor's block; or the number of tensors, if equal.
    """

    dim: int
    num_heads: int
    sizes: tuple[int, ...] | int = 3


Split.undone_by, Merge.undone_by = Merge, Split
SplitHeads.undone_by, MergeHeads.undone_by = MergeHeads, SplitHeads


@dataclasses.dataclass(frozen=True)
class Unflatten(_Sized):
    """Split one dimension of each tensor into several, as `torch.nn.Unflatten`.

    `Unflatten(1, (heads, size))` converts a projection `[d, heads * size]` to `[d, heads, size]`.
    """

    dim: int
    sizes: tuple[int, ...]

    def __call__(self, tensors: Tensors) -> Tensors:
        for tensor in tensors:
            _check_dim(self, tensor, self.dim)
            if tensor.shape[self.dim] != math.prod(self.sizes):
                raise ValueError(
                    f"{self} does not fit {tensor.label}, which has {tensor.shape[self.dim]} along "
                    f"dimension {self.dim} of its shape {tensor.shape}."
                )
        return tuple(
            each.reshape((*each.shape[: self.dim], *self.sizes, *each.shape[self.dim + 1 :]))
            for each in tensors
        )

    @property
    def inverse(self) -> "Flatten":
        """The step that joins the dimensions again."""
        return Flatten(self.dim, self.sizes)


@dataclasses.dataclass(frozen=True)
class Flatten(_Sized):
    """Join consecutive dimensions of each tensor, beginning at `dim`, into one."""

    dim: int
    sizes: tuple[int, ...]

    def __call__(self, tensors: Tensors) -> Tensors:
        end = self.dim + len(self.sizes)
        for tensor in tensors:
            if tensor.shape[self.dim : end] != self.sizes:
                raise ValueError(
                    f"{self} does not fit {tensor.label}, whose dimensions from {self.dim} on are "
                    f"{tensor.shape[self.dim :]}."
                )
        return tuple(
            each.reshape((*each.shape[: self.dim], math.prod(self.sizes), *each.shape[end:]))
            for each in tensors
        )

    @property
    def inverse(self) -> Unflatten:
        """The step that splits the dimension again."""
        return Unflatten(self.dim, self.sizes)


def run(steps: tuple[Step, ...], tensors: Tensors) -> Tensors:
    """Convert tensors of the checkpoint to parameters by steps, in their order."""
    for step in steps:
        tensors = step(tensors)
    return tensors


def run_back(steps: tuple[Step, ...], tensors: Tensors) -> Tensors:
    """Convert parameters to tensors of the checkpoint, by the steps' inverses in reverse order."""
    return run(tuple(step.inverse for step in reversed(steps)), tensors)


def _in_heads(tensor: LazyTensor, dim: int, num_heads: int) -> LazyTensor:
    """Reshape dimension `dim` to `[num_heads, size]`; return the tensor unchanged for one head."""
    if num_heads == 1:
        return tensor
    before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
    return tensor.reshape((*before, num_heads, tensor.shape[dim] // num_heads, *after))


def _without_heads(blocks: LazyTensor, dim: int, num_heads: int) -> LazyTensor:
    if num_heads == 1:
        return blocks
    before, after = blocks.shape[:dim], blocks.shape[dim + 2 :]
    return blocks.reshape((*before, num_heads * blocks.shape[dim + 1], *after))


def _count(step: Step, tensors: Tensors, wanted: int) -> Tensors:
    if len(tensors) != wanted:
        raise ValueError(
            f"{step} takes {wanted} of the checkpoint's tensors; got {len(tensors)}: "
            f"{', '.join(each.label for each in tensors)}. Name {wanted} in the rule."
        )
    return tensors


def _integer(x: Any) -> int | None:
    try:
        return operator.index(x)
    except TypeError:
        return None


def _check_dim(step: Step, tensor: LazyTensor, dim: int) -> None:
    if not 0 <= dim < tensor.ndim:
        raise ValueError(f"{step} does not fit {tensor.label}, whose shape is {tensor.shape}.")
