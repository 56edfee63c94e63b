"""Checkpoints of DeepSpeed: ZeRO stages 1 to 3, and universal ones.

Each process of a run writes the part of the float32 parameters and of Adam's moments that it owns,
flat. How parameters lie in the flat parts differs:

- Stages 1 and 2 lay the parameters of a group end to end, and cut the whole into one piece for each
  process. `param_slice_mappings` says which part of which parameter a process has; older
  checkpoints leave it out, and the order is that of `param_shapes`.
- Stage 3 cuts every parameter into equal pieces, the last one padded; a process lays its pieces end
  to end, over several groups.
- A universal checkpoint has a folder with whole tensors for every parameter.

A parameter is a view (`_tensor`) of the pieces it lies in, so that a slice reads no others.

ZeRO (https://arxiv.org/abs/1910.02054); https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxzero.interop._checkpoint import AdamMoments, Checkpoint, gather_moments, read_step
from jaxzero.interop._tensor import LazyTensor, concatenate
from jaxzero.interop._torch_file import TorchTensor, read_torch_file
from jaxzero.interop._unpickle import Record

LATEST = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_KINDS = ("fp32", "exp_avg", "exp_avg_sq")


class _Fragment(NamedTuple):
    """A run of a parameter's elements in one flat tensor."""

    rank: int
    group: int
    start: int
    size: int


class _Rank(NamedTuple):
    """What one process wrote."""

    file: Path
    flat: dict[str, list[LazyTensor]]  # kind -> a flat tensor for each group
    steps: list[Any]
    slices: list[Mapping[str, Record]] | None


def is_deepspeed(directory: Path) -> bool:
    """Whether a directory looks like a checkpoint of DeepSpeed, or holds one."""
    return any((directory / name).is_file() for name in LATEST) or any(
        _MODEL.fullmatch(path.name) for path in directory.iterdir()
    )


def open_deepspeed(directory: Path, records: Collection[str]) -> Checkpoint:
    """Open what `engine.save_checkpoint` or `ds_to_universal` wrote.

    Args:
        directory: with a `latest` file, which names the newest checkpoint, or that checkpoint.
        records: as for `unpickle`.

    Raises:
        ValueError: a file is missing, cut short or of another checkpoint, or sizes disagree.
        NotImplementedError: tensors were cut by tensor, pipeline or expert parallelism as well.
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
    return _open_zero(directory, states, files, records)


def _tagged(directory: Path) -> Path:
    for name in LATEST:
        if (directory / name).is_file():
            tag = (directory / name).read_text().strip()
            if Path(tag).name != tag or not (directory / tag).is_dir():
                raise ValueError(
                    f"{str(directory / name)!r} names {tag!r}, which is no directory beside it. "
                    "Copy that as well, or give the directory of another step."
                )
            return directory / tag
    return directory


def _ranked(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of all processes, in their order."""
    found: dict[int, Path] = {}
    for path in directory.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise NotImplementedError(
                f"{str(path)!r} was cut by tensor parallelism too. Convert the checkpoint with "
                "DeepSpeed's `ds_to_universal.py` and open the result."
            )
        found[int(match[1] or 0)] = path
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
        raise ValueError(f"{str(file)!r} holds no `module`, so it is no model state of DeepSpeed.")
    return state


def _open_zero(
    directory: Path, states: list[Mapping[str, Any]], files: list[Path], records: Collection[str]
) -> Checkpoint:
    stage, ranks = _read_ranks(files, records)
    groups = _param_shapes(states[0], directory)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    if stage == 3:
        fragments = _fragments_of_stage_3(shapes, ranks)
    else:
        fragments = _fragments_of_stage_2(groups, ranks)
    _check_fragments(fragments, shapes, ranks, directory)
    tensors = _untrained(states, stage, shapes, directory)

    def of(kind: str) -> dict[str, LazyTensor]:
        return {
            name: _from_fragments(name, kind, fragments[name], ranks).reshape(shape)
            for name, shape in shapes.items()
        }

    tensors |= of("fp32")
    aliases = {name: other for name, other in _shared(states[0]) if other in tensors}
    tensors |= {name: tensors[other] for name, other in aliases.items()}

    def moments(_: Sequence[str] | None = None) -> AdamMoments:
        kinds = {kind: of(kind) for kind in _KINDS[1:]}
        step = [each for rank in ranks for each in rank.steps][0]
        state = {name: {key: kinds[key][name] for key in kinds} | {"step": step} for name in shapes}
        return gather_moments(state, shapes, repr(str(directory)), read_step)

    has_moments = all(kind in rank.flat for rank in ranks for kind in _KINDS)
    return Checkpoint(
        path=directory,
        form=f"DeepSpeed ZeRO-{stage}",
        tensors=tensors,
        aliases=aliases,
        moments=moments if has_moments else None,
    )


