"""Find operations of a program that compute the same function, for inputs of equal shapes.

Parameters of a primitive can be programs, and rules of derivatives, which are Python functions that
JAX makes anew at each call. Two functions are the same if they have the same code and close over
the same values. If that cannot be known, the operations count as different.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from .._mesh import is_traced
from .ir import Atom, Block, Constant, Operation, Value, is_ref
from .trace import OpenProgram, inline

# Classes of JAX that do not matter for what a function computes: where it comes from, the
# traces that it is made in, and results that it has stored, such as the tree of its outputs.
_WITHOUT_MEANING = {"DebugInfo", "DynamicJaxprTrace", "SourceInfo", "JaxprEqnContext"}
_WITHOUT_MEANING |= {"Store", "EqualStore"}
# The variables in which `_memoize` of JAX's `partial_eval` keeps the results of calls.
_CACHES = {"cells", "sentinel"}
_OF_FUNCTION = ("f", "transforms", "params")


class Kinds:
    """Gives operations numbers by what they compute, and constants by their values."""

    def __init__(self):
        self._known: dict[Any, list[tuple[int, Operation]]] = {}
        self._num = 0
        self._constants: list[Constant] = []

    def constant(self, constant: Constant) -> int:
        """Return a number that all constants of the same value share."""
        for i, known in enumerate(self._constants):
            if same_constants(known, constant):
                return i
        self._constants.append(constant)
        return len(self._constants) - 1

    def number(self, operation: Operation) -> int:
        """Return a number that all operations which compute the same function share.

        An operation that has lost inputs or results (dead code of a loop) gets a number of its own,
        because its equation does not say which it has lost.
        """
        equation = operation.equation
        is_whole = len(operation.inputs) == len(equation.invars)
        if not is_whole or len(operation.outputs) != len(equation.outvars):
            self._num += 1
            return self._num
        inputs = [(x.aval.shape, x.aval.dtype) for x in equation.invars]
        outputs = ((x.shape, x.dtype) for x in operation.outputs)
        key = operation.name, _context(equation), *inputs, None, *outputs
        numbered = self._known.setdefault(key, [])
        for number, other in numbered:
            if _Comparison().same(other.equation.params, equation.params):
                return number
        self._num += 1
        numbered.append((self._num, operation))
        return self._num


def same_constants(a: Constant, b: Constant) -> bool:
    """Return whether two constants have the same type, dtype, shape and value."""
    return _Comparison().same(a.value, b.value)


def input_dtypes(operation: Operation) -> list[Any]:
    """Return the dtypes of an operation's inputs, also the dtypes that Python numbers got."""
    return [x.aval.dtype for x in operation.equation.invars]


def reads_refs(block: Block) -> bool:
    """Return whether any operation reads or changes a mutable array."""
    return any(is_ref(x.aval) for each in block.operations for x in each.equation.invars)


def flat_block(program: OpenProgram) -> Block:
    """Return a traced program as a block that can still be differentiated.

    A checkpoint, a loop or a function with its own derivative rule stays one operation. Calls of
    `jit` are inlined. Constants of the program are constants of the block.
    """
    inputs = tuple(Value(x.aval) for x in program.jaxpr.invars)
    operations: list[Operation] = []
    constants = program.constants
    outputs = inline(program.jaxpr, constants, inputs, operations, append=_append_as_it_is)
    return Block(inputs, tuple(outputs), tuple(operations))


def _append_as_it_is(
    equation: Any, inputs: list[Atom], operations: list[Operation], caller: Any
) -> Sequence[Atom]:
    outputs = tuple(Value(x.aval) for x in equation.outvars)
    name = equation.primitive.name
    operations.append(Operation(name, tuple(inputs), outputs, equation, caller=caller))
    return outputs


