"""Check that the partitions of a DeepSpeed ZeRO run have exactly the sizes that its shapes give.

DeepSpeed writes no map from elements of a flat tensor to parameters: their places follow from the
sizes before them. So a single wrong size shifts every later parameter, without an error. Here every
flat tensor must end with the last element of the last parameter, or with the padding that ZeRO's
arithmetic gives for it.

Stages 1 and 2: `W` processes divide a group of `T` elements into partitions of `S`, the least
number that gives `S W >= T` and an even `S`. Process `r` has padding at its end,

    p_r = min(S, max(0, (r + 1) S - T)),

which it writes or leaves out. In stage 3, a process holds `ceil(n / W)` elements of a parameter
that has `n`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxzero._text import shown

from .partition import Rank, Shape

# A parameter may begin at a multiple of 16 bytes of the model's dtype: of 8, 4, 2 or 1 bytes.
_ALIGNMENTS = (1, 2, 4, 8, 16)
_PARTITION_MULTIPLE = 2  # of elements in a partition


def paddings_of(group: Mapping[str, Shape], index: int, ranks: Sequence[Rank]) -> list[int]:
    """Return the number of padding elements after each parameter of a group of stage 1 or 2.

    Raises:
        ValueError: they are not what aligning the parameters gives, or processes differ.
    """
    file = str(ranks[0].file)
    stated = [rank.paddings for rank in ranks]
    if any(each != stated[0] for each in stated):
        raise ValueError(
            f"`param_alignment_paddings` of {file!r} differ from those of other processes. The "
            "files belong to different checkpoints."
        )
    if stated[0] is None:
        return [0] * len(group)
    held = stated[0][index] if isinstance(stated[0], list) and index < len(stated[0]) else None
    if not isinstance(held, list) or len(held) != len(group):
        count = len(held) if isinstance(held, list) else shown(held)
        raise ValueError(
            f"{file!r} has {count} paddings for the {len(group)} parameters of group {index}. Copy "
            "the checkpoint again."
        )
    sizes = [math.prod(shape) for shape in group.values()]
    possible = [[-size % unit for size in sizes[:-1]] + [0] for unit in _ALIGNMENTS]
    if held not in possible or not all(type(each) is int for each in held):
        raise ValueError(
            f"{file!r} has the paddings {shown(held)} (`param_alignment_paddings`) for parameters "
            f"of {shown(sizes)} elements in group {index}, which no alignment to 16 bytes gives. "
            "Copy the checkpoint again."
        )
    return held


def check_partitions(total: int, index: int, ranks: Sequence[Rank]) -> None:
    """Check the flat tensors of a group of stage 1 or 2, of `total` elements with paddings.

    Raises:
        ValueError: a flat tensor is longer or shorter than it must be.
    """
    multiple = _PARTITION_MULTIPLE
    size = -(-total // (len(ranks) * multiple)) * multiple
    for number, rank in enumerate(ranks):
        padding = min(size, max(0, (number + 1) * size - total))
        given = rank.group_paddings
        if given is not None and _at(given, index) != padding:
            raise ValueError(
                f"{str(rank.file)!r} gives group {index} a padding of {shown(_at(given, index))} "
                f"(`group_paddings`), but it must be {padding}: the parameters have {total} "
                "elements with alignment. The files belong to different checkpoints."
            )
        _check_sizes(rank, index, {size, size - padding})


def check_pieces(groups: Sequence[Mapping[str, Shape]], ranks: Sequence[Rank]) -> None:
    """Check the flat tensors of stage 3.

    Raises:
        ValueError: a flat tensor is longer or shorter than it must be.
    """
    sizes = [
        sum(-(-math.prod(shape) // len(ranks)) for shape in group.values()) for group in groups
    ]
    for rank in ranks:
        held = [tensor.size for tensor in rank.flat["fp32"]]
        # Older versions describe all groups of a process as one.
        if len(held) != len(sizes) and sum(held) != sum(sizes):
            raise ValueError(
                f"{str(rank.file)!r} holds {sum(held)} elements in {len(held)} groups, but "
                f"`param_shapes` gives {sum(sizes)} in {len(sizes)}. The files belong to different "
                "checkpoints."
            )
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
