"""Read the model states of DeepSpeed: shapes, buffers, frozen parameters and tied names.

`param_shapes` lists the parameters of each group in the order of the flat tensors. If it listed
them in another order, every size might still add up. Stages 1 and 2 also store the model itself, so
a few elements of every fragment of a parameter are compared with it. Stage 3 stores only the names
of the model's parameters, so each group is required to be in the order of these names. If the
shapes of two parameters were exchanged in `param_shapes`, nothing else in the files of stage 3
would show it.
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
    called,
    concatenate,
    plain_name,
)

from .torch_file import are_sizes, read_torch_file
from .zero_partitions import AGAIN, OTHERS, Fragments, Rank, Shape, wrong

_WINDOW = 16  # elements that are compared at the start, in the middle and at the end of a fragment


class ModelState:
    """The model state that one process wrote; names are those without PyTorch's wrappers.

    Args:
        file: the file.
        records: full names of classes that a pickle may name; they are not imported.
        merged: True for a universal checkpoint. Pipeline parallelism writes layers to other files
            and None as `module`, which is then read as an empty dict.

    Attributes:
        module: the model's state dict; stage 3 stores empty tensors for parameters.
        frozen: name of a frozen parameter -> its shape.
        fragments: name of a frozen parameter -> this process's part of it.
        shared: second name of a tied parameter -> the name under which its elements are stored.
        buffers: names of buffers.
    """

    def __init__(self, file: Path, records: Collection[str], *, merged: bool = False):
        content = read_torch_file(file, records=records)
        held = content if isinstance(content, Mapping) else {}
        module = held.get("module")
        module = {} if merged and module is None and "module" in held else module
        if not isinstance(module, Mapping):
            what = "has no `module`, so it is not a DeepSpeed model state"
            raise wrong(file, what, "Copy the directory of the checkpoint again.")
        self.file, self._content = file, held
        self.module = self._plain("module", module)
        self.frozen = self._plain("frozen_param_shapes", held.get("frozen_param_shapes"))
        self.fragments = self._plain("frozen_param_fragments", held.get("frozen_param_fragments"))
        shared, buffers = held.get("shared_params"), held.get("buffer_names")
        shared = shared.items() if isinstance(shared, Mapping) else ()
        self.shared = {plain_name(name): plain_name(other) for name, other in shared}
        self.buffers = {plain_name(name) for name in buffers or ()}

    def _plain(self, key: str, held: Any) -> dict[str, Any]:
        return by_plain_name(held or {}, f"`{key}` of {str(self.file)!r}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the entry `key` of the file, or `default`."""
        return self._content.get(key, default)

    def tensors(self, *, leaving_out: Collection[str]) -> dict[str, LazyTensor]:
        """Return the tensors in `module` whose names are not in `leaving_out`.

        If trained parameters are left out, the result holds buffers and untrained parameters.
        """
        return {
            name: called(name, value)
            for name, value in self.module.items()
            if isinstance(value, LazyTensor) and name not in leaving_out
        }

    def not_there(self, name: str) -> ValueError:
        """Return the error for a parameter `name` that has a shape in this file but no tensor."""
        what = f"gives {shown(name)} a shape, but the model there (`module`) has no such tensor, so"
        return wrong(self.file, f"{what} it cannot be checked", AGAIN)


def param_shapes(states: Sequence[ModelState]) -> list[dict[str, Shape]]:
    """Return name -> shape for the parameters of each group, in storage order.

    All processes must state the same shapes in the same order.
    """
    groups = [_groups_of(state) for state in states]
    items = [[list(group.items()) for group in each] for each in groups]
    for state, each in zip(states, items, strict=True):
        if each != items[0]:
            raise ValueError(
                f"`param_shapes` of {str(state.file)!r} differs from that of {states[0].file.name}."
                f" {OTHERS}"
            )
    return groups[0]


def _groups_of(state: ModelState) -> list[dict[str, Shape]]:
    given = state.get("param_shapes")
    given = [given] if isinstance(given, Mapping) else given
    if not isinstance(given, list) or not all(isinstance(group, Mapping) for group in given):
        what = "has no `param_shapes`, which describes the contents of the flat tensors"
        raise wrong(state.file, what, "It was not written by ZeRO.")
    where = f"`param_shapes` of {str(state.file)!r}"
    groups = [
        {name: _shape(name, x, state.file) for name, x in by_plain_name(group, where).items()}
        for group in given
    ]
    counts = collections.Counter(name for group in groups for name in group)
    twice, count = next(iter(counts.most_common(1)), ("", 0))
    if count > 1:
        raise wrong(state.file, f"has {shown(twice)} in two groups of `param_shapes`", AGAIN)
    return groups


def _shape(name: Any, shape: Any, where: Path) -> Shape:
    sizes = tuple(shape) if type(shape) is list else shape
    if type(name) is not str or not are_sizes(sizes) or math.prod(sizes) >= 2**60:
        raise ValueError(
            f"{shown(name)} in {str(where)!r} has the shape {shown(shape)}, which is not a list of "
            f"sizes. {AGAIN}"
        )
    return sizes


def check_order(state: ModelState, groups: Sequence[Mapping[str, Shape]]) -> None:
    """Raise `ValueError` unless each group of stage 3 has its parameters in the model's order."""
    position = {name: number for number, name in enumerate(state.module)}
    for group in groups:
        for name in group:
            if name not in position:
                raise state.not_there(name)
        for name, after in itertools.pairwise(group):
            if position[name] > position[after]:
                raise ValueError(
                    f"`param_shapes` of {str(state.file)!r} lists {shown(name)} before "
                    f"{shown(after)}, but the model has them in the other order, so it is not "
                    "clear which elements are whose. Copy the checkpoint again; if the optimizer "
                    "did get parameters in that order, convert the checkpoint with DeepSpeed's "
                    "`ds_to_universal.py`."
                )


