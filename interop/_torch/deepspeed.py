"""Open checkpoints of DeepSpeed: ZeRO stages 1 to 3, and universal checkpoints.

The directory of a step holds `*_model_states.pt` (buffers, frozen parameters, and the shapes of
all parameters) and, for each process, `zero_pp_rank_*_optim_states.pt` (see `zero_partitions`). A
universal checkpoint instead has a folder with unpartitioned tensors for every parameter.

https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxzero._text import shown
from jaxzero.interop._tensors import (
    AdamMoments,
    Checkpoint,
    LazyTensor,
    concatenate,
    gather_moments,
    read_step,
)

from .param_shapes import check_order, check_values, checked_shape, param_shapes
from .torch_file import read_torch_file
from .zero_partitions import MOMENTS, called, fragments_of, join, read_ranks

LATEST = ("latest", "latest_universal")
_MAX_TAG_BYTES = 4096  # of the name of a directory
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_OTHER_PARALLELISM = ("layer_", "expert_")  # prefixes of files of pipeline and expert parallelism


def is_deepspeed(directory: Path) -> bool:
    """Return True if a directory is, or contains, a checkpoint of DeepSpeed."""
    return any((directory / name).is_file() for name in LATEST) or any(
        _MODEL.fullmatch(path.name) for path in directory.iterdir()
    )


def open_deepspeed(directory: Path, records: Collection[str]) -> Checkpoint:
    """Open a checkpoint that `engine.save_checkpoint` or `ds_to_universal` wrote.

    Args:
        directory: directory of a run, whose `latest` file names the newest checkpoint; or the
            directory of one checkpoint.
        records: full names of classes that a pickle may name; they are not imported.

    Raises:
        ValueError: a file is missing, truncated or of another checkpoint, or sizes disagree.
        NotImplementedError: tensors are also partitioned by tensor, pipeline or expert parallelism.
    """
    directory = _tagged(directory)
    models = _ranked(directory, _MODEL)
    if not models:
        raise ValueError(
            f"{str(directory)!r} has no `*_model_states.pt`. Give the directory that holds the "
            "`latest` file of a DeepSpeed run."
        )
    states = [_model_state(file, records) for file in models]
    if (directory / "zero").is_dir():
        return _open_universal(directory, states[0], records)
    files = _ranked(directory, _OPTIMIZER)
    if not files:
        raise ValueError(
            f"{str(directory)!r} has no `zero_pp_rank_*_optim_states.pt`, so it was saved without "
            f"ZeRO: its weights are the entry 'module' of {models[0].name}. Open that file, with "
            "`key='module'`."
        )
    return _open_zero(directory, models, states, files, records)


def _tagged(directory: Path) -> Path:
    for name in LATEST:
        if (directory / name).is_file():
            with (directory / name).open("rb") as opened:
                tag = opened.read(_MAX_TAG_BYTES).decode(errors="replace").strip()
            inside = Path(tag).name == tag and tag not in ("", "..") and tag.isprintable()
            if not inside or not (directory / tag).is_dir():
                raise ValueError(
                    f"{str(directory / name)!r} names {shown(tag)}, which is not a directory "
                    "beside it. Copy that directory too, or give the directory of another step."
                )
            return directory / tag
    return directory


def _ranked(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """List the files of all processes in the order of ranks."""
    found: dict[int, Path] = {}
    for path in directory.iterdir():
        if path.name.startswith(_OTHER_PARALLELISM):
            raise NotImplementedError(
                f"{str(path)!r} was written by pipeline or expert parallelism. Convert the "
                "checkpoint with DeepSpeed's `ds_to_universal.py` and open the result."
            )
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise NotImplementedError(
                f"{str(path)!r} was written by tensor parallelism. Convert the checkpoint with "
                "DeepSpeed's `ds_to_universal.py` and open the result."
            )
        rank = int(match[1] or 0)
        if rank in found:
            raise ValueError(
                f"{str(path)!r} and {found[rank].name!r} are both of rank {rank}. Files of two "
                "checkpoints lie in one directory: keep those of one."
            )
        found[rank] = path
    missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
    if missing:
        raise ValueError(
            f"{str(directory)!r} has files of rank {max(found)}, but none like "
            f"{found[max(found)].name!r} of rank {missing[0]}. Copy the files of all processes."
        )
    return [found[rank] for rank in sorted(found)]


def _model_state(file: Path, records: Collection[str]) -> Mapping[str, Any]:
    state = read_torch_file(file, records=records)
    if not isinstance(state, Mapping) or not isinstance(state.get("module"), Mapping):
        raise ValueError(f"{str(file)!r} has no `module`, so it is not a DeepSpeed model state.")
    return state


def _open_zero(
    directory: Path,
    models: list[Path],
    states: list[Mapping[str, Any]],
    files: list[Path],
    records: Collection[str],
) -> Checkpoint:
    stage, ranks = read_ranks(files, records)
    groups = param_shapes(models, states)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    fragments = fragments_of(stage, groups, ranks)
    if stage == 3:
        tensors = _untrained_of_stage_3(states, directory)
    else:
        tensors = _tensors_of(states[0], leaving_out=shapes)

    def of(kind: str) -> dict[str, LazyTensor]:
        return {name: join(name, kind, shape, fragments, ranks) for name, shape in shapes.items()}

    def moments(_: Sequence[str] | None = None) -> AdamMoments:
        steps = set[int]().union(*(rank.steps for rank in ranks))
        if len(steps) != 1:
            raise ValueError(
                f"The processes that wrote {str(directory)!r} were at different steps: "
                f"{sorted(steps)}. The files belong to different checkpoints."
            )
        kinds = {kind: of(kind) for kind in MOMENTS}
        return AdamMoments(step=steps.pop(), **kinds)

    trained = of("fp32")
    if stage == 3:
        check_order(models[0], states[0], groups)
    else:
        check_values(models[0], states[0], trained)
    has_moments = all(kind in rank.flat for rank in ranks for kind in MOMENTS)
    return _with_aliases(
        Checkpoint(
            path=directory,
            form=f"DeepSpeed ZeRO-{stage}",
            tensors=tensors | trained,
            moments=moments if has_moments else None,
        ),
        states[0],
        trained,
    )


def _with_aliases(
    checkpoint: Checkpoint, state: Mapping[str, Any], trained: Collection[str]
) -> Checkpoint:
    shared = state.get("shared_params") or {}
    aliases = {name: other for name, other in shared.items() if other in checkpoint.tensors}
    module = state["module"]
    for name, other in aliases.items():
        tied, held = checkpoint.tensors[other], module.get(name)
        stored = isinstance(held, LazyTensor) and held.size > 0  # stage 3 stores empty tensors
        if name != other and (name in trained or (stored and held.shape != tied.shape)):
            raise ValueError(
                f"`shared_params` in {str(checkpoint.path)!r} says that {shown(name)} is "
                f"{shown(other)}, but it has a shape or elements of its own. Copy the checkpoint "
                "again."
            )
    tied = {name: checkpoint.tensors[other] for name, other in aliases.items()}
    tensors = {**checkpoint.tensors, **tied}
    return dataclasses.replace(checkpoint, tensors=tensors, aliases=aliases)


def _tensors_of(state: Mapping[str, Any], *, leaving_out: Collection[str]) -> dict[str, LazyTensor]:
    """Unpartitioned tensors of a model state: buffers, and parameters without optimizer state."""
    return {
        name: called(name, value)
        for name, value in state["module"].items()
        if isinstance(value, LazyTensor) and name not in leaving_out
    }


def _untrained_of_stage_3(
    states: list[Mapping[str, Any]], directory: Path
) -> dict[str, LazyTensor]:
    buffers = set(states[0].get("buffer_names") or ())
    others = set(states[0]["module"]) - buffers  # stage 3 stores empty tensors for parameters
    tensors = _tensors_of(states[0], leaving_out=others)
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


def _open_universal(
    directory: Path, state: Mapping[str, Any], records: Collection[str]
) -> Checkpoint:
    folders = sorted(path for path in (directory / "zero").iterdir() if path.is_dir())
    tensors = {folder.name: _whole(folder, "fp32", records) for folder in folders}
    tensors = _tensors_of(state, leaving_out=tensors) | tensors
    trained = [
        folder for folder in folders if any((folder / f"{kind}.pt").exists() for kind in MOMENTS)
    ]

    def moments(_: Sequence[str] | None = None) -> AdamMoments:
        found = {
            folder.name: {key: _whole(folder, key, records) for key in MOMENTS}
            | {"step": _content(folder / "step.pt", records)}
            for folder in trained
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return gather_moments(found, shapes, repr(str(directory)), read_step)

    return _with_aliases(
        Checkpoint(
            path=directory,
            form="DeepSpeed universal",
            tensors=tensors,
            moments=moments if trained else None,
        ),
        state,
        [folder.name for folder in trained],
    )


def _whole(folder: Path, kind: str, records: Collection[str]) -> LazyTensor:
    held = _content(folder / f"{kind}.pt", records)
    if not isinstance(held, LazyTensor):
        raise ValueError(
            f"{str(folder / kind)!r}.pt holds no tensor. Convert the checkpoint again."
        )
    return called(f"{folder.name}.{kind}", held)


def _content(file: Path, records: Collection[str]) -> Any:
    if not file.exists():
        raise ValueError(f"{str(file.parent)!r} lacks {file.name}. Convert the checkpoint again.")
    held = read_torch_file(file, records=records)
    return held["param"] if isinstance(held, Mapping) and "param" in held else held
