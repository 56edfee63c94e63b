"""Everything that relies on JAX's internals for traced programs: jaxprs, types, memory spaces.

[Note: types without the mesh] Inside a `shard_map`, JAX puts the mesh, with its axes `Manual`, into
the type of every array. Code that compares traced with computed values (Equinox's solvers: diffrax,
optimistix, lineax) compares these types too, and fails. So the body is traced with all axes
automatic, as under plain `jit`, which such code supports; the axis names stay bound, so that
collectives work. The traced jaxpr is then called in the `shard_map` as one `jit`, so that its
equations do not get types with the mesh.

JAX cannot transpose such a program: the types of the transpose would have the mesh. It would also
hold all gathered weights until backward, and differentiate codecs. So `forward_only` marks results,
and `known_together` marks arguments, which keeps `jax.linearize` from cutting a program apart.

Of host memory only pinned memory is used, from which a GPU copies while it computes. JAX calls it
the memory kind "pinned_host"; a traced array there has the memory space `Host` in its type. Arrays
in host memory can be sliced and updated, but not computed with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend import core as jex
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jaxtyping import Array

from .._without_gc import without_gc
from .emission import JAXPRS, with_copies, with_inner

_ASK_FOR_THE_DEVICE = {"axis_index", "debug_callback", "debug_print"}
HOST = "pinned_host"

# An array in host memory by its type, and nothing but a broadcast in the program. XLA allocates it
# there once it sees that slices in host memory are written into it. If it were moved there
# explicitly, XLA before JAX 0.11 would fill it on the device and copy it.
_empty_p = Primitive("empty_in_host")
_empty_p.def_abstract_eval(
    lambda *, shape, dtype, tag: ShapedArray(shape, dtype, memory_space=jax.memory.Space.Host)
)
_fill = mlir.lower_fun(
    lambda *, shape, dtype, tag: jnp.full(shape, tag, dtype), multiple_results=False
)
mlir.register_lowering(_empty_p, _fill)


def without_mesh(function: Callable, order: Callable | None = None) -> Callable:
    """Wrap a function of trees of arrays as a `shard_map` body that is traced without the mesh.

    Args:
        function: the function.
        order: changes the traced program (`loop_order.in_order`). With it, the body takes the
            program's tokens as its first argument, and returns them before the results of
            `function`.
    """

    @functools.wraps(function)
    def body(*args):
        tokens, args = (args[0], args[1:]) if order else ([], args)
        leaves, given = jax.tree.flatten(args)
        mesh = jax.sharding.get_abstract_mesh()

        def per_device(*leaves):
            return function(*jax.tree.unflatten(given, leaves))

        automatic = dict.fromkeys(mesh.axis_names, AxisType.Auto)
        # Tracing makes so many objects that Python's collector takes a fifth of its time.
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(automatic)), without_gc():
            closed, shapes = jax.make_jaxpr(per_device, return_shape=True)(*map(bare, leaves))
            closed = with_copies(closed)
            treedef = jax.tree.structure(shapes)
            if order:
                closed, leaves = order(closed, tokens), [*tokens, *leaves]
            constants = closed.consts
            called = _as_one_call(closed, leaves)
        if len(mesh.manual_axes) < len(mesh.axis_names):
            called = _with_mesh_context(mesh, called)
        outputs = jex.jaxpr_as_fun(called)(*constants, *leaves)
        num_tokens = len(outputs) - treedef.num_leaves
        results = jax.tree.unflatten(treedef, outputs[num_tokens:])
        return (outputs[:num_tokens], results) if order else results

    return body


def forward_only(tree: Any) -> Any:
    """Return the same arrays; reverse-mode differentiation of them raises `NotImplementedError`."""
    return jax.tree.map(
        lambda x: _forward_only_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree
    )


def known_together(arrays: Sequence[Any]) -> list[Any]:
    """Return the same arrays, marked so that `jax.linearize` takes all as known or all as unknown.

    Linearization computes at once, and keeps, all values that depend on known arrays only. For a
    program with known weights and unknown tangents, it would keep all weights in full.
    """
    return _known_together_p.bind(*arrays)


def without_refs(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr as one equation, which hides the `jax.Ref`s that the jaxpr makes inside.

    JAX removes refs when it lowers a program, but not from the body of a `jax.custom_jvp`.
    """
    if not any(map(_is_of_refs, jaxpr.effects)):
        return eval_jaxpr(jaxpr, constants, *arrays)
    return _without_refs_p.bind(*constants, *arrays, jaxpr=jaxpr)


def _is_of_refs(effect: Any) -> bool:
    return type(effect).__name__ == "InternalMutableArrayEffect"  # JAX exports no such class


def _run(*args: Any, jaxpr: Any) -> list[Any]:
    num = len(jaxpr.constvars)
    return eval_jaxpr(jaxpr, args[:num], *args[num:])


def _run_batched(args: Any, dims: Any, *, jaxpr: Any) -> Any:
    closed = jax.make_jaxpr(jax.vmap(functools.partial(_run, jaxpr=jaxpr), in_axes=dims))(*args)
    return without_refs(closed.jaxpr, closed.consts, args), [0] * len(jaxpr.outvars)


