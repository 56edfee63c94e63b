"""Checkpoints with Orbax: true shapes on disk, so that any mesh can take them up again.

A leaf that is padded here is cut to its own shape on the way out and padded for the mesh
at hand on the way in. Leaves are stored under their tree paths.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from ._collectives import unpad
from ._partition import Leaf, TreePlan, path_name
from ._placement import auto_mesh, pad_leaf, run_automatic
from ._zero import Zero

_STATE, _EXTRA = "state", "extra"


class Checkpoints:
    """The checkpoints of one run, in one directory. A context manager.

    Saving is asynchronous: `save` returns when the arrays are safe from being changed, and
    a checkpoint appears under its final name only when it is complete.

    Args:
        directory: made if it is missing.
        zero: what laid out the trees to be saved.
        keep: how many of the newest checkpoints to keep.

    Raises:
        ValueError: `keep` is less than 1.
    """

    def __init__(self, directory: str | os.PathLike, zero: Zero, *, keep: int = 2):
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1; got {keep}.")
        self.directory = Path(directory).absolute()
        self._zero = zero
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        handlers = {_STATE: ocp.StandardCheckpointHandler(), _EXTRA: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            self.directory, item_handlers=handlers, options=options
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: Mapping[str, Any], *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            step: its number; one that exists already is left as it is.
            state: trees by name, such as `{"params": ..., "opt_state": ...}`.
            extra: what else to keep, as JSON.
        """
        if step in self._manager.all_steps():
            return
        arrays = {
            name: _true_array(leaf, x, self._zero)
            for name, (leaf, x) in self._named_leaves(state).items()
            if not _is_empty(leaf)
        }
        args = ocp.args.Composite(
            **{
                _STATE: ocp.args.StandardSave(arrays),
                _EXTRA: ocp.args.JsonSave(dict(extra or {})),
            }
        )
        self._manager.save(step, args=args)

    def restore(
        self, like: Mapping[str, Any], *, step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a checkpoint into the layout of `like`.

        Args:
            like: the trees that are wanted, as arrays or from `zero.abstract`. The mesh need
                not be the one that saved.
            step: which checkpoint; the newest by default.

        Returns:
            The trees, and what was saved as `extra`.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it holds other leaves, or other shapes, than `like`.
        """
        self._manager.wait_until_finished()  # one that is being saved counts
        step = self.latest_step() if step is None else step
        if step is None or step not in self._manager.all_steps():
            raise FileNotFoundError(
                f"No checkpoint {'' if step is None else f'of step {step} '}in {self.directory}. "
                f"There are: {sorted(self._manager.all_steps()) or 'none'}."
            )
        named = self._named_leaves(like)
        self._check(named, step)
        targets = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=_sharding_to_read(leaf, x, self._zero)
            )
            for name, (leaf, x) in named.items()
            if not _is_empty(leaf)
        }
        args = ocp.args.Composite(
            **{_STATE: ocp.args.StandardRestore(targets), _EXTRA: ocp.args.JsonRestore()}
        )
        restored = self._manager.restore(step, args=args)
        stored = [
            _stored_array(leaf, restored[_STATE].get(name), x, self._zero)
            for name, (leaf, x) in named.items()
        ]
        tree = jax.tree.unflatten(jax.tree.structure(dict(like)), stored)
        return tree, restored[_EXTRA]

    def _check(self, named: Mapping[str, tuple[Leaf, Any]], step: int) -> None:
        metadata = self._manager.item_metadata(step)[_STATE]
        saved = {name: tuple(entry.shape) for name, entry in metadata.items()}
        wanted = {name: leaf for name, (leaf, _) in named.items() if not _is_empty(leaf)}
        for name, leaf in wanted.items():
            if name not in saved:
                raise ValueError(
                    f"The checkpoint of step {step} in {self.directory} has no leaf `{name}`. "
                    "`like` must have the tree that was saved."
                )
            if saved[name] != leaf.shape:
                raise ValueError(
                    f"The leaf `{name}` has shape {saved[name]} in the checkpoint of step "
                    f"{step}, and {leaf.shape} in `like`. Build the model that was saved."
                )
        if extra := saved.keys() - wanted.keys():
            raise ValueError(
                f"The checkpoint of step {step} holds `{min(extra)}`, which `like` lacks. "
                "`like` must have the tree that was saved."
            )

    def _named_leaves(self, state: Mapping[str, Any]) -> dict[str, tuple[Leaf, Any]]:
        """Every leaf by its path, with its layout."""
        named = {}
        for key in sorted(state):  # the order in which JAX flattens a dict
            tree = state[key]
            plan = self._zero.find_plan(tree) or _plan_as_it_is(tree)
            for leaf, x in zip(plan.leaves, jax.tree.leaves(tree), strict=True):
                stored = leaf
                if leaf.codec is not None:  # messages, as they are
                    stored = Leaf(leaf.path, leaf.stored.shape, leaf.stored.dtype, None)
                if _is_key(x):
                    data = jax.eval_shape(jax.random.key_data, x)
                    stored = Leaf(leaf.path, data.shape, data.dtype, None)
                named[key if leaf.path == "." else f"{key}.{leaf.path}"] = (stored, x)
        return named


def _is_empty(leaf: Leaf) -> bool:
    """Whether it has no elements; Orbax does not store such arrays."""
    return 0 in leaf.shape


def _plan_as_it_is(tree: Any) -> TreePlan:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = (Leaf(path_name(path), tuple(x.shape), x.dtype, None) for path, x in paths)
    return TreePlan(treedef, tuple(leaves))


def _sharding_to_read(leaf: Leaf, like: Any, zero: Zero) -> NamedSharding:
    """How a leaf is read: as the array wanted is laid out, if that is stored in its own shape."""
    sharding = getattr(like, "sharding", None)
    if leaf.layout is None and isinstance(sharding, NamedSharding) and not _is_key(like):
        return NamedSharding(auto_mesh(zero.mesh), sharding.spec)
    return _even_sharding(leaf, zero)


def _even_sharding(leaf: Leaf, zero: Zero) -> NamedSharding:
    """A sharding of the true shape that divides evenly, over as many devices as can be."""
    mesh = auto_mesh(zero.mesh)
    for axes in (zero.config.axes, ("local",), ("node",)):
        pieces = math.prod(mesh.shape[axis] for axis in axes)
        dims = [dim for dim, size in enumerate(leaf.shape) if size and size % pieces == 0]
        if leaf.layout and dims:
            dim = leaf.layout.dim if leaf.layout.dim in dims else dims[0]
            return NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))
    return NamedSharding(mesh, PartitionSpec())


def _is_key(x: Any) -> bool:
    """Whether it is a typed random key, which is stored as the numbers it stands for."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _true_array(leaf: Leaf, x: Any, zero: Zero) -> Any:
    if _is_key(x):
        return jax.random.key_data(x)
    if leaf.layout is None or not leaf.layout.is_padded:
        return x
    layout = leaf.layout
    return run_automatic(lambda x: unpad(x, layout), _even_sharding(leaf, zero), zero.mesh, x)


def _stored_array(leaf: Leaf, x: jax.Array | None, like: Any, zero: Zero) -> jax.Array:
    """Pad, and lay out as `like` is. `x` None: an empty leaf."""
    x = jnp.zeros(leaf.shape, leaf.dtype) if x is None else x
    if _is_key(like):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    sharding = getattr(like, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    auto = NamedSharding(auto_mesh(zero.mesh), spec)
    return run_automatic(lambda x: pad_leaf(leaf, x), auto, zero.mesh, x)