class _Comparison:
    """Compares two values, such as parameters of primitives, by `same`.

    A value may refer to itself, as a recursive function does through its closure.
    """

    def __init__(self):
        # Pairs under comparison, by identity; keeping the values alive keeps identities unique.
        self._assumed: dict[tuple[int, int], tuple[Any, Any]] = {}

    def same(self, a: Any, b: Any) -> bool:
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if is_traced(a):
            return False
        pair = id(a), id(b)
        if pair in self._assumed:
            return True
        self._assumed[pair] = a, b
        return self._compared(a, b)

    def _compared(self, a: Any, b: Any) -> bool:
        if isinstance(a, np.ndarray | np.generic | jax.Array):
            return _same_numbers(a, b)
        if isinstance(a, float | complex):  # 0 and -0 are equal, and not the same
            return _same_numbers(np.asarray(a), np.asarray(b))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(self.same(a[k], b[k]) for k in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(self.same, a, b))
        if isinstance(a, jex.ClosedJaxpr):
            return self.same(list(a.consts), list(b.consts)) and self._programs(a.jaxpr, b.jaxpr)
        if isinstance(a, jex.Jaxpr):
            return self._programs(a, b)
        if isinstance(a, types.FunctionType):
            return self._functions(a, b)
        if isinstance(a, types.MethodType):
            return self.same((a.__self__, a.__func__), (b.__self__, b.__func__))
        if isinstance(a, functools.partial):
            return self.same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
        name = type(a).__name__ if _is_of_jax(type(a).__module__) else ""
        if name in _WITHOUT_MEANING:
            return True
        if name == "WrappedFun":  # JAX compares them by identity
            return all(self.same(getattr(a, k), getattr(b, k)) for k in _OF_FUNCTION)
        if name in ("custom_jvp", "custom_vjp"):
            return self.same(vars(a), vars(b))
        try:
            return bool(a == b)
        except Exception:  # whatever a user's class raises
            return False

    def _functions(self, a: Any, b: Any) -> bool:
        if a.__code__ is not b.__code__ and a.__code__ != b.__code__:
            return False
        if not self.same((a.__defaults__, a.__kwdefaults__), (b.__defaults__, b.__kwdefaults__)):
            return False
        if a.__globals__ is not b.__globals__:
            return False
        # Not `__module__`, which `functools.wraps` copies from the function that is wrapped.
        caches = _CACHES if _is_of_jax(a.__globals__.get("__name__", "")) else set()
        names = a.__code__.co_freevars
        cells = zip(names, a.__closure__ or (), b.__closure__ or (), strict=True)
        return all(n in caches or self.same(_content(x), _content(y)) for n, x, y in cells)

    def _programs(self, a: Any, b: Any) -> bool:
        """Return whether two jaxprs have equal equations that read corresponding variables."""
        if len(a.eqns) != len(b.eqns):
            return False
        names: dict[Any, Any] = {}

        def defined(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
            names.update(zip(xs, ys, strict=False))
            avals = [[(x.aval.shape, _dtype(x.aval)) for x in each] for each in (xs, ys)]
            return avals[0] == avals[1]

        def read(x: Any, y: Any) -> bool:
            if isinstance(x, jex.Literal) or isinstance(y, jex.Literal):
                is_both = isinstance(x, jex.Literal) and isinstance(y, jex.Literal)
                return is_both and _dtype(x.aval) == _dtype(y.aval) and self.same(x.val, y.val)
            return names[x] is y

        def all_read(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
            return len(xs) == len(ys) and all(map(read, xs, ys))

        if not defined([*a.constvars, *a.invars], [*b.constvars, *b.invars]):
            return False
        for x, y in zip(a.eqns, b.eqns, strict=True):
            if x.primitive is not y.primitive or not all_read(x.invars, y.invars):
                return False
            if _context(x) != _context(y):
                return False
            if not self.same(x.params, y.params) or not defined(x.outvars, y.outvars):
                return False
        return all_read(a.outvars, b.outvars)


def _context(equation: Any) -> tuple[Any, Any]:
    """Return what an equation depends on beside its parameters: where it runs, and random bits."""
    return equation.ctx.compute_type, equation.ctx.threefry_partitionable


def _is_of_jax(module: str) -> bool:
    """Return whether a module is one of JAX, where a name has the meaning that is known here."""
    return module.partition(".")[0] == "jax"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _dtype(aval: Any) -> Any:
    return getattr(aval, "dtype", None)


def _same_numbers(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        return False
    # NaN is not equal to itself, but is the same number.
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
