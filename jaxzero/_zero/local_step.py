"""Check the inputs of local steps and the results of a step; run a step on one node's arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from .._collectives import readable_bytes
from .._local_steps import Exchange, Inner, LocalSteps
from .._mesh import AXES, NODE, AnyMesh
from .._sharding import StoredArray, TreeLayout, ZeroConfig, data_of, flatten, is_array, path_name
from .._warnings import warn
from .arguments import BATCH
from .batch_choice import is_split, rows_of
from .local_state import Layouts
from .placement import constrain
from .user_function import explaining_values

_STACKED = PartitionSpec(None, *BATCH)
_REMEDY = "Return `(params, opt_state, metrics)`, with the trees that the step was given, updated."


def batch_specs(batches: Any, every: int, num_devices: int) -> list[PartitionSpec]:
    """Return how each leaf of `batches` is split: rows over all devices; leaves without rows not.

    Args:
        batches: a tree of arrays `[every, ...]`.
        every: the number of steps in a round.
        num_devices: the number of devices that share a batch.

    Raises:
        ValueError: dim 0 of a leaf is not `every`, leaves have different numbers of rows, or the
            devices cannot share the rows evenly.
    """
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(batches)[0]
    named = [(path_name(path), x) for path, x in paths_and_leaves]
    for path, leaf in named:
        if not is_array(leaf) or not leaf.shape or leaf.shape[0] != every:
            got = f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else type(leaf).__name__
            raise ValueError(
                f"`batches` must be the batches of {every} steps, stacked on a new leading dim; "
                f"the leaf `{path}` is {got}. Stack them: `jax.tree.map(lambda *x: jnp.stack(x), "
                "*list_of_batches)`."
            )
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    try:
        num_rows = rows_of("`batches`", steps)
    except ValueError:
        shapes = ", ".join(f"`{path}` {list(x.shape)}" for path, x in named)
        raise ValueError(
            "`batches` must hold `[every, rows, ...]` with equally many rows in every leaf, beside "
            f"numbers and keys `[every]`; got {shapes}. What has no rows goes into the step by "
            "closing over it."
        ) from None
    if num_rows % num_devices:
        raise ValueError(
            f"`batches` has {num_rows} rows for each step, which {num_devices} devices cannot "
            "share evenly. Pad each batch with `jz.pad_batch`, or drop rows."
        )
    leaves = [x for _, x in jax.tree_util.tree_flatten_with_path(steps)[0]]
    return [
        _STACKED if is_split(path, x, num_rows) else PartitionSpec()
        for (path, _), x in zip(named, leaves, strict=True)
    ]


def node_specs(specs: Sequence[PartitionSpec]) -> list[PartitionSpec]:
    """Reduce the specs from `batch_specs` to the mesh axis `node`."""
    return [PartitionSpec(None, NODE) if spec == _STACKED else PartitionSpec() for spec in specs]


def local_method(method: Any, options: Mapping[str, Any]) -> LocalSteps:
    """Return `method` with the fields in `options` replaced; for None, `LocalSteps(**options)`.

    Raises:
        ValueError: `method` is no `LocalSteps`, `options` has an unknown field, or both `method`
            and the option `every` are missing.
    """
    if method is not None and not isinstance(method, LocalSteps):
        raise ValueError(
            f"`method` must be a `jz.LocalSteps`, such as `jz.streaming_diloco()`; got {method!r}."
        )
    fields = [field.name for field in dataclasses.fields(LocalSteps)]
    unknown = [name for name in options if name not in fields]
    if unknown:
        raise ValueError(f"`local_steps` has no option `{unknown[0]}`; it has {', '.join(fields)}.")
    if method is not None:
        return dataclasses.replace(method, **options)
    if "every" not in options:
        raise ValueError(
            "`local_steps` needs `every`, the number of steps between exchanges: give it, or a "
            "method such as `jz.streaming_diloco()`."
        )
    return LocalSteps(**options)


def check_kept(name: str, tree: Any, wanted: Any, nodes: int | None) -> None:
    """Raise `ValueError` unless a field of a `LocalState` has the structure and arrays of `wanted`.

    Args:
        name: the name of the field.
        tree: the value of the field.
        wanted: the expected tree, with an array or struct for each array.
        nodes: the size of the leading dim that counts nodes; None if there is no such dim.
    """
    (paths, leaves, treedef), (_, right, right_treedef) = flatten(tree), flatten(wanted)
    what = "it is another tree" if treedef != right_treedef else ""
    # Trees of another structure, which may have fewer leaves, are refused below.
    for path, x, like in zip(paths, leaves, right, strict=False):
        if what or not (is_array(x) or is_array(like)):
            continue
        got, expected = (
            f"{y.dtype}{list(y.shape)}" if is_array(y) else type(y).__name__
            for y in (data_of(x), data_of(like))
        )
        if got != expected:
            what = f"its leaf `{path_name(path)}` is {got}, not {expected}"
            what += f", which has a value for each of {nodes} nodes" if nodes else ""
    if what:
        raise ValueError(
            f"`state.{name}` is not that of the trees given to `init`, or was made with other "
            f"`fragments`, `outer` or `codec`: {what}. Make the state with the same method and "
            "trees."
        )


def check_local_steps(mesh: AnyMesh, config: ZeroConfig) -> None:
    """Raise an error unless each node of `mesh` can train on its own with `config`."""
    if config.stages is not None:
        raise NotImplementedError(
            "`local_steps` does not work with `stages` of the config, which divides the layers "
            "between nodes. Take a config without stages, such as `jz.zero3()`."
        )
    if config.ungathered is not None:
        raise NotImplementedError(
            "`local_steps` does not work with `ungathered` of the config, whose leaves are split "
            "over nodes in another way. Leave out one of the two."
        )
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


def warn_of_codec(exchange: Exchange) -> None:
    """Warn if messages are larger with the codec than without: see `Exchange.is_reduced`."""
    method = exchange.method
    exact = dataclasses.replace(exchange, method=dataclasses.replace(method, codec=None))
    encoded, unencoded = (readable_bytes(x.node_bytes) for x in (exchange, exact))
    if exchange.node_bytes > exact.node_bytes:
        warn(
            f"`codec={method.codec}` of `LocalSteps` brings {encoded} into each of "
            f"{exchange.num_nodes} nodes in a round, and float32 {unencoded}, because encoded "
            "messages cannot be summed on their way. Take `codec=None`."
        )


class LocalStep:
    """The user's `step(params, opt_state, batch)`, as a function of flat lists of arrays.

    A call takes an `Inner` (the arrays of parameters and optimizer state) and a batch. It returns
    the new `Inner`, and the metrics as a list of arrays.

    Args:
        step: the user's function.
        layouts: the layouts of its trees on one node.
        mesh: the mesh of all nodes.
        noted: a dict in which a call stores the tree structure of the metrics, as "metrics".
    """

    def __init__(self, step: Callable, layouts: Layouts, mesh: Mesh, noted: dict[str, Any]):
        self._step = step
        self._layouts = layouts
        self._mesh = mesh
        self._noted = noted

    def __call__(self, inner: Inner, batch: Any) -> tuple[Inner, list[Array]]:
        layouts = self._layouts.params, self._layouts.opt_state
        trees = [layout.stored(arrays) for layout, arrays in zip(layouts, inner, strict=True)]
        args = (*trees, batch)
        with explaining_values(self._step, args, {}, ("`params`", "`opt_state`", "`batch`")):
            result = self._step(*args)
        if not isinstance(result, tuple) or len(result) != 3:
            raise ValueError(
                "`step` must return three values; got "
                f"{len(result) if isinstance(result, tuple) else type(result).__name__}. {_REMEDY}"
            )
        *new, metrics = result
        kept = self._layouts.kept
        params, opt_state = (
            self._arrays(name, layout, tree, arrays, kept[name].axes)
            for name, layout, tree, arrays in zip(
                ("params", "opt_state"), layouts, new, inner, strict=True
            )
        )
        paths, leaves, self._noted["metrics"] = flatten(metrics)
        for path, x in zip(paths, leaves, strict=True):
            is_number = isinstance(x, bool | int | float | complex)
            if isinstance(x, StoredArray) or not (is_array(x) or is_number):
                raise ValueError(
                    f"`step` returns the metric `{path_name(path)}` as {type(x).__name__}. Metrics "
                    "are arrays and numbers; keep others outside, and `zero.unshard` a leaf that "
                    "is stored padded."
                )
        return Inner(params, opt_state), [jnp.asarray(x) for x in leaves]

    def _arrays(
        self, name: str, layout: TreeLayout, tree: Any, old: list[Array], axes: tuple[str, ...]
    ) -> list[Array]:
        """Check a tree that the step returned; return its arrays, laid out like those of its input.

        Args:
            name: the name of the tree, for messages.
            layout: the layout of the tree that the step was given.
            tree: the tree that the step returned.
            old: the arrays of the tree that the step was given.
            axes: the mesh axes that split the arrays.

        Raises:
            ValueError: `tree` has another structure, or an array of another shape or dtype, than
                the input.
        """
        paths, leaves, treedef = flatten(tree)
        if treedef != layout.treedef:
            raise ValueError(
                f"`step` returns `{name}` with another structure than it was given: {treedef}, "
                f"not {layout.treedef}. {_REMEDY}"
            )
        named = []
        for path, x, static in zip(paths, leaves, layout.statics, strict=True):
            if is_array(x) != (static is None):
                now = "no array" if static is None else "an array"
                raise ValueError(
                    f"`step` returns `{name}`, leaf `{path_name(path)}`, as {now}, {x!r}. {_REMEDY}"
                )
            if static is None:
                named.append((path_name(path), data_of(x)))
        for (path, x), before in zip(named, old, strict=True):
            if (x.shape, x.dtype) != (before.shape, before.dtype):
                raise ValueError(
                    f"`step` returns `{name}`, leaf `{path}`, as {x.dtype}{list(x.shape)}; it was "
                    f"given {before.dtype}{list(before.shape)}. Keep shapes and dtypes: all steps "
                    "of a round run in one loop."
                )
        return [
            constrain(x, self._mesh, leaf.spec(axes))
            for (_, x), leaf in zip(named, layout.leaves, strict=True)
        ]
