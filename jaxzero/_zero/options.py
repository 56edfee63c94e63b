"""The arguments of `Zero`, and of its `value_and_grad` and `apply` other than the function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .._collectives import check_tree
from .._mesh import AnyMesh, check_mesh
from .._sharding import ZeroConfig, without_defaults, zero3
from .host_memory import check_platform
from .node_shares import node_microbatches


@dataclasses.dataclass(frozen=True)
class Options:
    """The options given to `value_and_grad`, or (`has_gradients` False) to `apply`."""

    argnums: tuple[int, ...]
    has_aux: bool = False
    microbatches: int = 1
    weighted: bool = False
    reduce: tuple[tuple[str, ...], Any] | None = None  # reductions of outputs: names, treedef
    has_gradients: bool = True
    shares: tuple[int, ...] | None = None  # of the nodes, without a common factor; None: all equal
    halves: bool = False  # whether gradients of two half-batches are compared
    # How gradients are reduced, as `reduce`; None: as the leaves say (`overwritten_leaves`).
    gradient_reduce: tuple[tuple[str, ...], Any] | None = None

    @property
    def node_microbatches(self) -> tuple[int, ...] | None:
        """How many micro-batches the devices of each node run; None if all run `microbatches`."""
        return self.shares and node_microbatches(self.microbatches, self.shares)


def checked_config(mesh: AnyMesh, config: ZeroConfig | None) -> ZeroConfig:
    """The configuration of a `Zero`, by default plain ZeRO-3.

    Raises:
        ValueError: one of the arguments is of another kind, or the mesh has other axes, or nodes of
            a size for which sums cannot be added in one order (`CommSchedule.deterministic`).
        NotImplementedError: the platform of the mesh has no host memory, and the config uses it.
    """
    if isinstance(mesh, ZeroConfig):
        raise ValueError(
            "`mesh` comes before `config`: `jz.Zero(jz.make_mesh(), config)`; got "
            f"{without_defaults(mesh)}."
        )
    check_mesh(mesh)
    if config is None:
        return zero3()
    if not isinstance(config, ZeroConfig):
        raise ValueError(
            f"`config` must be a `jz.ZeroConfig`, such as `jz.zero3()`; got {config!r}."
        )
    if config.offload is not None:
        check_platform(mesh)
    if config.schedule.deterministic:
        check_tree(mesh)
    return config


def argument_numbers(argnums: Any) -> tuple[int, ...]:
    """`argnums` as a tuple.

    Raises:
        ValueError: it is no position of an argument, nor several.
    """
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(numbers, Sequence) or not all(isinstance(x, int) for x in numbers):
        raise ValueError(
            f"`argnums` must be the position of an argument, or several; got {argnums!r}. Of an "
            "`nnx.Module` what is an `nnx.Param` is differentiated, without a filter."
        )
    return tuple(numbers)
