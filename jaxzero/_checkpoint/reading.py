"""Read the arrays of a checkpoint with Orbax, after checking the files that Orbax will open.

Orbax opens files by name and reads some of them in full. A pipe in the place of a file would block
it where Ctrl-C has no effect, and a file of a terabyte would take all memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from .._regular_file import read_regular, regular_size
from .._zero import Zero
from .digests import MAX_ITEM_BYTES, MAX_TEXT_BYTES, MISSING, max_bytes_of
from .saver import EXTRA, STATE
from .stored_leaves import Named, check_same_leaves, target

# What Orbax and JSON raise if the content of a file is wrong, or a file is missing.
_OF_CONTENT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
_OF_CONTENT += (RecursionError, NotImplementedError, MemoryError, *MISSING)
_DATA = "d"  # folders of OCDBT, which hold the arrays in parts that are read as needed


def read_arrays(folder: Path, named: Mapping[str, Named], zero: Zero) -> dict[str, jax.Array]:
    """Read the leaves that have elements, in the shardings that `stored_leaves.target` gives.

    Raises:
        ValueError: leaves, shapes or dtypes differ from `named`; or a file is missing, is no
            regular file, is too large for these leaves, or cannot be decoded.
        OSError: a file cannot be read.
    """
    path = epath.Path(folder / STATE)
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        with _naming(folder):
            _check_files(folder, named)
            tree = handler.metadata(path).tree
            saved = {name: (tuple(entry.shape), entry.dtype) for name, entry in tree.items()}
        check_same_leaves(named, saved, folder)
        filled = {name: entry for name, entry in named.items() if not entry.is_empty}
        targets = {name: target(entry, zero) for name, entry in filled.items()}
        with _naming(folder):
            return handler.restore(path, args=ocp.args.StandardRestore(targets))


def read_extra(folder: Path) -> dict[str, Any]:
    """Read the values that were saved beside the arrays.

    Raises:
        ValueError: their file is missing, is not a regular file, is too large, or holds no JSON
            object.
        OSError: the file cannot be read.
    """
    with _naming(folder):
        extra = json.loads(read_regular(folder / EXTRA / "metadata", MAX_TEXT_BYTES))
        if not isinstance(extra, dict):
            raise TypeError(f"{EXTRA}/metadata holds no table of values")
    return extra


def _check_files(folder: Path, named: Mapping[str, Named]) -> None:
    """Raise unless all files are regular, and small enough to hold only the leaves `named`."""
    leaves = [entry.leaf for entry in named.values()]
    num_bytes = sum(MAX_ITEM_BYTES * math.prod(leaf.shape) for leaf in leaves)
    bound, total = max_bytes_of(num_bytes, len(leaves)), 0
    max_text = MAX_TEXT_BYTES + 2**20 * len(leaves)
    for parent, _, names in os.walk(folder / STATE):
        for name in names:
            path = Path(parent, name)
            size = regular_size(path)
            total += size
            if total > bound or (size > max_text and Path(parent).name != _DATA):
                raise ValueError(f"{path.relative_to(folder)} has {size} bytes, which is too many")


@contextlib.contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn errors about unreadable content in the `with` body into one that names `folder`."""
    try:
        yield
    except _OF_CONTENT as error:
        text = " ".join(str(error).split())[:500]
        raise ValueError(
            f"The checkpoint {str(folder)!r} cannot be read ({type(error).__name__}: {text}). Its "
            "files are damaged or were changed. Give an older `step`, or put it back from a backup."
        ) from error
