"""Compute values of a program on demand, and the first or the last stage's part of gradients.

The gradient of a weight outside of the layers may come from both ends of a pipeline. For example,
an embedding that is also the head gets gradients on the first stage and on the last. Its gradient
is a sum

    g = at_head + of_layers(cotangents)

where `cotangents` are the results of the backward loop. `at_head` does not depend on them, and the
last stage can compute it. `of_layers` is linear in them, and the first stage can compute it. `Sums`
evaluates one of these parts: in additions it leaves out the terms of the other part.

`zeros_of_layer` finds the values that are zero in backward of a micro-batch that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._program import (
    ADDITIONS,
    Atom,
    Barrier,
    Block,
    Constant,
    Loop,
    Operation,
    Value,
    at_line_of,
    dtype_of,
    has_host_effect,
    is_zero,
    movable_ops,
    operations_for,
)

# Operations that are linear in each single input; linear in the first input, but not in others;
# and linear in an input if the others are zeros.
_LINEAR = {
    *("conv_general_dilated", "cumsum", "dot_general", "mul", "psum", "reduce_sum"),
    *("reduce_window_sum", "reshard"),
}
_LINEAR_IN_FIRST = {"div", "dynamic_slice", "gather"}
_LINEAR_BESIDE_ZEROS = {"dynamic_update_slice", "scatter-add", "select_n"}
_SUMS = {*ADDITIONS, "sub"}


class Evaluation:
    """An evaluator of a program: it computes values when they are asked for, each of them once.

    Args:
        block: the program.
        given: the values that are known at first.
        loops: the layer loops, which are never run here.
        exists: a scalar, false in a tick that has no micro-batch: then the operations that are run
            have no effects on the host, such as prints. None: they always have these effects.
    """

    def __init__(
        self,
        block: Block,
        given: Mapping[Value, Any],
        loops: Collection[Operation | None] = (),
        exists: Array | None = None,
    ):
        self.block = block
        self.known = dict(given)
        self._loops = loops
        self._exists = exists

    def __call__(self, atoms: Sequence[Atom]) -> list[Any]:
        """Return the values of some atoms.

        Raises:
            NotImplementedError: an atom depends on a layer loop whose results are not given.
        """
        for operation in operations_for(self.block, atoms, self.known):
            if operation in self._loops:
                raise NotImplementedError(
                    f"Results of the loop over the layers at {operation.where} are needed on a "
                    "stage that does not have them, for the gradient of a weight outside of the "
                    "layers or an output. If the loop scans a weight that `layers` of `jz.Stages` "
                    "does not name, name it too; otherwise leave out `stages`."
                )
            inputs = [self.read(x) for x in operation.inputs]
            made = run_operation(operation, inputs, self._exists)
            self.known.update(zip(operation.outputs, made, strict=True))
        return [self.read(x) for x in atoms]

    def run(self, operations: Sequence[Operation], exists: Array) -> None:
        """Run operations for their effects on the host, which happen only if `exists` is true."""
        for operation in operations:
            run_operation(operation, self(operation.inputs), exists)

    def read(self, atom: Atom) -> Any:
        return self.known[atom] if isinstance(atom, Value) else atom.value


def run_operation(
    operation: Operation, inputs: Sequence[Any], exists: Array | None = None
) -> list[Any]:
    """Run an operation, and return its outputs.

    A loop is traced again, operation by operation. If `exists` is false, no effects on the host,
    such as prints, happen, neither here nor inside of a loop.
    """
    if not isinstance(operation, Loop):
        with at_line_of(operation):
            if exists is None or operation.outputs or not has_host_effect(operation):
                return operation.bind(inputs)
            return lax.cond(exists, lambda: operation.bind(inputs), lambda: [])
    num, first = operation.num_constants, operation.first_stack

    def body(carry: list[Any], layers: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = run_block(operation.body, [*inputs[:num], *carry, *layers], exists=exists)
        return outputs[: operation.num_carry], outputs[operation.num_carry :]

    with at_line_of(operation):
        carry, stacks = operation.scan(body, list(inputs[num:first]), list(inputs[first:]))
    return [*carry, *stacks]


def run_block(
    block: Block,
    inputs: Sequence[Any],
    changed: Mapping[Value, Callable[[Any], Any]] | None = None,
    exists: Array | None = None,
) -> list[Any]:
    """Run all operations of a block, and return its outputs.

    Args:
        block: the block.
        inputs: the values of the block's inputs.
        changed: functions by value: each is applied to its value once that is computed, and later
            operations read the result.
        exists: a scalar; if it is false, effects on the host do not happen. None: they always do.
    """
    values = dict(zip(block.inputs, inputs, strict=True))

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Constant) else values[atom]

    for operation in block.operations:
        outputs = run_operation(operation, [read(x) for x in operation.inputs], exists)
        values.update(zip(operation.outputs, outputs, strict=True))
        if changed is not None:
            values.update((x, changed[x](values[x])) for x in operation.outputs if x in changed)
    return [read(x) for x in block.outputs]


def before_widening(block: Block, atom: Atom) -> Atom:
    """Return the narrower float that an atom was cast from; without such a cast, the atom itself.

    The narrower one takes fewer bytes to send.
    """
    while isinstance(atom, Value) and atom in block.makers:
        maker = block.makers[atom]
        op, source = maker.view(), maker.source
        if not isinstance(op, movable_ops.ConvertDtype) or source is None or op.narrows:
            break
        if not jnp.issubdtype(source.dtype, jnp.floating):
            break
        atom = source
    return atom


def zeros_of_layer(loop: Loop, travelling: Collection[Atom]) -> set[Value]:
    """Return the values in the body of the backward loop that are zero if no micro-batch exists.

    All cotangents are then zeros: the loop's carry, and `travelling`. The other inputs are those of
    some existing micro-batch. So a product of a cotangent and another input is zero, unless that
    micro-batch has values that are not finite.
    """
    is_carried = range(loop.num_constants, loop.first_stack).__contains__
    given = [is_carried(i) or x in travelling or None for i, x in enumerate(loop.inputs)]
    return {x for x, zero in _zeros_inside(loop, given).items() if zero}


def _zeros_inside(loop: Loop, given: Sequence[bool | None]) -> dict[Value, bool]:
    """Find the values in the body of a loop that are zero in all iterations.

    The result is that of `_zeros` for the body.

    Args:
        loop: the loop.
        given: for each input of the loop, whether it is zero; None: it depends on no cotangent.
    """
    given, carry = [*given], slice(loop.num_constants, loop.first_stack)
    while True:
        pairs = zip(loop.body.inputs, given, strict=True)
        inside = _zeros(loop.body, {x: zero for x, zero in pairs if zero is not None})
        after = (_is_zero(x, inside, loop.body) for x in loop.body.outputs)
        joined = [x if x == y else False for x, y in zip(given[carry], after, strict=False)]
        if joined == given[carry]:
            return inside
        given[carry] = joined


def _zeros(block: Block, given: Mapping[Value, bool]) -> dict[Value, bool]:
    """Find the values of a block that are zero because they depend on cotangents of zero.

    Args:
        block: the block.
        given: for each input that depends on cotangents, True if it is known to be zero.

    Returns:
        For each value that depends on cotangents, True if it is known to be zero: if it is computed
        from zeros by an operation that is known to map zeros to zeros.
    """
    zeros = dict(given)
    for operation in block.operations:
        read = [zeros[x] for x in operation.values if x in zeros]
        if not read:
            continue
        if isinstance(operation, Barrier):
            outputs = [_is_zero(x, zeros, block) for x in operation.inputs]
        elif isinstance(operation, Loop):
            inside = _zeros_inside(operation, [_is_zero(x, zeros, block) for x in operation.inputs])
            outputs = [_is_zero(x, inside, operation.body) for x in operation.body.outputs]
            # A loop without iterations returns its carry as it was. `inside` holds for the carry
            # before and after any iteration.
            carried = operation.body.inputs[operation.num_constants : operation.first_stack]
            outputs[: operation.num_carry] = [inside.get(x) for x in carried]
        else:
            is_made = all(read) and _keeps_zeros(operation, zeros, block)
            outputs = [is_made] * len(operation.outputs)
        pairs = zip(operation.outputs, outputs, strict=True)
        zeros |= {x: zero for x, zero in pairs if zero is not None}
    return zeros


def _is_zero(atom: Atom, known: Mapping[Value, bool], block: Block) -> bool | None:
    """Return True if an atom is known to be zero, and None if it depends on no cotangent.

    Otherwise return False. `known` has the values that depend on cotangents, as `_zeros` returns
    them.
    """
    if is_zero(atom, block.makers):
        return True
    return known.get(atom) if isinstance(atom, Value) else None


def _keeps_zeros(operation: Operation, known: Mapping[Value, bool], block: Block) -> bool:
    """Return True if an operation's outputs are zero, given that its inputs in `known` are.

    These are the inputs that depend on cotangents; the others may have any values.
    """
    if operation.name in _LINEAR or operation.view() is not None:
        return True
    if _is_linear_in_first(operation):
        return known.keys().isdisjoint(operation.inputs[1:])
    if operation.name not in _SUMS | _LINEAR_BESIDE_ZEROS:
        return False
    # Only floats must be zero: indices and the predicate of `select_n` may be anything.
    added = [x for x in operation.inputs if jnp.issubdtype(dtype_of(x), jnp.inexact)]
    return bool(added) and all(_is_zero(x, known, block) for x in added)


def _is_linear_in_first(operation: Operation) -> bool:
    """Return True if an operation is linear in its first input, for fixed other inputs."""
    if operation.name == "gather" and operation.equation.params["fill_value"]:
        return False  # indices out of bounds give `fill_value`, which is not linear
    return operation.name in _LINEAR_IN_FIRST


def before_moves(block: Block, output: int) -> Any:
    """Trace an output of a block back through all operations that only move, scale or round.

    Args:
        block: the block.
        output: the index of the output.

    Returns:
        The value before the first of these operations; the output itself if there are none.
    """
    value = block.outputs[output]
    while value in block.makers and block.makers[value].view() is not None:
        value = block.makers[value].source
    return value


class Sums:
    """An evaluator of one of two terms, whose sum is a value that depends on the backward loop.

    One term, "of the layers", is linear in the results of the backward loop. The other, "the rest",
    does not depend on these results.

    Args:
        block: the program.
        tainted: all values that depend on the backward loop.

    Raises:
        NotImplementedError: an operation reads a value that has both terms, and is not known to be
            linear in it.
    """

    def __init__(self, block: Block, tainted: Set[Value]):
        self.block = block
        self._tainted = tainted
        # Values that have a part that does not depend on the backward loop.
        self._has_rest: set[Value] = set()
        for operation in block.operations:
            read = [x for x in operation.values if x in tainted]
            if not read:
                continue
            rest = not self._has_rest.isdisjoint(read)
            if operation.name in _SUMS:
                rest |= any(
                    not self._is_known_zero(x) for x in operation.inputs if x not in tainted
                )
            elif rest and not (len(read) == 1 and self._is_linear(operation, read[0])):
                raise NotImplementedError(
                    f"`{operation.name}` at {operation.where} is not known to be linear in the "
                    "gradients that it reads, of which the first and the last stage have a part "
                    "each. Leave out `stages`."
                )
            if rest:
                self._has_rest.update(operation.outputs)

    def has_layers(self, atom: Atom) -> bool:
        """Return True if an atom has a term that is linear in results of the backward loop."""
        return atom in self._tainted

    def has_rest(self, atom: Atom) -> bool:
        """Return True if an atom has a term that does not depend on the backward loop."""
        return atom in self._has_rest if atom in self._tainted else not self._is_known_zero(atom)

    def of_layers(self, atoms: Sequence[Atom], values: Evaluation) -> list[Any]:
        """Return the atoms' terms that are linear in results of the backward loop.

        `values` knows these results.
        """
        return self._evaluated(atoms, values, self.has_layers)

    def rest(self, atoms: Sequence[Atom], values: Evaluation) -> list[Any]:
        """Return the atoms' terms that do not depend on the backward loop."""
        return self._evaluated(atoms, values, self.has_rest)

    def _evaluated(
        self, atoms: Sequence[Atom], values: Evaluation, is_part: Callable[[Atom], bool]
    ) -> list[Any]:
        parts: dict[Value, Any] = {}

        def read(atom: Atom) -> Any:
            """Return an atom's term (None for zero), or its value if it is not split in terms."""
            if not is_part(atom):
                return None
            if not isinstance(atom, Value) or atom not in self._tainted or atom in values.known:
                return values([atom])[0]
            return parts[atom]

        tainted = [x for x in atoms if isinstance(x, Value) and x in self._tainted]
        for operation in operations_for(self.block, tainted, values.known):
            if self._tainted.isdisjoint(operation.outputs):
                continue
            if operation.name in _SUMS:
                (out,) = operation.outputs
                total = _sum(operation.name, *map(read, operation.inputs))
                parts[out] = None if total is None else jnp.broadcast_to(total, out.shape)
                continue
            if not all(is_part(x) for x in operation.outputs):
                continue
            inputs = [read(x) if x in self._tainted else values([x])[0] for x in operation.inputs]
            parts.update(zip(operation.outputs, run_operation(operation, inputs), strict=True))
        return [read(x) for x in atoms]

    def _is_linear(self, operation: Operation, source: Value) -> bool:
        if operation.name in _LINEAR or operation.view() is not None:
            return True
        if _is_linear_in_first(operation):
            return operation.inputs[0] is source
        floats = [
            x
            for x in operation.inputs
            if x is not source and jnp.issubdtype(dtype_of(x), jnp.inexact)
        ]
        return operation.name in _LINEAR_BESIDE_ZEROS and all(map(self._is_known_zero, floats))

    def _is_known_zero(self, atom: Atom) -> bool:
        return is_zero(atom, self.block.makers)


def _sum(name: str, left: Any, right: Any) -> Any:
    """Return `left + right`, or `left - right` if `name` is "sub"; None stands for zero."""
    if right is None:
        return left
    if name == "sub":
        right = -right
    return right if left is None else left + right
