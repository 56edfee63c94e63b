"""Open distributed checkpoints of PyTorch (DCP), the directories that FSDP and FSDP2 write.

`.metadata` lists the chunks of each tensor, with the file and byte range of each chunk; that range
is an archive of its own (`torch_file`). A slice is assembled from the chunks that it overlaps.
PyTorch reads `.metadata` with plain `pickle.load`, which executes code from the file; here the safe
reader of `unpickle` reads it.

https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxzero._text import escaped, shown
from jaxzero.interop._tensors import (
    Box,
    Checkpoint,
    LazyTensor,
    box_shape,
    by_plain_name,
    common_box,
    slices_within,
)

from .dcp_names import model_names, paths_of, read_moments, sort_tensors
from .pickle_machine import Record
from .torch_file import are_sizes, read_torch_file
from .unpickle import TorchDtype, unpickle

_MAX_SPLIT_DIMS = 4  # a chunk has 2^n corners in n dimensions
METADATA = ".metadata"
_TENSOR = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"
_BYTES = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"  # a pickled object


def covers_exactly(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether nonempty boxes cover a shape exactly, without gap or overlap.

    Each corner of a box gets a sign, opposite to that of its neighbours. The signs of all corners
    are added up by position. The boxes cover the shape if only the corners of the whole shape are
    left, and all other sums are 0. Dimensions that no box divides are left out.

    Raises:
        ValueError: the boxes divide too many dimensions.
    """
    if 0 in shape:
        return not boxes
    whole = tuple((0, size) for size in shape)
    dims = [dim for dim in range(len(shape)) if any(box[dim] != whole[dim] for box in boxes)]
    if len(dims) > _MAX_SPLIT_DIMS:
        raise ValueError(
            f"chunks divide {len(dims)} dimensions, and at most {_MAX_SPLIT_DIMS} are supported"
        )
    corners: collections.Counter[tuple[int, ...]] = collections.Counter()
    for box, sign in [*((box, 1) for box in boxes), (whole, -1)]:
        for upper in itertools.product((0, 1), repeat=len(dims)):
            corner = tuple(box[dim][side] for dim, side in zip(dims, upper, strict=True))
            corners[corner] += sign * (-1) ** sum(upper)
    return not any(corners.values())


class _Chunk(NamedTuple):
    box: Box
    file: Path
    start: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DcpTensor(LazyTensor):
    """A tensor of a distributed checkpoint, which stores it in chunks."""

    directory: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[_Chunk, ...]
    # Chunks whose archive header has been read: a tensor is read in many slices, its headers once.
    opened: dict[_Chunk, LazyTensor] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def label(self) -> str:
        """Name and directory, for messages."""
        return f"{shown(self.name)} in {str(self.directory)!r}"

    def _read_box(self, box: Box) -> np.ndarray:
        whole = np.empty([stop - start for start, stop in box], self.dtype)
        for chunk in self.chunks:
            common = common_box(chunk.box, box)
            if common is not None:
                held = self._archived(chunk)
                if held.shape != box_shape(chunk.box) or held.dtype != self.dtype:
                    raise ValueError(
                        f"A chunk of {self.label} is {held.dtype}{list(held.shape)}, but "
                        f"`.metadata` says {self.dtype}{list(box_shape(chunk.box))}. The files "
                        "belong to different checkpoints: copy the directory again."
                    )
                whole[slices_within(common, box)] = held[slices_within(common, chunk.box)]
        return whole

    def _archived(self, chunk: _Chunk) -> LazyTensor:
        if chunk not in self.opened:
            within = (chunk.start, chunk.length)
            held = read_torch_file(chunk.file, within=within, name=self.name)
            if not isinstance(held, LazyTensor):
                raise ValueError(
                    f"{shown(self.name)} in {str(chunk.file)!r} is not a tensor but a "
                    f"{type(held).__name__}. Save the checkpoint again."
                )
            self.opened[chunk] = held
        return self.opened[chunk]


def open_dcp(directory: Path, key: str | None = None) -> Checkpoint:
    """Open a directory that `torch.distributed.checkpoint.save` wrote.

    Args:
        directory: the directory.
        key: dotted path of the model's state dict in the saved dict; None to find it.
    """
    path = directory / METADATA
    metadata = unpickle(path.read_bytes(), repr(str(path)))
    entries = _mapping(metadata, "state_dict_metadata", path)
    places = _mapping(metadata, "storage_data", path)
    planned = metadata.field("planner_data") or {}  # flat name -> path; absent if not flattened
    if not all(type(name) is str for name in entries) or not isinstance(planned, Mapping):
        raise TypeError("names of tensors that are not text")
    paths = paths_of(entries, planned)
    chunks = _chunks_of(places, directory)
    tensors: dict[str, LazyTensor] = {}
    objects: dict[tuple[str | int, ...], Callable[[], Any]] = {}
    for name, entry in entries.items():
        if not isinstance(entry, Record) or entry.name not in (_TENSOR, _BYTES):
            raise TypeError(f"{shown(name)} is described by {shown(entry)}")
        if entry.name == _TENSOR:
            tensors[name] = _tensor(name, entry, chunks.get(name, {}), directory)
        else:
            objects[paths[name]] = functools.partial(_object, name, chunks.get(name, {}))
    kept, states = sort_tensors(tensors, paths)
    in_order = kept.keys() <= planned.keys()
    if in_order:  # in `entries`, tensors come in the order in which processes share their copies
        kept = {name: kept[name] for name in planned if name in kept}
    where = repr(str(directory))
    trained = {name for state in states.values() for name in state}
    names = model_names({name: paths[name] for name in kept}, trained, key, where)
    named = by_plain_name({short: kept[full] for full, short in names.items()}, where)
    moments = None
    if any("exp_avg" in held for state in states.values() for held in state.values()):
        moments = functools.partial(
            read_moments, states, objects, named, str(directory), in_order=in_order
        )
    return Checkpoint(path=directory, form="torch DCP", tensors=named, moments=moments)


