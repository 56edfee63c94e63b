"""Find the safetensors files of a checkpoint, and read slices of their tensors.

The library (https://github.com/huggingface/safetensors) maps the file and parses its header for
every slice, which is slow for many tensors on many devices. Here a slice is a map of its own byte
range, which lives as long as its array: mapped pages count as memory of the process.
"""

import dataclasses
import math
import mmap
import re
from pathlib import Path

import numpy as np

from jaxzero._text import escaped, first_names, shown
from jaxzero.interop._tensors import Box, LazyTensor, box_shape, read_index

from .header import read_header

SINGLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"  # maps each tensor to one of several files
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


def index_in(path: Path) -> Path | None:
    """Return the index of a directory, also under another name; None if there is not just one."""
    if (path / INDEX).is_file():
        return path / INDEX
    if (path / SINGLE).is_file():
        return None
    found = [file for file in path.glob(f"*{INDEX_SUFFIX}") if file.is_file()]
    return found[0] if len(found) == 1 else None


def files_in(path: Path) -> list[Path]:
    """Return the files of a directory that has no index.

    That is `model.safetensors`; or, if it is not there, the only file of another name, or files
    that are numbered as the parts of one checkpoint.

    Raises:
        ValueError: there are several files, and nothing says which belong together; or a part of
            a numbered checkpoint is missing.
    """
    others = sorted(path.glob("*.safetensors"))
    if (path / SINGLE).is_file() or not others:
        return [path / SINGLE]
    if len(others) == 1 and _NUMBERED.fullmatch(others[0].name) is None:
        return others
    parts = [_NUMBERED.fullmatch(file.name) for file in others]
    sets = {(part[1], part[3]) for part in parts if part is not None}
    if None in parts or len(sets) != 1:
        raise ValueError(
            f"{str(path)!r} has neither {SINGLE} nor one index, and several files: "
            f"{first_names([file.name for file in others])}. Name the file to open."
        )
    ((stem, total),) = sets
    names = [f"{stem}{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    differing = sorted(set(names) ^ {file.name for file in others})
    if differing:
        raise ValueError(
            f"{str(path)!r} has files of a checkpoint in {int(total)} parts; missing, or not one "
            f"of them: {first_names(differing)}. Copy or download it again."
        )
    return others


_LEAST_MAPPED = 2**16  # bytes; reading less than this takes no longer than mapping it


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
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

    @property
    def is_in_file(self) -> bool:
        """True: it is mapped, or so small that reading it takes as long."""
        return True

    def _read_box(self, box: Box) -> np.ndarray:
        if self.file.stat().st_size < self.offset + self.nbytes:
            raise ValueError(
                f"{str(self.file)!r} ends inside tensor {shown(self.name)}: it was cut off after "
                "it was opened. Copy or download it again."
            )
        lows, highs = [start for start, _ in box], [stop - 1 for _, stop in box]
        first, last = self._number(lows), self._number(highs)
        start, size = self.offset + first * self.dtype.itemsize, last + 1 - first
        if size == math.prod(box_shape(box)) and size * self.dtype.itemsize < _LEAST_MAPPED:
            with open(self.file, "rb") as file:
                file.seek(start)
                return np.fromfile(file, self.dtype, size).reshape(box_shape(box))
        return self._mapped(start, size, box_shape(box))

    def _number(self, index: list[int]) -> int:
        """Number of an element in row-major order."""
        number = 0
        for each, size in zip(index, self.shape, strict=True):
            number = number * size + each
        return number

    def _mapped(self, start: int, size: int, shape: tuple[int, ...]) -> np.ndarray:
        """Map `size` elements from byte `start` on, and view those of a box in them."""
        before = start % mmap.ALLOCATIONGRANULARITY  # where a map may begin
        length = before + size * self.dtype.itemsize
        with open(self.file, "rb") as file:
            mapped = mmap.mmap(
                file.fileno(), length, offset=start - before, access=mmap.ACCESS_READ
            )
        strides = [
            self.dtype.itemsize * math.prod(self.shape[dim + 1 :]) for dim in range(self.ndim)
        ]
        return np.ndarray(shape, self.dtype, mapped, before, strides)


def tensors_in(path: Path | str) -> dict[str, FileTensor]:
    """List the tensors of a safetensors checkpoint (others: `open_checkpoint`). Reads headers only.

    Args:
        path: a safetensors file, an index of several, or a directory with `model.safetensors` or
            with several files and their index. Files of other names are opened if there is one, or
            one set of numbered parts.

    Raises:
        ValueError: there is no safetensors checkpoint, or several; a file of it is missing,
            truncated or broken, a dtype is not supported, or the index does not match the files;
            or there is a whole file beside an index that names others.
    """
    return tensors_and_aliases(path)[0]


def tensors_and_aliases(path: Path | str) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """As `tensors_in`, and name of a tensor that was left out -> name of the equal one.

    `safetensors.torch.save_model` writes tied weights once, and the other names as metadata.
    """
    path = Path(path)
    given = path if path.name.endswith(INDEX_SUFFIX) and path.is_file() else None
    if path.is_file() and given is None:
        return _tensors_in_files([path], path)
    index = given or index_in(path)
    if index is None:
        return _tensors_in_files(files_in(path), path)
    file_of = read_index(index, "safetensors", was_named=given is not None)
    folder = index.parent
    tensors, aliases = _tensors_in_files(
        [folder / name for name in sorted(set(file_of.values()))], folder
    )
    for name, file in file_of.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(
                f"{str(index)!r} says that tensor {shown(name)} is in {escaped(file)}, which does "
                "not hold it. Copy or download the checkpoint again."
            )
    return tensors, aliases


def _tensors_in_files(
    files: list[Path], path: Path
) -> tuple[dict[str, FileTensor], dict[str, str]]:
    missing = [file.name for file in files if not file.exists() or file.is_dir()]
    if missing:
        raise ValueError(
            f"{str(path)!r} lacks {first_names(missing)}. Give a directory that `save_pretrained` "
            "of Hugging Face transformers wrote. `interop.open_checkpoint` also reads other forms, "
            "such as `pytorch_model.bin`."
        )
    found: dict[str, FileTensor] = {}
    told: dict[str, str] = {}
    for file in files:
        entries, metadata = read_header(file)
        told |= metadata
        for name, dtype, shape, offset in entries:
            if name in found:
                raise ValueError(
                    f"Tensor {shown(name)} is in {escaped(found[name].file.name)} and in "
                    f"{escaped(file.name)} of {str(path)!r}. One of the files belongs to another "
                    "checkpoint: save the checkpoint again into an empty directory."
                )
            found[name] = FileTensor(file=file, name=name, shape=shape, dtype=dtype, offset=offset)
    aliases = {name: x for name, x in told.items() if x in found and name not in found}
    return found, aliases
