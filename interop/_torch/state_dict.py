"""Read state dicts of models and optimizers that `torch.save` wrote, in one file or several."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxzero._text import escaped, first_names, shown
from jaxzero.interop._tensors import (
    AdamMoments,
    Checkpoint,
    FileTensor,
    LazyTensor,
    by_plain_name,
    read_index,
)

from .moments import Origin, moments_of
from .pickle_machine import Record
from .torch_file import read_torch_file

WEIGHTS = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"  # maps each tensor to one of several files
_EXTRA = "_extra_state"  # what a module adds to its state dict, of any type
_MAX_DEPTH, _MAX_PATH = 16, 1000  # of dicts that contain a state dict; characters of a dotted path


def open_torch_file(file: Path, key: str | None, records: Collection[str]) -> Checkpoint:
    """Open a `.pt`, `.pth`, `.bin` or `.ckpt` file; it may also hold the state of an optimizer."""
    content = read_torch_file(file, records=records)
    held = _state_dict(content, file, key)
    tensors = _named(held, file)
    optimizers = _optimizers_in(content)
    moments = functools.partial(_only_moments, optimizers, tensors, str(file))
    return Checkpoint(
        path=file,
        form="torch.save",
        tensors=tensors,
        moments=moments if optimizers else None,
        in_order=True,
    )


def open_torch_parts(directory: Path, records: Collection[str]) -> Checkpoint:
    """Open a checkpoint of `torch.save` in parts.

    `directory` is an index of the parts, or a directory that holds an index or `pytorch_model.bin`.
    """
    is_directory = directory.is_dir()
    index = directory / INDEX if is_directory else directory
    directory = index.parent
    if not index.is_file():
        file = directory / WEIGHTS
        tensors = _named(_state_dict(read_torch_file(file, records=records), file), file)
        return Checkpoint(path=directory, form="torch.save", tensors=tensors, in_order=True)
    tensors: dict[str, LazyTensor] = {}
    file_of = read_index(index, "torch.save", was_named=not is_directory)
    missing = [name for name in sorted(set(file_of.values())) if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"{str(directory)!r} lacks {first_names(missing)}, which {index.name} names. Copy or "
            "download the checkpoint again."
        )
    file_of = by_plain_name(file_of, repr(str(index)))
    for file in sorted({directory / name for name in file_of.values()}):
        held = _named(_state_dict(read_torch_file(file, records=records), file), file)
        absent = [name for name in file_of if file_of[name] == file.name and name not in held]
        if absent:
            raise ValueError(
                f"{str(index)!r} says that tensor {shown(absent[0])} is in {escaped(file.name)}, "
                "which does not hold it. Copy or download the checkpoint again."
            )
        strange = [name for name in held if file_of.get(name) != file.name]
        if strange:
            raise ValueError(
                f"{str(file)!r} holds tensor {shown(strange[0])}, which {index.name} does not look "
                "for there. Copy or download the checkpoint again."
            )
        tensors |= held
    return Checkpoint(path=directory, form="torch.save", tensors=tensors)


def read_optimizer(
    file: Path,
    checkpoint: Checkpoint,
    names: Sequence[str] | None,
    origin: Origin,
    records: Collection[str],
) -> AdamMoments:
    """Read a model's moments from a file with an optimizer's state dict; see `moments_of`."""
    optimizers = _optimizers_in(read_torch_file(file, records=records))
    if not optimizers:
        raise ValueError(f"{str(file)!r} holds no state of an optimizer. Give one that does.")
    return _only_moments(optimizers, checkpoint.tensors, repr(str(file)), names, origin)


def _only_moments(
    optimizers: Sequence[tuple[str, Mapping[str, Any]]],
    tensors: Mapping[str, LazyTensor],
    where: str,
    names: Sequence[str] | None = None,
    origin: Origin | None = None,
) -> AdamMoments:
    if len(optimizers) > 1:
        paths = first_names([path for path, _ in optimizers])
        raise ValueError(
            f"{where} holds {len(optimizers)} optimizers, {paths}, and nothing says which trained "
            "the model that is read. Save each model with its optimizer in a file of its own, and "
            "open that. Weights can be read without it."
        )
    return moments_of(optimizers[0][1], tensors, where, names, origin)


def _state_dict(content: Any, file: Path, key: str | None = None) -> Mapping[str, Any]:
    """Return the dict of tensors at the dotted path `key` in a file; None: the only such dict."""
    dicts = _dicts_of_tensors(content, file)
    if key is not None and key not in dicts:
        raise ValueError(
            f"`key` must be one of {first_names(list(dicts)) or 'none'}, which are the dicts of "
            f"tensors in {str(file)!r}; got {key!r}."
        )
    if key is not None:
        return dicts[key]
    if len(dicts) == 1:
        return next(iter(dicts.values()))
    if not dicts and _optimizers_in(content):
        raise ValueError(
            f"{str(file)!r} holds the state of an optimizer, and no model. Open the model with it: "
            f"`open_checkpoint(model, optimizer={str(file)!r})`. In the directory of a model, "
            "`optimizer.pt` and `optimizer.bin` are found: then give the directory."
        )
    if not dicts:
        raise ValueError(f"{str(file)!r} holds no dict of tensors. Save `model.state_dict()`.")
    top = " '' is the dict of the file itself." if "" in dicts else ""
    raise ValueError(
        f"{str(file)!r} holds several dicts of tensors: {first_names(list(dicts))}. Name that of "
        f"the model with `key=`.{top}"
    )


def _dicts_of_tensors(content: Any, file: Path) -> dict[str, Mapping[str, Any]]:
    """Return dotted path -> dict, for all dicts of tensors in a file that are not an optimizer's.

    A dict that can be reached by several paths is searched only once. Otherwise nested dicts, each
    of which contains the next one twice, would have exponentially many paths.
    """
    dicts: dict[str, Mapping[str, Any]] = {}
    searched: set[int] = set()
    left = [("", content, 0)]
    while left:
        path, held, depth = left.pop()
        if not isinstance(held, Mapping) or _is_optimizer(held):
            continue
        if any(isinstance(value, LazyTensor) for value in held.values()):
            if path in dicts:
                raise ValueError(
                    f"{str(file)!r} holds two dicts of tensors at {shown(path)}. Save only the "
                    "state dict of the model."
                )
            dicts[path] = held
        if id(held) not in searched:  # also below one with tensors, such as a score beside a model
            searched.add(id(held))
            inner = [(key, value) for key, value in held.items() if isinstance(value, Mapping)]
            if depth == _MAX_DEPTH and (inner or path not in dicts):
                raise ValueError(
                    f"{str(file)!r} holds dicts nested deeper than {_MAX_DEPTH}, at "
                    f"{shown(path)}. Save only the state dict of the model."
                )
            # Reversed: the last is taken first, and dicts keep the order of the file.
            left += [(_joined(path, key, file), value, depth + 1) for key, value in inner][::-1]
    return dicts


def _joined(path: str, key: Any, file: Path) -> str:
    text = key if isinstance(key, str) else shown(key)
    if len(path) + len(text) > _MAX_PATH:
        raise ValueError(
            f"{str(file)!r} holds a dict at {shown(path)}, {shown(text)}, a path of more than "
            f"{_MAX_PATH} characters. Save only the state dict of the model."
        )
    return f"{path}.{text}" if path else text


def _named(held: Mapping[Any, Any], file: Path) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for key, value in held.items():
        name = str(key) if type(key) is int else key
        if type(name) is not str or name in tensors:
            raise ValueError(
                f"{str(file)!r} has a tensor of the name {shown(key)}, but names must be different "
                "texts. Rename it in the state dict and save that again."
            )
        if isinstance(value, FileTensor):
            tensors[name] = dataclasses.replace(value, name=name)
        elif value is not None and not name.endswith(_EXTRA):
            kind = value.name if isinstance(value, Record) else type(value).__name__
            raise ValueError(
                f"{shown(name)} in {str(file)!r} is not a tensor but a {escaped(kind)}. "
                "Remove it from the state dict and save that again."
            )
    return by_plain_name(tensors, repr(str(file)))


def _is_optimizer(content: Mapping) -> bool:
    return {"state", "param_groups"} <= content.keys()


def _optimizers_in(content: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """List (path, state dict) of the optimizers at the top level of a file or one level down."""
    if not isinstance(content, Mapping):
        return []
    if _is_optimizer(content):
        return [("", content)]
    optimizers: dict[int, tuple[str, Mapping[str, Any]]] = {}  # by id: one at two paths counts once
    for key, value in content.items():
        path = key[:_MAX_PATH] if isinstance(key, str) else shown(key)
        in_list = isinstance(value, list)  # Lightning keeps a list of optimizers
        for number, each in enumerate(value if in_list else [value]):
            if isinstance(each, Mapping) and _is_optimizer(each):
                optimizers.setdefault(id(each), (f"{path}[{number}]" if in_list else path, each))
    return list(optimizers.values())
