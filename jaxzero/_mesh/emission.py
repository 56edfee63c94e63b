"""Copy equations that have been traced already into the current trace, without tracing them again.

When an equation is bound again (`bind`), JAX infers the types of its results again, and makes a
tracer of each. So, while a program is traced, one equation, a call, stands for many equations.
`with_copies` then replaces the call by these equations, which keep their types.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex
from jax.extend.core import Primitive
from jax.interpreters import mlir

# An equation, the names of its inputs, and the names of its outputs.
Named = tuple[Any, Sequence[Any], Sequence[Any]]
JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)
_Literal = jex.Literal
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
    equations, known = list(equations), set()
    if not equations:
        return {}
    numbers, inputs, outputs = {}, {}, {}
    for equation, read_names, made_names in equations:
        for var, name in zip(equation.invars, read_names, strict=True):
            if name in known or isinstance(var, _Literal):
                continue
            known.add(name)
            value = read(name)
            if isinstance(value, _NUMBERS):
                numbers[name] = jex.Literal(value, var.aval)
            else:
                inputs[name] = value
        known.update(made_names)
        outputs.update(zip(made_names, (x.aval for x in equation.outvars), strict=True))
    copies = _Copies(equations, list(inputs), outputs, numbers)
    return dict(zip(outputs, copies.bind(list(inputs.values())), strict=True))


def bind(equation: Any, inputs: Sequence[Any], **changes: Any) -> list[Any]:
    """Apply the primitive of an equation to `inputs`, with the parameters in `changes` changed."""
    params = equation.primitive.get_bind_params({**equation.params, **changes})
    functions, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*functions, *inputs, **params)
    return list(out) if equation.primitive.multiple_results else [out]


class Recording:
    """The equations of a function, which can be copied into other traces for other arrays.

    Attributes:
        is_closed: whether the equations can be copied. They cannot if they read an array of the
            trace that they were recorded in, or if the function returns a constant number.
    """

    def __init__(self, function: Callable[..., Any], arrays: Sequence[Any]):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*map(jax.typeof, arrays))
        jaxpr = closed.jaxpr
        self._treedef = jax.tree.structure(shapes)
        self._constants = list(closed.consts)
        self._inputs = [*jaxpr.constvars, *jaxpr.invars]
        self._outputs = list(jaxpr.outvars)
        given = {*self._inputs}
        is_known = [isinstance(x, jex.Literal) for x in self._outputs]
        made = {} if any(is_known) else {x: x.aval for x in self._outputs if x not in given}
        equations = [(x, x.invars, x.outvars) for x in jaxpr.eqns]
        self._copies = _Copies(equations, self._inputs, made, {})
        reads_trace = any(isinstance(x, Tracer) for x in self._constants)
        self.is_closed = not (reads_trace or any(is_known))

    def put(self, arrays: Sequence[Any]) -> Any:
        """Copy the recorded equations into the current trace, for other arrays of the same types.

        Returns:
            The results of the function for `arrays`.
        """
        values = [*self._constants, *arrays]
        known = dict(zip(self._inputs, values, strict=True))
        known.update(zip(self._copies.outputs, self._copies.bind(values), strict=True))
        return jax.tree.unflatten(self._treedef, [known[x] for x in self._outputs])


class _Copies:
    """Equations that one call stands for while a program is traced.

    Args:
        equations: the equations, with the names of their inputs and outputs.
        inputs: the names of the inputs of the call.
        outputs: the types of the outputs of the call, by name.
        numbers: literals, by name, that equations read in addition to the inputs.
    """

    def __init__(
        self,
        equations: Sequence[Named],
        inputs: Sequence[Any],
        outputs: Mapping[Any, Any],
        numbers: Mapping[Any, Any],
    ):
        self.equations = equations
        self.inputs = inputs
        self.outputs = outputs
        self.numbers = numbers
        self.effects = {effect for x, *_ in equations for effect in x.effects}
        self.is_high = any(_is_high(x) for x, *_ in equations)
        self._key: Callable[[], Any] = lambda: None

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Add the call to the current trace, and return its outputs."""
        # The calls of one recording have the same key as long as one of them exists, so JAX finds
        # the types of all but the first in its cache.
        if (key := self._key()) is None:
            key = _empty().replace()
            self._key = weakref.ref(key)
            _COPIES[key] = self
        return _copies_p.bind(*values, key=key)

    def in_place_of(self, call: Any) -> Iterator[Any]:
        """Yield copies of the equations that read the inputs of a call and make its outputs."""
        atoms = {**self.numbers, **dict(zip(self.inputs, call.invars, strict=True))}
        outputs = dict(zip(self.outputs, call.outvars, strict=True))
        source = call.source_info
        sources: dict[int, Any] = {}  # by id of the name stack; most equations share theirs
        for equation, read, made in self.equations:
            pairs = zip(equation.invars, read, strict=True)
            operands = [x if isinstance(x, _Literal) else atoms[name] for x, name in pairs]
            results = []
            for var, name in zip(equation.outvars, made, strict=True):
                result = atoms[name] = outputs.get(name) or jex.Var(var.aval)
                results.append(result)
            inner = equation.source_info.name_stack
            if (info := sources.get(id(inner)) if inner.stack else source) is None:
                names = source.name_stack + inner
                info = sources[id(inner)] = source.replace(name_stack=names)
            copy = equation.replace(invars=operands, outvars=results, source_info=info)
            yield from _expanded(copy)

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs for `values`, by binding each equation."""
        known = dict(zip(self.inputs, values, strict=True))
        known.update((name, x.val) for name, x in self.numbers.items())
        for equation, read, made in self.equations:
            pairs = zip(equation.invars, read, strict=True)
            operands = [x.val if isinstance(x, jex.Literal) else known[name] for x, name in pairs]
            known.update(zip(made, bind(equation, operands), strict=True))
        return [known[x] for x in self.outputs]


def with_copies(jaxpr: Any) -> Any:
    """Return a jaxpr, closed or not, whose calls are replaced by the equations they stand for."""
    if not isinstance(jaxpr, jex.Jaxpr):
        inner = with_copies(jaxpr.jaxpr)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    equations = [y for x in jaxpr.eqns for y in _expanded(x)]
    if len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=_without_dead(equations, jaxpr.outvars))


def with_inner(equation: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the jaxprs inside an equation; return the same object if none changes."""
    new = {}
    for name, param in equation.params.items():
        several = isinstance(param, tuple)
        before = param if several else (param,)
        for x in before:  # a loop, since `any` of a generator takes three times as long
            if isinstance(x, JAXPRS):
                break
        else:
            continue
        after = [change(x) if isinstance(x, JAXPRS) else x for x in before]
        if any(x is not y for x, y in zip(before, after, strict=True)):
            # A tuple may be a named one, such as that of `custom_linear_solve`.
            made = param._make if hasattr(param, "_fields") else tuple
            new[name] = made(after) if several else after[0]
    return equation.replace(params={**equation.params, **new}) if new else equation


