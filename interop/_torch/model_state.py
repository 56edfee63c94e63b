"""What the model states of DeepSpeed hold: shapes, buffers, frozen parameters and tied names.

`param_shapes` lists the parameters of each group in the order of the flat tensors. If it lists them
in another order, every size may still add up. Stages 1 and 2 also store the model itself, so some
elements of each parameter, of each process that holds some, are compared with it. Stage 3 stores
only the names of the model's parameters, and the order of each group must be theirs. Two of its
shapes that were exchanged do not show in the files.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxzero._text import shown
from jaxzero._warnings import warn
from jaxzero.interop._tensors import (
    Checkpoint,
    LazyTensor,
    by_plain_name,
    concatenate,
    plain_name,
)

from .torch_file import are_sizes, read_torch_file
from .zero_partitions import Fragments, Rank, Shape, called

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


def check_global_steps(models: Sequence[Path], states: Sequence[Mapping[str, Any]]) -> None:
    """Check that the model states of all processes are of one step.

    Args:
        models: their files.
        states: what they hold.

    Raises:
        ValueError: two of them have different steps.
    """
    first = states[0].get("global_steps")
    for file, state in zip(models, states, strict=True):
        step = state.get("global_steps")
        if type(step) is type(first) is int and step != first:
            raise ValueError(
                f"{str(file)!r} is of step {step}, but {models[0].name} of step {first}. The files "
                "belong to different checkpoints: copy those of one."
            )


def check_optimizer_step(stage: int, model: Path, state: Mapping[str, Any], rank: Rank) -> None:
    """Compare the step of a model state with that of the optimizer states beside it.

    The optimizer may have taken fewer steps, if the run once loaded a checkpoint without its
    optimizer. In stages 1 and 2 that is no question, since parameters are compared with the model.
    In stage 3 the files may also be of two checkpoints, so there it is a warning.

    Args:
        stage: of ZeRO.
        model: file of a model state.
        state: what it holds.
        rank: an optimizer state, whose steps are those of all (`check_ranks`).

    Raises:
        ValueError: the optimizer has taken more steps than the run.
    """
    run, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if type(run) is not int or type(skipped) is not int or not rank.steps:
        return
    taken = max(rank.steps)
    what = f"{str(rank.file)!r} is of an optimizer's step {shown(taken)}, but {model.name} of step"
    if taken > run:
        raise ValueError(
            f"{what} {run}. The files belong to different checkpoints: copy those of one."
        )
    if stage == 3 and taken != run - skipped:
        after = f", of which {skipped} were skipped" if skipped else ""
        warn(
            f"{what} {run}{after}. If the run did not restart its optimizer, the files belong to "
            "different checkpoints: then buffers and frozen parameters, which are in the model "
            "states, are those of another step. Copy the files of one checkpoint."
        )


def read_model_state(
    file: Path, records: Collection[str], *, merged: bool = False
) -> Mapping[str, Any]:
    """Read a model state.

    `merged` is for universal checkpoints. If those are of a pipeline, which writes its layers to
    other files, `module` is None; it becomes an empty dict.
    """
    state = read_torch_file(file, records=records)
    if merged and isinstance(state, Mapping) and state.get("module", state) is None:
        state = {**state, "module": {}}
    if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
        raise ValueError(f"{str(file)!r} has no `module`, so it is not a DeepSpeed model state.")
    return _with_plain_names(file, state)


def _with_plain_names(file: Path, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove wrappers from names, which `module` and `param_shapes` do not have alike."""
    plain = dict(state)
    for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
        if isinstance(held := state.get(key), Mapping):
            plain[key] = by_plain_name(held, f"`{key}` of {str(file)!r}")
    shared, buffers = state.get("shared_params"), state.get("buffer_names")
    if isinstance(shared, Mapping):
        plain["shared_params"] = {plain_name(k): plain_name(v) for k, v in shared.items()}
    if isinstance(buffers, list | tuple):
        plain["buffer_names"] = [plain_name(name) for name in buffers]
    return plain


def with_aliases(
    checkpoint: Checkpoint, state: Mapping[str, Any], trained: Collection[str], *, cut: bool = False
) -> Checkpoint:
    """Add the second names of tied parameters.

    Args:
        checkpoint: all other tensors.
        state: a model state.
        trained: names of parameters that have optimizer state.
        cut: the model state may hold parts of tensors only, because of tensor parallelism.

    Raises:
        ValueError: such a name has a shape or elements of its own.
    """
    shared = state.get("shared_params") or {}
    aliases = {name: other for name, other in shared.items() if other in checkpoint.tensors}
    module = state["module"]
    for name, other in aliases.items():
        tied, held = checkpoint.tensors[other], module.get(name)
        stored = isinstance(held, LazyTensor) and held.size > 0  # stage 3 stores empty tensors
        differs = stored and not cut and held.shape != tied.shape
        if name != other and (name in trained or differs):
            raise ValueError(
                f"`shared_params` in {str(checkpoint.path)!r} says that {shown(name)} is "
                f"{shown(other)}, but it has a shape or elements of its own. Copy the checkpoint "
                "again."
            )
    tied = {name: checkpoint.tensors[other] for name, other in aliases.items()}
    tensors = {**checkpoint.tensors, **tied}
    return dataclasses.replace(checkpoint, tensors=tensors, aliases=aliases)


def tensors_of(state: Mapping[str, Any], *, leaving_out: Collection[str]) -> dict[str, LazyTensor]:
    """Unpartitioned tensors of a model state: buffers, and parameters without optimizer state."""
    return {
        name: called(name, value)
        for name, value in state["module"].items()
        if isinstance(value, LazyTensor) and name not in leaving_out
    }


def untrained_of_stage_3(
    states: Sequence[Mapping[str, Any]], directory: Path
) -> dict[str, LazyTensor]:
    buffers = set(states[0].get("buffer_names") or ())
    others = set(states[0]["module"]) - buffers  # stage 3 stores empty tensors for parameters
    tensors = tensors_of(states[0], leaving_out=others)
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        shape = checked_shape(name, shape, directory)
        parts = [state["frozen_param_fragments"][name] for state in states]
        size = math.prod(shape)
        piece = -(-size // len(parts))
        if any(not isinstance(part, LazyTensor) or part.shape != (piece,) for part in parts):
            raise ValueError(
                f"The processes do not hold {piece} elements each of {shown(name)} in "
                f"{str(directory)!r}, but its shape is {shape}. Files are missing or belong to "
                "different checkpoints."
            )
        whole = concatenate([called(name, part) for part in parts], 0)
        tensors[name] = whole.narrow(0, 0, size).reshape(shape)
    return tensors
