"""Run functions with frozen parameters so that differentiation skips their frozen layers.

If the first layers of a stack are frozen, the stack is two arrays, and the model scans their
concatenation. Differentiating that scan computes gradients and keeps residuals for all layers. So
the function is traced, and each `scan` over such a stack runs as two scans:

    scan(f, carry, concatenate([a, b]))  ->  scan(f, scan(f, carry, a), b)

Casts, transposes and elementwise operations of a stack run on both parts; a slice runs on the part
that it lies in. Any other operation gets the concatenation: the result is right, but gradients are
computed for all layers. A warning names the operation.

A value may depend on active parameters, on frozen parameters, on the other arguments (the batch),
or on several of these. A value that depends on frozen parameters and the batch, but on no active
parameter, is known: it is the same whenever the batch is. `known_part` returns the known values
that the rest of the program reads. `rest_part` runs the rest, given these values. Values that
depend on frozen parameters alone, or on the batch alone (masks), are cheap to compute, and are
computed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.extend import source_info_util
from jaxtyping import Array, Shaped

from .._mesh import CALLS, REMAT, bare, bind, equations_inside, evaluate, scan_sizes
from .._warnings import warn
from .ir import Operation, Value
from .operation_kinds import is_elementwise
from .trace import has_shardings

_ACTIVE, _FROZEN, _BATCH, _RANDOM = 1, 2, 4, 8
_KNOWN = _FROZEN | _BATCH
RANDOM_BITS = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}


@dataclasses.dataclass(frozen=True, eq=False)
class SplitStack:
    """A stack of layers, in two parts along dim 0.

    Attributes:
        parts: the first layers, and the rest.
        name: tree path of the parameter that it is made from; None if it is made by a loop.
    """

    parts: tuple[Any, Any]
    name: str | None = None

    @property
    def cut(self) -> int:
        """The number of layers of the first part."""
        return self.parts[0].shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole stack."""
        first, second = self.parts
        return (first.shape[0] + second.shape[0], *first.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of both parts."""
        return self.parts[0].dtype

    @property
    def weak_type(self) -> bool:
        """Whether both parts are weakly typed."""
        return all(getattr(x, "weak_type", False) for x in self.parts)

    def join(self) -> Shaped[Array, ...]:
        """Return the whole stack as one array."""
        return jnp.concatenate(self.parts)


def run_on_split_stacks(function: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> Any:
    """Return `function(leaves)`, a tree of arrays; some of `leaves` may be `SplitStack`s.

    Args:
        function: takes a list of arrays, in which stacks are whole. It is traced once, and calls of
            `jit` in it are inlined.
        leaves: arrays and `SplitStack`s.
    """
    closed, shapes = jax.make_jaxpr(lambda *xs: function(list(xs)), return_shape=True)(
        *(bare(x) if isinstance(x, SplitStack) else x for x in leaves)
    )
    outputs = [_joined(x) for x in _run(closed.jaxpr, closed.consts, leaves)]
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _run(
    jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any], caller: Any = None
) -> list[Any]:
    """Evaluate a jaxpr on arrays and `SplitStack`s. `caller` is the equation that calls it."""

    def apply(equation: Any, args: list[Any]) -> Sequence[Any]:
        named = caller or equation
        with located(equation, named):
            return _equation(equation, args, named)

    return evaluate(jaxpr, constants, inputs, apply)


def located(equation: Any, caller: Any) -> contextlib.AbstractContextManager:
    """Give operations made in this context the line of `caller` and the scopes of `equation`."""
    scope = source_info_util.current_name_stack() + equation.source_info.name_stack
    return source_info_util.user_context(caller.source_info.traceback, name_stack=scope)


def _equation(equation: Any, inputs: list[Any], caller: Any) -> Sequence[Any]:
    """Evaluate one equation on arrays and `SplitStack`s; return its outputs."""
    split = [x for x in inputs if isinstance(x, SplitStack)]
    name, params = equation.primitive.name, equation.params
    if name in CALLS and not has_shardings(params):
        inner = params[CALLS[name]]
        return _run(inner.jaxpr, inner.consts, inputs, caller)
    if not split:
        return bind(equation, inputs)
    if name == REMAT:
        return _remat(params, inputs, caller)
    if name == "scan":
        return _scan(equation, inputs)
    if name == "unstack" and params["axis"] == 0:
        return [row for part in split[0].parts for row in part]
    for rule in (_sliced, _moved, _elementwise):
        output = rule(equation, inputs)
        if output is not None:
            return [output]
    _warn_of_joined(name, split)
    return bind(equation, [_joined(x) for x in inputs])


def _scan(equation: Any, inputs: list[Any]) -> list[Any]:
    """Run a `scan` over split stacks as two loops, one over each part."""
    params = equation.params
    num_constants, num_carry = scan_sizes(params)
    stacks = inputs[num_constants + num_carry :]
    split = [x for x in stacks if isinstance(x, SplitStack)]
    whole = [x for x in inputs[: num_constants + num_carry] if isinstance(x, SplitStack)]
    _warn_of_joined("scan", whole)
    before = [_joined(x) for x in inputs[: num_constants + num_carry]]
    if not split:
        return bind(equation, [*before, *stacks])
    cut, constants, carry = split[0].cut, before[:num_constants], before[num_constants:]
    lengths = (cut, params["length"] - cut)
    stacked: dict[int, list[Any]] = {}
    # A reversed loop begins with the last layers.
    for i in (1, 0) if params["reverse"] else (0, 1):
        xs = [_parts(x, cut)[i] for x in stacks]
        unroll = max(1, min(params["unroll"], lengths[i]))
        outputs = bind(equation, [*constants, *carry, *xs], length=lengths[i], unroll=unroll)
        carry, stacked[i] = outputs[:num_carry], outputs[num_carry:]
    return [*carry, *(SplitStack(parts) for parts in zip(stacked[0], stacked[1], strict=True))]


def _remat(params: Any, inputs: list[Any], caller: Any) -> list[Any]:
    """Run a function under `jax.checkpoint`, with each part of a stack as an input of its own."""
    arrays, treedef = jax.tree.flatten(
        [x.parts if isinstance(x, SplitStack) else x for x in inputs]
    )
    names = [x.name if isinstance(x, SplitStack) else None for x in inputs]

    def run(*arrays: Any) -> list[Any]:
        given = [
            SplitStack(x, name) if isinstance(x, tuple) else x
            for x, name in zip(jax.tree.unflatten(treedef, arrays), names, strict=True)
        ]
        return [_joined(x) for x in _run(params["jaxpr"], (), given, caller)]

    prevented = params["prevent_cse"]  # one for each input in newer releases
    prevent_cse = prevented if isinstance(prevented, bool) else any(prevented)
    return jax.checkpoint(run, policy=params["policy"], prevent_cse=prevent_cse)(*arrays)


def _sliced(equation: Any, inputs: list[Any]) -> Any:
    """Apply a slice of layers that all lie in one part; return None for any other operation."""
    if equation.primitive.name != "slice":
        return None
    (stack,), params = inputs, equation.params
    start, limit = list(params["start_indices"]), list(params["limit_indices"])
    i = int(start[0] >= stack.cut)
    if i == 0 and limit[0] > stack.cut:
        return None
    start[0], limit[0] = start[0] - i * stack.cut, limit[0] - i * stack.cut
    return jax.lax.slice(stack.parts[i], start, limit, params["strides"])


def _moved(equation: Any, inputs: list[Any]) -> SplitStack | None:
    """Apply a cast, transpose or reshape of each layer; return None for any other operation."""
    if len(inputs) != 1:
        return None
    (stack,) = inputs
    values = tuple(Value(var.aval) for var in equation.invars)
    outputs = tuple(Value(var.aval) for var in equation.outvars)
    view = Operation(equation.primitive.name, values, outputs, equation).view()
    of_layer = None if view is None else view.of_slice(stack.shape)
    if of_layer is None:
        return None
    first, second = (of_layer.of_stack(x.shape[0]).apply(x) for x in stack.parts)
    return SplitStack((first, second), stack.name)


def _elementwise(equation: Any, inputs: list[Any]) -> SplitStack | None:
    """Apply an elementwise operation to both parts of stacks; return None for any other.

    All inputs must have the shape of the stack or be scalars, else the result is None too.
    """
    stack = next(x for x in inputs if isinstance(x, SplitStack))
    if not is_elementwise(Operation(equation.primitive.name, (), (), equation)):
        return None
    shapes = [getattr(x, "shape", ()) for x in inputs]
    if any(shape not in ((), stack.shape) for shape in shapes):
        return None
    pairs = [
        _parts(x, stack.cut) if shape else (x, x) for x, shape in zip(inputs, shapes, strict=True)
    ]
    first, second = (bind(equation, xs)[0] for xs in zip(*pairs, strict=True))
    return SplitStack((first, second), stack.name)


def _parts(x: Any, cut: int) -> tuple[Any, Any]:
    return x.parts if isinstance(x, SplitStack) else (x[:cut], x[cut:])


def _joined(x: Any) -> Any:
    return x.join() if isinstance(x, SplitStack) else x


def _warn_of_joined(operation: str, stacks: Sequence[SplitStack]) -> None:
    names = sorted({x.name for x in stacks if x.name is not None})
    if names:
        warn(
            f"`{operation}` uses the whole stack of `{names[0]}`, of which the first "
            f"{stacks[0].cut} layers are frozen: gradients of all layers are computed, and those "
            "of the frozen ones dropped. Scan the stack (`jax.lax.scan`), or index its layers by "
            "Python integers."
        )


class _Program(NamedTuple):
    """A traced function, and what each of its values depends on."""

    jaxpr: Any
    constants: Sequence[Any]
    shapes: Any  # the tree that the function returns
    depends: dict[Any, int]  # of each variable, as flags
    saved: tuple[Any, ...]  # known variables that the rest reads


def known_part(
    function: Callable[[Any, Any, Any], Any], active: Any, frozen: Any, batch: Any
) -> list[Any]:
    """Compute the values that `rest_part` needs and that do not depend on `active`.

    Each of these values depends on both `frozen` and `batch`. Values that depend on only one of the
    two are left to `rest_part`.

    Args:
        function: `function(active, frozen, batch)`; all are trees of arrays.
        active: the active parameters, of which only shapes and dtypes are used.
        frozen: the frozen parameters.
        batch: the other arguments.

    Returns:
        The values, in the order that `rest_part` expects.

    Raises:
        ValueError: there is no such value; or one of them is random.
    """
    program = _trace(function, active, frozen, batch)
    if not program.saved:
        raise ValueError(
            "No value of the function depends on frozen parameters and not on active ones, so "
            "there are no activations to cache. Freeze the layers before them too (`before` of "
            "`zero.freeze`); and a `jax.checkpoint` or `jax.custom_vjp` may not hold the whole "
            "model, but one layer of it."
        )
    # Nothing that runs here reads an active parameter.
    given = [*[None] * len(jax.tree.leaves(active)), *jax.tree.leaves((frozen, batch))]
    made = {var: None for var in program.saved}
    _run_part(program, given, lambda flags: not flags & _ACTIVE, made)
    return list(made.values())


def rest_part(
    function: Callable[[Any, Any, Any], Any],
    active: Any,
    frozen: Any,
    batch: Any,
    saved: Sequence[Any],
) -> Any:
    """Return `function(active, frozen, batch)`, using the values `saved` from `known_part`.

    The other arguments are those of `known_part`; here the values of `active` are used too.

    Raises:
        ValueError: `saved` is of another function or of other shapes.
    """
    program = _trace(function, active, frozen, batch)
    want = [(var.aval.shape, var.aval.dtype) for var in program.saved]
    if [(x.shape, x.dtype) for x in saved] != want:
        raise ValueError(
            f"The cached activations are {[(x.shape, x.dtype) for x in saved]}, and this function "
            f"needs {want} for such a batch. They are of another function, freezing or batch."
        )
    given = jax.tree.leaves((active, frozen, batch))
    known = dict(zip(program.saved, saved, strict=True))
    outputs = _run_part(
        program, given, lambda flags: bool(flags & _ACTIVE) or flags & _KNOWN != _KNOWN, known
    )
    return jax.tree.unflatten(jax.tree.structure(program.shapes), outputs)


def _trace(function: Callable[[Any, Any, Any], Any], *groups: Any) -> _Program:
    leaves, treedef = jax.tree.flatten(groups)

    def flat(*leaves: Any) -> Any:
        return run_on_split_stacks(lambda xs: function(*jax.tree.unflatten(treedef, xs)), leaves)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    kinds = [
        flag
        for flag, group in zip((_ACTIVE, _FROZEN, _BATCH), groups, strict=True)
        for _ in jax.tree.leaves(group)
    ]
    depends = _dependences(closed.jaxpr, kinds)
    saved = _read_by_rest(closed.jaxpr, depends)
    return _Program(closed.jaxpr, closed.consts, shapes, depends, tuple(saved))


def _dependences(jaxpr: Any, kinds: Sequence[int]) -> dict[Any, int]:
    depends = dict(zip(jaxpr.invars, kinds, strict=True))
    depends |= dict.fromkeys(jaxpr.constvars, 0)
    for equation in jaxpr.eqns:
        # A print must run at each call. In JAX, a collective that names an axis has an effect too.
        effects = {type(effect).__name__ for effect in equation.effects}
        flags = _ACTIVE if effects - {"NamedAxisEffect"} else 0
        draws = (x.primitive.name in RANDOM_BITS for x in equations_inside(equation))
        flags |= _RANDOM if any(draws) else 0
        for var in equation.invars:
            flags |= 0 if isinstance(var, jex.Literal) else depends[var]
        depends |= dict.fromkeys(equation.outvars, flags)
    return depends


def _read_by_rest(jaxpr: Any, depends: dict[Any, int]) -> dict[Any, None]:
    """Return the variables to save: the known ones that active equations or the outputs read.

    They are the keys of the result, in order. `depends` has the flags of each variable.

    Raises:
        ValueError: one of them is random.
    """
    saved: dict[Any, None] = {}
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    # An equation without outputs has an effect, such as a print.
    readers = [x.invars for x in jaxpr.eqns if not x.outvars or depends[x.outvars[0]] & _ACTIVE]
    for var in (var for invars in [*readers, jaxpr.outvars] for var in invars):
        if isinstance(var, jex.Literal) or depends[var] & (_ACTIVE | _KNOWN) != _KNOWN:
            continue
        if depends[var] & _RANDOM:
            where = source_info_util.summarize(made_by[var].source_info)
            raise ValueError(
                f"The frozen layers draw random numbers, as dropout does, up to {where}: cached "
                "activations would repeat one draw for ever. Give these layers no key, or do not "
                "cache."
            )
        saved[var] = None
    return saved


def _run_part(
    program: _Program, inputs: Sequence[Any], is_run: Callable[[int], bool], known: dict[Any, Any]
) -> list[Any]:
    """Evaluate the equations that `is_run` selects; return the outputs of the program.

    `is_run` takes the flags that say what the outputs of an equation depend on. The outputs of an
    equation that it rejects are read from `known`. Results of evaluated equations are written to
    `known` if it has their variables as keys.
    """

    def apply(equation: Any, args: list[Any]) -> list[Any]:
        flags = program.depends[equation.outvars[0]] if equation.outvars else _ACTIVE
        if not is_run(flags):
            return [known.get(var) for var in equation.outvars]
        with located(equation, equation):
            outputs = bind(equation, args)
        pairs = zip(equation.outvars, outputs, strict=True)
        known.update((var, x) for var, x in pairs if var in known)
        return outputs

    return evaluate(program.jaxpr, program.constants, inputs, apply)