def _refuse_to_transpose(cotangent: Any, x: Any) -> Any:
    raise NotImplementedError(
        "`jax.grad`, `jax.vjp` and other reverse-mode derivatives of a function that `zero.apply` "
        "or `zero.value_and_grad` has returned are not possible. Give the function itself to "
        "`zero.value_and_grad`, with everything that is computed of its results inside. "
        "Hessian-vector products are the `jax.jvp` of its gradients."
    )


_forward_only_p = jex.Primitive("forward_only")
_forward_only_p.def_impl(lambda x: x)
_forward_only_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_forward_only_p, _refuse_to_transpose)
batching.defvectorized(_forward_only_p)
mlir.register_lowering(_forward_only_p, lambda ctx, x: [x])

_known_together_p = jex.Primitive("known_together")
_known_together_p.multiple_results = True
_known_together_p.def_impl(lambda *arrays: list(arrays))
_known_together_p.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[_known_together_p] = lambda x, tangents: (known_together(x), list(tangents))
batching.primitive_batchers[_known_together_p] = lambda x, dims: (known_together(x), dims)
mlir.register_lowering(_known_together_p, lambda ctx, *arrays: list(arrays))

_without_refs_p = jex.Primitive("without_refs")
_without_refs_p.multiple_results = True
_without_refs_p.def_impl(_run)
_without_refs_p.def_effectful_abstract_eval(
    lambda *avals, jaxpr: (
        [x.aval for x in jaxpr.outvars],
        {effect for effect in jaxpr.effects if not _is_of_refs(effect)},
    )
)
batching.primitive_batchers[_without_refs_p] = _run_batched
mlir.register_lowering(_without_refs_p, mlir.lower_fun(_run))


def with_inputs_alone(jaxpr: Any) -> Any:
    """Return a jaxpr without constants, which takes those of `jaxpr` as its first inputs."""
    # The debug info names each input, and JAX checks that there are as many names.
    unnamed = jaxpr.debug_info.with_unknown_names()
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return jaxpr.replace(constvars=[], invars=inputs, debug_info=unnamed)


# Takes the place of a program with results of these types.
_results_p = Primitive("results")
_results_p.multiple_results = True
_results_p.def_abstract_eval(lambda *avals, results: list(results))


def _as_one_call(closed: Any, leaves: list[Any]) -> Any:
    """Wrap `closed` in a jaxpr with one equation, a `jit` that calls it.

    Arrays that the user's function closes over become arguments of the `jit`: as constants of the
    compiled program they would keep it from being reused with other values.
    """
    jaxpr, results = closed.jaxpr, tuple(x.aval for x in closed.jaxpr.outvars)

    @jax.jit
    def call(constants, leaves):
        return _results_p.bind(*constants, *leaves, results=results)

    outer = jax.make_jaxpr(call)([*map(bare, closed.consts)], [*map(bare, leaves)])
    # To trace the jaxpr again would take longer than to trace the user's function.
    (equation,) = outer.jaxpr.eqns
    called = equation.params["jaxpr"].replace(jaxpr=with_inputs_alone(jaxpr))
    equation = equation.replace(params={**equation.params, "jaxpr": called}, effects=jaxpr.effects)
    of_call = dict(eqns=[equation], effects=jaxpr.effects, is_high=jaxpr.is_high)
    return outer.replace(jaxpr=outer.jaxpr.replace(**of_call))


def bare(x: Any) -> Any:
    """Return the type of `x` without its sharding: shape, dtype, weak type and memory space."""
    weak_type = getattr(x, "weak_type", False)
    if is_traced(x) and jax.typeof(x).memory_space == jax.memory.Space.Host:
        # A `ShapeDtypeStruct` has a memory space only as a part of its sharding.
        host = jax.memory.Space.Host
        return ShapedArray(x.shape, x.dtype, weak_type, memory_space=host)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak_type)


def _with_mesh_context(mesh: Any, closed: Any) -> Any:
    """Return a jaxpr whose `axis_index` and debug prints JAX can lower inside a `shard_map`.

    JAX lowers such an equation as a `shard_map` over the axes that are automatic in the mesh of its
    context, so the context becomes one of `mesh`. A `shard_map` in the jaxpr gets the manual axes
    around it, or the compiler would partition library calls.
    """
    manual = dict.fromkeys(mesh.manual_axes, AxisType.Manual)

    @functools.cache
    def context(inside: tuple[str, ...]) -> Any:  # the axes of a `shard_map` that it is in
        axes = dict.fromkeys(inside, AxisType.Manual)
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(axes)):
            return jax.make_jaxpr(lambda: lax.axis_index(mesh.manual_axes[0]))().jaxpr.eqns[0].ctx

    def change(equation: Any) -> Any:
        if equation.primitive.name == "shard_map":
            around = equation.params["mesh"].abstract_mesh.update_axis_types(manual)
            return equation.replace(params={**equation.params, "mesh": around})
        if equation.primitive.name not in _ASK_FOR_THE_DEVICE:
            return equation
        return equation.replace(ctx=context(equation.ctx.cur_abstract_mesh.manual_axes))

    return rewrite(closed, change)


CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # `closed_call` from JAX 0.12 on
}
REMAT = "remat2"  # the primitive of `jax.checkpoint`
CALLS_AND_REMAT = CALLS | {REMAT: "jaxpr"}


def evaluate(
    jaxpr: Any,
    constants: Sequence[Any],
    inputs: Sequence[Any],
    apply: Callable[[Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluate a jaxpr on values of any kind; return its outputs.

    Args:
        jaxpr: the jaxpr.
        constants: the values of its constants.
        inputs: the values of its inputs.
        apply: returns the outputs of an equation, given the equation and the values of its inputs.
        literal: converts a number that is written in the jaxpr to a value.
    """
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(x.val) if isinstance(x, jex.Literal) else values[x] for x in atoms]

    for equation in jaxpr.eqns:
        outputs = apply(equation, read(equation.invars))
        values.update(zip(equation.outvars, outputs, strict=True))
    return read(jaxpr.outvars)


def appended(first: Any, second: Any, read: Sequence[Any]) -> Any:
    """Return a closed jaxpr that runs `first`, and then `second` on `first`'s variables `read`.

    The inputs are those of `first`. The outputs are those of `second`, then those of `first`.
    """
    one, two = first.jaxpr, second.jaxpr
    names = dict(zip(two.invars, read, strict=True))

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [x if isinstance(x, jex.Literal) else names.get(x, x) for x in atoms]

    equations = [x.replace(invars=renamed(x.invars)) for x in two.eqns]
    jaxpr = one.replace(
        constvars=[*one.constvars, *two.constvars],
        outvars=[*renamed(two.outvars), *one.outvars],
        eqns=[*one.eqns, *equations],
        effects=one.effects | two.effects,
        is_high=one.is_high or two.is_high,
        debug_info=one.debug_info.with_unknown_names(),
    )
    return jex.ClosedJaxpr(jaxpr, [*first.consts, *second.consts])


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation, without their constants."""
    for param in equation.params.values():
        for x in param if isinstance(param, tuple | list) else (param,):
            if isinstance(x, JAXPRS):
                yield getattr(x, "jaxpr", x)


def equations_inside(equation: Any) -> Iterator[Any]:
    """Yield an equation, and all equations of the jaxprs inside it."""
    yield equation
    for jaxpr in inner_jaxprs(equation):
        for inner in jaxpr.eqns:
            yield from equations_inside(inner)


def rewrite(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every equation of a jaxpr, closed or not, and of the jaxprs inside it.

    Equations and jaxprs in which nothing changes are returned as the same objects. A jaxpr that
    several equations share, as the layers of an unrolled model do, is rewritten once, so what
    `change` returns may depend on nothing but the equation.
    """
    known: dict[int, tuple[Any, Any]] = {}  # by id, each jaxpr and its replacement

    def rewritten(jaxpr: Any) -> Any:
        if id(jaxpr) in known:
            return known[id(jaxpr)][1]
        if isinstance(jaxpr, jex.Jaxpr):
            equations = [change(with_inner(x, rewritten)) for x in jaxpr.eqns]
            is_same = all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True))
            new = jaxpr if is_same else jaxpr.replace(eqns=equations)
        else:
            inner = rewritten(jaxpr.jaxpr)
            new = jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
        known[id(jaxpr)] = jaxpr, new
        return new

    return rewritten(jaxpr)


def is_traced(x: Any) -> bool:
    """Return whether `x` is a tracer rather than an array with values."""
    return isinstance(x, Tracer)


def is_tracing() -> bool:
    """Return whether a transformation such as `jax.jit` is tracing the caller."""
    return is_traced(jax.device_put(np.zeros(())))  # a tracer there, an array elsewhere


def in_host(x: Any) -> bool:
    """Return whether `x`, an array, a tracer or a struct with a sharding, is in host memory."""
    if is_traced(x):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    return getattr(getattr(x, "sharding", None), "memory_kind", None) == HOST


def memory_kind_of(x: Any) -> str | None:
    """Return the memory kind of `x` for a `NamedSharding`: `HOST`, or None for device memory."""
    return HOST if in_host(x) else None


def empty_in_host(shape: tuple[int, ...], dtype: Any, tag: int) -> Array:
    """Make an array in host memory, inside a traced program, with no particular contents.

    Args:
        shape: its shape; all of it must be overwritten, slice by slice.
        dtype: its dtype.
        tag: a number that differs for each array of a loop. XLA would allocate only one of several
            equal arrays, and copy the others from it.
    """
    return _empty_p.bind(shape=tuple(shape), dtype=jnp.dtype(dtype), tag=tag)


def to_device(x: Array) -> Array:
    """Copy a traced array to device memory; return it unchanged if it is there already."""
    return jax.device_put(x, jax.memory.Space.Device) if in_host(x) else x


def to_host(x: Array) -> Array:
    """Copy a traced array to host memory; return it unchanged if it is there already."""
    return x if in_host(x) else jax.device_put(x, jax.memory.Space.Host)
