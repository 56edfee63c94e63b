"""Find where a program mixes values of different rows of the batch.

Each device computes a loss on its own rows. The mean of these losses is that of one device with all
rows if the loss is a mean of rows. So the rows are followed through all operations of the forward
program. `row_states` says how a value depends on rows; `row_rules`, `row_dims` and `row_lookups`
say how operations change that. A `Mixing` is found where rows meet, except in sums that reach the
loss linearly, and unless a collective over all devices follows. Nothing is said about results of
operations without a rule, so that no mixing is reported wrongly; but mixings may be missed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .._mesh import ROWS_APART
from . import row_dims, row_lookups
from .ir import Atom, Block, Loop, Operation
from .operation_kinds import is_elementwise, shape_of
from .row_rules import IDENTITIES, OTHERS, Rows, Rule, collective, elementwise, joined_rows
from .row_states import (
    CONSTANT,
    Mixing,
    NotAligned,
    Parts,
    State,
    Sum,
    as_rows,
    has_outer,
    unknown,
)
from .trace import branch_blocks, called_block, while_body, without_dead_code

_MOST_ROUNDS = 6  # of a loop, until the states that it carries stay as they are

_RULES: dict[str, Rule] = {
    "all_gather": collective,
    "all_to_all": collective,
    "axis_index": row_lookups.device,
    "broadcast_in_dim": row_dims.broadcast,
    "concatenate": row_dims.concatenate,
    "conv_general_dilated": row_dims.convolution,
    "dot_general": row_dims.dot,
    "dynamic_slice": row_lookups.slice_at,
    "dynamic_update_slice": row_lookups.write_at,
    "expand_dims": row_dims.expand_dims,
    "gather": row_lookups.gather,
    "iota": row_lookups.iota,
    "pad": row_dims.pad,
    "ppermute": collective,
    "random_bits": row_lookups.random_bits,
    "reduce_scatter": collective,
    "reshape": row_dims.reshape,
    "rev": row_dims.reverse,
    "slice": row_dims.cut,
    "sort": row_dims.along,
    "split": row_dims.cut,
    "squeeze": row_dims.squeeze,
    "tile": row_dims.tile,
    "transpose": row_dims.transpose,
    **dict.fromkeys(("approx_top_k", "top_k"), row_dims.along),
    **dict.fromkeys(("cholesky", "eigh", "fft", "lu", "qr", "svd"), row_dims.batched),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), row_dims.along),
    **dict.fromkeys(("pmax", "pmin", "psum", "psum_invariant"), collective),
    **dict.fromkeys(("random_fold_in", "random_seed", "random_split"), row_lookups.key),
    **dict.fromkeys(("random_unwrap", "random_wrap", "threefry2x32"), row_lookups.key),
    **dict.fromkeys(("reduce_and", "reduce_max", "reduce_min", "reduce_or"), row_dims.reduce),
    **dict.fromkeys(("argmax", "argmin", "reduce_prod", "reduce_sum"), row_dims.reduce),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), row_dims.windows),
    "reduce_window_sum": row_dims.windows,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), row_lookups.scatter),
}
_ORIGINS = {"axis_index", "iota", "random_bits"}  # not constant, although their inputs are


@dataclasses.dataclass(frozen=True)
class RowInput:
    """A program's input that has rows, or that differs between devices or micro-batches.

    Attributes:
        dim: the dim that is split over devices; None: the input has no rows.
        num_rows: the size of that dim, on one device and in one micro-batch.
    """

    dim: int | None
    num_rows: int = 0


def find_mixings(
    block: Block, inputs: Mapping[int, RowInput], axes: frozenset[str], outputs: Sequence[int]
) -> list[frozenset[Mixing]]:
    """Find where values of different rows meet on the way to outputs of a program.

    Args:
        block: the program. If it is differentiated, only its forward part leads to `outputs`.
        inputs: the inputs with rows, by position.
        axes: the mesh axes that split the rows, over more than one device.
        outputs: the positions of the outputs.

    Returns:
        For each of `outputs`, the mixings that it depends on. At each of them, one device with all
        rows would compute another value.
    """
    sizes = [x.num_rows for x in inputs.values() if x.dim is not None]
    if not sizes or not all(sizes):
        return [frozenset()] * len(outputs)
    rows = Rows(max(sizes, key=lambda x: (sizes.count(x), x)), axes)
    forward = without_dead_code(
        dataclasses.replace(block, outputs=tuple(block.outputs[i] for i in outputs))
    )
    given = [_input(inputs.get(i), rows.num) for i in range(len(block.inputs))]
    return [_of_output(x) for x in _Walk(rows).block(forward, given)]


def _of_output(state: State) -> frozenset[Mixing]:
    """Return the mixings of an output: those of its state and, if it has rows, a mixing per sum."""
    sums = state.sums if state.rows else ()
    return state.mixings.union(
        Mixing("statistic", x.operation, x.operation, x.is_mean) for x in sums
    )


def _input(given: RowInput | None, num: int) -> State:
    if given is None:
        return CONSTANT
    if given.dim is None:
        return State(differs=True)
    if given.num_rows % num:
        return State(differs=True, is_known=False)
    parts: Parts = ((num, 1), (given.num_rows // num, 0))
    return State(as_rows({given.dim: parts}))


class _Walk:
    """Computes the states of all values in the blocks of a program."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.depth = 0  # number of loops around the current block
        self.blocks: dict[int, Any] = {}  # the blocks inside operations, by their id

    def block(self, block: Block, inputs: Sequence[State]) -> list[State]:
        """Return the states of a block's outputs, given those of its inputs."""
        states: dict[Atom, State] = {
            x: state for x, state in zip(block.inputs, inputs, strict=True) if state is not CONSTANT
        }
        for operation in block.operations:
            given = [states.get(x, CONSTANT) for x in operation.inputs]
            is_constant = all(x is CONSTANT for x in given)
            if is_constant and not (operation.name in _ORIGINS or _has_blocks(operation)):
                continue
            for out, state in zip(operation.outputs, self.operation(operation, given), strict=True):
                if state is not CONSTANT:
                    states[out] = state
        return [states.get(x, CONSTANT) for x in block.outputs]

    def operation(self, operation: Operation, given: Sequence[State]) -> Sequence[State]:
        """Return the states of an operation's outputs, given those of its inputs."""
        name = operation.name
        if ROWS_APART in str(operation.equation.source_info.name_stack):
            return [unknown(*given)] * len(operation.outputs)
        if name in IDENTITIES and len(given) == len(operation.outputs):
            return given
        if (rule := _RULES.get(name)) is not None:
            return rule(self.rows, operation, given)
        if is_elementwise(operation) or (name in OTHERS and _keeps_shape(operation)):
            return elementwise(self.rows, operation, given)
        if isinstance(operation, Loop):
            return self.loop(operation, given)
        if name == "while":
            return self.while_loop(operation, given)
        if name == "cond":
            return self.cond(operation, given)
        if (block := self.inside(operation, called_block)) is not None:
            return self.block(block, given)
        return [unknown(*given)] * len(operation.outputs)

    def inside(self, operation: Operation, read: Any) -> Any:
        """Return the blocks in an operation, as `read` gives them, which is called once for it."""
        if id(operation) not in self.blocks:
            self.blocks[id(operation)] = read(operation)
        return self.blocks[id(operation)]

    def cond(self, operation: Operation, given: Sequence[State]) -> list[State]:
        branches = self.inside(operation, branch_blocks)
        outputs = [self.block(branch, given[1:]) for branch in branches]
        chosen = dataclasses.replace(given[0], rows=(), sums=frozenset(), index=None)
        return [_either((chosen, *each), self.rows) for each in zip(*outputs, strict=True)]

    def while_loop(self, operation: Operation, given: Sequence[State]) -> list[State]:
        body, num_of_cond, num_of_body = self.inside(operation, while_body)
        # The condition of a batched loop depends on all rows, but is not a value of any row.
        first = num_of_cond + num_of_body
        constants, carry = given[num_of_cond:first], list(given[first:])
        for _ in range(_MOST_ROUNDS):
            after = self.block(body, [*constants, *carry])
            joined = [_either(x, self.rows) for x in zip(carry, after, strict=True)]
            if joined == carry:
                return carry
            carry = joined
        return [unknown(*given)] * len(carry)

    def loop(self, loop: Loop, given: Sequence[State]) -> list[State]:
        self.depth += 1
        try:
            return self._loop(loop, given, -self.depth)
        finally:
            self.depth -= 1

    def _loop(self, loop: Loop, given: Sequence[State], level: int) -> list[State]:
        first = loop.num_constants + loop.num_carry
        constants, carry = given[: loop.num_constants], list(given[loop.num_constants : first])
        layers = [_layer(x, level) for x in given[first:]]
        for _ in range(_MOST_ROUNDS):
            after = self.block(loop.body, [*constants, *carry, *layers])
            out = [_added(x, loop, level, self.rows) for x in after[: loop.num_carry]]
            joined = [_either(x, self.rows) for x in zip(carry, out, strict=True)]
            if joined == carry:
                stacked = [_stacked(x, level) for x in after[loop.num_carry :]]
                return [*carry, *stacked]
            carry = joined
        return [unknown(*given)] * len(loop.outputs)


