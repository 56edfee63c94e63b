"""Tensors that stay in their file until somebody asks for a slice of them.

A checkpoint of n bytes on N devices needs n/N bytes on each. So nothing is loaded up front: a tree
of `FileTensor`s goes to `zero.shard`, which asks each leaf for the slices its devices own, and
safetensors (https://github.com/huggingface/safetensors) maps just those bytes into memory.
"""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # says which of several files holds which tensor

# Names of the format; those that numpy has no type for come from ml_dtypes.
_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor in a safetensors file, seen in the orientation and dtype that the model wants.

    It holds no bytes and no open file. Indexing reads: the file's bytes of that slice, no more.
    """

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]  # as seen: reversed if `transposed`
    dtype: np.dtype  # as seen: slices are cast to it after they were read
    transposed: bool = False

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def transpose(self) -> "FileTensor":
        """The same tensor with its dimensions reversed. Reads nothing."""
        return dataclasses.replace(self, shape=self.shape[::-1], transposed=not self.transposed)

    def astype(self, dtype: np.typing.DTypeLike) -> "FileTensor":
        """The same tensor as another dtype. Reads nothing."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def read(self) -> np.ndarray:
        """Read the whole tensor."""
        return self[tuple(slice(None) for _ in self.shape)]

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        """Read one slice per dimension, each with step 1, from the file into a new array.

        Raises:
            ValueError: there are too many or too few slices, or a step other than 1.
        """
        bounds = self._bounds(slices)
        shape = tuple(stop - start for start, stop in bounds)
        if 0 in shape:
            return np.empty(shape, self.dtype)
        if self.transposed:
            bounds = bounds[::-1]
        array = self._read_file(tuple(slice(start, stop) for start, stop in bounds))
        return (array.T if self.transposed else array).astype(self.dtype, copy=False)

    def _bounds(self, slices: tuple[slice, ...]) -> list[tuple[int, int]]:
        slices = slices if isinstance(slices, tuple) else (slices,)
        plain = all(isinstance(each, slice) and each.step in (None, 1) for each in slices)
        if len(slices) != self.ndim or not plain:
            raise ValueError(
                f"`slices` of tensor {self.name!r} must be {self.ndim} slices with step 1, one per "
                f"dimension of {self.shape}; got {slices!r}. Use `read()` and index the array."
            )
        bounds = (each.indices(dim) for each, dim in zip(slices, self.shape, strict=True))
        return [(start, max(start, stop)) for start, stop, _ in bounds]

    def _read_file(self, slices: tuple[slice, ...]) -> np.ndarray:
        with safe_open(self.file, framework="np") as file:
            return file.get_slice(self.name)[slices] if slices else file.get_tensor(self.name)


def tensors_in(directory: Path | str) -> dict[str, FileTensor]:
    """List the tensors of a checkpoint, in one file or in several. Reads headers only.

    Raises:
        ValueError: the directory holds no safetensors checkpoint, a file of it is missing or cut
            short, or a tensor has a dtype that JAX has no type for.
    """
    found = {}
    for file in _files_of(Path(directory)):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    view = opened.get_slice(name)
                    dtype = _dtype_of(view.get_dtype(), name, file)
                    shape = tuple(view.get_shape())
                    found[name] = FileTensor(file=file, name=name, shape=shape, dtype=dtype)
        except SafetensorError as error:
            raise ValueError(
                f"{str(file)!r} is not a whole safetensors file ({error}). Copy or download the "
                "checkpoint again."
            ) from error
    return found


def _files_of(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        files = [directory / name for name in sorted(set(names))]
    else:
        files = [directory / _SINGLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{str(directory)!r} lacks {', '.join(missing)}. Give a directory that "
            "`save_pretrained` of Hugging Face transformers wrote. It writes safetensors, so it "
            "converts an older checkpoint (`pytorch_model.bin`) that it has loaded."
        )
    return files


def _dtype_of(name: str, tensor: str, file: Path) -> np.dtype:
    if name not in _DTYPES:
        raise ValueError(
            f"Tensor {tensor!r} in {str(file)!r} has dtype {name}, which is not one of "
            f"{', '.join(_DTYPES)}. Save the checkpoint again in one of those."
        )
    return _DTYPES[name]
