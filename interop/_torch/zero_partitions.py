"""Reassemble parameters and Adam's moments from the partitions of a DeepSpeed ZeRO run.

Each process writes its partition of the float32 parameters and of the moments, flattened, for
every parameter group:

- Stages 1 and 2 concatenate the parameters of a group in the order of `param_shapes`, each followed
  by padding that aligns the next, and divide the result into one shard per process.
- Stage 3 divides every parameter into equal shards, the last one padded; a process concatenates its
  shards over all groups.

A parameter is a view (`_tensors`) of its shards, so that reading a slice reads no other shards.

ZeRO (https://arxiv.org/abs/1910.02054), section 5.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxzero.interop._tensors import LazyTensor, concatenate, read_step

from .torch_file import TorchTensor, read_torch_file
from .unpickle import Record

Shape = tuple[int, ...]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Fragment(NamedTuple):
    """A contiguous range of a parameter's elements in one flat tensor."""

    rank: int
    group: int
    start: int
    size: int


Fragments = Mapping[str, list[Fragment]]


class Rank(NamedTuple):
    """The optimizer state that one process wrote."""

    file: Path
    flat: dict[str, list[LazyTensor]]  # "fp32" or a moment -> one flat tensor per group
    steps: set[int]
    paddings: list[list[int]] | None  # number of padding elements after each parameter, per group


def read_ranks(files: list[Path], records: Collection[str]) -> tuple[int, list[Rank]]:
    """Read the optimizer states of all processes; return the ZeRO stage and one `Rank` per file.

    Raises:
        ValueError: a file is not a ZeRO state, or files are missing or of different checkpoints.
    """
    stages, ranks = set(), []
    for file in files:
        state = read_torch_file(file, records=records)
        state = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or "partition_count" not in state:
            raise ValueError(
                f"{str(file)!r} is not an optimizer state of ZeRO: it was not partitioned."
            )
        stage = state.get("zero_stage", 1)  # `BF16_Optimizer` omits it and partitions as stage 1
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
            f"{str(files[0].parent)!r} holds states of ZeRO stages {sorted(map(str, stages))}, but "
            "must hold one stage: 1, 2 or 3. It contains files of two checkpoints."
        )
    return stages.pop(), ranks


def _read_rank(file: Path, state: Mapping[str, Any]) -> Rank:
    if "fp32_flat_groups" in state:
        weights, base = state["fp32_flat_groups"], state.get("optimizer_state_dict", {})
    else:
        weights = state["single_partition_of_fp32_groups"]
        base = state.get("base_optimizer_state", {})
    if isinstance(base, Mapping):
        held = base.get("state", {})
        held = [held[index] for index in sorted(held)]
    else:
        held = list(base)  # an elastic checkpoint has a list in place of the dict `state`
    flat = {"fp32": list(weights)}
    for kind in MOMENTS:
        if len(held) == len(weights) and all(kind in each for each in held):
            flat[kind] = [each[kind] for each in held]
    for tensors in flat.values():
        for tensor in tensors:
            if not isinstance(tensor, LazyTensor) or tensor.ndim != 1:
                raise ValueError(f"{str(file)!r} holds a group that is not a flat tensor.")
    steps = [each["step"] for each in held if "step" in each]
    steps += [state["base_optimizer_state_step"]] if "base_optimizer_state_step" in state else []
    paddings = state.get("param_alignment_paddings")
    return Rank(file, flat, {read_step(step) for step in steps}, paddings)


def fragments_of(
    stage: int, groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]
) -> Fragments:
    """Locate each parameter in the flat tensors.

    Args:
        stage: ZeRO stage, 1 to 3.
        groups: name -> shape of the parameters of each group, in storage order.
        ranks: optimizer states of all processes.

    Raises:
        ValueError: the flat tensors have too few elements for the parameters.
    """
    fragments = _of_stage_3(groups, ranks) if stage == 3 else _of_stage_2(groups, ranks)
    for group in groups:
        for name, shape in group.items():
            _check(name, shape, fragments[name], ranks)
    return fragments


def join(
    name: str, kind: str, shape: Shape, fragments: Fragments, ranks: Sequence[Rank]
) -> LazyTensor:
    """Assemble a parameter (kind "fp32") or one of its moments from its fragments."""
    found = []
    for part in fragments[name]:
        flat = called(name, ranks[part.rank].flat[kind][part.group])
        found.append(flat.narrow(0, part.start, part.start + part.size))
    return concatenate(found, 0).reshape(shape)


def called(name: str, tensor: LazyTensor) -> LazyTensor:
    """Return the tensor with the name that messages should use."""
    return dataclasses.replace(tensor, name=name) if isinstance(tensor, TorchTensor) else tensor


def _of_stage_2(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> Fragments:
    # `param_slice_mappings` is not used: with `round_robin_gradients` DeepSpeed (0.19.8) lists the
    # wrong parameters there.
    found: dict[str, list[Fragment]] = {}
    for index, group in enumerate(groups):
        sizes = [((rank, index), each.flat["fp32"][index].size) for rank, each in enumerate(ranks)]
        paddings = ranks[0].paddings[index] if ranks[0].paddings else [0] * len(group)
        if len(paddings) != len(group):
            raise ValueError(
                f"{str(ranks[0].file)!r} has {len(paddings)} paddings for the {len(group)} "
                f"parameters of group {index}. Copy the checkpoint again."
            )
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            found[name] = _cut(offset, math.prod(shape), sizes)
            offset += math.prod(shape) + padding
    return found


def _of_stage_3(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> Fragments:
    found: dict[str, list[Fragment]] = {}
    offset = 0
    for name, shape in (item for group in groups for item in group.items()):
        left = math.prod(shape)
        piece = -(-left // len(ranks))
        found[name] = []
        for number, rank in enumerate(ranks):
            sizes = [((number, g), each.size) for g, each in enumerate(rank.flat["fp32"])]
            held = min(piece, left)  # the rest of the piece is padding
            found[name] += _cut(offset, held, sizes)
            left -= held
        offset += piece
    return found


def _cut(offset: int, size: int, pieces: Sequence[tuple[tuple[int, int], int]]) -> list[Fragment]:
    """Locate the `size` elements from `offset` on in consecutive shards."""
    found, begin = [], 0
    for (rank, group), length in pieces:
        start, stop = max(offset, begin), min(offset + size, begin + length)
        if start < stop:
            found.append(Fragment(rank, group, start - begin, stop - start))
        begin += length
    return found


def _check(name: str, shape: Shape, parts: list[Fragment], ranks: Sequence[Rank]) -> None:
    held = sum(part.size for part in parts)
    if held != math.prod(shape):
        raise ValueError(
            f"The processes hold {held} elements of {name!r} in {str(ranks[0].file.parent)!r}, but "
            f"its shape is {shape}. The files belong to different checkpoints."
        )
    for part in parts:
        for kind, groups in ranks[part.rank].flat.items():
            if part.start + part.size > groups[part.group].size:
                raise ValueError(
                    f"`{kind}` of {name!r} should end at {part.start + part.size} of group "
                    f"{part.group} in {str(ranks[part.rank].file)!r}, which has "
                    f"{groups[part.group].size} elements. The files are of different checkpoints."
                )
