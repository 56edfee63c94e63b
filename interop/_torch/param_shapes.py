"""The shapes that a DeepSpeed model state gives, and whether the flat tensors agree with them.

`param_shapes` lists the parameters of each group in the order of the flat tensors. If it lists them
in another order, every size may still add up. Stages 1 and 2 also store the model itself, so some
elements of each parameter, of each process that holds some, are compared with it. Stage 3 stores
only the names of the model's parameters, and the order of each group must be theirs. Two of its
shapes that were exchanged do not show in the files.
"""

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxzero._text import shown
from jaxzero.interop._tensors import LazyTensor, by_plain_name

from .partition import Fragments, Shape
from .sizes import are_sizes

_WINDOW = 16  # elements that are compared at the start, in the middle and at the end of a fragment


def param_shapes(
    files: Sequence[Path], states: Sequence[Mapping[str, Any]]
) -> list[dict[str, Shape]]:
    """Return name -> shape for the parameters of each group, in storage order.

    Args:
        files: files of the model states, for messages.
        states: model states of all processes that wrote one.

    Raises:
        ValueError: there are no shapes, one is malformed, or processes differ.
    """
    groups = [_groups_of(file, state) for file, state in zip(files, states, strict=True)]
    items = [[list(group.items()) for group in each] for each in groups]
    for file, each in zip(files, items, strict=True):
        if each != items[0]:
            raise ValueError(
                f"`param_shapes` of {str(file)!r} differs from that of {files[0].name}. The files "
                "belong to different checkpoints."
            )
    return groups[0]


def checked_shape(name: Any, shape: Any, where: Path) -> Shape:
    """Return a shape as a tuple.

    Raises:
        ValueError: it is not a shape, or the name is no text.
    """
    sizes = tuple(shape) if type(shape) is list else shape
    if type(name) is not str or not are_sizes(sizes) or math.prod(sizes) >= 2**60:
        raise ValueError(
            f"{shown(name)} in {str(where)!r} has the shape {shown(shape)}, which is not a list of "
            "sizes. Copy the checkpoint again."
        )
    return sizes


def check_order(
    file: Path, state: Mapping[str, Any], groups: Sequence[Mapping[str, Shape]]
) -> None:
    """Check that each group of stage 3 lists parameters in the order of the model.

    Raises:
        ValueError: it does not, or the model has no parameter of a name.
    """
    position = {name: number for number, name in enumerate(state["module"])}
    for group in groups:
        for name in group:
            if name not in position:
                raise _not_in_model(file, name)
        for name, after in itertools.pairwise(group):
            if position[name] > position[after]:
                raise ValueError(
                    f"`param_shapes` of {str(file)!r} lists {shown(name)} before {shown(after)}, "
                    "but the model has them in the other order, so it is not clear which elements "
                    "are whose. Copy the checkpoint again; if the optimizer did get parameters in "
                    "that order, convert the checkpoint with DeepSpeed's `ds_to_universal.py`."
                )


def check_values(
    file: Path,
    state: Mapping[str, Any],
    trained: Mapping[str, LazyTensor],
    fragments: Fragments,
) -> None:
    """Check that some elements of each fragment are those of the model that stages 1 and 2 store.

    Raises:
        ValueError: they differ, shapes do, or the model lacks a parameter.
    """
    for name in state.get("frozen_param_shapes") or {}:
        if name not in state["module"]:
            raise _not_in_model(file, name)
    for name, tensor in trained.items():
        held = state["module"].get(name)
        if not isinstance(held, LazyTensor):
            raise _not_in_model(file, name)
        if held.shape != tensor.shape:
            raise ValueError(
                f"{shown(name)} has shape {tensor.shape} in `param_shapes` of {str(file)!r}, but "
                f"{held.shape} in the model there. Copy the checkpoint again."
            )
        flat, model = (each.reshape((each.size,)) for each in (tensor, held))
        for start in _starts([fragment.size for fragment in fragments[name]]):
            window = (slice(start, start + _WINDOW),)
            with np.errstate(over="ignore", invalid="ignore"):
                cast = flat[window].astype(held.dtype)
            if not np.array_equal(cast.astype(float), model[window].astype(float), equal_nan=True):
                raise ValueError(
                    f"{shown(name)} in the flat tensors of {str(file.parent)!r} differs from the "
                    f"model in {file.name}, from element {start} on. Sizes or the order in "
                    "`param_shapes` are wrong, or the files belong to different checkpoints: copy "
                    "them again."
                )


def _starts(sizes: Sequence[int]) -> list[int]:
    """First elements of the windows of a parameter: three for each of its fragments."""
    found, begin = {0}, 0
    for size in sizes:
        middle, last = (max(0, each - _WINDOW) for each in (size // 2, size))
        found |= {begin, begin + middle, begin + last}
        begin += size
    return sorted(found)


def _not_in_model(file: Path, name: str) -> ValueError:
    return ValueError(
        f"{str(file)!r} gives {shown(name)} a shape, but the model there (`module`) has no such "
        "tensor, so it cannot be checked. Copy the checkpoint again."
    )


def _groups_of(file: Path, state: Mapping[str, Any]) -> list[dict[str, Shape]]:
    given = state.get("param_shapes")
    given = [given] if isinstance(given, Mapping) else given
    if not isinstance(given, list) or not all(isinstance(group, Mapping) for group in given):
        raise ValueError(
            f"{str(file)!r} has no `param_shapes`, which describes the contents of the flat "
            "tensors. It was not written by ZeRO."
        )
    where = f"`param_shapes` of {str(file)!r}"
    groups = [
        {
            name: checked_shape(name, shape, file)
            for name, shape in by_plain_name(group, where).items()
        }
        for group in given
    ]
    counts = collections.Counter(name for group in groups for name in group)
    twice, count = next(iter(counts.most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(
            f"`param_shapes` of {str(file)!r} has {shown(twice)} in two groups. Copy the "
            "checkpoint again."
        )
    return groups
