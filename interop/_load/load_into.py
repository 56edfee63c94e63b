"""Any model's parameters from a checkpoint, and back: `load_into` and `tensors_from`."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxzero._sharding import StoredArray, data_of
from jaxzero.interop._match import match
from jaxzero.interop._rules import Rule, to_ours, to_theirs
from jaxzero.interop._tensors import ArrayTensor, LazyTensor, ShardedTensor, named_leaves

from .open import open_checkpoint


def load_into(
    tree: Any,
    source: Path | str | Mapping[str, LazyTensor],
    *,
    rules: Iterable[Rule] | None = None,
    ignore: Iterable[str] = (),
    dtype: np.typing.DTypeLike | None = None,
) -> Any:
    """Open a checkpoint as the parameters of your own model.

    No tensor is read yet: give the result to `zero.shard`, of which each process reads what its
    devices own, or read it here and now: `jax.tree.map(lambda tensor: tensor.read(), loaded)`.

    Args:
        tree: parameters of the model: arrays or `jax.ShapeDtypeStruct`s, in any tree (Flax NNX or
            Linen, Equinox, plain). Their shapes and paths matter, their values do not.
        source: a checkpoint's directory or file, for `open_checkpoint`, or tensors by name.
        rules: which parameter comes from which tensor. If left out, `match` proposes them, and what
            it cannot decide is an error, what it assumed is a warning.
        ignore: names of tensors that are no parameters of the model, with `*` for any text.
        dtype: of floating-point parameters; as in the checkpoint if left out. Others have the dtype
            of `tree`.

    Returns:
        The tree, its leaves of type `LazyTensor`.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape or kind than the model needs,
            or the rules do not fit the model. Tensors are named.
    """
    named = named_leaves(tree)
    shapes = {path: tuple(leaf.shape) for path, leaf in named.leaves.items()}
    if isinstance(source, Mapping):
        tensors, where = source, "in `source`"
    else:
        tensors, where = open_checkpoint(source), f"in {str(source)!r}"
    if rules is None:
        proposal = match(tree, tensors, ignore=ignore)
        proposal.raise_if_undecided()
        if proposal.assumed:
            warnings.warn(f"`load_into` assumed: {'; '.join(proposal.assumed)}.", stacklevel=2)
        rules, ignore = proposal.rules, proposal.left_out
    loaded = to_ours(rules, shapes, tensors, where=where, ignore=ignore)
    return named.rebuild(
        {
            path: _cast(tensor, named.leaves[path].dtype, path, dtype)
            for path, tensor in loaded.items()
        }
    )


def tensors_from(tree: Any, rules: Iterable[Rule], *, like: Any = None) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint, made of parameters: the inverse of `load_into`.

    Nothing is read or gathered yet; `save_tensors` does it tensor by tensor.

    Args:
        tree: parameters: whole arrays, or sharded ones as `zero.shard` gives them.
        rules: those of `load_into`.
        like: a tree that `tree` must equal in paths and shapes, such as `load_into` gave.

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
            f"two trees ({len(differing)} such paths). Pass a tree such as was loaded."
        )
    held = {path: _held(leaf, tuple(wanted[path].shape), path) for path, leaf in leaves.items()}
    return to_theirs(rules, held)


def _held(leaf: Any, shape: tuple[int, ...], path: str) -> LazyTensor:
    if tuple(leaf.shape) != shape:
        raise ValueError(
            f"The parameters have shape {tuple(leaf.shape)} at `{path}`, the model has {shape}."
        )
    if isinstance(leaf, StoredArray) and leaf.form.codec is not None:
        raise ValueError(
            f"The parameters are stored as messages of {leaf.form.codec} at `{path}`. Pass them as "
            "they were before, or `zero.unshard(tree)`."
        )
    if isinstance(leaf, LazyTensor):
        return leaf
    if isinstance(leaf, StoredArray | jax.Array):
        return ShardedTensor(data_of(leaf), shape, path)
    return ArrayTensor(np.asarray(leaf), path)


def _cast(
    tensor: LazyTensor, wanted: Any, path: str, dtype: np.typing.DTypeLike | None
) -> LazyTensor:
    floating = jnp.issubdtype(tensor.dtype, jnp.floating)
    if floating != jnp.issubdtype(wanted, jnp.floating):
        raise ValueError(
            f"Tensor {tensor.label} has dtype {tensor.dtype}, but `{path}` of the model has "
            f"{wanted}: one is floating-point and the other is not."
        )
    if floating:
        return tensor if dtype is None else tensor.astype(dtype)
    return tensor.astype(wanted)