def _object(name: str, places: Mapping) -> Any:
    """Read a pickled object of a distributed checkpoint, such as a number or a list.

    Args:
        name: flat name of the object in the checkpoint, for messages.
        places: offset of a chunk -> its file and byte range; an object has the key None.
    """
    file, start, length = places[None]
    return read_torch_file(file, within=(start, length), name=name)


def _mapping(metadata: Any, name: str, path: Path) -> Mapping:
    value = metadata.field(name) if isinstance(metadata, Record) else None
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{str(path)!r} does not describe a distributed checkpoint: it has no `{name}`. Give a "
            "directory that `torch.distributed.checkpoint.save` wrote."
        )
    return value


def _chunks_of(places: Mapping, directory: Path) -> dict[str, dict[tuple | None, tuple]]:
    """Collect, from `storage_data` of the metadata, where the chunks of each name lie.

    Returns:
        Name -> offset of a chunk in its tensor (None if the name is no tensor) -> (file, first
        byte, length in bytes).
    """
    chunks: dict[str, dict[tuple | None, tuple]] = {}
    sizes: dict[str, int] = {}
    for index, place in places.items():
        name, offset = index.field("fqn"), index.field("offset")
        file, start, length = (place.field(key) for key in ("relative_path", "offset", "length"))
        if (
            type(name) is not str
            or not (offset is None or are_sizes(offset))
            or type(file) is not str
            or Path(file).name != file
            or type(start) is not int
            or type(length) is not int
        ):
            raise ValueError(
                f"{str(directory / METADATA)!r} puts {shown(name)} at {shown(start)} in "
                f"{shown(file)}, which is not a place in a file beside it. Do not load it."
            )
        if place.field("transform_descriptors"):
            raise NotImplementedError(
                f"{shown(name)} in {str(directory)!r} was saved through an extension "
                f"({shown(place.field('transform_descriptors'))}). Save it without extensions."
            )
        if file not in sizes:
            if not (directory / file).is_file():
                raise ValueError(
                    f"{str(directory)!r} lacks {escaped(file)}, in which {shown(name)} lies. Copy "
                    "all files of the checkpoint: each process wrote its own."
                )
            sizes[file] = (directory / file).stat().st_size
        if start < 0 or length < 0 or start + length > sizes[file]:
            raise ValueError(
                f"{str(directory / file)!r} is truncated: {shown(name)} should end at byte "
                f"{shown(start + length)}, but the file has {sizes[file]} bytes. Copy it again."
            )
        of_name = chunks.setdefault(name, {})
        if offset in of_name:
            raise ValueError(
                f"{str(directory / METADATA)!r} puts the chunk of {shown(name)} at "
                f"{shown(offset)} in two places. Save the checkpoint again."
            )
        of_name[offset] = (directory / file, start, length)
    return chunks


def _tensor(name: str, entry: Record, places: Mapping, directory: Path) -> DcpTensor:
    shape, properties = entry.field("size"), entry.field("properties")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    where = f"{shown(name)} in {str(directory)!r}"
    if not isinstance(dtype, TorchDtype) or not are_sizes(shape):
        raise ValueError(
            f"{where} has dtype {shown(dtype)} and shape {shown(shape)}, which cannot be read."
        )
    chunks = []
    for chunk in entry.field("chunks", ()):
        offsets, sizes = chunk.field("offsets"), chunk.field("sizes")
        box = _box(offsets, sizes, shape)
        if box is None or (offsets not in places and math.prod(sizes)):
            raise ValueError(
                f"{where} has a chunk of shape {shown(sizes)} at {shown(offsets)}, which "
                + (f"is not inside its shape {shown(shape)}." if box is None else "no file holds.")
                + " Copy or save the checkpoint again."
            )
        if math.prod(sizes):
            chunks.append(_Chunk(box, *places[offsets]))
    try:
        exact = covers_exactly(shape, [chunk.box for chunk in chunks])
    except ValueError as error:
        raise ValueError(f"{where} cannot be read: its {error}.") from error
    if not exact:
        raise ValueError(
            f"The {len(chunks)} chunks of {where} do not cover its shape {shown(shape)} without "
            "gap or overlap. Copy or save the checkpoint again."
        )
    return DcpTensor(
        directory=directory, name=name, shape=shape, dtype=dtype.dtype, chunks=tuple(chunks)
    )


def _box(offsets: Any, sizes: Any, shape: tuple[int, ...]) -> Box | None:
    if not are_sizes(offsets) or not are_sizes(sizes) or len(offsets) != len(shape):
        return None
    if len(sizes) != len(shape):
        return None
    box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    inside = all(stop <= size for (_, stop), size in zip(box, shape, strict=True))
    return box if inside else None
