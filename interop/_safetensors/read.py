"""Find the safetensors files that make up a checkpoint, and list their tensors.

The format is that of https://github.com/huggingface/safetensors.
"""

import re
from pathlib import Path

from jaxzero._text import escaped, first_names, shown
from jaxzero.interop._tensors import FileTensor, read_index

from .header import read_header

SINGLE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"  # maps each tensor to one of several files
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")


def index_in(path: Path) -> Path | None:
    """Return the index file to read in a directory; None if there is none.

    That is the file `INDEX`. Without it, and without the model in one file (`SINGLE`), it is the
    only index of another name; several such indices count as none.
    """
    if (path / INDEX).is_file():
        return path / INDEX
    if (path / SINGLE).is_file():
        return None
    others = [file for file in path.glob(f"*{INDEX_SUFFIX}") if file.is_file()]
    return others[0] if len(others) == 1 else None


def files_in(path: Path) -> list[Path]:
    """Return the safetensors files of a directory that has no index.

    These are `model.safetensors`; or, if it is not there, the only file of another name, or the
    files whose names number them as the parts of one checkpoint.
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


def tensors_in(path: Path | str) -> dict[str, FileTensor]:
    """List the tensors of a safetensors checkpoint, reading headers only.

    For other formats see `open_checkpoint`.

    Args:
        path: a safetensors file, an index that lists several, or a directory. A directory holds
            `model.safetensors`, or an index and the files that it lists; or else one file of
            another name, or one set of numbered parts.

    Raises:
        ValueError: there is no safetensors checkpoint, or several; a file of it is missing,
            truncated or broken, a dtype is not supported, or the index does not match the files;
            or there is a model in one file beside an index that lists other files.
    """
    return tensors_and_aliases(path)[0]


def tensors_and_aliases(path: Path | str) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """List the tensors of a safetensors checkpoint, and the other names of tied weights.

    `safetensors.torch.save_model` writes a tied weight once, and its other names as metadata.

    Returns:
        Name -> tensor, as from `tensors_in`; and other name of a tied weight -> name of its tensor.
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
    tensors: dict[str, FileTensor] = {}
    all_metadata: dict[str, str] = {}
    for file in files:
        entries, metadata = read_header(file)
        all_metadata |= metadata
        for name, dtype, shape, offset in entries:
            if name in tensors:
                raise ValueError(
                    f"Tensor {shown(name)} is in {escaped(tensors[name].file.name)} and in "
                    f"{escaped(file.name)} of {str(path)!r}. One of the files belongs to another "
                    "checkpoint: save the checkpoint again into an empty directory."
                )
            tensors[name] = FileTensor(
                file=file, name=name, shape=shape, dtype=dtype, offset=offset
            )
    aliases = {
        name: kept for name, kept in all_metadata.items() if kept in tensors and name not in tensors
    }
    return tensors, aliases
