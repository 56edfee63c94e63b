"""Copy equations that have been traced already into the current trace, without tracing them again.

When an equation is bound again (`per_device.bind`), JAX infers the types of its results again. JAX
copies the body of a `jit` with `inline=True` into the trace equation by equation, and keeps their
types, in less than half of the time. So equations are wrapped in such a `jit` here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from .per_device import is_traced, with_inputs_alone

# An equation, the names of its inputs, and the names of its outputs.
Named = tuple[Any, Sequence[Any], Sequence[Any]]
_NUMBERS = (bool, int, float, complex, np.generic)


def emit(equations: Iterable[Named], read: Callable[[Any], Any]) -> dict[Any, Any]:
    """Copy equations into the current trace, in their order.

    Args:
        equations: each is a triple: the equation, names of its inputs, names of its outputs. A name
            may be any hashable value, and two different values have different names. An input that
            no earlier equation produces is obtained from `read`.
        read: returns the array or number for a name, of the type of the equation's input.

    Returns:
        The outputs of all equations, by name.
    """
    atoms: dict[Any, Any] = {}
    inputs, values, outputs, copies = [], [], {}, []
    for equation, read_names, made_names in equations:
        operands = []
        for var, name in zip(equation.invars, read_names, strict=True):
            if name not in atoms:
                value = read(name)
                if isinstance(var, jex.Literal):
                    atoms[name] = var
                elif isinstance(value, _NUMBERS):
                    atoms[name] = jex.Literal(value, var.aval)
                else:
                    atoms[name] = new = jex.Var(var.aval)
                    inputs.append(new)
                    values.append(value)
            operands.append(atoms[name])
        made = [jex.Var(var.aval) for var in equation.outvars]
        outputs.update(zip(made_names, made, strict=True))
        atoms.update(zip(made_names, made, strict=True))
        copies.append(equation.replace(invars=operands, outvars=made))
    jaxpr = _a_call()[0].params["jaxpr"].jaxpr
    jaxpr = jaxpr.replace(
        invars=inputs,
        outvars=list(outputs.values()),
        eqns=copies,
        is_high=any(map(_is_high, copies)),
    )
    return dict(zip(outputs, _call(jaxpr, values), strict=True))


def _is_high(equation: Any) -> bool:
    """Return whether JAX replaces an equation by others before XLA sees it, as a `custom_root`."""
    avals = (x.aval for x in equation.invars)
    return equation.primitive.is_high(*avals, **equation.params)


class Recording:
    """A recorded function: its jaxpr, which can be copied into other traces for other arrays.

    Attributes:
        is_closed: whether the jaxpr reads no array of the trace that it was recorded in.
    """

    def __init__(self, function: Callable[..., Any], arrays: Sequence[Any]):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*map(jax.typeof, arrays))
        jaxpr = closed.jaxpr
        self._treedef = jax.tree.structure(shapes)
        self._constants = list(closed.consts)
        self._jaxpr = with_inputs_alone(jaxpr)
        self.is_closed = not any(map(is_traced, self._constants))

    def put(self, arrays: Sequence[Any]) -> Any:
        """Copy the recorded equations into the current trace, for other arrays of the same types.

        Returns:
            The results of the function for `arrays`.

        Returns:
            What the function returns for `arrays`.
        """
        outputs = _call(self._jaxpr, [*self._constants, *arrays])
        return jax.tree.unflatten(self._treedef, outputs)


def _call(jaxpr: Any, values: list[Any]) -> Any:
    """Bind a `jit` whose body is a jaxpr without constants; JAX inlines it into the trace."""
    equation, inline = _a_call()
    num, params = len(values), equation.params
    per_input = {x: params[x] * num for x in ("in_shardings", "in_layouts", "donated_invars")}
    per_output = {x: params[x] * len(jaxpr.outvars) for x in ("out_shardings", "out_layouts")}
    changed = {**per_input, **per_output, "inline": inline, "jaxpr": jex.ClosedJaxpr(jaxpr, [])}
    return equation.primitive.bind(*values, **{**params, **changed})


@functools.cache
def _a_call() -> tuple[Any, Any]:
    """Make a call of a `jit`, as an equation to copy, and return it with the value for `inline`.

    JAX inlines a `jit` whose parameter `inline` has that value.
    """
    traced = jax.make_jaxpr(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((), "float32"))
    kinds: Any = getattr(jax, "Inline", None)  # from JAX 0.12 on
    inline = True if kinds is None else kinds.JAX_EARLY
    (equation,) = traced.jaxpr.eqns
    called = equation.params["jaxpr"]
    jaxpr = with_inputs_alone(called.jaxpr)
    params = {**equation.params, "jaxpr": called.replace(jaxpr=jaxpr)}
    return equation.replace(params=params), inline
