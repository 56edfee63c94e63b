"""The updates that a program may run in its loops, as arguments and results of the `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._execute import LeafUpdate
from .._windowed_update import LayerUpdate, TracedUpdate, layer_updates


class ProgramUpdates:
    """The updates of the leaves that can be updated layer by layer.

    Args:
        update: of all leaves, traced together with the program; None: nothing is updated.
        positions: for each leaf of `update`, the index of its gradient among those of the program.

    Raises:
        NotImplementedError: as `layer_updates`.
    """

    def __init__(self, update: TracedUpdate | None, positions: Sequence[int] = ()):
        self._positions = positions
        self.leaves: dict[int, LayerUpdate] = {} if update is None else layer_updates(update)
        self._atoms = list(dict.fromkeys(x for leaf in self.leaves.values() for x in leaf.scalars))
        self._scalars = update.scalars(self._atoms) if update is not None else []

    @property
    def arguments(self) -> list[list[Array]]:
        """Global arrays: the state of each leaf, and the scalars."""
        return [*(leaf.arrays[1:] for leaf in self.leaves.values()), self._scalars]

    @property
    def in_specs(self) -> list[PartitionSpec]:
        """The specs of `arguments`, each for all arrays of an entry."""
        return [*self.out_specs, PartitionSpec()]

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """For each leaf the spec of its new arrays."""
        return [x.update.layouts.spec(x.leaf.spec) for x in self.leaves.values()]

    def on_device(
        self,
        stored: Sequence[Array],
        arguments: Sequence[Sequence[Array]],
        differentiated: Sequence[int],
    ) -> dict[int, LeafUpdate]:
        """The updates on one device, by index of the leaf among those of all sharded arguments.

        Args:
            stored: this device's shards of the sharded arguments, of which the first is updated.
            arguments: its shards of `arguments`.
            differentiated: indices in `stored` of the leaves that get gradients.
        """
        scalars = dict(zip(self._atoms, arguments[-1], strict=True))
        found = {}
        for (number, leaf), state in zip(self.leaves.items(), arguments[:-1], strict=True):
            i = differentiated[self._positions[number]]
            found[i] = LeafUpdate(
                [stored[i], *state],
                leaf.names,
                leaf.reads,
                lambda gradient, layers, leaf=leaf: leaf.new_layers(gradient, layers, scalars),
            )
        return found
