"""Define `StoredArray`, a leaf that is stored padded or encoded, and functions on its trees.

A leaf with a dim that the devices divide evenly is stored as a plain `jax.Array` in its own shape.
Any other leaf is stored padded with zeros, or encoded. Then the stored array and its layout form
one pytree node whose static part is the layout, so that the layout is still known in a sub-tree, a
renamed tree or a merged tree. `jax.tree.map` and optax see the stored array inside. Computing with
the node itself is an error, because the result would include the padding.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax

from .._mesh import memory_kind_of
from .layout import LeafSpec

_BINARY = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
_OTHERS = "neg pos abs invert lt le gt ge getitem len iter contains bool float int index"


class StoredKey:
    """The last entry in the path of a `StoredArray`'s data; it prints as the empty string.

    So `jax.tree_util.keystr(path)` gives the path of the parameter, with one more separator at its
    end if a separator is set. Code that reads `path[-1].key` fails instead of getting a wrong name.
    """

    def __str__(self) -> str:
        return ""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"The path of a parameter that `Zero` stores padded or encoded ends with an entry that "
            f"has no `{name}`: the entry before it is the last that names the parameter. Wrap an "
            "optimizer that reads paths: `tx = zero.optimizer(tx)`."
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredKey)

    def __hash__(self) -> int:
        return hash(StoredKey)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a tree path as text, such as `layers.0.kernel`; the root is `.`."""
    named = tuple(key for key in path if not isinstance(key, StoredKey))
    return jax.tree_util.keystr(named, simple=True, separator=".") or "."


def path_endings(path: tuple[Any, ...]) -> Iterator[str]:
    """Yield a path as text, then without its first entry, and so on, to the empty path.

    In an optimizer's state, the path of an array that belongs to a parameter ends with the
    parameter's path.
    """
    return (path_name(path[i:]) for i in range(len(path) + 1))


def spread_prefix(prefix: Any, tree: Any, kind: type) -> list[Any]:
    """Spread a tree prefix over a tree: return, for each leaf of `tree`, the prefix's leaf for it.

    Args:
        prefix: a tree prefix of `tree`, with leaves of type `kind`.
        tree: the full tree.
        kind: type of the prefix's leaves; they count as leaves even if JAX would flatten them.

    Raises:
        ValueError: `prefix` is not a tree prefix of `tree`.
    """

    def is_leaf(x: Any) -> bool:
        return isinstance(x, kind)

    spread = jax.tree.map(
        lambda leaf, subtree: jax.tree.map(lambda _: leaf, subtree), prefix, tree, is_leaf=is_leaf
    )
    return jax.tree.leaves(spread, is_leaf=is_leaf)


class _Explained(type):
    """The metaclass of `StoredArray`: JAX prints the class's `repr` when two trees do not match."""

    def __repr__(cls) -> str:
        return (
            f"{super().__repr__()} (a leaf that `jz.Zero` holds padded or encoded; it matches only "
            "its like: lay out the other tree by `zero.shard`, or make this one ordinary arrays by "
            "`zero.unshard`; of `nnx.Optimizer`, see the how-to of Flax NNX)"
        )


