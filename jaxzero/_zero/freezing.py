"""`Freezing` cuts parameters into two trees: the frozen first layers, and the active rest."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from .._codecs import Codec
from .._program import SplitStack, run_on_split_stacks
from .._sharding import LeafSpec, TreeLayout, arrays_of
from .activation_cache import ActivationCache
from .batch_choice import BatchArgnums
from .frozen_layers import Names, find_prefix
from .sharded_trees import ShardedTrees
from .tree_cuts import TreeCut, check_untraced, cut_of_state, join_arrays, make_cut, split_arrays
from .user_function import call_checked


class Freezing:
    """The choice of which first layers of a model are frozen. Its methods cut and join trees.

    `Zero.freeze` makes it; `print` it to see what is frozen. It holds no arrays. Frozen layers have
    no gradients, no reductions and no optimizer state in use. They are gathered in the forward pass
    only, unless an active parameter is used before them. Cut and join trees between steps, not in a
    jitted step.

    Attributes:
        prefix: the number of frozen layers.
        num_layers: the number of layers of the model.

    Example:
        >>> freezing = zero.freeze(params, 4, layers="layers", before="embeddings")
        >>> active, frozen = freezing.split(params)
        >>> active_state, frozen_state = freezing.split_optimizer(tx, opt_state)
        >>> loss, grads = zero.value_and_grad(freezing.wrap(loss_fn))(active, frozen, batch)
        >>> params = freezing.join(active, frozen)

    References:
        PipeTransformer (https://proceedings.mlr.press/v139/he21a.html).
    """

    def __init__(
        self,
        zero: ShardedTrees,
        params: Any,
        prefix: int,
        layers: Names,
        before: Names,
        codec: Codec | None,
    ):
        if zero.config.stages is not None and codec is not None:
            raise NotImplementedError(
                "`codec` of `zero.freeze` does not work with `stages` of the config: a message of "
                "a stack has no layers to divide. Leave out one of the two."
            )
        layout = zero._layout_of(params)
        for leaf in layout.leaves:
            if leaf.codec is not None:
                raise ValueError(
                    f"`params`, leaf `{leaf.path}`: it is stored as messages of {leaf.codec}, "
                    "which are never trained. Pass such leaves in an argument of their own, as "
                    "with LoRA."
                )
        self._zero = zero
        self.prefix = prefix
        self.num_layers, rows = find_prefix(layout.leaves, prefix, layers, before)
        # Each stage holds all frozen layers of a stack that is frozen in part. A stack that is
        # frozen as a whole is divided between the stages.
        is_cut = zero.config.stages is not None and any(n for n in rows)
        of_frozen = dataclasses.replace(zero.config, stages=None) if is_cut else None
        self._cut = make_cut(layout, rows, zero._devices, zero.config, codec, of_frozen)
        if is_cut and self._cut.active.treedef == self._cut.frozen.treedef:
            raise NotImplementedError(
                "`params` are stacks of layers and nothing else, so the active and the frozen tree "
                "look alike, of which `stages` of the config divide one. Add a leaf to `params` "
                "that is not in `layers`, such as a head."
            )
        for part in (self._cut.active, self._cut.frozen):
            zero._registry.add(part)

    def __repr__(self) -> str:
        return f"Freezing({self.prefix} of {self.num_layers} layers)"

    def __str__(self) -> str:
        """List for each parameter whether it is frozen, active, or frozen in its first rows."""
        total = sum(math.prod(leaf.shape) for leaf in self._cut.whole.leaves)
        frozen = sum(math.prod(leaf.shape) for leaf in self._cut.frozen.leaves)
        lines = [
            f"{self.prefix} of {self.num_layers} layers are frozen: {frozen:,} of {total:,} "
            f"parameters ({frozen / max(total, 1):.0%})"
        ]
        encoded = {leaf.path: leaf.codec for leaf in self._cut.frozen.leaves}
        for leaf, rows in zip(self._cut.whole.leaves, self._cut.rows, strict=True):
            what = "active" if rows == 0 else "frozen" if rows is None else f"rows 0-{rows - 1}"
            codec = encoded.get(leaf.path)
            stored = f", stored as {codec}" if codec is not None else ""
            lines.append(f"  {what:<10} {leaf.path} {list(leaf.shape)}{stored}")
        return "\n".join(lines)

    # Trees.

    def split(self, params: Any) -> tuple[Any, Any]:
        """Cut parameters into `(active, frozen)`.

        Both are sharded trees with the structure of `params`. A leaf that is in one tree is None in
        the other. A stack of layers that is frozen in part is cut: its first rows are in `frozen`,
        the rest in `active`. Leaves that are neither cut nor encoded are the arrays of `params`,
        not copies: do not donate `params` afterwards.

        Args:
            params: a tree sharded like the one given to `zero.freeze`, or its `ShapeDtypeStruct`s.

        Raises:
            ValueError: `params` has another structure or other shapes, or is traced.
        """
        layout = self._zero._layout_of(params)
        self._check("params", layout, self._cut.whole)
        return self._split(params, self._cut, self._zero._weight_axes)

    def join(self, active: Any, frozen: Any) -> Any:
        """Join the two trees from `split` to the whole parameters. Encoded leaves are decoded.

        Raises:
            ValueError: a tree does not come from `split`, or is traced.
        """
        for name, tree, layout in (
            ("active", active, self._cut.active),
            ("frozen", frozen, self._cut.frozen),
        ):
            self._check(name, self._zero._layout_of(tree), layout)
        return self._join(active, frozen, self._cut, self._zero._weight_axes)

    def wrap(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Turn `f(params, ...)` into `g(active, frozen, ...)`, for `value_and_grad` and `apply`.

        `f` sees the whole tree. If `f` scans a stack that is frozen in part, the scan becomes two
        loops, one over the frozen layers and one over the active layers, before anything is
        differentiated. If `f` indexes the stack by a Python integer, the layer is read from the
        tree that holds it. `f` may use collectives and `jax.checkpoint`, cast the stack, and stack
        outputs of the scan.

        Raises:
            ValueError: `g` is called with a tree that does not come from this freezing.

        Warns:
            UserWarning: `f` uses a whole stack in another way. The result is right, but gradients
                of its frozen layers are computed, and dropped.
        """

        @functools.wraps(f)
        def wrapped(active, frozen, *args, **kwargs):
            leaves = self._leaves(active, frozen)
            names = ["`params`", *(f"argument {i}" for i in range(2, len(args) + 2)), *kwargs]

            def call(leaves: list[Any]) -> Any:
                return call_checked(f, [self._cut.whole.whole(leaves), *args], kwargs, names)

            if any(isinstance(x, SplitStack) for x in leaves):
                return run_on_split_stacks(call, leaves)
            return call(leaves)

        vars(wrapped)["__signature__"] = _with_two_trees(f)
        return wrapped

    def cache(
        self,
        f: Callable[..., Any],
        frozen: Any,
        *,
        max_bytes: int | None = None,
        batch_argnums: BatchArgnums = None,
    ) -> ActivationCache:
        """Make a cache of the frozen layers' outputs, to reuse when a batch comes again.

        Args:
            f: `f(params, ...)`, as for `wrap`, without dropout in the frozen layers.
            frozen: the frozen parameters, from `split`.
            max_bytes: the most bytes of host memory to use in this process. Once they are used up,
                the activations of further batches are computed at each call.
            batch_argnums: as for `value_and_grad`, where positions count `frozen` as argument 0.
        """
        if self._zero.config.stages is not None:
            raise NotImplementedError(
                "`freezing.cache` does not work with `stages` of the config, whose micro-batches "
                "it does not divide. Leave out one of the two."
            )
        self._check("frozen", self._zero._layout_of(frozen), self._cut.frozen)
        layout = self._cut.active
        structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layout.leaves]
        active = layout.whole(structs)
        return ActivationCache(self._zero, self.wrap(f), active, frozen, max_bytes, batch_argnums)

    # Optimizers.

    def split_optimizer(self, tx: optax.GradientTransformation, opt_state: Any) -> tuple[Any, Any]:
        """Cut the optimizer state of the whole parameters into `(active, frozen)`.

        The first is a state of `tx` for the active parameters. The second holds the moments of the
        frozen leaves and rows. Keep the second for `join_optimizer`, or drop it.

        Args:
            tx: the optimizer, as given to `zero.init_optimizer`.
            opt_state: the state of `tx` for the whole parameters.

        Raises:
            ValueError: `opt_state` is not the state of `tx` for these parameters, or is traced.
            NotImplementedError: a stack is frozen in part, and `tx` keeps an array for it that
                cannot be cut by layers, such as a mean over layers.
        """
        cut = self._cut_of_state(tx)
        self._check("opt_state", self._zero._layout_of(opt_state), cut.whole)
        return self._split(opt_state, cut, self._zero._state_axes)

    def join_optimizer(
        self, tx: optax.GradientTransformation, active_state: Any, frozen_state: Any
    ) -> Any:
        """Join the two states from `split_optimizer` to the state of the whole parameters.

        Counters are taken from `active_state`. If `frozen_state` was dropped, take a new one: the
        second result of `freezing.split_optimizer(tx, zero.init_optimizer(tx, params))`.

        Raises:
            ValueError: a state does not come from `split_optimizer`, or is traced.
        """
        cut = self._cut_of_state(tx)
        for name, tree, layout in (
            ("active_state", active_state, cut.active),
            ("frozen_state", frozen_state, cut.frozen),
        ):
            self._check(name, self._zero._layout_of(tree), layout)
        return self._join(active_state, frozen_state, cut, self._zero._state_axes)

    # Shared by the methods above.

    def _cut_of_state(self, tx: optax.GradientTransformation) -> TreeCut:
        zero = self._zero
        cut = cut_of_state(tx, self._cut, self.num_layers, zero._devices, zero.config)
        for part in (cut.whole, cut.active, cut.frozen):
            zero._states.add(part)
        return cut

    def _split(self, tree: Any, cut: TreeCut, axes: tuple[str, ...]) -> tuple[Any, Any]:
        arrays = arrays_of(tree)
        check_untraced(arrays)
        active, frozen = split_arrays(cut, arrays, self._zero._programs, axes)
        return cut.active.stored(active), cut.frozen.stored(frozen)

    def _join(self, active: Any, frozen: Any, cut: TreeCut, axes: tuple[str, ...]) -> Any:
        parts = arrays_of(active), arrays_of(frozen)
        check_untraced([*parts[0], *parts[1]])
        return cut.whole.stored(join_arrays(cut, *parts, self._zero._programs, axes))

    def _leaves(self, active: Any, frozen: Any) -> list[Any]:
        """Join full arrays of both trees, inside a program, to a list of the whole tree's leaves.

        A stack that is cut into frozen and active layers becomes a `SplitStack` of both parts.
        """
        values = (
            self._values("active", active, self._cut.active),
            self._values("frozen", frozen, self._cut.frozen),
        )
        leaves = []
        for leaf, (rest, first) in zip(
            self._cut.whole.leaves, self._cut.pairs(*values), strict=True
        ):
            both = rest is not None and first is not None
            leaves.append(
                SplitStack((first, rest), leaf.path) if both else first if rest is None else rest
            )
        return leaves

    def _check(self, name: str, given: TreeLayout, known: TreeLayout) -> None:
        """Raise `ValueError` unless the tree `name` has the expected layout.

        Compared are the structure, the shapes and the codecs of `given` (the caller's tree) and
        `known` (the tree of this freezing).
        """
        if given.treedef == known.treedef and given.shapes == known.shapes:
            pairs = zip(given.leaves, known.leaves, strict=True)
            if all(x.codec == y.codec for x, y in pairs):
                return
        shapes = {leaf.path: leaf.shape for leaf in given.leaves}
        wrong = (leaf for leaf in known.leaves if shapes.get(leaf.path) != leaf.shape)
        leaf = next(wrong, None)
        shape = None if leaf is None else shapes.get(leaf.path, "nothing")
        raise self._not_ours(name, leaf, shape)

    def _values(self, name: str, tree: Any, known: TreeLayout) -> list[Any]:
        """Return the full arrays of a tree inside a program, after comparing shapes with `known`.

        Raises:
            ValueError: the tree has another structure or other shapes.
        """
        try:
            values = known.flatten_like(tree)
        except ValueError as error:
            raise self._not_ours(name) from error
        for leaf, x in zip(known.leaves, values, strict=True):
            shape = getattr(x, "shape", "nothing")
            if shape not in (leaf.shape, leaf.on_device(self._zero.mesh).shape):
                raise self._not_ours(name, leaf, shape)
        return values

    def _not_ours(self, name: str, leaf: LeafSpec | None = None, shape: Any = None) -> ValueError:
        where = ""
        if leaf is not None:
            where = f" At `{leaf.path}` it has {shape}, where {leaf.shape} is expected."
        return ValueError(
            f"`{name}` is not a tree of this freezing ({self.prefix} of {self.num_layers} "
            f"layers).{where} Make one for it with `zero.freeze`."
        )


def _with_two_trees(f: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of `f` with `active` and `frozen` in place of its first parameter.

    None if Python does not know the signature of `f`.
    """
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return None
    kind = inspect.Parameter.POSITIONAL_ONLY
    trees = [inspect.Parameter(name, kind) for name in ("active", "frozen")]
    if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return inspect.Signature(trees + parameters)