def check_values(
    state: ModelState, trained: Mapping[str, LazyTensor], fragments: Fragments
) -> None:
    """Raise `ValueError` unless trained parameters equal the model that stages 1 and 2 also store.

    Some elements of each fragment are compared.

    Args:
        state: the model state that holds the stored model.
        trained: parameters joined from the flat tensors, by name.
        fragments: where each parameter lies in the flat tensors.
    """
    file = state.file
    for name in state.frozen:
        if name not in state.module:
            raise state.not_there(name)
    for name, tensor in trained.items():
        held = state.module.get(name)
        if not isinstance(held, LazyTensor):
            raise state.not_there(name)
        if held.shape != tensor.shape:
            raise ValueError(
                f"{shown(name)} has shape {tensor.shape} in `param_shapes` of {str(file)!r}, but "
                f"{held.shape} in the model there. {AGAIN}"
            )
        flat, model = (each.reshape((each.size,)) for each in (tensor, held))
        for start in _starts([fragment.size for fragment in fragments[name]]):
            window = (slice(start, start + _WINDOW),)
            # Beyond the range of the model's dtype, a float32 weight is infinite in the model too.
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
    """Return the numbers of elements at which the compared windows of a parameter begin.

    `check_values` compares three short windows in each fragment; `sizes` has the fragments'
    numbers of elements.
    """
    starts, begin = {0}, 0
    for size in sizes:
        middle, last = (max(0, each - _WINDOW) for each in (size // 2, size))
        starts |= {begin, begin + middle, begin + last}
        begin += size
    return sorted(starts)


def check_global_steps(states: Sequence[ModelState]) -> None:
    """Raise `ValueError` unless the model states of all processes are of the same step."""
    first = states[0].get("global_steps")
    for state in states:
        step = state.get("global_steps")
        if type(step) is type(first) is int and step != first:
            what = f"is of step {step}, but {states[0].file.name} of step {first}"
            raise wrong(state.file, what, OTHERS)


def check_optimizer_step(stage: int, state: ModelState, rank: Rank) -> None:
    """Raise `ValueError` if the optimizer state is of a later step than the model state.

    The optimizer may have taken fewer steps than the run, if the run once loaded a checkpoint
    without its optimizer. In stage 3, fewer steps may also mean that the files are of two
    checkpoints, so there they give a warning. In stages 1 and 2, `check_values` would find that.
    """
    run, skipped = state.get("global_steps"), state.get("skipped_steps", 0)
    if type(run) is not int or type(skipped) is not int or not rank.steps:
        return
    taken = max(rank.steps)
    what = f"is of an optimizer's step {shown(taken)}, but {state.file.name} of step {run}"
    if taken > run:
        raise wrong(rank.file, what, OTHERS)
    if stage == 3 and taken != run - skipped:
        after = f", of which {skipped} were skipped" if skipped else ""
        warn(
            f"{str(rank.file)!r} {what}{after}. If the run did not restart its optimizer, the "
            "files belong to different checkpoints: then buffers and frozen parameters, which are "
            "in the model states, are those of another step. Copy the files of one checkpoint."
        )


def with_aliases(
    checkpoint: Checkpoint, state: ModelState, trained: Collection[str], *, cut: bool = False
) -> Checkpoint:
    """Add the second names of tied parameters to a checkpoint.

    Args:
        checkpoint: the checkpoint, without the second names.
        state: the model state that lists tied parameters.
        trained: names of the parameters that have optimizer state.
        cut: True if tensor parallelism cut the tensors of the model state, so that their shapes
            are not compared.
    """
    aliases = {name: other for name, other in state.shared.items() if other in checkpoint.tensors}
    for name, other in aliases.items():
        tied, held = checkpoint.tensors[other], state.module.get(name)
        # Stage 3 stores empty tensors for parameters: no shape to compare.
        stored = held if isinstance(held, LazyTensor) and held.size else tied
        if name != other and (name in trained or not cut and stored.shape != tied.shape):
            raise ValueError(
                f"`shared_params` in {str(checkpoint.path)!r} says that {shown(name)} is "
                f"{shown(other)}, but it has a shape or elements of its own. {AGAIN}"
            )
    tied = {name: checkpoint.tensors[other] for name, other in aliases.items()}
    tensors = {**checkpoint.tensors, **tied}
    return dataclasses.replace(checkpoint, tensors=tensors, aliases=aliases)


def untrained_of_stage_3(states: Sequence[ModelState]) -> dict[str, LazyTensor]:
    """Return buffers, and frozen parameters joined from the parts that the processes hold."""
    first = states[0]
    tensors = first.tensors(leaving_out=first.module.keys() - first.buffers)
    for name, given in first.frozen.items():
        shape = _shape(name, given, first.file)
        parts = [state.fragments[name] for state in states]
        size = math.prod(shape)
        piece = -(-size // len(parts))
        if any(not isinstance(part, LazyTensor) or part.shape != (piece,) for part in parts):
            raise ValueError(
                f"The processes do not hold {piece} elements each of {shown(name)} in "
                f"{str(first.file.parent)!r}, but its shape is {shape}. Files are missing or belong"
                " to different checkpoints."
            )
        whole = concatenate([called(name, part) for part in parts], 0)
        tensors[name] = whole.narrow(0, 0, size).reshape(shape)
    return tensors