class StoredArray(metaclass=_Explained):
    """A parameter, gradient or optimizer moment in the padded or encoded form of `jz.Zero`.

    Attributes:
        data: the global stored array: `[*padded shape]`, or the messages of a codec.
        form: the layout: true shape, split dim, codec. It is static data of the pytree node.
    """

    __slots__ = ("data", "form")
    __array_ufunc__ = None  # numpy leaves operators to this class
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # unhashable, as arrays are

    def __init__(self, data: Any, form: LeafSpec):
        self.data = data
        self.form = form
        _register_with_flax()

    @classmethod
    def of(cls, data: Any, leaf: LeafSpec) -> StoredArray:
        """Wrap data that is stored in the layout `leaf`.

        The memory kind is left out of the layout, and without a codec also the dtype. Both are
        read from the data instead: optimizers may cast the data or move them.
        """
        dtype = None if leaf.codec is None else leaf.dtype
        return cls(data, dataclasses.replace(leaf, path="", dtype=dtype, memory_kind=None))

    def leaf(self, path: str = "") -> LeafSpec:
        """Return the layout, with the present dtype and memory kind of the array.

        Raises:
            ValueError: the data do not have the stored shape of the layout, or are no messages of
                its codec.
        """
        memory_kind = memory_kind_of(self.data)
        leaf = dataclasses.replace(self.form, path=path, dtype=self.dtype, memory_kind=memory_kind)
        if tuple(self.data.shape) != leaf.stored_shape:
            raise ValueError(
                f"The leaf `{path}` of shape {self.shape} is stored as {leaf.stored_shape}, and "
                f"its data have the shape {tuple(self.data.shape)}: "
                + _what_changed(tuple(self.data.shape), leaf.stored_shape)
            )
        if leaf.codec is not None and self.data.dtype != leaf.stored.dtype:
            raise ValueError(
                f"The leaf `{path}` is stored as messages of {leaf.codec} in {leaf.stored.dtype}, "
                f"and its data are {self.data.dtype}: `jax.tree.map` applied a function to the "
                "messages, which are no numbers. Leave encoded trees out of it, or change the "
                "whole array: `zero.unshard`, then the function, then `zero.shard`."
            )
        return leaf

    @property
    def is_empty(self) -> bool:
        """Whether this holds no array, as after `eqx.partition`, which puts None in its place."""
        return not jax.tree.leaves(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape, without padding."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.form.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the array; of messages, the dtype of the array that they decode to."""
        return self.data.dtype if self.form.codec is None else self.form.dtype

    @property
    def size(self) -> int:
        """The number of elements, without padding."""
        return math.prod(self.form.shape)

    def __eq__(self, other: object) -> bool:
        """Compare two nodes that hold, in place of arrays, shardings, masks or labels.

        With a node that holds an array, raise `TypeError`, as every other operator does.
        """
        if isinstance(other, StoredArray) and not is_array(self.data):
            return self.form == other.form and bool(self.data == other.data)
        if is_array(other) or isinstance(other, int | float | complex):
            raise TypeError(_message(self, "The operator `==`"))
        return NotImplemented

    def __repr__(self) -> str:
        if not is_array(self.data):  # for example a sharding or a mask in place of the array
            return f"StoredArray({self.data!r})"
        spec = getattr(getattr(self.data, "sharding", None), "spec", None)
        split = "" if spec is None else f", split as {spec}"
        return f"StoredArray({self.dtype}{list(self.shape)}, {_how(self.form)}{split})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name in StoredArray.__slots__:
            raise AttributeError(name)
        raise AttributeError(_message(self, f"`.{name}`"))

    def __jax_array__(self) -> NoReturn:
        raise TypeError(_message(self, "a JAX operation"))

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(_message(self, "a NumPy operation"))

    def unbox(self) -> NoReturn:
        """Raise `TypeError`; `flax.linen` calls this before it checks a parameter's shape."""
        raise TypeError(_message(self, "`flax.linen`"))


def is_stored(x: Any) -> bool:
    """Return whether `x` is a `StoredArray`; serves as `is_leaf` of JAX's tree functions."""
    return isinstance(x, StoredArray)


def data_of(x: Any) -> Any:
    """Return the data of a `StoredArray`; return anything else unchanged."""
    return x.data if isinstance(x, StoredArray) else x


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of any library, or a `StoredArray` that holds an array."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def flatten(tree: Any) -> tuple[list[tuple[Any, ...]], list[Any], Any]:
    """Return paths, leaves and structure of a tree, in which a `StoredArray` is one leaf."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stored)
    return [path for path, _ in pairs], [leaf for _, leaf in pairs], treedef


def array_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree that are arrays, or `StoredArray`s that hold one."""
    return [leaf for leaf in flatten(tree)[1] if is_array(leaf)]


def of_arrays(tree: Any, values: Iterable[Any]) -> list[Any]:
    """Return the values of the arrays of a tree; `values` has one for each leaf."""
    pairs = zip(flatten(tree)[1], values, strict=True)
    return [value for leaf, value in pairs if is_array(leaf)]


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree, each with its path as text."""
    paths, leaves, _ = flatten(tree)
    return [(path_name(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]


def _how(form: LeafSpec) -> str:
    if form.codec is not None:
        return f"stored as messages of {form.codec}"
    return f"padded with zeros to {list(form.padded_shape)}"


def _what_changed(shape: tuple[int, ...], stored: tuple[int, ...]) -> str:
    """Return a text: what probably changed data of shape `stored` to `shape`, and the remedy."""
    if _has_one_more(shape, stored):
        return (
            "`jax.vmap`, `jax.lax.scan` or a stack of trees has added a dim to the stored array. "
            "`jax.vmap(zero.unshard)(tree)` makes ordinary arrays with this dim; without it, as "
            "in `jax.tree.map(lambda x: x[i], tree)` or a mean over it, the tree is as before."
        )
    if _has_one_more(stored, shape):
        return (
            "`jax.vmap`, `jax.lax.scan` or an index has taken a part of the stored array of a "
            "stack. Lay out the parts in place of the stack: `jax.vmap(zero.shard)(stack)`, over "
            "which `jax.vmap` and `jax.lax.scan` can run."
        )
    return (
        "`jax.tree.map` applied a function that changes shapes to the stored array. Change the "
        "whole array: `zero.unshard`, then the function, then `zero.shard`."
    )


def _has_one_more(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether `shape` has one dim more than `other`, and is equal to it without that dim."""
    return any(shape[:i] + shape[i + 1 :] == other for i in range(len(shape)))


def _message(x: StoredArray, user: str) -> str:
    return (
        f"{user} cannot use this parameter of shape {list(x.shape)} directly: `Zero` holds it "
        f"split over devices and {_how(x.form)}. Pass it as an argument to a function given to "
        "`zero.value_and_grad` or `zero.apply`, which sees it as an array in its own shape; or "
        "make it an ordinary array with `zero.unshard`."
    )


def _refusal(name: str) -> Any:
    def refuse(self: StoredArray, *args: Any) -> NoReturn:
        raise TypeError(_message(self, f"The operator `{name}`"))

    refuse.__name__ = name
    return refuse


for _name in f"{_OTHERS} {_BINARY} r{_BINARY.replace(' ', ' r')}".split():
    setattr(StoredArray, f"__{_name}__", _refusal(f"__{_name}__"))


def _register_with_flax() -> None:
    # `flax.linen` would report the padded shape as a mismatch that no user can explain. It unboxes
    # subclasses of `AxisMetadata` before it looks at shapes, so `unbox` can report what is wrong.
    meta = sys.modules.get("flax.core.meta")
    if meta is not None and not issubclass(StoredArray, meta.AxisMetadata):
        meta.AxisMetadata.register(StoredArray)
        serialization = sys.modules["flax.serialization"]  # which `flax` imports too
        serialization.register_serialization_state(StoredArray, _not_in_bytes, _not_in_bytes)


def _not_in_bytes(x: StoredArray, *_: Any) -> NoReturn:
    raise TypeError(_message(x, "`flax.serialization`"))


jax.tree_util.register_pytree_with_keys(
    StoredArray,
    lambda x: (((StoredKey(), x.data),), x.form),
    lambda form, children: StoredArray(next(iter(children)), form),
    lambda x: ((x.data,), x.form),
)
