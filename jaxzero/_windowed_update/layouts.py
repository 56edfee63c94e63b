"""Which arrays an update reads and writes, and to which parameter each belongs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import Mesh, PartitionSpec

from .._sharding import DimSharding, LeafSpec, TreePlan


@dataclasses.dataclass(frozen=True)
class UpdateLayouts:
    """The layouts of the trees of an update, in which every array is split over `axes`.

    Attributes:
        gradients: the layout of the gradients.
        state: the layout of the optimizer state.
        params: the layout of the trained parameters; the gradients have the same paths.
        mesh: the mesh that all of them are laid out on.
        axes: the mesh axes that split them.
    """

    gradients: TreePlan
    state: TreePlan
    params: TreePlan
    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The leaves of gradients, state and parameters, in this order."""
        return (*self.gradients.leaves, *self.state.leaves, *self.params.leaves)

    def owners(self) -> list[int | None]:
        """For each of `leaves` the index of the parameter that it belongs to.

        A leaf of the state belongs to the parameter whose path ends its own, if it has the same
        shape and layout. Other leaves of the state (counters, factored statistics) belong to none.

        Raises:
            ValueError: the gradients are not those of the parameters.
        """
        params = self.params.leaves
        if [x.path for x in self.gradients.leaves] != [x.path for x in params]:
            given, trained = (
                {x.path for x in plan.leaves} for plan in (self.gradients, self.params)
            )
            raise ValueError(
                "`grads` must be a tree like the trained parameters; the leaves "
                f"{sorted(given ^ trained)} are in only one of them."
            )
        by_path = {leaf.path: i for i, leaf in enumerate(params)}
        of_state = [self._owner(leaf, by_path) for leaf in self.state.leaves]
        return [*range(len(params)), *of_state, *range(len(params))]

    def _owner(self, leaf: LeafSpec, by_path: Mapping[str, int]) -> int | None:
        keys = leaf.path.split(".")
        for i in range(len(keys) + 1):
            owner = by_path.get(".".join(keys[i:]) or ".")
            if owner is not None:
                param = self.params.leaves[owner]
                if (leaf.shape, _split(leaf)) == (param.shape, _split(param)):
                    return owner
        return None

    def spec(self, leaf: LeafSpec) -> PartitionSpec:
        """The spec of an array in a `shard_map` over the mesh axes of ZeRO."""
        return leaf.spec(self.axes, manual_only=True)


def _split(leaf: LeafSpec) -> DimSharding | None:
    """How a leaf is split; on one device only a leaf in host memory has a layout (`in_memory`)."""
    return leaf.layout if leaf.layout and leaf.layout.num_shards > 1 else None
