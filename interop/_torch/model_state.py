"""What the model states of DeepSpeed hold: buffers, frozen parameters and names of tied ones."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxzero._text import shown
from jaxzero.interop._tensors import (
    Checkpoint,
    LazyTensor,
    by_plain_name,
    concatenate,
    plain_name,
)

from .param_shapes import checked_shape
from .torch_file import read_torch_file
from .zero_partitions import called


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
