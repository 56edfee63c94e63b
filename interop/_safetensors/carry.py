"""Find and copy the files that a new checkpoint takes from its source: config, tokenizer, modules.

Nothing outside of the source directory is copied: a link in a downloaded checkpoint could otherwise
carry a private file into the next upload, or lead in a circle. One kind of link is followed: in the
cache of Hugging Face, files in `snapshots/<revision>` are links to files in `blobs`.
"""

import collections
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxzero._regular_file import read_regular
from jaxzero._text import matches
from jaxzero.interop._tensors import LazyTensor

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 2**26  # read whole into memory; real ones have some KB
# Patterns of the files and folders, besides weights and config, that are copied from `source`.
CARRIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "preprocessor_config.json",
    "sentence_bert_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "[0-9]_*",  # modules of sentence-transformers, such as 1_Pooling
)


@dataclasses.dataclass(frozen=True)
class Carried:
    """The files, besides weights, that a new checkpoint takes from its source.

    Attributes:
        files: path in the new directory -> file to copy, without `config.json`.
        config: the content of `config.json`; None if there is none.
    """

    files: Mapping[str, Path]
    config: dict[str, Any] | None

    def write(self, folder: Path, tensors: Mapping[str, LazyTensor]) -> None:
        """Copy the files into `folder`, and write the config.

        The entry `dtype` of the config becomes the dtype that most floating-point elements of
        `tensors` have.
        """
        for name, file in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
        if self.config is not None:
            dtype = _usual_dtype(tensors)
            keys = [key for key in ("dtype", "torch_dtype") if key in self.config and dtype]
            content = self.config | dict.fromkeys(keys, dtype)
            text = json.dumps(content, indent=2, sort_keys=True)
            (folder / _CONFIG).write_text(text + "\n")


def carried_from(source: Path) -> Carried:
    """Find the files to copy from the directory `source`, before anything is written."""
    if not source.is_dir():
        raise ValueError(
            f"`source` must be the directory of a checkpoint; {str(source)!r} is none. Leave it "
            "out to write weights alone."
        )
    roots = [source.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    files = {}
    for path in sorted(source.iterdir()):
        if matches(path.name, (_CONFIG, *CARRIED)):
            for file in _files_under(path):
                files[file.relative_to(source).as_posix()] = _regular(file, roots)
    config = files.pop(_CONFIG, None)
    return Carried(files, None if config is None else _read_config(config))


def _files_under(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            yield from _files_under(entry)
    else:
        yield path


def _regular(path: Path, roots: Sequence[Path]) -> Path:
    """Return the regular file that `path` is or links to; it must be inside one of `roots`.

    Raises:
        ValueError: it is a broken link, outside of the folders `roots`, or no regular file.
    """
    try:
        file = path.resolve(strict=True)
    except (FileNotFoundError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(
            f"{str(path)!r} is a symbolic link that leads to no file. Put the file in its place, "
            "or remove the link to save without it."
        ) from error
    if not any(file.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{str(path)!r} is a symbolic link to {str(file)!r}, outside of the checkpoint. Copy "
            "the file there in its place if it belongs to the checkpoint; if not, remove the link."
        )
    if not file.is_file():
        what = "a symbolic link to a folder" if file.is_dir() else "no regular file"
        raise ValueError(
            f"{str(path)!r} is {what}, which is not copied. Put a copy in its place, or remove it."
        )
    return file


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path, _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}). Correct or remove it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object. Correct or remove it.")
    return content


def _usual_dtype(tensors: Mapping[str, LazyTensor]) -> str | None:
    """Return the name of the dtype of most floating-point elements; None if there are none."""
    sizes: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        if jnp.issubdtype(tensor.dtype, jnp.floating):
            sizes[tensor.dtype.name] += tensor.size
    return next((dtype for dtype, _ in sizes.most_common(1)), None)
