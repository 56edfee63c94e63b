"""Divide lists of equal layers between stages: separate leaves in storage, stacks in the program.

A layer in a list is stored as leaves of its own, each split over the devices of all stages, like
the leaves outside of the layers. The program of a stage takes the same leaf of all layers as one
stack. The stage has its own layers of the stack, and gathers them one by one, as those of any
stack. So once in a step each device sends its part of every layer to the stage that runs the layer,
and once the gradients go back. A node sends `(S - 1) / S^2` of all layers' weights and as much of
their gradients.

If the first layers of a list are frozen, another tree holds them. They form a stack of their own,
and each stage gathers all of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._collectives import all_gather, all_to_all, labelled
from .._mesh import STAGE
from .._program import StackPart
from .._sharding import LeafSpec, Stages


@dataclasses.dataclass(frozen=True)
class LayerLists:
    """A map of leaves to the arrays that a stage's program takes: a stack for each list of layers.

    A leaf outside of lists is an array by itself.

    Attributes:
        leaves: the leaves of all sharded arguments.
        stages: the config; None: no stages.
        members: for each array, the indices of the leaves that it consists of. A stack has a leaf
            for each layer; an array outside of lists has one leaf.
        frozen: the indices of the arrays that are stacks of frozen layers, which stages do not
            divide.
    """

    leaves: tuple[LeafSpec, ...]
    stages: Stages | None
    members: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...]

    @classmethod
    def of(
        cls, leaves: Sequence[LeafSpec], trees: Sequence[int], stages: Stages | None
    ) -> LayerLists:
        """Find the lists of layers among the leaves.

        Args:
            leaves: the leaves of all sharded arguments.
            trees: for each leaf, the index of the argument that holds it.
            stages: the config; None: no stages.

        Raises:
            ValueError: the layers of a list are not numbered from 0, or not of equal shapes.
        """
        arrays: list[dict[int, int]] = []  # for each array its leaves, by the number of the layer
        lists: dict[tuple[str, int], dict[int, int]] = {}
        frozen: dict[int, None] = {}
        for i, (leaf, tree) in enumerate(zip(leaves, trees, strict=True)):
            place = stages.place_in_list(leaf.path) if stages is not None else None
            if place is None:
                if stages is not None and stages.has(leaf.path) and leaf.stages is None:
                    frozen[len(arrays)] = None
                arrays.append({0: i})
                continue
            path, number = place
            if (path, tree) not in lists:
                lists[path, tree] = {}
                arrays.append(lists[path, tree])
            lists[path, tree][number] = i
        for (path, _), layers in lists.items():
            # The layers before the first one are frozen, if another tree has them.
            before = [
                x
                for (other, _), x in lists.items()
                if other == path and {*x} == {*range(min(layers))}
            ]
            frozen |= dict.fromkeys(map(arrays.index, before))
            first = min(layers) if before else 0
            _check_list(first, sorted(layers), [leaves[layers[n]] for n in sorted(layers)])
        members = tuple(tuple(x[number] for number in sorted(x)) for x in arrays)
        return cls(tuple(leaves), stages, members, tuple(frozen))

    def is_list(self, j: int) -> bool:
        """Return True if array `j` is a stack of leaves of a list."""
        return self._path_of_list(j) is not None

    def is_divided(self, j: int) -> bool:
        """Return True if the layers of array `j` are divided between the stages.

        Frozen layers that `zero.freeze` has split off are not divided.
        """
        is_stack = self.stages is not None and self.stages.has(self.arrays[j].path)
        return is_stack and j not in self.frozen

    @functools.cached_property
    def stacks(self) -> dict[int, StackPart]:
        """For each array of stacked layers, which part of a whole stack it is.

        A stack whose first layers are frozen has two parts: the frozen and the active layers. Keys
        are indices of arrays.

        Raises:
            ValueError: two arguments hold frozen layers of one stack.
        """
        frozen = {self.arrays[j].path for j in self.frozen}
        if len(frozen) < len(self.frozen):
            raise ValueError(
                f"Two arguments hold frozen layers of {', '.join(sorted(frozen))}: which of them "
                "come before the active layers is not known. Call the function with one of them."
            )
        divided = [j for j in range(len(self.members)) if self.is_divided(j)]
        stack_of = {self.arrays[j].path: j for j in reversed(divided)}
        first = {j: StackPart(stack_of.get(self.arrays[j].path, j)) for j in self.frozen}
        num_frozen = {x.stack: self.arrays[j].shape[0] for j, x in first.items()}
        return {j: StackPart(j, num_frozen.get(j, 0)) for j in divided} | first

    @functools.cached_property
    def arrays(self) -> list[LeafSpec]:
        """The layout of each array; in the path of a list, `*` stands for the layer's number."""
        return [self._array(j) for j in range(len(self.members))]

    def numbers(self, leaves: Sequence[int]) -> list[int]:
        """Return the indices of the arrays that consist of the given leaves.

        Raises:
            NotImplementedError: the leaves are some layers of a list but not all, or are layers of
                a frozen list.
        """
        wanted = {*leaves}
        for j, group in enumerate(self.members):
            if j in self.frozen and self.is_list(j) and not wanted.isdisjoint(group):
                raise NotImplementedError(
                    f"`{self.arrays[j].path}` are frozen layers, which stages do not divide, so "
                    "there are no gradients of them. Differentiate by the active part alone, or "
                    "leave out `stages`."
                )
            if not wanted.isdisjoint(group) and not wanted.issuperset(group):
                missing = next(self.leaves[i].path for i in group if i not in wanted)
                raise NotImplementedError(
                    f"Stages cannot divide a list of layers of which some are trained and others, "
                    f"such as `{missing}`, are not. Freeze the first layers by `zero.freeze`, or "
                    "leave out `stages`."
                )
        return [j for j, group in enumerate(self.members) if group[0] in wanted]

    def apart_of(self, leaves: Iterable[int]) -> list[int]:
        """Return, for each of some leaves outside of lists, the index of the array that it is.

        Raises:
            NotImplementedError: a leaf is in a list.
        """
        own = {x[0]: j for j, x in enumerate(self.members) if not self.is_list(j)}
        if inside := [self.leaves[i].path for i in leaves if i not in own]:
            raise NotImplementedError(
                f"`{inside[0]}` is overwritten by its gradient, which stages cannot do for a layer "
                "of a list. Leave out `stages`."
            )
        return [own[i] for i in leaves]

    def apart(self, arrays: Sequence[Any]) -> list[Any]:
        """Convert one value for each array to one for each leaf, in the order of leaves.

        The stacks of lists are split into their layers. `arrays` have no padding layers.
        """
        leaves: dict[int, Any] = {}
        for j, (x, group) in enumerate(zip(arrays, self.members, strict=True)):
            for row, i in enumerate(group):
                leaves[i] = lax.index_in_dim(x, row, keepdims=False) if self.is_list(j) else x
        return [leaves[i] for i in range(len(self.leaves))]

    def of_stage(self, j: int, shards: Sequence[Array], dtype: Any) -> Array:
        """Exchange shards of a list's layers, so that each stage gets its own layers, `[n, ...]`.

        If the last stages have fewer than `n` layers, zeros take the places of the missing ones.
        Frozen layers are not divided: each stage gets all of them.

        Args:
            j: the index of the array that is the list's stack.
            shards: this device's shard of each layer's leaf.
            dtype: the dtype in which shards are sent.
        """
        num = lax.axis_size(STAGE)
        x = jnp.stack(shards)
        dim = self._dim_of_stages(j)
        if j in self.frozen:
            if dim is None:
                return x
            with labelled("weights", self.arrays[j].path):
                return all_gather(x.astype(dtype), STAGE, dim).astype(x.dtype)
        if len(x) < num:
            raise ValueError(
                f"`{self.arrays[j].path}` has {len(x)} layers for {num} stages. Change `layers` of "
                "`jz.Stages`, or take a mesh with fewer stages."
            )
        size = -(-len(x) // num)
        x = jnp.pad(x, [(0, size * num - len(x)), *[(0, 0)] * (x.ndim - 1)])
        if dim is None:
            return lax.dynamic_slice_in_dim(x, lax.axis_index(STAGE) * size, size)
        with labelled("weights", self.arrays[j].path):
            return all_to_all(x.astype(dtype), STAGE, 0, dim).astype(x.dtype)

    def to_leaves(self, j: int, gradient: Array) -> list[Array]:
        """Exchange gradients of a stage's layers, so that they are split as the leaves are.

        This is the reverse of `of_stage`.

        Args:
            j: the index of the array that is the list's stack.
            gradient: the gradient of this stage's layers, `[n, ...]`.

        Returns:
            This device's shard of the gradient of each layer's leaf.
        """
        dim = self._dim_of_stages(j)
        with labelled("gradients", self.arrays[j].path):
            if dim is None:
                whole = all_gather(gradient, STAGE, 0)
            else:
                whole = all_to_all(gradient, STAGE, dim, 0)
        return [whole[row] for row in range(len(self.members[j]))]

    def _dim_of_stages(self, j: int) -> int | None:
        """Return the dim of a list's stack that is split over stages in storage; None if none."""
        split = self.leaves[self.members[j][0]].stages
        return None if split is None else split.dim + 1

    def _path_of_list(self, j: int) -> str | None:
        if self.stages is None:
            return None
        place = self.stages.place_in_list(self.leaves[self.members[j][0]].path)
        return place and place[0]

    def _array(self, j: int) -> LeafSpec:
        leaf, path = self.leaves[self.members[j][0]], self._path_of_list(j)
        if path is None:
            return leaf
        return dataclasses.replace(
            leaf,
            path=path,
            shape=(len(self.members[j]), *leaf.shape),
            layout=leaf.layout and leaf.layout.moved(leaf.layout.dim + 1),
            other_axes=PartitionSpec(),
            stages=None,
        )


def _check_list(first: int, numbers: Sequence[int], leaves: Sequence[LeafSpec]) -> None:
    like, wanted = leaves[0], list(range(first, first + len(numbers)))
    if numbers != wanted:
        raise ValueError(
            f"`layers` of `jz.Stages` names a list of layers, of which `{like.path}` and others "
            f"have the numbers {numbers}; they should be those from {first} to {wanted[-1]}."
        )
    for leaf in leaves[1:]:
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"`layers` of `jz.Stages` names a list of layers, of which `{like.path}` is "
                f"{like.dtype}{list(like.shape)} and `{leaf.path}` {leaf.dtype}"
                f"{list(leaf.shape)}. Only equal layers can be divided: leave out `stages`."
            )
