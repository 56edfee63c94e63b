"""The user's step as one node runs it: trees in its own layout, checked when it returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from .._local_steps import Inner
from .._sharding import StoredArray, TreePlan, data_of, flatten, is_array, path_name
from .local_layouts import Layouts
from .placement import constrain
from .python_values import explaining_values

_REMEDY = "Return `(params, opt_state, metrics)`, with the trees that the step was given, updated."


class LocalStep:
    """The user's `step(params, opt_state, batch)` on flat lists of arrays.

    Args:
        step: the user's function.
        layouts: the layouts of its trees on one node.
        mesh: the mesh of all nodes.
        found: gets the structure of the metrics, as "metrics".
    """

    def __init__(self, step: Callable, layouts: Layouts, mesh: Mesh, found: dict[str, Any]):
        self._step = step
        self._layouts = layouts
        self._mesh = mesh
        self._found = found

    def __call__(self, inner: Inner, batch: Any) -> tuple[Inner, list[Array]]:
        plans = self._layouts.params, self._layouts.opt_state
        trees = [plan.stored(arrays) for plan, arrays in zip(plans, inner, strict=True)]
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
            self._arrays(name, plan, tree, arrays, kept[name].axes)
            for name, plan, tree, arrays in zip(
                ("params", "opt_state"), plans, new, inner, strict=True
            )
        )
        paths, leaves, self._found["metrics"] = flatten(metrics)
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
        self, name: str, plan: TreePlan, tree: Any, old: list[Array], axes: tuple[str, ...]
    ) -> list[Array]:
        """The arrays of a tree that the step returns, laid out like the old ones.

        Raises:
            ValueError: it has another structure, or an array of another shape or dtype.
        """
        paths, leaves, treedef = flatten(tree)
        if treedef != plan.treedef:
            raise ValueError(
                f"`step` returns `{name}` with another structure than it was given: {treedef}, "
                f"not {plan.treedef}. {_REMEDY}"
            )
        named = []
        for path, x, static in zip(paths, leaves, plan.statics, strict=True):
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
                    f"given {before.dtype}{list(before.shape)}. Keep shapes and dtypes, for all "
                    "steps of a round run in one program."
                )
        return [
            constrain(x, self._mesh, leaf.spec(axes))
            for (_, x), leaf in zip(named, plan.leaves, strict=True)
        ]
