"""Run functions as compiled programs that are cached, and differentiate programs by given rules.

`jax.value_and_grad` traces at each call, so it sees attributes and closed-over arrays that have
changed since the last call. `Programs`, for calls outside of `jax.jit`, also sees them: it lowers
the program at each call, with the closed-over arrays as arguments, and reuses the compiled program
of an equal StableHLO text. Tracing takes milliseconds where compiling takes seconds. A training
step belongs in `jax.jit`, which traces and compiles once.

A program returns only arrays. An Equinox or NNX module that `Initializer` makes also holds
functions and Python values, which are kept aside.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.sharding import Mesh

from .._mesh import in_turn, is_traced, is_tracing, last_tokens, remember
from .._program import OpenProgram, is_mutable, open_program
from .._sharding import array_leaves, flatten, is_array, rebuild, statics_of, trained_leaves
from .._without_gc import without_gc

_MOST_KEPT = 64  # compiled programs of one `Zero`, for various functions, shapes and dtypes


class Programs:
    """A cache of the compiled programs of one `Zero`. It holds neither their arrays nor functions.

    Args:
        mesh: the mesh that the programs run on.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def run(self, program: Callable, *args: Any, out_shardings: Any = None) -> Any:
        """Return `program(*args)`. If an equal program was compiled before, that one is reused.

        If a transformation such as `jax.jit` is tracing this call, the program becomes part of the
        trace, and nothing is cached. `jax.disable_jit` has no effect on the program.

        Args:
            program: a function of trees of arrays. It returns a tree. Leaves of this tree that are
                not arrays (strings, functions) are returned as they are.
            args: trees of arrays or tracers.
            out_shardings: a sharding for each array that is returned, or one for all; None leaves
                the shardings to the compiler.
        """
        # Inside a trace this call only traces. That makes so many objects that Python's garbage
        # collector would take a fifth of the time, and most are garbage only at the end.
        tracing = is_tracing() or any(map(is_traced, jax.tree.leaves(args)))
        with jax.disable_jit(False), without_gc() if tracing else nullcontext():
            return self.ready(program, *args, out_shardings=out_shardings)(*args)

    def ready(self, program: Callable, *args: Any, out_shardings: Any = None) -> Callable:
        """Trace and compile `program`; return a function for arguments of the types of `args`.

        The arguments are those of `run`.
        """
        structure: dict[str, Any] = {}

        def arrays_only(*args: Any) -> list[Any]:
            leaves, treedef = jax.tree.flatten(program(*args))
            structure.update(treedef=treedef, statics=statics_of(leaves))
            return [x for x in leaves if is_array(x)]

        if out_shardings is not None and not isinstance(out_shardings, jax.sharding.Sharding):
            out_shardings = jax.tree.leaves(out_shardings)
        arrays = jax.tree.leaves(args)
        is_part = is_tracing() or any(map(is_traced, arrays))
        opened = None if is_part else open_program(arrays_only, *args)
        # A closure may also hold values of an outer transformation.
        if opened is None or any(map(is_traced, opened.constants)):
            part = jax.jit(_after_tokens(arrays_only), out_shardings=(None, out_shardings))

            def call(*args: Any) -> Any:
                outputs = in_turn(part, *args)  # the trace sets `structure`
                return rebuild(arrays=outputs, **structure)

            return call
        for x in (*opened.constants, *arrays):
            if is_mutable(x):
                raise ValueError(
                    "A function that `zero` runs is given, or closes over, a mutable array "
                    f"(`jax.Ref`) {x.dtype}{list(x.shape)}. Pass its value, `ref[...]`."
                )
        lowered = jax.jit(opened.run, out_shardings=out_shardings).lower(opened.constants, arrays)
        text = lowered.as_text()
        prints, calls_python = opened.callbacks()
        # Which Python function a callback calls is not in the text, so it is compiled at each call.
        if calls_python or ("callback" in text and not prints):
            compiled = lowered.compile()
        else:
            # The text lacks unused arguments too, and weak types and shardings of the results.
            parts = (text, opened.types, prints, out_shardings)
            compiled = self._compiled("\n".join(map(str, parts)), lowered)
        constants = _placed(opened.constants, compiled)
        return lambda *args: rebuild(arrays=compiled(constants, jax.tree.leaves(args)), **structure)

    def _compiled(self, text: str, lowered: Any) -> Any:
        key = hashlib.sha256(text.encode()).hexdigest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        compiled = lowered.compile()
        with self._lock:
            self._kept[key] = compiled
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled


