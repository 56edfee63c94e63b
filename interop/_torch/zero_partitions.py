"""Reassemble parameters and Adam's moments from the partitions of a DeepSpeed ZeRO run.

Each process writes its partition of the float32 parameters and of the moments, flattened, for
every parameter group:

- Stages 1 and 2 concatenate the parameters of a group in the order of `param_shapes`, each followed
  by padding that aligns the next, and divide the result into one shard per process. `W` processes
  divide a group of `T` elements into partitions of `S`, the least number that gives `S W >= T` and
  an even `S`. Process `r` has padding at its end, `p_r = min(S, max(0, (r + 1) S - T))`, which it
  writes or leaves out.
- Stage 3 divides every parameter of `n` elements into shards of `ceil(n / W)`, the last one padded;
  a process concatenates its shards over all groups.

DeepSpeed writes no map from elements of a flat tensor to parameters: their places follow from the
sizes before them. So a single wrong size shifts every later parameter, without an error. Here every
flat tensor must end with the last element of the last parameter, or with the padding that ZeRO's
arithmetic gives for it. A parameter is a view (`_tensors`) of its shards, so that reading a slice
reads no other shards.

ZeRO (https://arxiv.org/abs/1910.02054), section 5.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxzero._text import shown
from jaxzero.interop._tensors import LazyTensor, called, concatenate

from .moments import MOMENTS, read_step
from .pickle_machine import Record
from .torch_file import read_torch_file

AGAIN = "Copy the checkpoint again."
OTHERS = "The files belong to different checkpoints: copy those of one."
Shape = tuple[int, ...]
# A parameter may begin at a multiple of 16 bytes of the model's dtype: of 8, 4, 2 or 1 bytes.
_ALIGNMENTS = (1, 2, 4, 8, 16)
_PARTITION_MULTIPLE = 2  # DeepSpeed makes partitions of an even number of elements
_SAMPLE = 16  # elements that are compared at each place


def wrong(file: Path, what: str, remedy: str) -> ValueError:
    """Return the error "'file' {what}. {remedy}"."""
    return ValueError(f"{str(file)!r} {what}. {remedy}")


class Fragment(NamedTuple):
    """A contiguous range of a parameter's elements in one flat tensor."""

    rank: int
    group: int
    start: int
    size: int


Fragments = Mapping[str, list[Fragment]]


class Rank(NamedTuple):
    """The optimizer state that one process (rank) wrote."""

    file: Path
    flat: dict[str, list[LazyTensor]]  # "fp32" or a moment -> one flat tensor per group
    steps: set[int]
    entries: frozenset  # names of what the optimizer keeps for parameters, such as exp_avg
    paddings: Any  # number of padding elements after each parameter, per group; as in the file
    group_paddings: Any  # number of padding elements at the end of each group; as in the file


def paddings_of(group: Mapping[str, Shape], index: int, ranks: Sequence[Rank]) -> list[int]:
    """Return the number of padding elements after each parameter of a group of stage 1 or 2.

    Args:
        group: name -> shape of the group's parameters.
        index: number of the group.
        ranks: the optimizer states of all processes.

    Raises:
        ValueError: the processes state different paddings, or no alignment gives these paddings.
    """
    file, stated = ranks[0].file, ranks[0].paddings
    if any(rank.paddings != stated for rank in ranks):
        what = "has other `param_alignment_paddings` than the files of other processes"
        raise wrong(file, what, OTHERS)
    if stated is None:
        return [0] * len(group)
    held = stated[index] if isinstance(stated, list) and index < len(stated) else None
    if not isinstance(held, list) or len(held) != len(group):
        count = len(held) if isinstance(held, list) else shown(held)
        what = f"has {count} paddings for the {len(group)} parameters of group {index}"
        raise wrong(file, what, AGAIN)
    sizes = [math.prod(shape) for shape in group.values()]
    possible = [[-size % unit for size in sizes[:-1]] + [0] for unit in _ALIGNMENTS]
    if held not in possible or not all(type(each) is int for each in held):
        what = (
            f"has the paddings {shown(held)} (`param_alignment_paddings`) for parameters of "
            f"{shown(sizes)} elements in group {index}, which no alignment to 16 bytes gives"
        )
        raise wrong(file, what, AGAIN)
    return held