def _read_ranks(files: list[Path], records: Collection[str]) -> tuple[int, list[_Rank]]:
    stages, ranks = set(), []
    for file in files:
        state = read_torch_file(file, records=records)
        state = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or "zero_stage" not in state:
            raise ValueError(f"{str(file)!r} is no optimizer state of ZeRO: it has no `zero_stage`.")
        stage = state["zero_stage"]
        stages.add(stage.arguments[0] if isinstance(stage, Record) else stage)
        count = state["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if count != len(files):
            raise ValueError(
                f"{str(file.parent)!r} has the optimizer states of {len(files)} processes, but "
                f"{count} wrote them. Copy the files of all processes."
            )
        ranks.append(_read_rank(file, state))
    if len(stages) != 1 or not stages <= {1, 2, 3}:
        raise ValueError(
            f"{str(files[0].parent)!r} holds states of ZeRO stages {sorted(map(str, stages))}; one "
            "of 1, 2 and 3 is needed. Files of two checkpoints lie in one directory."
        )
    return stages.pop(), ranks


def _read_rank(file: Path, state: Mapping[str, Any]) -> _Rank:
    if "fp32_flat_groups" in state:
        weights, base = state["fp32_flat_groups"], state.get("optimizer_state_dict", {})
    else:
        weights = state.get("single_partition_of_fp32_groups", [])
        base = state.get("base_optimizer_state", {})
    if isinstance(base, Mapping):
        held = base.get("state", {})
        held = [held[index] for index in sorted(held)]
    else:
        held = list(base)  # an elastic checkpoint has a list of what is in `state` otherwise
    flat = {"fp32": list(weights)}
    for kind in _KINDS[1:]:
        if len(held) == len(weights) and all(kind in each for each in held):
            flat[kind] = [each[kind] for each in held]
    for tensors in flat.values():
        for tensor in tensors:
            if not isinstance(tensor, LazyTensor) or tensor.ndim != 1:
                raise ValueError(f"{str(file)!r} holds a group that is not a flat tensor.")
    steps = [each["step"] for each in held if "step" in each]
    steps += [state["base_optimizer_state_step"]] if "base_optimizer_state_step" in state else []
    return _Rank(file, flat, steps, state.get("param_slice_mappings"))


def _param_shapes(state: Mapping[str, Any], directory: Path) -> list[dict[str, tuple[int, ...]]]:
    shapes = state.get("param_shapes")
    shapes = [shapes] if isinstance(shapes, Mapping) else shapes
    if not isinstance(shapes, list) or not all(isinstance(group, Mapping) for group in shapes):
        raise ValueError(
            f"The model state in {str(directory)!r} has no `param_shapes`, which says what its "
            "flat tensors hold. It was not written by ZeRO."
        )
    return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]


def _fragments_of_stage_2(
    groups: list[dict[str, tuple[int, ...]]], ranks: list[_Rank]
) -> dict[str, list[_Fragment]]:
    found: dict[str, list[_Fragment]] = {name: [] for group in groups for name in group}
    if all(rank.slices for rank in ranks):
        for number, rank in enumerate(ranks):
            for group, slices in enumerate(rank.slices or ()):
                for name, place in slices.items():
                    start, size = place.field("start"), place.field("numel")
                    found.setdefault(name, []).append(_Fragment(number, group, start, size))
        return found
    for index, group in enumerate(groups):
        offset = 0
        for name, shape in group.items():
            size = math.prod(shape)
            sizes = [rank.flat["fp32"][index].size for rank in ranks]
            found[name] = _cut(offset, size, [((r, index), n) for r, n in enumerate(sizes)])
            offset += size
    return found


