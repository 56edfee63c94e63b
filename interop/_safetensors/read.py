"""Read slices of tensors in safetensors files (https://github.com/huggingface/safetensors).

The library maps the file and parses its header for every slice, which is slow for many tensors on
many devices, and mapped pages count as memory of the process. So slices are read here directly
from the byte range in the header.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from jaxzero.interop._tensors import Box, LazyTensor, escaped, first_names, shown

from .header import read_header
from .which_files import files_in, index_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTensor(LazyTensor):
    """A tensor in a safetensors file; it holds neither data nor an open file.

    Indexing reads the bytes of that slice from the file.
    """

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # of its first byte, from the start of the file

    @property
    def label(self) -> str:
        """Name and file."""
        return f"{shown(self.name)} in {str(self.file)!r}"

    def _read_box(self, box: Box) -> np.ndarray:
        if self.file.stat().st_size < self.offset + self.nbytes:
            raise ValueError(
                f"{str(self.file)!r} ends inside tensor {shown(self.name)}: it was cut off after "
                "it was opened. Copy or download it again."
            )
        whole = self.ndim  # the box covers all dimensions from this one on
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
        return array.reshape(shape)

    def _read_scattered(self, box: Box) -> np.ndarray:
        # The map is dropped after this slice, since mapped pages count as memory of the process.
        # Elements are read as integers: numpy copies foreign types (bfloat16) one at a time.
        raw = np.dtype(f"u{self.dtype.itemsize}")
        mapped = np.memmap(self.file, raw, "r", self.offset, self.shape)
        return np.array(mapped[tuple(slice(start, stop) for start, stop in box)]).view(self.dtype)


def tensors_in(path: Path | str) -> dict[str, FileTensor]:
    """List the tensors of a checkpoint. Reads headers only.

    Args:
        path: a safetensors file, or a directory with `model.safetensors` or with several files and
            their index. Files of other names are opened if there is one, or one set of numbered
            parts.

    Raises:
        ValueError: there is no safetensors checkpoint, or several; a file of it is missing,
            truncated or broken, a dtype is not supported, or the index does not match the files.
    """
    path = Path(path)
    if path.is_file():
        return _tensors_in_files([path], path)
    index = index_in(path)
    if index is None:
        return _tensors_in_files(files_in(path), path)
    file_of = _read_index(index)
    tensors = _tensors_in_files([path / name for name in sorted(set(file_of.values()))], path)
    for name, file in file_of.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(
                f"{str(index)!r} says that tensor {shown(name)} is in {escaped(file)}, which does "
                "not hold it. Copy or download the checkpoint again."
            )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        file_of = json.loads(index.read_bytes())["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in file_of.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        plain = False
    if not plain or not file_of:
        raise ValueError(
            f"{str(index)!r} is not an index of safetensors files: its `weight_map` must give a "
            "file of the same directory for each tensor. Copy or download it again."
        )
    return file_of


def _tensors_in_files(files: list[Path], path: Path) -> dict[str, FileTensor]:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{str(path)!r} lacks {first_names(missing)}. Give a directory that `save_pretrained` "
            "of Hugging Face transformers wrote. To convert an older checkpoint "
            "(`pytorch_model.bin`), load it with transformers and save it again."
        )
    found: dict[str, FileTensor] = {}
    for file in files:
        for name, dtype, shape, offset in read_header(file):
            if name in found:
                raise ValueError(
                    f"Tensor {shown(name)} is in {escaped(found[name].file.name)} and in "
                    f"{escaped(file.name)} of {str(path)!r}. One of the files belongs to another "
                    "checkpoint: save the checkpoint again into an empty directory."
                )
            found[name] = FileTensor(file=file, name=name, shape=shape, dtype=dtype, offset=offset)
    return found
