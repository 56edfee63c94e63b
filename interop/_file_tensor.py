"""Tensors in safetensors files (https://github.com/huggingface/safetensors), one file or several.

A file is 8 bytes that give the length of a header, the header (JSON: dtype, shape and byte range of
each tensor), and the bytes. The library judges headers; it reads slices by mapping the file and
parsing the header anew each time, which a checkpoint of many tensors on many devices does very
often. So slices are read here, straight from the byte range that the header gives.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxzero.interop._safetensors import DTYPES
from jaxzero.interop._tensor import Box, LazyTensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # says which of several files holds which tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor(LazyTensor):
    """A tensor in a safetensors file.

    It holds no bytes and no open file. Indexing reads: the file's bytes of that slice, no more.
    """

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # of its first byte in the file

    @property
    def label(self) -> str:
        """Name and file."""
        return f"{self.name!r} in {str(self.file)!r}"

    def _read_box(self, box: Box) -> np.ndarray:
        whole = self.ndim  # from this dimension on, all is asked for
        while whole and box[whole - 1] == (0, self.shape[whole - 1]):
            whole -= 1
        lead = [stop - start for start, stop in box[: max(whole - 1, 0)]]
        if math.prod(lead) > 1:
            return self._read_scattered(box)
        return self._read_run(box)

    def _read_run(self, box: Box) -> np.ndarray:
        start = 0
        for (first, _), size in zip(box, self.shape, strict=True):
            start = start * size + first
        shape = [stop - start for start, stop in box]
        with open(self.file, "rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            array = np.fromfile(file, self.dtype, math.prod(shape))
        if array.size != math.prod(shape):
            raise ValueError(
                f"{str(self.file)!r} ends inside tensor {self.name!r}: it was cut off after it was "
                "opened. Copy or download it again."
            )
        return array.reshape(shape)

    def _read_scattered(self, box: Box) -> np.ndarray:
        # Mapped for this slice only: pages that stay mapped would count as memory of the process.
        # Read as integers: numpy copies types that are not its own (bfloat16) one by one.
        raw = np.dtype(f"u{self.dtype.itemsize}")
        mapped = np.memmap(self.file, raw, "r", self.offset, self.shape)
        return np.array(mapped[tuple(slice(start, stop) for start, stop in box)]).view(self.dtype)


def tensors_in(directory: Path | str) -> dict[str, FileTensor]:
    """List the tensors of a checkpoint, in one file or in several. Reads headers only.

    Raises:
        ValueError: the directory holds no safetensors checkpoint, a file of it is missing or cut
            short, or a tensor has a dtype that JAX has no type for.
    """
    found: dict[str, FileTensor] = {}
    directory = Path(directory)
    for file in [directory] if directory.is_file() else _files_of(directory):
        for tensor in _tensors_of(file):
            if tensor.name in found:
                raise ValueError(
                    f"Tensor {tensor.name!r} is in {found[tensor.name].file.name} and in "
                    f"{file.name} of {str(directory)!r}. One of the two is left over from another "
                    "checkpoint: save it again into an empty directory."
                )
            found[tensor.name] = tensor
    return found


def _tensors_of(file: Path) -> list[FileTensor]:
    try:
        with safe_open(file, framework="np") as opened:
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            described = {
                name: (tuple(view.get_shape()), _dtype_of(view.get_dtype(), name, file))
                for name, view in views.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"{str(file)!r} is not a whole safetensors file ({error}). Copy or download the "
            "checkpoint again."
        ) from error
    offsets = _offsets_in(file)
    return [
        FileTensor(file=file, name=name, shape=shape, dtype=dtype, offset=offsets[name])
        for name, (shape, dtype) in described.items()
    ]


def _offsets_in(file: Path) -> dict[str, int]:
    # The library has found the header whole and the ranges in it without gap or overlap.
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


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
    if name not in DTYPES:
        raise ValueError(
            f"Tensor {tensor!r} in {str(file)!r} has dtype {name}, which is not one of "
            f"{', '.join(DTYPES)}. Save the checkpoint again in one of those."
        )
    return DTYPES[name]