def _expanded(equation: Any) -> Iterable[Any]:
    if equation.primitive is _copies_p:
        return _COPIES[equation.params["key"]].in_place_of(equation)
    return (with_inner(equation, with_copies),)


def _without_dead(equations: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
    """Drop equations without effects whose results nothing reads, as JAX's tracing does."""
    live, kept = {id(x) for x in outputs}, []
    for equation in reversed(equations):
        if equation.effects or not live.isdisjoint(map(id, equation.outvars)):
            live.update(map(id, equation.invars))
            kept.append(equation)
    return kept[::-1]


def _is_high(equation: Any) -> bool:
    """Return whether JAX replaces an equation by others before XLA sees it, as a `custom_root`."""
    avals = (x.aval for x in equation.invars)
    return equation.primitive.is_high(*avals, **equation.params)


# JAX's cache of types keeps the parameters of primitives, and so would keep arrays that equations
# close over. It holds jaxprs weakly: the parameter is an empty one, the key of its `_Copies`.
_COPIES: weakref.WeakKeyDictionary[Any, _Copies] = weakref.WeakKeyDictionary()


@functools.cache
def _empty() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr


class _CopiesPrimitive(Primitive):
    multiple_results = True

    def is_high(self, *avals: Any, key: Any) -> bool:
        return _COPIES[key].is_high


def _types(*avals: Any, key: Any) -> tuple[list[Any], set[Any]]:
    return [*_COPIES[key].outputs.values()], _COPIES[key].effects


def _run(*values: Any, key: Any) -> list[Any]:
    return _COPIES[key].run(values)


_copies_p = _CopiesPrimitive("copies")
_copies_p.def_effectful_abstract_eval(_types)
_copies_p.def_impl(_run)
mlir.register_lowering(_copies_p, mlir.lower_fun(_run))
