"""What one process of a DeepSpeed ZeRO run wrote of its partition."""

from pathlib import Path
from typing import Any, NamedTuple

from jaxzero.interop._tensors import LazyTensor

Shape = tuple[int, ...]


class Rank(NamedTuple):
    """The optimizer state that one process wrote."""

    file: Path
    flat: dict[str, list[LazyTensor]]  # "fp32" or a moment -> one flat tensor per group
    steps: set[int]
    paddings: Any  # number of padding elements after each parameter, per group; as in the file
    group_paddings: Any  # number of padding elements at the end of each group; as in the file
