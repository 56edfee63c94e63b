"""Trace a function to a `Block`.

A block is a flat list of operations: calls of `jit`, `closed_call` and `remat` are inlined, a
`scan` becomes a `Loop` whose body is another block, and dead operations are dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.extend.core.primitives import closed_call_p
from jax.sharding import NamedSharding

from .._mesh import (
    CALLS,
    REMAT,
    bare,
    equations_inside,
    evaluate,
    rewrite,
    scan_sizes,
    without_refs,
)
from .._warnings import warn
from .ir import Atom, Barrier, Block, Constant, Loop, Operation, Value, is_mutable, is_ref
from .layout_requests import CALLBACKS, explaining, without_our_axes

_WITH_RULES = dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
OF_MUTABLE = (
    "Every device runs the function on its own rows, and would write a value of its own. Pass the "
    "value, `ref[...]`, as an argument; return the new one with `has_aux=True`, where `aux_reduce` "
    "says how the values of devices are combined, and write it outside: `ref[...] = aux`. A "
    "`jax.new_ref` that the function makes itself needs nothing."
)
_ALIAS = {"copy", "copy_p", "name"}  # their output is their only input


@dataclasses.dataclass(frozen=True)
class OpenProgram:
    """A traced function: its jaxpr, and the arrays that it closes over, which the jaxpr takes.

    Attributes:
        jaxpr: takes the constants and the arguments.
        constants: the arrays that the function closes over, also tracers of outer transformations.
        shapes: the tree of `ShapeDtypeStruct`s that the function returns.
    """

    jaxpr: Any
    constants: list[Any]
    shapes: Any

    @property
    def run(self) -> Callable[[list[Any], list[Any]], list[Any]]:
        """A function `run(constants, arrays)` of flat lists that closes over no array."""
        jaxpr = self.jaxpr

        def run(constants: list[Any], arrays: list[Any]) -> list[Any]:
            return eval_jaxpr(jaxpr, constants, *arrays)

        return run

    def run_without_refs(self, constants: list[Any], arrays: list[Any]) -> list[Any]:
        """Do as `run` does, and hide `jax.Ref`s made inside, as a `jax.custom_jvp` requires."""
        return without_refs(self.jaxpr, constants, arrays)

    @property
    def treedef(self) -> Any:
        """The tree structure of the function's result."""
        return jax.tree.structure(self.shapes)

    @property
    def types(self) -> list[str]:
        """The types of constants, arguments and results, weak types included."""
        jaxpr = self.jaxpr
        return [str(x.aval) for x in (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)]

    def callbacks(self) -> tuple[list[str], bool]:
        """Return the parameters of each `jax.debug.print`, and whether other callbacks exist."""
        inside = [y for x in self.jaxpr.eqns for y in equations_inside(x)]
        prints = [str(x.params) for x in inside if x.primitive.name == "debug_print"]
        others = (x for x in inside if x.primitive.name in CALLBACKS)
        return prints, any(x.primitive.name != "debug_print" for x in others)


