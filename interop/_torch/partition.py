"""What one process of a DeepSpeed ZeRO run wrote of its partition."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxzero.interop._tensors import LazyTensor

Shape = tuple[int, ...]


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
    entries: frozenset  # names of what the optimizer keeps, of any parameter: exp_avg and others
    paddings: Any  # number of padding elements after each parameter, per group; as in the file
    group_paddings: Any  # number of padding elements at the end of each group; as in the file
