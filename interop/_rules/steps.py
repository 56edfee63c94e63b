"""Invertible steps that convert tensors of a checkpoint into parameters.

A step maps a tuple of lazy tensors to a tuple of lazy tensors. Rules list steps in the direction
of *reading*; writing runs their inverses in reverse order, so that both directions agree.
"""

import abc
import dataclasses
import math

from jaxzero.interop._tensors import LazyTensor, concatenate

Tensors = tuple[LazyTensor, ...]


class Step(abc.ABC):
    """One invertible step from a checkpoint towards parameters."""

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
    `Transpose(2, 3, 1, 0)` a weight of `torch.nn.Conv2d` (OIHW) to a kernel HWIO.
    """

    dims: tuple[int, ...]

    def __init__(self, *dims: int):
        object.__setattr__(self, "dims", dims)

    def __call__(self, tensors: Tensors) -> Tensors:
        return tuple(each.transpose(*self.dims) for each in tensors)

    @property
    def inverse(self) -> "Transpose":
        """The inverse permutation."""
        return Transpose(*sorted(range(len(self.dims)), key=self.dims.__getitem__))

    def __repr__(self) -> str:
        return f"Transpose{self.dims}" if len(self.dims) != 1 else f"Transpose({self.dims[0]})"


@dataclasses.dataclass(frozen=True)
class Split(Step):
    """Split one tensor of the checkpoint along `dim` into several parameters.

    Attributes:
        dim: dimension of the tensor.
        sizes: size of each part along `dim`; or the number of equal parts.
    """

    dim: int
    sizes: tuple[int, ...] | int

    def __call__(self, tensors: Tensors) -> Tensors:
        (whole,) = _count(self, tensors, 1)
        _check_dim(self, whole, self.dim)
        total, sizes = whole.shape[self.dim], self.sizes
        if isinstance(sizes, int):
            sizes = (total // sizes,) * sizes
        if sum(sizes) != total:
            raise ValueError(
                f"{self} does not fit {whole.label}, which has {total} along dimension {self.dim} "
                f"of its shape {whole.shape}."
            )
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return tuple(
            whole.narrow(self.dim, start, start + size)
            for start, size in zip(starts, sizes, strict=True)
        )

    @property
    def inverse(self) -> "Merge":
        """Concatenates the parts."""
        return Merge(self.dim, self.sizes)


@dataclasses.dataclass(frozen=True)
class Merge(Step):
    """Concatenate several tensors of the checkpoint along `dim` into one parameter.

    Attributes:
        dim: dimension of the tensors.
        sizes: size of each tensor along `dim`; or the number of tensors, if sizes are equal.
    """

    dim: int
    sizes: tuple[int, ...] | int

    def __call__(self, tensors: Tensors) -> Tensors:
        equal = isinstance(self.sizes, int)
        _count(self, tensors, self.sizes if isinstance(self.sizes, int) else len(self.sizes))
        for each in tensors:
            _check_dim(self, each, self.dim)
        given = tuple(each.shape[self.dim] for each in tensors)
        if len(set(given)) != 1 if equal else given != self.sizes:
            raise ValueError(
                f"{self} does not fit {tensors[0].label} and the other tensors of the rule, which "
                f"have {given} along dimension {self.dim}."
            )
        return (concatenate(tensors, self.dim),)

    @property
    def inverse(self) -> Split:
        """Splits the tensor again."""
        return Split(self.dim, self.sizes)


@dataclasses.dataclass(frozen=True)
class Unflatten(Step):
    """Split one dimension of each tensor into several, as `torch.nn.Unflatten`.

    `Unflatten(1, (heads, size))` converts a projection `[d, heads * size]` to `[d, heads, size]`.
    """

    dim: int
    sizes: tuple[int, ...]

    def __call__(self, tensors: Tensors) -> Tensors:
        for each in tensors:
            _check_dim(self, each, self.dim)
            if each.shape[self.dim] != math.prod(self.sizes):
                raise ValueError(
                    f"{self} does not fit {each.label}, which has {each.shape[self.dim]} along "
                    f"dimension {self.dim} of its shape {each.shape}."
                )
        return tuple(
            each.reshape((*each.shape[: self.dim], *self.sizes, *each.shape[self.dim + 1 :]))
            for each in tensors
        )

    @property
    def inverse(self) -> "Flatten":
        """Joins the dimensions again."""
        return Flatten(self.dim, self.sizes)


@dataclasses.dataclass(frozen=True)
class Flatten(Step):
    """Join consecutive dimensions of each tensor, beginning at `dim`, into one."""

    dim: int
    sizes: tuple[int, ...]

    def __call__(self, tensors: Tensors) -> Tensors:
        end = self.dim + len(self.sizes)
        for each in tensors:
            if each.shape[self.dim : end] != self.sizes:
                raise ValueError(
                    f"{self} does not fit {each.label}, whose dimensions from {self.dim} on are "
                    f"{each.shape[self.dim :]}."
                )
        return tuple(
            each.reshape((*each.shape[: self.dim], math.prod(self.sizes), *each.shape[end:]))
            for each in tensors
        )

    @property
    def inverse(self) -> Unflatten:
        """Splits the dimension again."""
        return Unflatten(self.dim, self.sizes)


def run(steps: tuple[Step, ...], tensors: Tensors) -> Tensors:
    """Convert tensors of the checkpoint to parameters."""
    for step in steps:
        tensors = step(tensors)
    return tensors


def run_back(steps: tuple[Step, ...], tensors: Tensors) -> Tensors:
    """Convert parameters to tensors of the checkpoint."""
    return run(tuple(step.inverse for step in reversed(steps)), tensors)


def _count(step: Step, tensors: Tensors, wanted: int) -> Tensors:
    if len(tensors) != wanted:
        raise ValueError(
            f"{step} takes {wanted} of the checkpoint's tensors; got {len(tensors)}: "
            f"{', '.join(each.label for each in tensors)}. Name {wanted} in the rule."
        )
    return tensors


def _check_dim(step: Step, tensor: LazyTensor, dim: int) -> None:
    if not 0 <= dim < tensor.ndim:
        raise ValueError(f"{step} does not fit {tensor.label}, whose shape is {tensor.shape}.")