def open_program(function: Callable, *args: Any) -> OpenProgram:
    """Trace `function(*args)`, and turn the arrays that it closes over into arguments."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return OpenProgram(closed.jaxpr, list(closed.consts), shapes)


def trace(function: Callable, *avals: Any) -> tuple[Block, OpenProgram]:
    """Trace `function` to a block without dead operations.

    Args:
        function: takes one array for each of `avals`; returns any tree of arrays.
        avals: `ShapeDtypeStruct`s or arrays, of which only shape and dtype are used.

    Returns:
        The block, and the `OpenProgram` that it is made of.
    """
    with explaining():
        program = open_program(function, *map(bare, avals))
    _check_mutable(program.constants)
    _warn_of_split(program.constants)
    program = _with_own_tokens(program)
    closed = without_our_axes(jex.ClosedJaxpr(program.jaxpr, program.constants))
    return without_dead_code(_block(closed)), program


def _check_mutable(constants: Sequence[Any]) -> None:
    """Raise `ValueError` for a mutable array that the function closes over."""
    for x in constants:
        if is_mutable(x):
            raise ValueError(
                f"The function closes over a mutable array (`jax.Ref`) {x.dtype}{list(x.shape)}. "
                + OF_MUTABLE
            )


def _with_own_tokens(program: OpenProgram) -> OpenProgram:
    """Replace the tokens that a program closes over by new ones; tokens carry no data."""
    is_token = [not hasattr(x, "shape") for x in program.constants]
    if not any(is_token):
        return program

    def run(*args: Any) -> list[Any]:
        pairs = zip(program.constants, is_token, strict=True)
        constants = [jax.lax.create_token() if token else x for x, token in pairs]
        return eval_jaxpr(program.jaxpr, constants, *args)

    closed = jax.make_jaxpr(run)(*(x.aval for x in program.jaxpr.invars))
    return OpenProgram(closed.jaxpr, list(closed.consts), program.shapes)


def _warn_of_split(constants: Sequence[Any]) -> None:
    """Warn of a sharded array that the function closes over: each device will hold all of it."""
    for x in constants:
        sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) else None
        if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            warn(
                f"The function closes over an array {x.dtype}{list(x.shape)} that is split as "
                f"{sharding.spec}. Its values are right, but every device holds all of it. Pass it "
                "as an argument: a parameter is gathered where it is used and dropped after."
            )


def traced_once(function: Callable, *args: Any) -> tuple[Callable, Any]:
    """Trace `function(*args)` once, so that later calls do not trace it again.

    Returns:
        A function that runs the trace on arguments like `args`; and the tree of `ShapeDtypeStruct`s
        that it returns.
    """
    program = open_program(function, *args)

    def traced(*args):
        outputs = program.run(program.constants, jax.tree.leaves(args))
        return jax.tree.unflatten(program.treedef, outputs)

    return traced, program.shapes


def without_checkpoints(function: Callable) -> Callable:
    """Remove `jax.checkpoint`s from `function`, so that differentiation keeps their values."""

    def plain(equation: Any) -> Any:
        if equation.primitive.name != REMAT:
            return equation
        body = jex.ClosedJaxpr(equation.params["jaxpr"], ())
        return equation.replace(primitive=closed_call_p, params={"call_jaxpr": body})

    def run(*args: Any) -> Any:
        program = open_program(function, *args)
        jaxpr = rewrite(program.jaxpr, plain)
        outputs = eval_jaxpr(jaxpr, program.constants, *jax.tree.leaves(args))
        return jax.tree.unflatten(program.treedef, outputs)

    return run


def rewritten(
    operation: Operation, function: Callable, inputs: Sequence[Atom]
) -> tuple[list[Operation], list[Atom]]:
    """Trace a function to operations that take the place of `operation`, at its source line.

    Args:
        operation: gives the line and the scopes.
        function: takes an array for each of `inputs`; returns an array or a list of arrays.
        inputs: the values and constants that the new operations read.

    Returns:
        The new operations, and the outputs of `function`.
    """
    values = [x for x in inputs if isinstance(x, Value)]

    def with_constants(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        outputs = function(*(x.value if isinstance(x, Constant) else next(given) for x in inputs))
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    source = operation.equation.source_info
    with source_info_util.user_context(source.traceback, name_stack=source.name_stack):
        closed = jax.make_jaxpr(with_constants)(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)
        )
    operations: list[Operation] = []
    caller = operation.caller or operation.equation
    return operations, inline(closed.jaxpr, closed.consts, values, operations, caller)


def _block(closed: Any) -> Block:
    inputs = tuple(Value(var.aval) for var in closed.jaxpr.invars)
    operations: list[Operation] = []
    outputs = inline(closed.jaxpr, closed.consts, inputs, operations)
    return Block(inputs, tuple(outputs), tuple(operations))


def _append(
    equation: Any, inputs: list[Atom], operations: list[Operation], caller: Any
) -> Sequence[Atom]:
    name, params = equation.primitive.name, equation.params
    if name in _ALIAS:
        return inputs
    if name == REMAT:
        if params["differentiated"]:
            inputs = _barrier(equation, inputs, operations)
        return inline(params["jaxpr"], (), inputs, operations, caller or equation)
    outputs = tuple(Value(var.aval) for var in equation.outvars)
    if name == "scan" and not any(is_ref(var.aval) for var in equation.invars):
        sizes = scan_sizes(params)
        body = _block(params["jaxpr"])
        operation = Loop(name, tuple(inputs), outputs, equation, body, *sizes, caller=caller)
    else:
        operation = Operation(name, tuple(inputs), outputs, equation, caller=caller)
    operations.append(operation)
    return outputs


def inline(
    jaxpr: Any,
    consts: Sequence[Any],
    inputs: Sequence[Atom],
    operations: list[Operation],
    caller: Any = None,
    append: Callable[..., Sequence[Atom]] = _append,
) -> list[Atom]:
    """Let `append` add each equation of a jaxpr to `operations`; return the jaxpr's outputs."""

    def apply(equation: Any, args: list[Atom]) -> Sequence[Atom]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS and not has_shardings(params):
            inner = params[CALLS[name]]
            return inline(inner.jaxpr, inner.consts, args, operations, caller or equation, append)
        return append(equation, args, operations, caller)

    return evaluate(jaxpr, [*map(Constant, consts)], inputs, apply, Constant)


def branch_blocks(operation: Operation) -> list[Block]:
    """Return the branches of a `cond` as blocks, which take its inputs but for the index."""
    return [without_dead_code(_block(branch)) for branch in operation.equation.params["branches"]]


