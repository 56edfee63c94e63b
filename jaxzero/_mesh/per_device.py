"""Trace the body of a `shard_map` as if it ran on one device, without the mesh in array types.

Inside a `shard_map`, JAX puts the mesh, with its axes `Manual`, into the type of every array. Code
that compares traced with computed values (Equinox's solvers: diffrax, optimistix, lineax) compares
these types too, and fails. So the body is traced with all axes automatic, as under plain `jit`,
which such code supports; the axis names stay bound, so that collectives work. The traced jaxpr is
then called in the `shard_map` as one `jit`, so that its equations do not get types with the mesh.

JAX cannot transpose such a program: the types of the transpose would have the mesh. It would also
hold all gathered weights until backward, and pass through codecs. `forward_only` marks results, and
`known_together` marks arguments, so that `jax.linearize` does not cut a program apart either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from .._without_gc import without_gc

_ASK_FOR_THE_DEVICE = {"axis_index", "debug_callback", "debug_print"}


def without_mesh(function: Callable) -> Callable:
    """Wrap a function of trees of arrays as a `shard_map` body that is traced without the mesh."""

    @functools.wraps(function)
    def body(*args):
        leaves, treedef = jax.tree.flatten(args)
        mesh = jax.sharding.get_abstract_mesh()

        def per_device(*leaves):
            return function(*jax.tree.unflatten(treedef, leaves))

        automatic = dict.fromkeys(mesh.axis_names, AxisType.Auto)
        # Tracing makes so many objects that Python's collector takes a fifth of its time.
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(automatic)), without_gc():
            closed, shapes = jax.make_jaxpr(per_device, return_shape=True)(*map(bare, leaves))
            constants = closed.consts
            called = _as_one_call(closed.jaxpr, constants, leaves)
        if len(mesh.manual_axes) < len(mesh.axis_names):
            called = _with_mesh_context(mesh, called)
        outputs = jex.jaxpr_as_fun(called)(*constants, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return body


def forward_only(tree: Any) -> Any:
    """The same arrays; reverse-mode differentiation of them raises `NotImplementedError`."""
    return jax.tree.map(
        lambda x: _forward_only_p.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree
    )


def known_together(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays; where one of them is unknown to `jax.linearize`, so are all.

    Linearization computes what depends on known arrays only, and keeps it: of a program with known
    weights and unknown tangents, the weights in full.
    """
    return _known_together_p.bind(*arrays)


def without_refs(jaxpr: Any, constants: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, in one equation that hides the `jax.Ref`s that are made inside.

    JAX removes these when it lowers a program, but not from the body of a `jax.custom_jvp`.
    """
    if not any(map(_is_of_refs, jaxpr.effects)):
        return eval_jaxpr(jaxpr, constants, *arrays)
    return _without_refs_p.bind(*constants, *arrays, jaxpr=jaxpr)


def _is_of_refs(effect: Any) -> bool:
    return type(effect).__name__ == "InternalMutableArrayEffect"


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


def _as_one_call(jaxpr: Any, constants: list[Any], leaves: list[Any]) -> Any:
    """Wrap `jaxpr` in a jaxpr with one equation, a `jit` that calls it.

    Arrays that the user's function closes over become arguments of the `jit`: as constants of the
    compiled program they would keep it from being reused with other values.
    """

    @jax.jit
    def call(constants, leaves):
        return eval_jaxpr(jaxpr, constants, *leaves)

    return jax.make_jaxpr(call)([*map(bare, constants)], [*map(bare, leaves)])


def bare(x: Any) -> Any:
    """The type of `x` without its sharding: shape, dtype, weak type and memory space."""
    weak_type = getattr(x, "weak_type", False)
    if is_traced(x) and jax.typeof(x).memory_space == jax.memory.Space.Host:
        # A `ShapeDtypeStruct` has a memory space only as a part of its sharding.
        host = jax.memory.Space.Host
        return ShapedArray(x.shape, x.dtype, weak_type, memory_space=host)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak_type)


def _with_mesh_context(mesh: Any, closed: Any) -> Any:
    """Give equations with `axis_index` or a debug print the context of `mesh`, to lower them.

    If an axis of the mesh is automatic, JAX lowers these as a `shard_map` over the axes that are
    not manual yet, and finds these axes in the mesh of the equation's context.
    """
    with jax.sharding.use_abstract_mesh(mesh):
        context = jax.make_jaxpr(lambda: lax.axis_index(mesh.manual_axes[0]))().jaxpr.eqns[0].ctx

    def change(equation: Any) -> Any:
        asks = equation.primitive.name in _ASK_FOR_THE_DEVICE
        return equation.replace(ctx=context) if asks else equation

    return rewrite(closed, change)


def rewrite(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every equation of a jaxpr, closed or not, and of the jaxprs inside it.

    Equations and jaxprs in which nothing changes are returned as the same objects.
    """
    if not isinstance(jaxpr, jex.Jaxpr):
        inner = rewrite(jaxpr.jaxpr, change)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    equations = [change(_rewrite_inside(x, change)) for x in jaxpr.eqns]
    is_same = all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=equations)


def _rewrite_inside(equation: Any, change: Callable[[Any], Any]) -> Any:
    new = {}
    for name, param in equation.params.items():
        several = isinstance(param, tuple)
        before = param if several else (param,)
        after = [rewrite(x, change) if _is_jaxpr(x) else x for x in before]
        if any(x is not y for x, y in zip(before, after, strict=True)):
            new[name] = _like(param, after) if several else after[0]
    return equation.replace(params={**equation.params, **new}) if new else equation


def _like(old: tuple, items: list[Any]) -> tuple:
    """`items` as a tuple of the type of `old`, such as the named tuple of `custom_linear_solve`."""
    return type(old)(*items) if hasattr(old, "_fields") else tuple(items)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def is_traced(x: Any) -> bool:
    """Whether `x` is a tracer rather than an array with values."""
    return isinstance(x, Tracer)


def is_tracing() -> bool:
    """Whether a transformation such as `jax.jit` is tracing the caller."""
    return is_traced(jax.device_put(np.zeros(())))  # a tracer there, an array elsewhere
