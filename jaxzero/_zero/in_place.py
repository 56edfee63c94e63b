"""Call the user's function, and refuse changes to modules in place that would be lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._sharding import mutated_leaf, nnx_leaves
from .python_values import explaining_values


def call_checked(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Any:
    """Return `function(*args, **kwargs)`.

    Args:
        function: the user's function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        names: the names of all of them in error messages.

    Raises:
        ValueError: it reads values of arrays in Python; or it has changed an `nnx.Module` or
            `nnx.Rngs` in place, and does not return the new value.
    """
    values = [*args, *kwargs.values()]
    before = [nnx_leaves(value) for value in values]
    with explaining_values(function, args, kwargs, names):
        output = function(*args, **kwargs)
    returned = {id(x) for x in jax.tree.leaves(output)}
    for name, old, value in zip(names, before, values, strict=True):
        changed = mutated_leaf(old, nnx_leaves(value), returned)
        if changed is not None:
            path, kind = changed
            raise ValueError(
                f"The function changes {name}, leaf `{path}`, and the change would be "
                "lost: a function of sharded parameters gets a copy of the module. Return it "
                f"with `has_aux=True`, here `nnx.state(model, {kind})`, several kinds by "
                "`nnx.Any(...)`, and write it back with `nnx.update`; or call a copy that may "
                "be lost, `nnx.clone(model)`. Of `nnx.Rngs`, draw a key outside and pass it: "
                "`key = rngs.dropout()`."
            )
    return output