def _keeps_shape(operation: Operation) -> bool:
    return shape_of(operation.inputs[0]) == operation.outputs[0].shape


def _has_blocks(operation: Operation) -> bool:
    """Return whether an operation has blocks of its own, which may draw random bits."""
    return isinstance(operation, Loop) or operation.name in ("cond", "while")


def _layer(state: State, level: int) -> State:
    """Return the state of one layer of a stack, as a loop's body reads it. The loop scans dim 0.

    If dim 0 has rows, the row of the iteration gets `level`, a negative number, in place of a dim.
    """
    if state is CONSTANT:
        return state
    places = {dim: dim - 1 for dim in range(1, 64)}  # of all dims that an array can have
    inside = row_dims.moved(state, places)
    if (parts := state.parts(0)) is None:
        return inside
    return dataclasses.replace(inside, rows=as_rows({**dict(inside.rows), level: parts}))


def _stacked(state: State, level: int) -> State:
    """Return the state of a stack of a body's outputs, one from each iteration of a loop.

    If an output depends on the row of its iteration, which has number `level`, dim 0 has the rows.
    """
    if state is CONSTANT:
        return state
    rows = {dim if dim < 0 else dim + 1: parts for dim, parts in state.rows}
    if level in rows:
        rows[0] = rows.pop(level)
    noise_dims = frozenset(dim + 1 for dim in state.noise_dims)
    return dataclasses.replace(state, rows=as_rows(rows), noise_dims=noise_dims, index=None)


def _added(state: State, loop: Loop, level: int, rows: Rows) -> State:
    """Return the state of a carried value after a loop, given its `state` after one iteration.

    It is a sum over rows if `state` has the row of the iteration, which has number `level`.
    """
    if state.parts(level) is None:
        return state
    rest = tuple(x for x in state.rows if x[0] != level)
    sums = state.sums if has_outer(rest, rows.num) else state.sums | {Sum(loop)}
    return dataclasses.replace(state, rows=rest, sums=sums)


def _either(states: Sequence[State], rows: Rows) -> State:
    """Return the state of a value that has one of several states, as after a `cond`."""
    first = states[0]
    if all(x == first for x in states):
        return first
    if not all(x.is_known for x in states):
        return unknown(*states)
    try:
        dims = joined_rows(states)
    except NotAligned:
        return unknown(*states)
    return State(
        dims,
        frozenset().union(*(x.sums for x in states)),
        frozenset().union(*(x.mixings for x in states)),
        differs=any(x.differs for x in states),
    )