def _fragments_of_stage_3(
    shapes: Mapping[str, tuple[int, ...]], ranks: list[_Rank]
) -> dict[str, list[_Fragment]]:
    found, offset = {}, 0
    for name, shape in shapes.items():
        left = math.prod(shape)
        piece = -(-left // len(ranks))
        found[name] = []
        for number, rank in enumerate(ranks):
            sizes = [tensor.size for tensor in rank.flat["fp32"]]
            held = min(piece, left)  # what is more than that is padding
            found[name] += _cut(offset, held, [((number, g), n) for g, n in enumerate(sizes)])
            left -= held
        offset += piece
    return found


def _cut(
    offset: int, size: int, pieces: Sequence[tuple[tuple[int, int], int]]
) -> list[_Fragment]:
    """The run of `size` elements from `offset` on, in pieces that lie end to end."""
    found, begin = [], 0
    for (rank, group), length in pieces:
        start, stop = max(offset, begin), min(offset + size, begin + length)
        if start < stop:
            found.append(_Fragment(rank, group, start - begin, stop - start))
        begin += length
    return found


def _check_fragments(
    fragments: Mapping[str, list[_Fragment]],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: list[_Rank],
    directory: Path,
) -> None:
    for name, parts in fragments.items():
        held = sum(part.size for part in parts)
        if name not in shapes or held != math.prod(shapes[name]):
            raise ValueError(
                f"The processes hold {held} elements of {name!r} in {str(directory)!r}, but its "
                f"shape is {shapes.get(name)}. Files are missing, or of different checkpoints."
            )
        for part in parts:
            for kind, groups in ranks[part.rank].flat.items():
                size = groups[part.group].size if part.group < len(groups) else 0
                if part.start < 0 or part.size < 0 or part.start + part.size > size:
                    raise ValueError(
                        f"`{kind}` of {name!r} should lie at {part.start} to "
                        f"{part.start + part.size} of group {part.group} in "
                        f"{str(ranks[part.rank].file)!r}, which has {size} elements. Files are of "
                        "different checkpoints."
                    )


def _from_fragments(
    name: str, kind: str, parts: list[_Fragment], ranks: list[_Rank]
) -> LazyTensor:
    found = []
    for part in parts:
        flat = ranks[part.rank].flat[kind][part.group]
        found.append(_called(name, flat).narrow(0, part.start, part.start + part.size))
    return concatenate(found, 0)


def _called(name: str, tensor: LazyTensor) -> LazyTensor:
    return dataclasses.replace(tensor, name=name) if isinstance(tensor, TorchTensor) else tensor


def _untrained(
    states: list[Mapping[str, Any]],
    stage: int,
    trained: Collection[str],
    directory: Path,
) -> dict[str, LazyTensor]:
    """Buffers and frozen parameters, which no optimizer holds."""
    state = states[0]
    buffers = state.get("buffer_names") or ()
    frozen = state.get("frozen_param_shapes") or {}
    tensors = {
        name: _called(name, value)
        for name, value in state["module"].items()
        if isinstance(value, LazyTensor) and name not in trained
        if name in buffers or stage < 3
    }
    for name, shape in frozen.items() if stage == 3 else ():
        parts = [each["frozen_param_fragments"][name] for each in states]
        whole = concatenate([_called(name, part) for part in parts], 0)
        size = math.prod(shape)
        if whole.size < size:
            raise ValueError(
                f"The processes hold {whole.size} elements of {name!r} in {str(directory)!r}, but "
                f"its shape is {tuple(shape)}. Files are missing, or of different checkpoints."
            )
        tensors[name] = whole.narrow(0, 0, size).reshape(tuple(shape))
    return tensors


def _shared(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    return list((state.get("shared_params") or {}).items())


def _open_universal(
    directory: Path, state: Mapping[str, Any], records: Collection[str]
) -> Checkpoint:
    folders = sorted(path for path in (directory / "zero").iterdir() if path.is_dir())
    tensors = {folder.name: _whole(folder, "fp32", records) for folder in folders}
    module = state["module"]
    tensors |= {
        name: _called(name, value)
        for name, value in module.items()
        if isinstance(value, LazyTensor) and name not in tensors and value.size
    }
    aliases = {name: other for name, other in _shared(state) if other in tensors}
    tensors |= {name: tensors[other] for name, other in aliases.items()}
    trained = [folder for folder in folders if (folder / "exp_avg.pt").is_file()]

    def moments(_: Sequence[str] | None = None) -> AdamMoments:
        found = {
            folder.name: {key: _whole(folder, key, records) for key in ("exp_avg", "exp_avg_sq")}
            | {"step": _content(folder / "step.pt", records)}
            for folder in trained
        }
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return gather_moments(found, shapes, repr(str(directory)), read_step)

    return Checkpoint(
        path=directory,
        form="DeepSpeed universal",
        tensors=tensors,
        aliases=aliases,
        moments=moments if trained else None,
    )


def _whole(folder: Path, kind: str, records: Collection[str]) -> LazyTensor:
    held = _content(folder / f"{kind}.pt", records)
    if not isinstance(held, LazyTensor):
        raise ValueError(f"{str(folder / kind)!r}.pt holds no tensor. Convert the checkpoint again.")
    return _called(f"{folder.name}.{kind}", held)


def _content(file: Path, records: Collection[str]) -> Any:
    if not file.is_file():
        raise ValueError(f"{str(file.parent)!r} lacks {file.name}. Convert the checkpoint again.")
    held = read_torch_file(file, records=records)
    return held["param"] if isinstance(held, Mapping) and "param" in held else held
