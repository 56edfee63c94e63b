"""Convert leaves between their sharded form and their form on disk, which fits any mesh.

On disk leaves are stored by path and without padding: padding is removed when saving, and added
for the current mesh when restoring. A random key is stored as its key data. A process-local leaf,
such as a step counter, must be equal on all processes, and is written once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._mesh import HOST, in_host, to_device
from .._sharding import (
    LeafSpec,
    StoredArray,
    data_of,
    flatten,
    is_array,
    path_name,
    trained_leaves,
)
from .._zero import Zero, auto_mesh, check_host_bytes, pad_leaf, run_automatic


class Named(NamedTuple):
    """A leaf of the state: its layout, and its array or struct."""

    leaf: LeafSpec  # its shape on disk, dtype and layout
    value: Any  # an array, or its abstract shape and sharding

    @property
    def is_empty(self) -> bool:
        """True if the leaf has no elements; Orbax does not store such arrays."""
        return 0 in self.leaf.shape

    @property
    def is_key(self) -> bool:
        """True for a typed random key."""
        return jnp.issubdtype(self.value.dtype, jax.dtypes.prng_key)


def named_leaves(state: Mapping[str, Any], zero: Zero) -> dict[str, Named]:
    """Return the leaves of `state` by path, in the order in which JAX flattens `state`.

    Raises:
        TypeError: `state` is not a mapping of names to trees, or a leaf is not an array.
        ValueError: two leaves have one name, because a key contains a dot.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise TypeError(
            "The state must be a dict of trees by name, such as "
            '`{"params": params, "opt_state": opt_state}`; '
            f"got {type(state).__name__}. Give each tree a name."
        )
    named = {}
    for key in sorted(state):
        tree = state[key]
        for leaf, array in _leaves(key, tree, zero):
            entry = Named(leaf, data_of(array))
            if leaf.codec is not None:  # encoded leaves are stored as messages, without decoding
                entry = entry._replace(
                    leaf=LeafSpec(leaf.path, leaf.stored.shape, leaf.stored.dtype, None)
                )
            if entry.is_key:
                data = jax.eval_shape(jax.random.key_data, array)
                entry = entry._replace(leaf=LeafSpec(leaf.path, data.shape, data.dtype, None))
            name = _name(key, leaf.path)
            if name in named:
                raise ValueError(
                    f"Two leaves of the state are named `{name}`, because a key contains a dot, "
                    "and a checkpoint keeps leaves by name. Rename that key."
                )
            named[name] = entry
    return named


def _name(key: str, path: str) -> str:
    """Return the name of a leaf: the key of its tree, then its path, which is "." for a root."""
    return key if path == "." else f"{key}.{path}"


def _leaves(key: str, tree: Any, zero: Zero) -> list[tuple[LeafSpec, Any]]:
    """List the arrays of one tree of the state, each with its layout.

    Raises:
        TypeError: a leaf outside any `eqx.Module` or `nnx.Module` is not an array.
    """
    paths, leaves, _ = flatten(tree)
    arrays = []
    for path, value, in_module in zip(paths, leaves, trained_leaves(tree), strict=True):
        is_empty = isinstance(value, StoredArray) and value.is_empty
        if is_array(value):
            arrays.append((path, value))
        elif in_module is None and not is_empty:
            name = _name(key, path_name(path))
            raise TypeError(
                f"The leaf `{name}` must be an array; got {type(value).__name__}. Convert it "
                "to an array, or pass it in `extra`, which holds JSON."
            )
    layout = zero.find_layout(tree)
    if layout is not None:
        return [(leaf, value) for leaf, (_, value) in zip(layout.leaves, arrays, strict=True)]
    return [
        (
            value.leaf(path_name(path))
            if isinstance(value, StoredArray)
            else LeafSpec(path_name(path), tuple(value.shape), value.dtype, None),
            value,
        )
        for path, value in arrays
    ]


def check_fits_jax(named: Mapping[str, Named]) -> None:
    """Raise `ValueError` if a NumPy array has values that do not fit the dtype JAX has for it.

    Without `jax_enable_x64`, `restore` would return integers of 64 bits modulo 2^32, and large
    floats as infinity. Digits of floats are rounded, as everywhere in JAX.
    """
    for name, entry in named.items():
        if isinstance(entry.value, jax.Array | jax.ShapeDtypeStruct) or entry.is_key:
            continue
        array = np.asarray(entry.value)
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype == array.dtype:
            continue
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        is_lost = narrow != array if is_integer else np.isfinite(array) & ~np.isfinite(narrow)
        if is_lost.any():
            raise ValueError(
                f"The leaf `{name}` is {array.dtype} and holds {array[is_lost][0]}, and JAX would "
                f"restore it as {dtype}, which cannot hold that. Pass it in `extra`, which holds "
                "JSON, or set `jax_enable_x64`."
            )


