"""Read, validate and write the header of a safetensors file.

A file (https://github.com/huggingface/safetensors) consists of 8 bytes with the length of the
header, the header (JSON: dtype, shape and byte range of each tensor), and the data. The
safetensors library rejects a broken header without naming the tensor, and does not give byte
offsets; so this module parses the header itself, and accepts none that the library rejects.
"""

import collections
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxzero._regular_file import open_regular, regular_size
from jaxzero._text import escaped, shown
from jaxzero.interop._tensors import MAX_DIMS, LazyTensor, kind_of_file

# The order is that of the library, which writes tensors from the last dtype to the first, so that
# each begins at a multiple of its element size.
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, kind, kind))
    for name, kind in (
        *(("BOOL", "bool"), ("U8", "uint8"), ("I8", "int8")),
        *(("F8_E5M2", "float8_e5m2"), ("F8_E4M3", "float8_e4m3fn")),
        *(("I16", "int16"), ("U16", "uint16"), ("F16", "float16"), ("BF16", "bfloat16")),
        *(("I32", "int32"), ("U32", "uint32"), ("F32", "float32")),
        *(("F64", "float64"), ("I64", "int64"), ("U64", "uint64")),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
_METADATA = "__metadata__"  # an entry that is not a tensor
# A key of the metadata of `HuggingFaceStorageWriter`, and a key of its entry for each tensor.
_SHARDS, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_SHARD = re.compile(r"shard-\d+-")
_MAX_HEADER_BYTES = 100_000_000  # limit of the library
_ALIGNMENT = 8  # of the first tensor, in bytes
_ZIP = b"PK\x03\x04"  # the first bytes of an archive


class Entry(NamedTuple):
    """The header entry of one tensor: its name, dtype, shape and place in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the start of the file


def read_header(file: Path) -> tuple[list[Entry], dict[str, str]]:
    """Read and validate the header of a file, without reading tensor data.

    Returns:
        Its tensors, and its metadata.

    Raises:
        ValueError: the file is truncated, the header is malformed, or the tensors do not cover the
            data exactly, without gap or overlap; or it is a pipe or a device. The message names
            file and tensor.
    """
    size = regular_size(file)
    with open_regular(file) as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            if start.startswith(_ZIP):
                raise ValueError(
                    f"{str(file)!r} is an archive, as `torch.save` writes it, and no safetensors "
                    "file. If its name ends in .safetensors, rename it so that it ends in .pt; "
                    "then open it with `interop.open_checkpoint`."
                )
            if (kind := kind_of_file(file)) is not None:
                raise ValueError(f"{str(file)!r} {kind}")
            raise _broken(file, f"its {size} bytes do not hold the {length} of its header")
        text = opened.read(length)
    header = _parse(file, text)
    metadata = header.get(_METADATA, {})
    _check_whole(file, metadata)
    entries = [
        _entry(file, name, content, 8 + length)
        for name, content in header.items()
        if name != _METADATA
    ]
    end = 8 + length
    # By size too, since an empty tensor has the offset of the one after it.
    for entry in sorted(entries, key=lambda entry: (entry.offset, _num_bytes(entry))):
        if entry.offset != end:
            raise _broken(
                file,
                f"tensor {shown(entry.name)} begins at byte {entry.offset}, where the one before "
                f"it ends at {end}",
            )
        end += _num_bytes(entry)
    if end != size:
        raise _broken(file, f"it has {size} bytes, and its tensors end at {end}")
    return entries, metadata


def header_of(tensors: Mapping[str, LazyTensor]) -> bytes:
    """Return the header of a file that holds `tensors` in this order: all bytes before the data."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}  # as transformers writes it
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_order(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """Sort tensor names into the order in which the safetensors library writes the tensors."""
    return sorted(tensors, key=lambda name: (-_RANK[_NAMES[tensors[name].dtype]], name))


def check_writable(name: str, tensor: LazyTensor) -> None:
    """Raise `ValueError` if the format does not support the dtype or the name of a tensor."""
    if tensor.dtype not in _NAMES:
        raise ValueError(
            f"Tensor {shown(name)} has dtype {tensor.dtype}, which safetensors cannot hold. Cast "
            f"it to one of {', '.join(str(each) for each in _NAMES)}."
        )
    if not isinstance(name, str):
        raise ValueError(f"Names of tensors must be text in safetensors; got {shown(name)}.")
    if name == _METADATA:
        raise ValueError(f"No tensor can be called {name!r} in safetensors. Give it another name.")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"No tensor can be called {shown(name)} in safetensors, whose names are UTF-8. Give it "
            "another name."
        ) from error


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            raise ValueError(f"{shown(counts.most_common(1)[0][0])} is there twice")
        return entries

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
        json.dumps(header, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no surrogates
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header is not proper JSON: {escaped(error)}") from error
    metadata = header.get(_METADATA, {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not _are(metadata.values(), str):
        raise _broken(file, "its header is no table of tensors with text for metadata")
    return header


def _check_whole(file: Path, metadata: Mapping[str, str]) -> None:
    """Raise `ValueError` if a file holds shards of one process instead of whole tensors.

    `HuggingFaceStorageWriter` of PyTorch can save such files. It can also consolidate the shards of
    all processes into files of whole tensors. The consolidated files have the same kind of
    metadata, but all offsets in it are 0, and their names have no `shard-`.
    """
    info = metadata.get(_SHARDS)
    if info is None:
        return
    try:
        offsets = [number for each in json.loads(info).values() for number in each[_OFFSETS]]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(file, f"its `{_SHARDS}` is no table of offsets") from error
    if any(offsets) or _SHARD.match(file.name):
        raise ValueError(
            f"{str(file)!r} holds the shards of one process (`{_SHARDS}`), and no whole tensors. "
            "Put the files of all processes together with `consolidate_safetensors_files` of "
            "torch.distributed.checkpoint, or save with `enable_consolidation=True`."
        )


def _entry(file: Path, name: str, content: Any, begin: int) -> Entry:
    """Validate the entry of one tensor in a header, and convert it to an `Entry`."""
    fields = content if isinstance(content, dict) else {}
    shape, offsets = fields.get("shape"), fields.get("data_offsets")
    if not (
        isinstance(shape, list)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and _are([*shape, *offsets], int)
        and min([*shape, *offsets]) >= 0
    ):
        raise _broken(
            file,
            f"the entry of tensor {shown(name)} is {shown(content)}, but must have a dtype, and a "
            "shape and two data_offsets of non-negative integers",
        )
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields.get("dtype"), str) else None
    if dtype is None:
        raise ValueError(
            f"Tensor {shown(name)} in {str(file)!r} has dtype {shown(fields.get('dtype'))}, which "
            f"is not one of {', '.join(DTYPES)}. Save the checkpoint again in one of those."
        )
    entry = Entry(name, dtype, tuple(shape), begin + offsets[0])
    if (
        len(shape) > MAX_DIMS
        # numpy also limits the product of the dimensions that are not 0.
        or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**63
        or _num_bytes(entry) != offsets[1] - offsets[0]
    ):
        raise _broken(
            file,
            f"tensor {shown(name)} of {fields['dtype']} has shape {shown(shape)}, which does not "
            f"match its {offsets[1] - offsets[0]} bytes",
        )
    return entry


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _are(values: Iterable[Any], kind: type) -> bool:
    return all(type(value) is kind for value in values)  # `isinstance` would take a bool for an int


def _broken(file: Path, what: str) -> ValueError:
    return ValueError(
        f"{str(file)!r} is not a whole safetensors file: {what}. Copy or download the checkpoint "
        "again."
    )
