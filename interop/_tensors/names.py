"""Name the leaves of trees by dotted paths, and tensors without the wrappers that PyTorch adds.

`torch.compile`, FSDP and activation checkpointing wrap a module in another, which adds a component
to the names of its parameters: `layers.0._orig_mod.weight`. Some functions of PyTorch remove it and
others do not, so one checkpoint may hold both forms of a name. A leading `module.` is kept:
`DistributedDataParallel` may have added it, but the model may also have a module of this name.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from jaxzero._sharding import is_stored
from jaxzero._text import shown

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
Value = TypeVar("Value")


class NamedLeaves(NamedTuple):
    """The leaves of a tree by dotted path, and a function that rebuilds the tree."""

    leaves: dict[str, Any]  # in the order of the tree
    rebuild: Callable[[Mapping[str, Any]], Any]  # {path: new leaf} -> a tree of this structure


def named_leaves(tree: Any) -> NamedLeaves:
    """Name the leaves of a tree: `layers.0.up.kernel`.

    Dictionary keys, positions in lists, and attributes (of Equinox modules, say) are joined by
    dots. An `nnx.Param` or other variable of Flax is named by its place, without `value`.

    Raises:
        ValueError: a leaf is not an array, or two have one name.
    """
    leaves: dict[str, Any] = {}
    paths = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable) or is_stored(x)
    )
    for path, leaf in paths:
        is_variable = isinstance(leaf, nnx.Variable)
        value = jax.tree.leaves(leaf, is_leaf=is_stored)[0] if is_variable else leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(
                f"The leaf `{name}` is not an array; got {type(value).__name__}. Keep functions "
                "and settings out of the tree (`nnx.split`, `equinox.filter`)."
            )
        if name in leaves:
            raise ValueError(f"Two leaves of the tree are called `{name}`: keys must hold no dots.")
        leaves[name] = value
    treedef = jax.tree.structure(tree)

    def rebuild(others: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(treedef, [others[name] for name in leaves])

    return NamedLeaves(leaves, rebuild)


def plain_name(name: Any) -> Any:
    """Drop the components of a name that PyTorch's wrappers add; return a non-string unchanged."""
    if type(name) is not str:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name


def by_plain_name(held: Mapping[Any, Value], where: str) -> dict[Any, Value]:
    """Rename the keys of `held` to plain names; `ValueError` if two become equal.

    The order is kept. `where` names the checkpoint in the message.
    """
    full: dict[Any, Any] = {}
    for name in held:
        other = full.setdefault(plain_name(name), name)
        if other is not name:
            raise ValueError(
                f"{where} holds both {shown(other)} and {shown(name)}, which are one name without "
                "the wrappers of PyTorch. Save one state dict only."
            )
    return {plain: held[name] for plain, name in full.items()}
