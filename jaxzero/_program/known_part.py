"""Cut a function of active and frozen parameters where its values begin to depend on the active.

A value of the traced program depends on active parameters, on frozen ones, on the other arguments
(the batch), or on several of these. Those that depend on frozen parameters and the batch, and on
nothing active, are the same whenever the batch is. `known_part` returns the ones that the rest of
the program reads; `rest_part` runs the rest, given these. What depends on frozen parameters alone,
or on the batch alone (masks), is cheap to keep or to compute, and is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jex
from jax.extend import source_info_util

from .._mesh import bind, equations_inside
from .split_stacks import located, run_on_split_stacks

_ACTIVE, _FROZEN, _BATCH, _RANDOM = 1, 2, 4, 8
_KNOWN = _FROZEN | _BATCH
_RANDOM_BITS = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}


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
    """Compute what `rest_part` needs, and what depends on `frozen` and `batch` but not `active`.

    Args:
        function: `function(active, frozen, batch)`, trees of arrays.
        active: of this tree only shapes and dtypes are used.
        frozen: the frozen parameters.
        batch: the other arguments.

    Raises:
        ValueError: nothing is known without `active`; or what is known is random.
    """
    program = _trace(function, active, frozen, batch)
    if not program.saved:
        raise ValueError(
            "No value of the function depends on frozen parameters and not on active ones, so "
            "there are no activations to cache. Freeze the layers before them too (`before` of "
            "`zero.freeze`); and a `jax.checkpoint` or `jax.custom_vjp` may not hold the whole "
            "model, but one layer of it."
        )
    given = [*[None] * len(jax.tree.leaves(active)), *jax.tree.leaves((frozen, batch))]
    env = _run(program, given, lambda flags: not flags & _ACTIVE, {})
    return [env[var] for var in program.saved]


def rest_part(
    function: Callable[[Any, Any, Any], Any],
    active: Any,
    frozen: Any,
    batch: Any,
    saved: Sequence[Any],
) -> Any:
    """Return `function(active, frozen, batch)`, given what `known_part` returned for it.

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
    env = _run(
        program, given, lambda flags: bool(flags & _ACTIVE) or flags & _KNOWN != _KNOWN, known
    )
    outputs = [_read(env, var) for var in program.jaxpr.outvars]
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
        # A print belongs to each call; that a collective names an axis is an effect, too.
        effects = {type(effect).__name__ for effect in equation.effects}
        flags = _ACTIVE if effects - {"NamedAxisEffect"} else 0
        draws = (x.primitive.name in _RANDOM_BITS for x in equations_inside(equation))
        flags |= _RANDOM if any(draws) else 0
        for var in equation.invars:
            flags |= 0 if isinstance(var, jex.Literal) else depends[var]
        depends |= dict.fromkeys(equation.outvars, flags)
    return depends


def _read_by_rest(jaxpr: Any, depends: dict[Any, int]) -> dict[Any, None]:
    """The known variables that active equations or the outputs read, in order.

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


def _run(
    program: _Program, inputs: Sequence[Any], is_run: Callable[[int], bool], known: dict[Any, Any]
) -> dict[Any, Any]:
    """Evaluate the equations whose outputs depend on what `is_run` accepts."""
    env = dict(zip(program.jaxpr.constvars, program.constants, strict=True)) | known
    env |= zip(program.jaxpr.invars, inputs, strict=True)
    for equation in program.jaxpr.eqns:
        flags = program.depends[equation.outvars[0]] if equation.outvars else _ACTIVE
        if is_run(flags):
            with located(equation, equation):
                outputs = bind(equation, [_read(env, var) for var in equation.invars])
            env |= zip(equation.outvars, outputs, strict=True)
    return env


def _read(env: dict[Any, Any], var: Any) -> Any:
    return var.val if isinstance(var, jex.Literal) else env[var]