def _placed(constants: Sequence[Any], compiled: Any) -> list[Any]:
    """Copy the arrays that a function closes over to the devices where the program needs them.

    So no call makes a transfer that `jax.transfer_guard("disallow")` would refuse.
    """
    shardings = compiled.input_shardings[0][0]
    return [
        x
        if sharding is None or not sharding.is_fully_addressable or getattr(x, "committed", False)
        else jax.device_put(x, sharding)
        for x, sharding in zip(constants, shardings, strict=True)
    ]


def _after_tokens(program: Callable) -> Callable:
    """Turn `program(*args)` into a function from `(tokens, *args)` to `(tokens, outputs)`.

    Tokens are arrays that make the collectives of programs run in order; see `in_turn`.
    """

    def call(tokens: list[Any], *args: Any) -> tuple[list[Any], Any]:
        remember(tokens)
        outputs = program(*args)
        return last_tokens(), outputs

    return functools.wraps(program)(call)


# The tangents of a program's results, from `(closed_over, args)`, their tangents, and the results.
Rule = Callable[[Any, Any, Any], Any]


def run_with_tangents(
    function: Callable, args: Any, rule_of: Callable[[OpenProgram], tuple[list[Any], Rule]]
) -> Any:
    """Run `function(*args)` as a program whose tangents JAX computes by a given rule.

    Args:
        function: a function of trees of arrays.
        args: the arguments of `function`.
        rule_of: maps the traced program to `(closed_over, rule)`. `closed_over` are the arrays that
            the function to differentiate closes over. `rule(primals, tangents, results)` returns
            the tangents of `results`. Here `primals` is `(closed_over, args)`, and `tangents` has a
            tangent or a `SymbolicZero` for each of these arrays. JAX keeps the rule, so the rule
            should hold no arrays.
    """

    def run(tokens: list[Any], *args: Any) -> tuple[list[Any], Any]:
        program = open_program(_after_tokens(function), tokens, *args)
        closed_over, rule = rule_of(program)
        return _differentiated_by(rule, program, closed_over, tokens, args)

    return in_turn(run, *args)


def _differentiated_by(
    tangents_of: Rule, program: OpenProgram, closed_over: list[Any], tokens: list[Any], args: Any
) -> tuple[list[Any], Any]:
    """Run a program of tokens and arguments, whose tangents the rule `tangents_of` computes."""
    # JAX keeps the rule and all that it closes over, so the rule must not close over arrays.
    bare = dataclasses.replace(program, constants=[])
    run, treedef = bare.run_without_refs, bare.treedef
    # JAX calls the rule later: outside of `map_nodes`, for a program of one node.
    context = contextvars.copy_context()

    @jax.custom_jvp
    def call(constants: Any, tokens: list[Any], args: Any) -> Any:
        return jax.tree.unflatten(treedef, run(constants[0], jax.tree.leaves((tokens, *args))))

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (constants, closed_over), tokens, args = primals
        # A new function, not `call`: one that its own rule refers to is freed only by Python's
        # collector of cycles, and JAX's cache of it, with the user's function, one run later.
        at_primals = dataclasses.replace(bare, constants=constants)
        last, results = _differentiated_by(tangents_of, at_primals, closed_over, tokens, args)

        def in_context() -> Any:
            remember(last)
            return tangents_of((closed_over, args), (tangents[0][1], tangents[2]), results)

        return (last, results), (zeros(last), context.copy().run(in_context))

    call.defjvp(rule, symbolic_zeros=True)
    return call((program.constants, closed_over), tokens, args)


def run_straight_through(program: Callable, exact: Callable, *args: Any) -> Any:
    """Run `program(*args)`. Its tangents are those of `exact`, which encodes no messages.

    Raises:
        NotImplementedError: JAX differentiates with respect to what the program closes over.
    """

    def tangents_of(primals: Any, tangents: Any, results: Any) -> Any:
        if any(map(is_varied, jax.tree.leaves(tangents[0]))):
            raise NotImplementedError(
                "Rounds of local steps have no derivatives with respect to what the step closes "
                "over. Keep it in `opt_state`, or pass it with the batches."
            )
        leaves, treedef = jax.tree.flatten(primals[1])
        function = lambda leaves: exact(*jax.tree.unflatten(treedef, leaves))  # noqa: E731
        return jvp_of_some(function, leaves, jax.tree.leaves(tangents[1]))[1]

    return run_with_tangents(program, args, lambda opened: (opened.constants, tangents_of))


