"""Run a function of JAX, and record the outputs of the submodules of a model.

Flax NNX, Equinox and plain classes have no common way to do so, so `__call__` of their classes is
replaced while the function runs. A submodule is recognised by the arrays that it holds: `nnx.merge`
and `eqx.combine` make other objects of them. In a `scan` or with `nnx.vmap` the arrays are others
too, so what is in there is not recorded.
"""

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxzero._mesh import is_traced

from .trees import as_numpy, first_array

Calls = dict[str, list[np.ndarray]]  # by name: the first array of the output of each call


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[Calls]:
    """Record the outputs of submodules of `model`, under the names that `named_leaves` gives."""
    calls: Calls = {}
    names: dict[Any, str] = {}
    for name, part in submodules_of(model).items():
        names.setdefault(_identity(part), name)
    active: set[int] = set()  # a class may call `__call__` of its base

    def replaced(original: Any) -> Any:
        @functools.wraps(original)
        def run(self, *args, **kwargs):
            name = None if id(self) in active else names.get(_identity(self))
            bound = original.__get__(self, type(self))
            if name is None:
                return bound(*args, **kwargs)
            active.add(id(self))
            try:
                output = bound(*args, **kwargs)
            finally:
                active.discard(id(self))
            array = first_array(output)
            if is_traced(array):  # in a vmap: one call for each example
                jax.debug.callback(lambda x: _add(calls, name, x), array)
            else:
                _add(calls, name, array)
            return output

        return run

    owners = {_owner(type(part)) for part in submodules_of(model).values()}
    originals = {owner: vars(owner)["__call__"] for owner in owners}
    try:
        for owner, original in originals.items():
            owner.__call__ = replaced(original)
        yield calls
        jax.effects_barrier()
    finally:
        for owner, original in originals.items():
            owner.__call__ = original


def _add(calls: Calls, name: str, output: Any) -> None:
    if name and output is not None and not jnp.issubdtype(output.dtype, jax.dtypes.extended):
        array = as_numpy(output)
        assert array is not None
        calls.setdefault(name, []).append(array)


def submodules_of(model: Any) -> dict[str, Any]:
    """The parts of a model that can be called, by dotted path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def walk(node: Any, path: str) -> None:
        if id(node) in seen or isinstance(node, nnx.Variable | nnx.RngStream):
            return
        seen.add(id(node))
        if path and callable(node) and isinstance(type(node).__call__, types.FunctionType):
            found[path] = node
        for name, part in _parts(node):
            walk(part, f"{path}.{name}" if path else str(name))

    walk(model, "")
    return found


def _parts(node: Any) -> list[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, tuple | list):
        return list(enumerate(node))
    if isinstance(node, type | types.FunctionType | types.ModuleType | np.ndarray | jax.Array):
        return []
    held = getattr(node, "__dict__", {})
    return [(name, part) for name, part in held.items() if not name.startswith("_")]


def _identity(part: Any) -> Any:
    leaves = jax.tree.leaves(part)
    return type(part), tuple(map(id, leaves)) if leaves else id(part)


def _owner(kind: type) -> type:
    """The class that defines `__call__`."""
    return next(each for each in kind.__mro__ if "__call__" in vars(each))


def calls_in(intermediates: Any) -> Calls:
    """Name what a function returns as intermediates: `{"layers": {"0": {"mlp": array}}}`.

    Those of Flax have a tuple with an element for each call, under the name `__call__` if they are
    outputs of modules, and Linen puts them under "intermediates".
    """
    calls: Calls = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, nnx.Variable):
            node = node.get_value()
        if isinstance(node, Mapping):
            for key, part in node.items():
                walk(part, path if key in ("__call__",) else (*path, str(key)))
        elif isinstance(node, list):
            for number, part in enumerate(node):
                walk(part, (*path, str(number)))
        else:
            for each in node if isinstance(node, tuple) else (node,):
                _add(calls, ".".join(path), first_array(each))

    held = intermediates if isinstance(intermediates, Mapping) else {}
    walk(held["intermediates"] if set(held) == {"intermediates"} else intermediates, ())
    return calls
