"""Per-device programs, traced as those of one device are.

Inside a `shard_map` JAX types every array with the mesh, its axes `Manual`. Code that compares
what it traced with what it computes (Equinox's solvers: diffrax, optimistix, lineax) compares
these types too, and fails. So the body is traced with all axes automatic, as under plain `jit`,
which such code knows; their names stay bound, so that collectives work. What was traced goes into
the `shard_map` as it is, in one piece: nothing of it is bound, and so typed, again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.extend import core as jex
from jax.sharding import AxisType

_ASK_FOR_THE_DEVICE = {"axis_index", "debug_callback", "debug_print"}


def without_mesh(function: Callable) -> Callable:
    """`function`, of trees of arrays, as the body of a `shard_map` that it knows nothing of."""

    @functools.wraps(function)
    def body(*args):
        leaves, treedef = jax.tree.flatten(args)
        mesh = jax.sharding.get_abstract_mesh()

        def per_device(*leaves):
            return function(*jax.tree.unflatten(treedef, leaves))

        automatic = dict.fromkeys(mesh.axis_names, AxisType.Auto)
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(automatic)):
            closed, shapes = jax.make_jaxpr(per_device, return_shape=True)(*map(bare, leaves))
            constants = closed.consts
            called = _in_one_piece(closed.jaxpr, constants, leaves)
        if len(mesh.manual_axes) < len(mesh.axis_names):
            called = _in_sight_of(mesh, called)
        outputs = jex.jaxpr_as_fun(called)(*constants, *leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return body


def _in_one_piece(jaxpr: Any, constants: list[Any], leaves: list[Any]) -> Any:
    """A call of `jaxpr`. What the user's function closes over is passed to it: inside a `jit`
    it would be part of the compiled program, which could then serve for no other values."""

    @jax.jit
    def call(constants, leaves):
        return eval_jaxpr(jaxpr, constants, *leaves)

    return jax.make_jaxpr(call)([*map(bare, constants)], [*map(bare, leaves)])


def bare(x: Any) -> jax.ShapeDtypeStruct:
    """What `x` is, but for where it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _in_sight_of(mesh: Any, closed: Any) -> Any:
    """Have what asks which device it is on lowered in sight of `mesh`.

    If an axis is automatic, it becomes a `shard_map` over those axes that are not manual
    yet, and it is the mesh in its context that knows which.
    """
    with jax.sharding.use_abstract_mesh(mesh):
        context = jax.make_jaxpr(lambda: lax.axis_index(mesh.manual_axes[0]))().jaxpr.eqns[0].ctx

    def change(equation: Any) -> Any:
        asks = equation.primitive.name in _ASK_FOR_THE_DEVICE
        return equation.replace(ctx=context) if asks else equation

    return rewrite(closed, change)


def rewrite(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """`jaxpr`, closed or not, with `change` of every equation, also of those inside others.

    What `change` returns as it was given stays the same object, with all that it is in.
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
    """A tuple of the same type: `custom_linear_solve` has its jaxprs in one with names."""
    return type(old)(*items) if hasattr(old, "_fields") else tuple(items)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)


def is_traced(x: Any) -> bool:
    """Whether `x` stands for a value of a program being traced, rather than being an array."""
    return isinstance(x, Tracer)
