"""Lazy tensors for arrays in memory: numpy's, and the tensors of a PyTorch `state_dict`."""

import dataclasses
from typing import Any

import numpy as np

from jaxzero._text import shown

from .boxes import Box
from .lazy import LazyTensor


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayTensor(LazyTensor):
    """An array in memory, as a lazy tensor."""

    array: np.ndarray
    label: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """The array's dtype."""
        return self.array.dtype

    def _read_box(self, box: Box) -> np.ndarray:
        return np.asarray(self.array[tuple(slice(start, stop) for start, stop in box)])


def as_lazy(value: Any, name: str, where: str) -> LazyTensor:
    """Wrap a numpy array or a PyTorch tensor as a lazy tensor, without a copy.

    A lazy tensor is returned unchanged.

    Args:
        value: the tensor.
        name: its name, for messages.
        where: where it is, for messages, such as "in `tensors`".

    Raises:
        ValueError: `value` is of another type, is a `DTensor`, or has no dense values that numpy
            can hold.
    """
    if isinstance(value, LazyTensor):
        return value
    if hasattr(value, "full_tensor"):  # a `DTensor`, of which a process has a part
        raise ValueError(
            f"{shown(name)} {where} is a DTensor, and this process holds a part of it. Write the "
            "state dict with `torch.distributed.checkpoint.save` and give its directory; or, on "
            "every process, `{name: x.full_tensor() for name, x in state_dict.items()}`."
        )
    if hasattr(value, "detach"):
        try:
            return ArrayTensor(array_of_torch(value), name)
        # PyTorch raises TypeError for sparse and quantized tensors, NotImplementedError for those
        # on `meta`, and RuntimeError for nested ones.
        except (KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{shown(name)} {where} is no dense tensor of numbers that NumPy can hold "
                f"({error}). Convert it, or leave it out of the state dict."
            ) from error
    if isinstance(value, np.ndarray):
        return ArrayTensor(value, name)
    raise ValueError(
        f"{shown(name)} {where} is no `interop.LazyTensor` but a {type(value).__name__}. "
        "`interop.open_checkpoint` gives those of a file, `interop.tensors_from` those of "
        "parameters, and `interop.ArrayTensor(array, name)` makes one of a numpy array."
    )


def array_of_torch(tensor: Any) -> np.ndarray:
    """Return a PyTorch tensor as a numpy array, which shares the memory of a tensor on the CPU.

    Raises:
        TypeError: numpy and ml_dtypes lack its dtype, or it is sparse.
    """
    import torch

    # PyTorch conjugates and negates views lazily, by a flag that numpy would ignore.
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if dtype.isbuiltin == 1:  # of NumPy itself; 2: of ml_dtypes
        return tensor.numpy()
    # PyTorch refuses to convert bfloat16 and float8, which NumPy lacks, so view them as integers.
    return tensor.view({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).numpy().view(dtype)
