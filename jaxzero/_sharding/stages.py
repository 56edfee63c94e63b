"""Configure pipeline stages: which arrays are stacks of layers, and how stages split arrays."""

from __future__ import annotations

import dataclasses
import re

from jax.sharding import PartitionSpec

from .._codecs import Codec
from .._mesh import STAGE
from .hops import check_codec, check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Divide the layers of a model between nodes, as the stages of a pipeline.

    All layers are in stacks `[layers, ...]` or in a list of equal layers. One `jax.lax.scan` runs
    through the stacks, or a Python loop layer by layer; a Python loop runs through the list. A
    stage has `ceil(layers / stages)` layers. If the stages do not divide the layers, the last
    stages have fewer, possibly none, and stacks are stored padded with zeros. A step runs forward
    and backward of one micro-batch after the other (1F1B).

    Attributes:
        microbatches: the number of micro-batches of a step, where `value_and_grad` is not given
            one.
        layers: the path of the stacks in the parameters, such as "layers" or
            "params.decoder.layers", or several such paths. In the path of a list, `*` stands for
            the number of a layer, as in "layers.*" or "params.block_*".
        messages: codec of the activations and cotangents that stages send, such as `Int8()`; None
            sends them as they are. It is used where it makes them smaller, and if it quantizes, for
            arrays with at least `min_quantized_size` elements. Each message is rounded, so losses
            and gradients change.

    Raises:
        ValueError: an option is of another type or out of range.

    References:
        DAPPLE (https://arxiv.org/abs/2007.01045).
    """

    microbatches: int
    layers: str | tuple[str, ...] = "layers"
    messages: Codec | None = None

    def __post_init__(self):
        check_integer("microbatches", "Stages", self.microbatches, 1)
        if self.messages is not None:
            check_codec("messages", "Stages", self.messages)
        names = self.names
        if not names or not all(isinstance(x, str) and x for x in names):
            raise ValueError(
                '`layers` of `Stages` must be a path of stacks in the parameters, such as "layers",'
                f" or several; got {self.layers!r}."
            )
        if several := [x for x in names if x.count("*") > 1]:
            raise ValueError(
                "A path in `layers` of `Stages` may have one `*`, for the number of a layer; got "
                f"{several[0]!r}."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of stacks, or of lists of layers."""
        return (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)

    def has(self, path: str) -> bool:
        """Return whether the leaf at `path` is a stack of layers: at or below one of `names`."""
        return any(path == name or path.startswith(f"{name}.") for name in self.names)

    def place_in_list(self, path: str) -> tuple[str, int] | None:
        """Return, for a leaf in a list of layers, its path and the number of its layer.

        In that path, `*` stands in place of the number. None for any other leaf.
        """
        for name in self.names:
            pattern = re.escape(name).replace(r"\*", r"(\d+)") + r"(?=\.|$)"
            if "*" in name and (match := re.match(pattern, path)):
                return name + path[match.end() :], int(match.group(1))
        return None


def stage_split(
    path: str, shape: tuple[int, ...], stages: Stages, num_stages: int, num_shards: int
) -> PartitionSpec:
    """Return how a leaf is split over stages: a stack along its layers, another leaf along any dim.

    The devices of a stage split the leaf further, along another dim. If a leaf is no stack, and has
    no two dims that divide evenly, it is replicated over stages.

    Args:
        path: the path of the leaf.
        shape: the shape of the full leaf.
        stages: the config.
        num_stages: how many stages there are.
        num_shards: into how many shards the devices of a stage split a leaf.

    Raises:
        ValueError: a stack has fewer layers than there are stages.
    """
    if stages.has(path):
        if not shape or shape[0] < num_stages:
            raise ValueError(
                f"The stack `{path}` {list(shape)} must have at least {num_stages} layers in dim "
                f"0, as there are as many stages. Change `layers` of `jz.Stages`, "
                f"{stages.layers!r}: that of a list has `*` for the number of a layer, as in "
                '"layers.*". Or take a mesh with fewer stages.'
            )
        return PartitionSpec(STAGE)
    evenly = [dim for dim, size in enumerate(shape) if size and size % num_stages == 0]
    for dim in evenly:
        others = (size for i, size in enumerate(shape) if i != dim)
        if any(size % num_shards == 0 for size in others):
            return PartitionSpec(*[None] * dim, STAGE)
    return PartitionSpec()