def jvp_of_some(function: Callable, primals: list[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Return `jax.jvp` of a function of a list of arrays, where only some arrays have a tangent."""
    varied = [i for i, x in enumerate(tangents) if x is not None and is_varied(x)]

    def of_varied(arrays: list[Any]) -> Any:
        merged = list(primals)
        for i, x in zip(varied, arrays, strict=True):
            merged[i] = x
        return function(merged)

    return jax.jvp(of_varied, ([primals[i] for i in varied],), ([tangents[i] for i in varied],))


def tangents_like(results: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Return a tangent for each result: for floats the next of `tangents`, for others zero."""
    more = iter(tangents)
    return [next(more) if jnp.issubdtype(x.dtype, jnp.inexact) else zeros(x) for x in results]


def zeros(tree: Any) -> Any:
    """Return a symbolic zero tangent for each array of a tree."""
    return jax.tree.map(lambda x: zero_from_primal(x, symbolic_zeros=True), tree)


def is_varied(tangent: Any) -> bool:
    """Return whether a tangent is an array of floats, not one that is known to be zero."""
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


class Initializer:
    """Calls `init_fn` and returns the list of its arrays, so that `jit` can run it.

    An `eqx.Module` or `nnx.Module` may have leaves that are not arrays; only `shapes` returns them.
    A Python number outside of a module becomes an array, as it does when `jit` returns it.
    """

    def __init__(self, init_fn: Callable):
        self.init_fn = init_fn
        self._context = jax.sharding.get_abstract_mesh()

    def __call__(self, *args: Any) -> list[Any]:
        # Without the mesh of the program, if the caller has none: where Flax Linen finds a mesh, it
        # asks for the axes that `nn.with_partitioning` names.
        has_none = self._context.empty
        with jax.sharding.use_abstract_mesh(self._context) if has_none else nullcontext():
            tree = self.init_fn(*args)
        return array_leaves(numbers_as_arrays(tree))

    def shapes(self, *args: Any) -> Any:
        """Return the tree that `init_fn` returns, with `ShapeDtypeStruct`s for its arrays."""
        _check_makes(self.init_fn, args)
        _check_arrays(args)
        kept: dict[str, Any] = {}

        def run(*args: Any) -> list[Any]:
            tree = numbers_as_arrays(self.init_fn(*args))
            _, leaves, treedef = flatten(tree)
            kept.update(treedef=treedef, statics=statics_of(leaves))
            return [x for x in leaves if is_array(x)]

        arrays = jax.eval_shape(run, *args)
        if "Tracer(" in str(kept["treedef"]):
            raise ValueError(
                "`init_fn` returns a module that holds an array as a static attribute, as an "
                "`nnx.Module` does in `jax.jit` with a plain array (`self.w = array`). Make it "
                "`nnx.Param(array)` to train it, or `nnx.Variable(array)`; or lay out a module "
                "that is made outside of `jit`: `zero.shard(Model(...))`."
            )
        return rebuild(kept["treedef"], kept["statics"], arrays)


def numbers_as_arrays(tree: Any) -> Any:
    """Convert the Python numbers in a tree to arrays, except numbers in a module."""
    _, leaves, treedef = flatten(tree)
    pairs = zip(leaves, trained_leaves(tree), strict=True)
    return jax.tree.unflatten(
        treedef,
        [
            jnp.asarray(x) if kind is None and isinstance(x, int | float | complex) else x
            for x, kind in pairs
        ],
    )


def _check_makes(init_fn: Any, args: tuple[Any, ...]) -> None:
    """Raise `TypeError` if `init_fn` is no function, but parameters or a module that has some."""
    if callable(init_fn):
        if not array_leaves(init_fn):
            return
        try:
            signature = inspect.signature(init_fn)
        except ValueError:  # of a function without one, such as a built-in in a `Partial`
            return
        with suppress(TypeError):  # a module may be called: with a batch, which is not given here
            signature.bind(*args)
            return
    raise TypeError(
        "`init_fn` must be a function that makes the parameters, such as `lambda key: "
        f"Model(nnx.Rngs(key))`; got a {type(init_fn).__name__}. Shard what is made already: "
        "`zero.shard(params)`."
    )


def _check_arrays(args: tuple[Any, ...]) -> None:
    """Raise `ValueError` unless all leaves of `args` are arrays or numbers, as `jit` needs."""
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            is_number = isinstance(leaf, int | float | complex)
            if not is_number and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ValueError(
                    f"Argument {i} for `init_fn` must hold arrays and numbers only; got {leaf!r}. "
                    "Bind other values first: `functools.partial(init_fn, ...)`."
                )
