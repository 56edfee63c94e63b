"""Load parameters of any model from a checkpoint (`load_into`), and back (`tensors_from`)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxzero._sharding import StoredArray, data_of
from jaxzero.interop._match import settled
from jaxzero.interop._rules import Rule, to_ours, to_theirs
from jaxzero.interop._tensors import ArrayTensor, LazyTensor, ShardedTensor, named_leaves

from .open import open_checkpoint


def load_into(
    tree: Any,
    source: Path | str | Mapping[str, Any],
    *,
    rules: Iterable[Rule] | None = None,
    ignore: Iterable[str] = (),
    accept: str | Rule | Iterable[str | Rule] = (),
    dtype: np.typing.DTypeLike | None = None,
) -> Any:
    """Open a checkpoint as the parameters of your own model.

    Tensors are read later: pass the result to `zero.shard`, where each process reads the shards of
    its devices, or read all of it: `jax.tree.map(lambda tensor: tensor.read(), loaded)`.

    Args:
        tree: parameters of the model: arrays or `jax.ShapeDtypeStruct`s, in any tree (Flax NNX or
            Linen, Equinox, plain). Only their paths, shapes and dtypes are used.
        source: path of a checkpoint, as for `open_checkpoint`; or tensors by name: a `Checkpoint`,
            a `state_dict` of PyTorch, or arrays of numpy. Tensors in the memory of the CPU are not
            copied: if you change them later, the changed values are read.
        rules: map tensors to parameters. If None, `match` proposes rules. A parameter that it
            cannot decide is an error, and so is a proposed rule that may be wrong and is not in
            `accept`; the message has the rules.
        ignore: patterns (with `*`) for names of tensors that are not parameters of the model.
        accept: the part of the proposal that you have checked: rules, which are used as they are,
            or patterns (with `*`) for paths of parameters whose proposed rules are right. "*"
            accepts all proposed rules. Only without `rules`.
        dtype: dtype of floating-point parameters; None keeps that of the checkpoint. Other
            parameters have the dtype of `tree`. Reading a slice with a number that the dtype cannot
            hold, not even rounded, raises `ValueError`.

    Returns:
        The tree with `LazyTensor`s as leaves.

    Raises:
        TypeError: `source` is neither a path nor tensors by name.
        ValueError: a tensor is missing, unknown, or has another shape or kind than the model needs,
            or the rules do not fit the model. The message names the tensor. Or, without `rules`,
            a proposed rule has to be confirmed or chosen.
    """
    if dtype is not None:
        dtype = checked_dtype(dtype)
    named = named_leaves(tree)
    shapes = {path: tuple(leaf.shape) for path, leaf in named.leaves.items()}
    if isinstance(source, Mapping):
        path = getattr(source, "path", None)  # of a `Checkpoint`
        tensors, where = source, "in `source`" if path is None else f"in {str(path)!r}"
    elif hasattr(source, "state_dict"):
        raise TypeError(
            f"`source` must be the path of a checkpoint, or tensors by name; got {type(source)}. "
            "Give the `state_dict()` of a module of PyTorch."
        )
    else:
        tensors, where = open_checkpoint(source), f"in {str(source)!r}"
    rules, ignore = settled(tree, tensors, rules=rules, accept=accept, ignore=ignore)
    loaded = to_ours(rules, shapes, tensors, where=where, ignore=ignore)
    return named.rebuild(
        {
            path: _cast(tensor, named.leaves[path].dtype, path, dtype)
            for path, tensor in loaded.items()
        }
    )


def tensors_from(
    tree: Any,
    rules: Iterable[Rule],
    *,
    like: Any = None,
    dtype: np.typing.DTypeLike | Mapping[str, LazyTensor] | None = None,
) -> dict[str, LazyTensor]:
    """Convert parameters to the tensors of a checkpoint: the inverse of `load_into`.

    Tensors are lazy: `save_tensors` gathers and reads them one by one.

    Args:
        tree: parameters: full arrays, or shards from `zero.shard`.
        rules: the rules given to `load_into`.
        like: a tree with the expected paths and shapes, such as the result of `load_into`.
        dtype: dtype of floating-point tensors. None keeps the dtype of the parameters. Tensors by
            name, such as the checkpoint that was loaded, give each tensor the dtype of the one with
            the same name. Reading a number that the dtype cannot hold raises `ValueError`.

    Raises:
        ValueError: the rules do not fit the tree, `tree` and `like` differ, or a parameter is
            stored as messages of a codec.
    """
    leaves = named_leaves(tree).leaves
    wanted = leaves if like is None else named_leaves(like).leaves
    if leaves.keys() != wanted.keys():
        differing = sorted(leaves.keys() ^ wanted.keys())
        raise ValueError(
            f"The parameters are not those of the model: `{differing[0]}` is in only one of the "
            f"two trees ({len(differing)} such paths). Pass a tree like the one that was loaded."
        )
    held = {path: _held(leaf, tuple(wanted[path].shape), path) for path, leaf in leaves.items()}
    tensors = to_theirs(rules, held)
    if dtype is None:
        return tensors
    if isinstance(dtype, Mapping):
        dtypes = {name: dtype[name].dtype for name in tensors if name in dtype}
    else:
        dtypes = dict.fromkeys(tensors, checked_dtype(dtype))
    return {
        name: x.astype(dtypes[name])
        if name in dtypes and all(jnp.issubdtype(y, jnp.floating) for y in (x.dtype, dtypes[name]))
        else x
        for name, x in tensors.items()
    }


def _held(leaf: Any, shape: tuple[int, ...], path: str) -> LazyTensor:
    if tuple(leaf.shape) != shape:
        raise ValueError(
            f"The parameters have shape {tuple(leaf.shape)} at `{path}`, the model has {shape}."
        )
    if isinstance(leaf, StoredArray) and leaf.form.codec is not None:
        raise ValueError(
            f"The parameters are stored as messages of {leaf.form.codec} at `{path}`. Pass the "
            "parameters before encoding, or `zero.unshard(tree)`."
        )
    return lazy_leaf(leaf, shape, path)


def lazy_leaf(leaf: Any, shape: tuple[int, ...], path: str) -> LazyTensor:
    """Return a leaf of a tree as a lazy tensor, without the padding beyond `shape`.

    A leaf that is a lazy tensor is returned unchanged. `path` names the leaf in messages.
    """
    if isinstance(leaf, LazyTensor):
        return leaf
    leaf = data_of(leaf)
    if isinstance(leaf, jax.Array):
        return ShardedTensor(leaf, shape, path)
    return ArrayTensor(np.asarray(leaf), path)


def checked_dtype(dtype: np.typing.DTypeLike) -> np.dtype:
    """Return the argument `dtype` as a numpy dtype; `ValueError` unless it is floating-point."""
    try:
        checked = np.dtype(dtype)
    except TypeError:
        checked = None
    if checked is None or not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(
            f"`dtype` must be that of floating-point numbers; got {dtype!r}. Give for example "
            "'float32' or 'bfloat16'."
        )
    return checked


def _cast(
    tensor: LazyTensor, wanted: Any, path: str, dtype: np.typing.DTypeLike | None
) -> LazyTensor:
    for kind, what in ((jnp.floating, "floating-point"), (jnp.complexfloating, "complex")):
        if jnp.issubdtype(tensor.dtype, kind) != jnp.issubdtype(wanted, kind):
            raise ValueError(
                f"Tensor {tensor.label} has dtype {tensor.dtype}, but `{path}` of the model has "
                f"{wanted}: one is {what} and the other is not."
            )
    if jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor if dtype is None else tensor.astype(dtype)
    return tensor.astype(wanted)
