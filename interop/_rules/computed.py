"""Steps that compute values: the sum of two biases, and a weight from its direction and norm.

The other steps only move elements, and so they also map Adam's moments. A step that computes
cannot: the moments of a sum or a product are not the sum or the product of the moments.
`check_moves` refuses rules with such steps for moments.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from jaxzero.interop._tensors import Box, View, concatenate, replaced, whole_box

from .steps import Step, Tensors

Cell = Literal["rnn", "lstm", "gru"]
Back = Literal["first", "halves"]


@dataclasses.dataclass(frozen=True, repr=False)
class _BySlice(View):
    """A view whose slices along `dim` are computed from the same slices of the viewed tensors.

    Reading a box of the view reads whole slices of the viewed tensors, and all of a viewed scalar.
    If `dim` is None, every element may depend on all elements of the viewed tensors, so the viewed
    tensors are read whole.
    """

    dim: int | None
    function: Callable[..., np.ndarray]

    def own_boxes(self) -> list[Box]:
        """Return the slices along `dim` that this process can compute from its own shards.

        Raises:
            NotImplementedError: this process holds only a part of a slice of the viewed tensor, or
                several tensors are viewed.
        """
        (source, *others) = self.viewed
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
        parts = [each._read_box(self._slice(whole_box(each.shape), part)) for each in self.viewed]
        inside = [slice(*bounds) for bounds in box]
        if self.dim is not None:
            inside[self.dim] = slice(None)
        return self.function(*parts)[tuple(inside)]


def _by_slice(
    tensors: Tensors, shape: tuple[int, ...], dim: int | None, function: Callable[..., np.ndarray]
) -> _BySlice:
    return _BySlice(shape, tensors[-1].dtype, tensors[-1].label, tensors, dim, function)


class _Computing(Step):
    """Base class of steps that compute values when loading; `undo` is the direction of saving."""

    computes = True

    @abc.abstractmethod
    def undo(self, tensors: Tensors) -> Tensors:
        """Return tensors of the checkpoint from which the step would compute `tensors`."""

    @property
    def inverse(self) -> Step:
        """The step that runs `undo`."""
        return _Undo(self)


@dataclasses.dataclass(frozen=True)
class _Undo(Step):
    of: _Computing
    computes = True

    def __call__(self, tensors: Tensors) -> Tensors:
        return self.of.undo(tensors)

    @property
    def inverse(self) -> Step:
        return self.of


@dataclasses.dataclass(frozen=True)
class AddBiases(_Computing):
    """Add the two biases of a recurrent layer of torch, for a model that has one bias.

    From `(bias_ih, bias_hh)` of `torch.nn.RNN` or `LSTM`, `[gates * h]`, it makes their sum. In
    `torch.nn.GRU`, `[3 * h]`, the last third of `bias_hh` is multiplied by the reset gate, so it
    stays apart: the result is `[4 * h]`, the sums for the gates r and z, then n of `bias_ih`, then
    n of `bias_hh`. `Split` divides it among gates.

    Attributes:
        cell: "rnn", "lstm" or "gru".
        back: how a sum is divided when it is written: "first" writes all of it as `bias_ih`, and
            zeros as `bias_hh`; "halves" writes one half as each.
    """

    cell: Cell
    back: Back = "first"

    def __post_init__(self):
        for name, kinds in (("cell", Cell), ("back", Back)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"`{name}` must be one of {get_args(kinds)}; got {self}.")

    def __call__(self, tensors: Tensors) -> Tensors:
        shapes = [each.shape for each in tensors]
        parts = 3 if self.cell == "gru" else 1
        if (
            len(shapes) != 2
            or shapes[0] != shapes[1]
            or len(shapes[0]) != 1
            or shapes[0][0] % parts
        ):
            raise ValueError(
                f"{self} takes the two biases of a layer, `bias_ih` and `bias_hh`, of one size"
                f"{' that 3 divides' if parts == 3 else ''}; got shapes {shapes}."
            )
        (size,) = shapes[0]
        end = size - size // 3 if self.cell == "gru" else size
        both = tuple(each.narrow(0, 0, end) for each in tensors)
        total = _by_slice(both, both[0].shape, 0, lambda a, b: (a + b).astype(a.dtype))
        apart = [each.narrow(0, end, size) for each in tensors] if end < size else []
        return (concatenate((total, *apart), 0),)

    def undo(self, tensors: Tensors) -> Tensors:
        """Divide the sum into two biases, in the way that `back` says."""
        parts = 4 if self.cell == "gru" else 1
        if len(tensors) != 1 or tensors[0].ndim != 1 or tensors[0].shape[0] % parts:
            raise ValueError(
                f"{self} makes one bias"
                f"{' of 4 equal parts' if parts == 4 else ''}; got {[x.shape for x in tensors]}."
            )
        (total,) = tensors
        size = total.shape[0] // parts
        added = total.narrow(0, 0, 2 * size) if parts == 4 else total
        divided = (
            (added, _by_slice((added,), added.shape, 0, np.zeros_like))
            if self.back == "first"
            else (_by_slice((added,), added.shape, 0, lambda x: (x / 2).astype(x.dtype)),) * 2
        )
        if parts == 1:
            return divided
        apart = (total.narrow(0, k * size, (k + 1) * size) for k in (2, 3))
        return tuple(concatenate(two, 0) for two in zip(divided, apart, strict=True))


@dataclasses.dataclass(frozen=True)
class WeightNorm(_Computing):
    """Compute a weight that torch stores as norm and direction, `g * v / |v|`.

    The tensors are `(weight_g, weight_v)` of `torch.nn.utils.weight_norm`, or
    `(parametrizations.weight.original0, parametrizations.weight.original1)` of
    `torch.nn.utils.parametrizations.weight_norm`. The other direction writes `g = |w|` and `v = w`,
    which give the weight again. Norms are computed in float32 at least.

    Attributes:
        dim: dimension with a norm for each of its indices, as `dim` in torch; None for one norm of
            the whole weight.
    """

    dim: int | None = 0

    def __post_init__(self):
        if self.dim is not None and (not isinstance(self.dim, int) or self.dim < 0):
            raise ValueError(f"`dim` must be an integer from 0 on, or None; got {self}.")

    def __call__(self, tensors: Tensors) -> Tensors:
        shapes = [each.shape for each in tensors]
        if len(shapes) != 2 or not self._fits(shapes[1]) or shapes[0] != self.norms_of(shapes[1]):
            raise ValueError(f"{self} takes the norms, and the directions; got shapes {shapes}.")
        weight = functools.partial(_weight, self.dim)
        return (_by_slice(tensors, shapes[1], self.dim, weight),)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return self.dim is None or self.dim < len(shape)

    def norms_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the norms of a weight of this shape."""
        if self.dim is None:
            return ()
        return tuple(size if dim == self.dim else 1 for dim, size in enumerate(shape))

    def undo(self, tensors: Tensors) -> Tensors:
        """Return the norms of the weight, and the weight itself as the directions."""
        if len(tensors) != 1 or not self._fits(tensors[0].shape):
            shapes = [each.shape for each in tensors]
            raise ValueError(f"{self} makes one weight; got shapes {shapes}.")
        dim, shape = self.dim, self.norms_of(tensors[0].shape)
        norms = _by_slice(tensors, shape, dim, lambda w: _norms(dim, w).astype(w.dtype))
        return norms, tensors[0]


def _weight(dim: int | None, norms: np.ndarray, directions: np.ndarray) -> np.ndarray:
    wide = _wide(directions)
    scale = norms.astype(wide.dtype) / _norms(dim, directions)
    return (wide * scale).astype(directions.dtype)


def _norms(dim: int | None, weight: np.ndarray) -> np.ndarray:
    wide = _wide(weight)
    axes = tuple(n for n in range(weight.ndim) if n != dim)
    return np.sqrt(np.square(wide).sum(axis=axes, keepdims=dim is not None))


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.float64 else x.astype(np.float32)
