"""Compute tangents of sharded programs, for `jax.jvp` and `jax.linearize`.

Messages are integers, packed bits, or floats sent as bits, and none of these have tangents. So JAX
does not differentiate a sharded program. Instead, a second program computes the tangents. It is
made like the first, from the `jax.jvp` of the function that was traced for the first. The tangents
of weights are further sharded weights, gathered where they are used. The tangents of gradients are
reduced as gradients are. The second program has no codecs: the first program's codecs are
differentiated straight through, and all messages have the precision of the leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._mesh import current_microbatch, known_together
from .._program import OpenProgram
from .._sharding import TreeLayout
from .arguments import Argument, Call, Options
from .programs import is_varied, jvp_of_some
from .updates import ProgramUpdates
from .user_function import constant_weight


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a function along tangents, and the arguments of its sharded program.

    Attributes:
        traced: the function.
        constants: the arrays that the function closes over.
        of_constants: the tangents of `constants`.
        call: the arguments of the function's program.
        arrays: for each argument its global arrays.
        of_arrays: the tangents of `arrays`.
    """

    traced: OpenProgram
    constants: list[Any]
    of_constants: list[Any]
    call: Call
    arrays: list[list[Any]]
    of_arrays: list[list[Any]]

    @classmethod
    def along(cls, traced: OpenProgram, call: Call, primals: Any, tangents: Any) -> Derivative:
        """Make the derivative at the point `primals` along `tangents`.

        Args:
            traced: the function on one device, traced on flat lists.
            call: the arguments of its program.
            primals: `(closed_over, args)`, the arrays that the function closes over and the
                arguments of the program.
            tangents: the tangents of `primals`, in the same tree.
        """
        (constants, args), (of_constants, of_args) = _known_together(primals, tangents)
        return cls(traced, constants, of_constants, call, args[0], of_args[0])

    def arguments(self) -> tuple[Call, list[list[Any]]]:
        """Return the call of the program that computes tangents, and the arrays of each argument.

        It is the first program's call with two more arguments: the tangents of weights, and the
        tangents of other arrays. Tangents that are known to be zero are left out.
        """
        leaves, weights, specs, others = [], [], [], []
        for argument, tangents in zip(self.call.arguments, self.of_arrays, strict=True):
            if argument.layout is not None:
                pairs = zip(argument.layout.leaves, tangents, strict=True)
                leaves += [leaf for leaf, x in pairs if is_varied(x)]
                weights += filter(is_varied, tangents)
            else:
                pairs = zip(argument.specs, tangents, strict=True)
                specs += [spec for spec, x in pairs if is_varied(x)]
                others += filter(is_varied, tangents)
        layout, untrained = TreeLayout(None, tuple(leaves), ()), (False,) * len(leaves)
        more = (
            Argument("tangents", None, (), layout, (), untrained),
            Argument("tangents", None, (), None, tuple(specs), (False,) * len(specs)),
        )
        call = dataclasses.replace(self.call, arguments=(*self.call.arguments, *more))
        return call, [*self.arrays, weights, others]

    def flat(self, stored: list[Any], inputs: list[Any], *_: Any) -> Any:
        """Compute the derivative on one device, with flat lists of arrays in and out.

        Args:
            stored: the full weights, then the tangents that are not zero.
            inputs: the other arguments, then the tangents that are not zero.

        Returns:
            The tangent of the loss; the weight of the examples (not its tangent); the tangents of
            the gradients; and the tangents of the other outputs that are floats.
        """
        index = current_microbatch()
        primals = [*self.constants, *([] if index is None else [index])]
        tangents = [*self.of_constants, *([] if index is None else [None])]
        for arrays, is_weight in ((stored, True), (inputs, False)):
            pairs = zip(self.call.arguments, self.of_arrays, strict=True)
            mine = [
                x
                for argument, xs in pairs
                if (argument.layout is not None) == is_weight
                for x in xs
            ]
            more = iter(arrays[len(mine) :])
            primals += arrays[: len(mine)]
            tangents += [next(more) if is_varied(x) else None for x in mine]
        num = len(self.constants)

        def function(arrays: list[Any]) -> Any:
            outputs = self.traced.run(arrays[:num], arrays[num:])
            loss, weight, gradients, others = jax.tree.unflatten(self.traced.treedef, outputs)
            return loss, weight if weight is None else constant_weight(weight), gradients, others

        values, (loss, _, gradients, others) = jvp_of_some(function, primals, tangents)
        return loss, values[1], gradients, list(filter(is_varied, others))

    def floats(self, reductions: Sequence[str]) -> list[str]:
        """Return the `reductions` of those outputs that are floats.

        `reductions` has an entry for each output other than the loss.
        """
        pairs = zip(reductions, self.traced.shapes[3], strict=True)
        return [how for how, x in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]


def trace_along(
    run: Callable, arrays: list[list[Any]], state: Any, along: Sequence[int], num_arguments: int
) -> None:
    """Trace `run(arrays, state)`, and its tangents along the arguments at the positions `along`.

    Args:
        run: the function.
        arrays: for each argument its arrays.
        state: the second argument of `run`, which gets no tangents.
        along: positions of the arguments that get tangents.
        num_arguments: the number of positional arguments of the call.

    Raises:
        ValueError: a position in `along` is negative, or not below `num_arguments`.
    """
    if any(not 0 <= number < num_arguments for number in along):
        raise ValueError(
            "`tangent_argnums` must be positions of arguments, from 0 to "
            f"{num_arguments - 1}; got {tuple(along)}."
        )

    def traced(arrays: list[list[Any]], state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(arrays)
        numbers = [number for number, xs in enumerate(arrays) for _ in xs]
        tangents = [
            x if number in along and jnp.issubdtype(x.dtype, jnp.inexact) else None
            for number, x in zip(numbers, leaves, strict=True)
        ]

        def function(leaves: list[Any]) -> Any:
            return run(jax.tree.unflatten(treedef, leaves), state)

        return jvp_of_some(function, leaves, tangents) if along else function(leaves)

    # A new function each time: `eval_shape` does not trace the same function twice.
    jax.eval_shape(traced, arrays, state)


def check_tangents(
    options: Options, combines: bool, updates: ProgramUpdates, tangents: Any
) -> None:
    """Raise `NotImplementedError` if the tangents of a program cannot be computed.

    Args:
        options: the options of the program.
        combines: whether the program reduces some gradients in another way than by their mean.
        updates: the updates that the program runs.
        tangents: the tangents of the program's arguments.
    """
    reasons = {
        "with `halves=True`. Leave it out there": options.halves,
        "with `shares`. Leave them out there": options.shares is not None,
        "with gradients that `gradient_reduce` combines (the state of fp8 layers). Leave these "
        "leaves out of what is differentiated": combines,
        "with respect to its wire state. Pass `jax.lax.stop_gradient(wire_state)`": (
            any(map(is_varied, jax.tree.leaves(tangents[1])))
        ),
        "from `zero.value_and_update` that updates arrays in host memory. Use "
        "`zero.value_and_grad` and `zero.apply_gradients`": bool(updates.leaves),
    }
    for reason, is_given in reasons.items():
        if is_given:
            raise NotImplementedError(f"`jax.jvp` of a function {reason}.")


def _known_together(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Return `primals` and `tangents`, with `known_together` applied to their arrays of floats.

    So `jax.linearize` keeps no full weights.
    """
    leaves, treedef = jax.tree.flatten((primals, tangents))
    arrays = [i for i, x in enumerate(leaves) if is_varied(x)]
    for i, x in zip(arrays, known_together([leaves[i] for i in arrays]), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)
