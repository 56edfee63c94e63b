"""Tangents of a sharded program, for `jax.jvp` and `jax.linearize`.

Messages are integers, packed bits, or floats sent as bits, and none of these have tangents. So JAX
does not differentiate the program. A second program computes the tangents, and is made like the
first, from the `jax.jvp` of the function that was traced for it: the tangents of weights are
further sharded weights, which are gathered where they are used, and the tangents of gradients are
reduced as gradients are. It has no codecs: those of the first program are differentiated straight
through, and everything in it travels in the precision of the leaf.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._mesh import current_microbatch, known_together
from .._program import OpenProgram, open_program
from .._sharding import TreePlan
from .arguments import Argument, Call
from .loss import constant_weight


Rule = Callable[["Derivative", Any], Any]  # of the results of the program; returns their tangents


def with_tangents(
    mapped: Callable, args: Any, traced: Callable[[], OpenProgram], tangents: Rule
) -> Any:
    """Call `mapped(*args)`, as a function that JAX can differentiate forward.

    Args:
        mapped: the program, a function of global arrays: those of arguments, the wire state, and
            the arrays of updates.
        args: the trees of these arrays.
        traced: returns what the function on one device was traced to, once `mapped` is traced.
        tangents: computes the tangents of the results.
    """
    program = open_program(mapped, *args)
    run, treedef, function = program.run, program.treedef, traced()
    # The rule stays with a compiled program, and must hold no arrays.
    numbers = {id(x): i for i, x in enumerate(program.constants)}
    places = [numbers[id(x)] for x in function.constants]
    function = dataclasses.replace(function, constants=[])
    # JAX calls the rule later: outside of `map_nodes`, for a program of one node.
    context = contextvars.copy_context()

    @jax.custom_jvp
    def call(constants: list[Any], args: Any) -> Any:
        return jax.tree.unflatten(treedef, run(constants, jax.tree.leaves(args)))

    def rule(primals: Any, changes: Any) -> tuple[Any, Any]:
        results = call(*primals)
        (constants, args), (of_constants, of_args) = _known_together(primals, changes)
        derivative = Derivative(
            function,
            [constants[i] for i in places],
            [of_constants[i] for i in places],
            args[0],
            of_args[0],
            any(map(_is_varied, jax.tree.leaves(of_args[1:]))),
        )
        return results, context.copy().run(tangents, derivative, results)

    call.defjvp(rule, symbolic_zeros=True)
    return call(program.constants, args)


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a function on one device, and the arguments of its sharded program.

    Attributes:
        function: the function, traced on flat lists.
        constants: the arrays that it closes over.
        of_constants: their tangents.
        arrays: the global arrays of each argument of the program.
        of_arrays: their tangents.
        of_state: whether wire state or updates have tangents.
    """

    function: OpenProgram
    constants: list[Any]
    of_constants: list[Any]
    arrays: list[list[Any]]
    of_arrays: list[list[Any]]
    of_state: bool

    def arguments(self, call: Call) -> tuple[Call, list[list[Any]]]:
        """`call` and its arrays, with two further arguments: tangents of weights, and of others."""
        leaves, weights, specs, others = [], [], [], []
        for argument, tangents in zip(call.arguments, self.of_arrays, strict=True):
            if argument.plan is not None:
                pairs = zip(argument.plan.leaves, tangents, strict=True)
                leaves += [leaf for leaf, x in pairs if _is_varied(x)]
                weights += filter(_is_varied, tangents)
            else:
                pairs = zip(argument.specs, tangents, strict=True)
                specs += [spec for spec, x in pairs if _is_varied(x)]
                others += filter(_is_varied, tangents)
        plan, untrained = TreePlan(None, tuple(leaves), ()), (False,) * len(leaves)
        further = (
            Argument("tangents", None, (), plan, (), untrained),
            Argument("tangents", None, (), None, tuple(specs), (False,) * len(specs)),
        )
        call = dataclasses.replace(call, arguments=(*call.arguments, *further))
        return call, [*self.arrays, weights, others]

    def flat(self, call: Call) -> Callable:
        """The derivative as a function of the full arrays of `arguments(call)`, on flat lists."""
        kinds = [[], []]  # of weights, and of others: which have tangents
        for argument, tangents in zip(call.arguments, self.of_arrays, strict=True):
            kinds[argument.plan is None] += map(_is_varied, tangents)

        def flat(stored: list[Any], inputs: list[Any], *_: Any) -> Any:
            index = current_microbatch()
            indices = [] if index is None else [index]
            primals, tangents = [], []
            for arrays, varied in zip((stored, inputs), kinds, strict=True):
                further = iter(arrays[len(varied) :])
                primals += arrays[: len(varied)]
                tangents += [next(further) if is_varied else None for is_varied in varied]
            return self._differentiated(indices, primals, tangents)

        return flat

    def floats(self, reductions: Sequence[str]) -> list[str]:
        """The reductions of the other outputs that have tangents, among those of all."""
        pairs = zip(reductions, self.function.shapes[3], strict=True)
        return [how for how, x in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]

    def _differentiated(
        self, indices: list[Any], primals: list[Any], tangents: list[Any]
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """Tangents of loss, gradients and other outputs, and the weight of the examples."""
        all_primals = [*self.constants, *indices, *primals]
        changes = [x if _is_varied(x) else None for x in self.of_constants]
        all_tangents = [*changes, *[None] * len(indices), *tangents]
        varied = [i for i, x in enumerate(all_tangents) if x is not None]

        def function(arrays: list[Any]) -> Any:
            merged = list(all_primals)
            for i, x in zip(varied, arrays, strict=True):
                merged[i] = x
            num = len(self.constants)
            outputs = self.function.run(merged[:num], merged[num:])
            loss, weight, gradients, others = jax.tree.unflatten(self.function.treedef, outputs)
            return loss, weight if weight is None else constant_weight(weight), gradients, others

        pairs = ([values[i] for i in varied] for values in (all_primals, all_tangents))
        (_, weight, *_), (loss, _, gradients, others) = jax.jvp(
            function, *([x] for x in pairs)
        )
        return loss, weight, gradients, list(filter(_is_varied, others))


def tangents_like(results: list[Any], tangents: Sequence[Any]) -> list[Any]:
    """A tangent for each array: the next of `tangents` for floats, zero for others."""
    remaining = iter(tangents)
    return [
        next(remaining) if jnp.issubdtype(x.dtype, jnp.inexact) else zeros(x) for x in results
    ]


def zeros(tree: Any) -> Any:
    """The tangents of arrays that do not change."""
    return jax.tree.map(lambda x: zero_from_primal(x, symbolic_zeros=True), tree)


def _is_varied(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


def _known_together(primals: Any, tangents: Any) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten((primals, tangents))
    arrays = [i for i, x in enumerate(leaves) if _is_varied(x)]
    for i, x in zip(arrays, known_together([leaves[i] for i in arrays]), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)