def check_partitions(total: int, index: int, ranks: Sequence[Rank]) -> None:
    """Raise `ValueError` unless a group's flat tensors have the sizes of stages 1 and 2.

    Args:
        total: elements of the group, with the paddings after its parameters.
        index: number of the group.
        ranks: the optimizer states of all processes.
    """
    size = -(-total // (len(ranks) * _PARTITION_MULTIPLE)) * _PARTITION_MULTIPLE
    for number, rank in enumerate(ranks):
        padding = min(size, max(0, (number + 1) * size - total))
        given = rank.group_paddings
        if given is not None and _at(given, index) != padding:
            what = (
                f"gives group {index} a padding of {shown(_at(given, index))} (`group_paddings`), "
                f"but it must be {padding}: the parameters have {total} elements with alignment"
            )
            raise wrong(rank.file, what, OTHERS)
        _check_sizes(rank, index, {size, size - padding})


def check_pieces(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> None:
    """Raise `ValueError` unless each process's flat tensors have the sizes that stage 3 gives them.

    The sizes follow from the shapes in `groups` and from the number of processes.
    """
    sizes = [
        sum(-(-math.prod(shape) // len(ranks)) for shape in group.values()) for group in groups
    ]
    for rank in ranks:
        held = [tensor.size for tensor in rank.flat["fp32"]]
        # Older versions describe all groups of a process as one.
        if len(held) != len(sizes) and sum(held) != sum(sizes):
            what = (
                f"holds {sum(held)} elements in {len(held)} groups, but `param_shapes` gives "
                f"{sum(sizes)} in {len(sizes)}"
            )
            raise wrong(rank.file, what, OTHERS)
        for index, size in enumerate(sizes if len(held) == len(sizes) else held):
            _check_sizes(rank, index, {size})


def _check_sizes(rank: Rank, index: int, allowed: set[int]) -> None:
    for kind, flat in rank.flat.items():
        held = flat[index].size if index < len(flat) else 0
        # The moments may be padded where the parameters are not.
        if held not in allowed:
            raise ValueError(
                f"`{kind}` of group {index} in {str(rank.file)!r} has {held} elements, but "
                f"`param_shapes` gives {' or '.join(map(str, sorted(allowed)))}. The files belong "
                "to different checkpoints, or are damaged: copy them again."
            )


def _at(values: Any, index: int) -> Any:
    inside = isinstance(values, list) and index < len(values)
    return values[index] if inside and type(values[index]) is int else None


def read_ranks(files: list[Path], records: Collection[str]) -> tuple[int, list[Rank]]:
    """Read the optimizer states of all processes; return the ZeRO stage and one `Rank` per file."""
    stages, ranks = set(), []
    for file in files:
        state = read_torch_file(file, records=records)
        state = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or "partition_count" not in state:
            what = "is not an optimizer state of ZeRO: it was not partitioned"
            raise wrong(file, what, AGAIN)
        stage = state.get("zero_stage", 1)  # `BF16_Optimizer` omits it and partitions as stage 1
        stage = stage.arguments[0] if isinstance(stage, Record) else stage
        stages.add(stage if type(stage) is int else shown(stage))
        count = state["partition_count"]
        count = max(count) if isinstance(count, list) else count
        if type(count) is not int or count != len(files):
            what = f"has the optimizer states of {len(files)} processes, but {shown(count)} wrote"
            raise wrong(file.parent, f"{what} them", "Copy the files of all processes.")
        ranks.append(_read_rank(file, state))
    if len(stages) != 1 or not stages <= {1, 2, 3}:
        what = f"holds states of ZeRO stages {sorted(map(str, stages))}, but must hold one stage: "
        raise wrong(files[0].parent, f"{what}1, 2 or 3", OTHERS)
    return stages.pop(), ranks


def check_ranks(ranks: Sequence[Rank]) -> None:
    """Raise `ValueError` unless the files are of one step, and no two hold the same elements.

    In stages 1 and 2 parameters are also compared with the model (`check_values`); moments are
    not.
    """
    first = ranks[0]
    for rank in ranks:
        if rank.steps != first.steps:
            steps, others = (shown(sorted(each.steps)) for each in (rank, first))
            what = f"is of step {steps}, but {first.file.name} of step {others}"
            raise wrong(rank.file, what, OTHERS)
    seen: dict[bytes, Rank] = {}
    for rank in ranks:
        sample = _sample(rank)
        if sample in seen:
            what = f"holds the same elements as {seen[sample].file.name}, so one is a copy of the"
            raise wrong(rank.file, f"{what} other", "Copy the files of all processes again.")
        if sample is not None:
            seen[sample] = rank


def _sample(rank: Rank) -> bytes | None:
    """Return the bytes of some elements of a process's parameters and of their first moments.

    Return None if all sampled parameters are equal, or all sampled moments, which are zeros before
    the first step. The partitions of two processes may then be the same without an error.
    """
    sampled = []
    for kind in ("fp32", MOMENTS[0]):
        flat = rank.flat.get(kind, ())
        starts = [{0, each.size // 2, max(0, each.size - _SAMPLE)} for each in flat]
        samples = [
            each[(slice(start, start + _SAMPLE),)]
            for each, begin in zip(flat, starts, strict=True)
            for start in sorted(begin)
        ]
        if flat and all((each == each[:1]).all() for each in samples):
            return None
        sampled += samples
    return b"".join(each.tobytes() for each in sampled)


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
    for tensor in itertools.chain(*flat.values()):
        if not isinstance(tensor, LazyTensor) or tensor.ndim != 1:
            raise wrong(file, "holds a group that is not a flat tensor", AGAIN)
    steps = [each["step"] for each in held if "step" in each]
    steps += [state["base_optimizer_state_step"]] if "base_optimizer_state_step" in state else []
    paddings = (state.get("param_alignment_paddings"), state.get("group_paddings"))
    entries = frozenset(entry for each in held for entry in each)
    return Rank(file, flat, {read_step(step) for step in steps}, entries, *paddings)


def fragments_of(
    stage: int, groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]
) -> Fragments:
    """Locate each parameter in the flat tensors of all processes: name -> list of fragments.

    Args:
        stage: the ZeRO stage.
        groups: name -> shape of each group's parameters, in storage order.
        ranks: the optimizer states of all processes.
    """
    return _of_stage_3(groups, ranks) if stage == 3 else _of_stage_2(groups, ranks)


def join(
    name: str, kind: str, shape: Shape, fragments: Fragments, ranks: Sequence[Rank]
) -> LazyTensor:
    """Assemble a parameter (`kind` "fp32") or one of its moments from its fragments."""
    parts = []
    for part in fragments[name]:
        flat = called(name, ranks[part.rank].flat[kind][part.group])
        parts.append(flat.narrow(0, part.start, part.start + part.size))
    return concatenate(parts, 0).reshape(shape)


def _of_stage_2(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> Fragments:
    # `param_slice_mappings` is not used: with `round_robin_gradients` DeepSpeed (0.19.8) lists the
    # wrong parameters there.
    fragments: dict[str, list[Fragment]] = {}
    for rank in ranks:
        if len(rank.flat["fp32"]) != len(groups):
            what = f"holds {len(rank.flat['fp32'])} groups, but `param_shapes` describes"
            raise wrong(rank.file, f"{what} {len(groups)}", OTHERS)
    for index, group in enumerate(groups):
        sizes = [((rank, index), each.flat["fp32"][index].size) for rank, each in enumerate(ranks)]
        paddings = paddings_of(group, index, ranks)
        offset = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            fragments[name] = _cut(offset, math.prod(shape), sizes)
            offset += math.prod(shape) + padding
        check_partitions(offset, index, ranks)
    return fragments


def _of_stage_3(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> Fragments:
    check_pieces(groups, ranks)
    fragments: dict[str, list[Fragment]] = {}
    offset = 0
    for name, shape in (item for group in groups for item in group.items()):
        left = math.prod(shape)
        piece = -(-left // len(ranks))
        fragments[name] = []
        for number, rank in enumerate(ranks):
            sizes = [((number, g), each.size) for g, each in enumerate(rank.flat["fp32"])]
            held = min(piece, left)  # the rest of the piece is padding
            fragments[name] += _cut(offset, held, sizes)
            left -= held
        offset += piece
    return fragments


def _cut(offset: int, size: int, pieces: Sequence[tuple[tuple[int, int], int]]) -> list[Fragment]:
    """Locate a range of elements in consecutive flat tensors.

    Args:
        offset: number of the range's first element, counted over all the flat tensors.
        size: number of elements in the range.
        pieces: ((rank, group), number of elements) of each flat tensor.
    """
    fragments, begin = [], 0
    for (rank, group), length in pieces:
        start, stop = max(offset, begin), min(offset + size, begin + length)
        if start < stop:
            fragments.append(Fragment(rank, group, start - begin, stop - start))
        begin += length
    return fragments