def while_body(operation: Operation) -> tuple[Block, int, int]:
    """Return the body of a `while`, and how many constants its condition and its body have.

    The operation's inputs are the constants of the condition, those of the body, and the carry.
    """
    params = operation.equation.params
    body = without_dead_code(_block(params["body_jaxpr"]))
    return body, params["cond_nconsts"], params["body_nconsts"]


def called_block(operation: Operation) -> Block | None:
    """Return the block that a `custom_jvp`, `custom_vjp` or `jit` calls; else None."""
    if (key := {**CALLS, **_WITH_RULES}.get(operation.name)) is None:
        return None
    return without_dead_code(_block(operation.equation.params[key]))


def has_shardings(params: dict[str, Any]) -> bool:
    """Return whether a nested `jit` requests shardings, which inlining would drop."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)


def _barrier(equation: Any, inputs: list[Atom], operations: list[Operation]) -> list[Atom]:
    """Append a barrier on the inputs of a recomputation; return the inputs after the barrier.

    Without a barrier XLA would merge the recomputation with the first computation.
    """
    prevent_cse = equation.params["prevent_cse"]
    prevent_cse = (prevent_cse,) * len(inputs) if isinstance(prevent_cse, bool) else prevent_cse
    barred = [
        i
        for i, (atom, is_barred) in enumerate(zip(inputs, prevent_cse, strict=True))
        if is_barred and isinstance(atom, Value)
    ]
    if not barred:
        return inputs
    outputs = tuple(Value(equation.invars[i].aval) for i in barred)
    operations.append(
        Barrier("optimization_barrier", tuple(inputs[i] for i in barred), outputs, equation)
    )
    inputs = list(inputs)
    for i, output in zip(barred, outputs, strict=True):
        inputs[i] = output
    return inputs


def calls_python(operation: Operation) -> bool:
    """Return whether an operation has a callback in it, with an effect or without."""
    return any(x.primitive.name in CALLBACKS for x in equations_inside(operation.equation))


def at_line_of(operation: Operation) -> contextlib.AbstractContextManager:
    """Open a context in which traced operations get the source line of `operation`."""
    equation = operation.caller or operation.equation
    return source_info_util.user_context(equation.source_info.traceback)


def operations_for(
    block: Block, wanted: Iterable[Atom], known: Container[Value]
) -> list[Operation]:
    """Return the operations of a block that compute `wanted` from `known`, in program order."""
    positions: set[int] = set()
    waiting = list(wanted)
    while waiting:
        atom = waiting.pop()
        if isinstance(atom, Constant) or atom in known:
            continue
        position = block.positions[atom]
        if position not in positions:
            positions.add(position)
            waiting += block.operations[position].inputs
    return [block.operations[i] for i in sorted(positions)]


def without_dead_code(block: Block) -> Block:
    """Drop operations whose results are unused, inside loops too."""
    live = {atom for atom in block.outputs if isinstance(atom, Value)}
    kept: list[Operation] = []
    for operation in reversed(block.operations):
        if not operation.has_effects and live.isdisjoint(operation.outputs):
            continue
        if isinstance(operation, Barrier):
            operation = _narrow_barrier(operation, live)
        elif isinstance(operation, Loop):
            operation = _narrow_loop(operation, live)
        kept.append(operation)
        live.update(operation.values)
    return Block(block.inputs, block.outputs, tuple(reversed(kept)))


def _narrow_barrier(barrier: Barrier, live: set[Value]) -> Barrier:
    pairs = zip(barrier.inputs, barrier.outputs, strict=True)
    used = [(given, out) for given, out in pairs if out in live]
    inputs, outputs = zip(*used, strict=True)
    return dataclasses.replace(barrier, inputs=inputs, outputs=outputs)


def _narrow_loop(loop: Loop, live: set[Value]) -> Loop:
    """Drop stacked outputs that are unused, and inputs that the body then does not read.

    Carried values stay, since an iteration may read what the previous one wrote.
    """
    keep_out = [i for i, value in enumerate(loop.outputs) if i < loop.num_carry or value in live]
    body = dataclasses.replace(loop.body, outputs=tuple(loop.body.outputs[i] for i in keep_out))
    body = without_dead_code(body)
    read = {x for operation in body.operations for x in operation.values}
    read.update(atom for atom in body.outputs if isinstance(atom, Value))
    first_stack = loop.first_stack

    def needed(i: int) -> bool:
        return loop.num_constants <= i < first_stack or body.inputs[i] in read

    keep_in = [i for i in range(len(loop.inputs)) if needed(i)]
    return dataclasses.replace(
        loop,
        inputs=tuple(loop.inputs[i] for i in keep_in),
        outputs=tuple(loop.outputs[i] for i in keep_out),
        body=dataclasses.replace(body, inputs=tuple(body.inputs[i] for i in keep_in)),
        num_constants=sum(i < loop.num_constants for i in keep_in),
    )
