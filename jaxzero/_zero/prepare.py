"""Make the `Transform` of one call: classify the arguments, and check them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .arguments import check_meshes, check_rows, resolve
from .batch_choice import BatchArgnums
from .node_shares import check_share_nodes
from .options import Options
from .sharded_trees import ShardedTrees
from .transform import Transform


def prepare(
    zero: ShardedTrees,
    f: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: Options,
    batch_argnums: BatchArgnums,
    in_specs: Sequence[Any] | None,
) -> tuple[Transform, list[list[Any]]]:
    """Classify the arguments of a call of `f`, check them, and build its `Transform`.

    Returns:
        The transform, and the stored arrays of each argument.

    Raises:
        ValueError: an argument does not fit; see `resolve`, `check_meshes`, `check_rows`
            and `check_share_nodes`.
    """
    numbers = tuple(i + len(args) if i < 0 else i for i in options.argnums)
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"`argnums` names an argument twice; got {numbers}.")
    options = dataclasses.replace(options, argnums=numbers)
    here = zero._here
    call, arrays = resolve(
        f,
        args,
        kwargs,
        argnums=numbers,
        batch_argnums=batch_argnums,
        in_specs=in_specs,
        registry=here._plans,
        states=here._states,
        num_devices=here.num_devices,
    )
    check_meshes(call, arrays, here.mesh)
    check_share_nodes(here._devices, options.shares)
    check_rows(call, arrays, here._devices, options.microbatches)
    return Transform(f, call, options, here._devices, zero.config), arrays
