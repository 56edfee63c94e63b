"""Check, before anything is traced, that a mesh and a config can run local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._local_steps import LocalSteps
from .._mesh import AXES, NODE, AnyMesh
from .._sharding import ZeroConfig, data_of, flatten, is_array, path_name


def local_method(method: LocalSteps | None, options: Mapping[str, Any]) -> LocalSteps:
    """`method` with these fields replaced; with None, a new one.

    Raises:
        ValueError: a field is not known, or `every` is given nowhere.
    """
    if method is not None and not isinstance(method, LocalSteps):
        raise ValueError(
            f"`method` must be a `jz.LocalSteps`, such as `jz.streaming_diloco()`; got {method!r}."
        )
    known = [field.name for field in dataclasses.fields(LocalSteps)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"`local_steps` has no option `{unknown[0]}`; it has {', '.join(known)}.")
    if method is not None:
        return dataclasses.replace(method, **options)
    if "every" not in options:
        raise ValueError(
            "`local_steps` needs `every`, the number of steps between exchanges: give it, or a "
            "method such as `jz.streaming_diloco()`."
        )
    return LocalSteps(**options)


def check_kept(name: str, tree: Any, wanted: Any, nodes: int | None) -> None:
    """Raise `ValueError` unless a field of a `LocalState` has the right arrays.

    Args:
        name: of the field.
        tree: its value.
        wanted: the same tree with an array or struct for each of its arrays.
        nodes: how many nodes have arrays of their own in it, on a leading dim; None: they have not.
    """
    (paths, leaves, treedef), (_, right, right_treedef) = flatten(tree), flatten(wanted)
    what = "it is another tree" if treedef != right_treedef else ""
    for path, x, like in zip(paths, leaves, right, strict=False):
        if what or not (is_array(x) or is_array(like)):
            continue
        now, then = (
            f"{y.dtype}{list(y.shape)}" if is_array(y) else type(y).__name__
            for y in (data_of(x), data_of(like))
        )
        if now != then:
            what = f"its leaf `{path_name(path)}` is {now} in place of {then}"
            what += f", which has a value for each of {nodes} nodes" if nodes else ""
    if what:
        raise ValueError(
            f"`state.{name}` is not that of the trees given to `init`, or was made with other "
            f"`fragments`, `outer` or `codec`: {what}. Make the state with the same method and "
            "trees."
        )


def check_local_steps(mesh: AnyMesh, config: ZeroConfig) -> None:
    """Raise an error unless nodes of `mesh` can train by themselves with `config`."""
    if mesh.shape[NODE] == 1:
        raise ValueError(
            "`local_steps` trains each node by itself, and the mesh has one node. Make one of "
            "several: `jz.make_mesh(nodes=...)`."
        )
    others = [axis for axis in mesh.axis_names if axis not in AXES and mesh.shape[axis] > 1]
    if others:
        raise NotImplementedError(
            f"`local_steps` needs a mesh of {AXES} alone; this one also has {tuple(others)}. Train "
            "with fewer axes, or without local steps."
        )
    if config.needs_wire_state:
        raise ValueError(
            "`local_steps` sends no weights or gradients between nodes, so `WeightDelta` and "
            "`ErrorFeedback` in the config have nothing to do, and their wire state would be of no "
            "use. Take `jz.zeropp()` or `jz.zero3()`, and `codec=jz.Int4()` for the exchange."
        )
    if config.schedule.deterministic:
        raise ValueError(
            "`local_steps` trains each node by itself, so results depend on the number of nodes, "
            'and `CommSchedule(deterministic="mesh")` promises that they do not. Leave out one of '
            "the two."
        )
    if config.offload is not None:
        raise NotImplementedError(
            "`local_steps` cannot keep arrays in host memory yet. Leave out `offload`."
        )