def with_arrays(tree: Any, arrays: Sequence[Any]) -> Any:
    """Replace the arrays of `tree` in order by `arrays`; keep leaves that are not arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    remaining = iter(arrays)
    return jax.tree.unflatten(treedef, [next(remaining) if is_array(x) else x for x in leaves])


def true_array(named: Named, zero: Zero) -> Any:
    """Return the leaf without padding, the form that checkpoints store."""
    leaf, array = named
    own = _own_array(named)
    if own is not None:
        return own
    if named.is_key:
        return jax.random.key_data(array)
    if not leaf.padded_dims:
        return array
    sharding = _in_memory_of(array, _even_sharding(leaf, zero))
    return run_automatic(lambda x: leaf.unpad(to_device(x)), sharding, zero._programs, array)


def digests_of_own(named: Mapping[str, Named]) -> dict[str, str]:
    """Return the digest of each process-local array by path; empty if there is one process."""
    own = {name: _own_array(entry) for name, entry in named.items()}
    return {
        name: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
        for name, x in own.items()
        if x is not None
    }


def _own_array(named: Named) -> np.ndarray | None:
    """Return a process-local leaf as a host array; None for a global leaf, or a single process."""
    x = jax.random.key_data(named.value) if named.is_key else named.value
    is_shared = isinstance(x, jax.Array) and not x.is_fully_addressable
    return None if jax.process_count() == 1 or is_shared else np.asarray(x)


def target(named: Named, zero: Zero) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding in which a leaf is read.

    A leaf without padding is read directly into the requested sharding.
    """
    leaf, like = named
    sharding = getattr(like, "sharding", None)
    is_whole = leaf.layout is None and not leaf.padded_dims and not named.is_key
    if is_whole and isinstance(sharding, NamedSharding):
        read = NamedSharding(auto_mesh(zero.mesh), sharding.spec)
    else:
        read = _even_sharding(leaf, zero)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_in_memory_of(like, read))


def check_room(named: Mapping[str, Named], zero: Zero) -> None:
    """Raise `MemoryError` if the host lacks memory for the leaves that go to host memory."""
    targets = [target(entry, zero) for entry in named.values() if in_host(entry.value)]
    sizes = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(zero.mesh.local_devices)
        for x in targets
    )
    check_host_bytes("arrays of the checkpoint", sum(sizes))


def _in_memory_of(x: Any, sharding: NamedSharding) -> NamedSharding:
    """Return the sharding with the memory of `x`: host memory if `x` is in host memory.

    Offloaded leaves are read into host memory, since all of them may not fit into device memory.
    They are padded in device memory, one by one.
    """
    return sharding.with_memory_kind(HOST) if in_host(x) else sharding


def _even_sharding(leaf: LeafSpec, zero: Zero) -> NamedSharding:
    """Choose a sharding of the unpadded shape that divides evenly over as many axes as possible."""
    mesh = auto_mesh(zero.mesh)
    for axes in (zero.config.axes, ("local",), ("node",)):
        pieces = math.prod(mesh.shape[axis] for axis in axes)
        dims = [dim for dim, size in enumerate(leaf.shape) if size and size % pieces == 0]
        if leaf.layout and dims:
            dim = leaf.layout.dim if leaf.layout.dim in dims else dims[0]
            return NamedSharding(mesh, PartitionSpec(*[None] * dim, axes))
    return NamedSharding(mesh, PartitionSpec())


def stored_array(named: Named, x: jax.Array | None, zero: Zero) -> jax.Array:
    """Pad the array `x` that was read for a leaf, and reshard it as the leaf was requested.

    `x` is None for a leaf without elements, of which nothing is stored.
    """
    leaf, like = named
    given = jnp.zeros(leaf.shape, leaf.dtype) if x is None else x
    if named.is_key:
        return jax.random.wrap_key_data(given, impl=jax.random.key_impl(like))
    sharding = getattr(like, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    auto = _in_memory_of(like, NamedSharding(auto_mesh(zero.mesh), spec))
    return run_automatic(lambda x: pad_leaf(leaf, to_device(x)), auto, zero._programs, given)


def check_same_leaves(
    named: Mapping[str, Named], saved: Mapping[str, tuple[tuple[int, ...], Any]], folder: Path
) -> None:
    """Raise `ValueError` unless a checkpoint has the leaves `named`, of equal shapes and dtypes."""
    wanted = {name: entry.leaf for name, entry in named.items() if not entry.is_empty}
    for name, leaf in wanted.items():
        if name not in saved:
            raise ValueError(
                f"The checkpoint {folder} has no leaf `{name}`. Its first is `{min(saved)}`, of "
                f"{len(saved)}. `like` must have the tree that was saved."
            )
        shape, dtype = saved[name]
        if shape != leaf.shape:
            # In a `LocalState` the leading dim counts nodes.
            of_nodes = ".params." in name and shape[1:] == leaf.shape[1:]
            hint = " After local steps on other nodes: `rounds.abstract(..., nodes=...)`."
            raise ValueError(
                f"The leaf `{name}` has shape {shape} in the checkpoint {folder}, and {leaf.shape} "
                f"in `like`. Build the model that was saved.{hint if of_nodes else ''}"
            )
        if dtype != leaf.dtype:
            raise ValueError(
                f"The leaf `{name}` is {dtype} in the checkpoint {folder}, and {leaf.dtype} in "
                "`like`. Restore it as it was saved, then cast it."
            )
    if extra := saved.keys() - wanted.keys():
        raise ValueError(
            f"The checkpoint {folder} holds `{min(extra)}`, which `like` lacks. `like` must have "
            "the tree that was saved."
        )
