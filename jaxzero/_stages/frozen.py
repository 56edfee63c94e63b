"""Run frozen first layers before the pipeline starts, each stage for a share of the micro-batches.

Frozen layers before the trained ones are not divided between stages. Each stage has all of them,
and runs them for its share of the micro-batches, as in data parallelism. Their results are sent to
all stages once, and are inputs of the pipeline's program, which has the active layers only. Let a
layer take the time `F` forward and `B` backward. If `P` of `L` layers are frozen, `m` micro-batches
take on `S` stages the time

    ceil(m / S) P F + (m + S - 1) / S (L - P) (F + B)

The weights of frozen layers do not change, so each stage keeps all of them, split over the devices
of the stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .._collectives import all_gather, labelled, repeated
from .._mesh import STAGE
from .._program import (
    Block,
    Loop,
    Value,
    at_line_of,
    operations_for,
    scan_indexed_stacks,
    without_dead_code,
)
from .cut import dependents
from .evaluation import Evaluation


class FrozenCut(NamedTuple):
    """A program in two parts: its frozen layers, and the rest, which reads their results.

    Attributes:
        loop: the loop over the frozen layers.
        first: the program of the frozen layers; its outputs are `passed`.
        rest: the program of everything else. It has `passed` as further inputs, and the outputs of
            the whole program.
        passed: the results of the frozen layers that `rest` reads.
    """

    loop: Loop
    first: Block
    rest: Block
    passed: tuple[Value, ...]

    def run(
        self, weights: Mapping[Value, Any], rows: Mapping[Value, Array], microbatches: int
    ) -> list[Array]:
        """Run the frozen layers, and return the arrays of `passed` on all stages.

        Args:
            weights: the arrays of the program's inputs that are equal for all micro-batches.
            rows: the arrays of the program's other inputs, `[microbatches, ...]`.
            microbatches: the number of micro-batches.

        Returns:
            Arrays `[microbatches, ...]`.
        """
        num = -(-microbatches // lax.axis_size(STAGE))
        share = lax.axis_index(STAGE) * num + jnp.arange(num, dtype=jnp.int32)

        def one(carry: None, number: Array) -> tuple[None, list[Any]]:
            index = jnp.minimum(number, microbatches - 1)
            given = {x: array[index] for x, array in rows.items()}
            values = Evaluation(self.first, {**weights, **given}, exists=number == index)
            return carry, values(self.passed)

        traced, note = repeated(one, num)
        with at_line_of(self.loop):
            _, made = lax.scan(traced, None, share)
            note()
            with labelled("activations"):
                return [all_gather(x, STAGE, 0)[:microbatches] for x in made]


def cut_behind_frozen(
    block: Block, frozen: Sequence[Value], trained: Sequence[Value]
) -> FrozenCut | None:
    """Cut a program of one micro-batch behind its frozen layers; return None if it has none.

    Frozen layers through which gradients pass are not cut off. The first stage runs them: before
    the divided layers in forward, and after the divided layers in backward.

    Args:
        block: the program.
        frozen: inputs of the program that are stacks of frozen layers.
        trained: inputs of the program with respect to which there are gradients.
    """
    block = scan_indexed_stacks(block, [*frozen])
    made_of = dependents(block, frozen)
    loops = [
        x
        for x in block.operations
        if isinstance(x, Loop) and not made_of.isdisjoint(x.inputs[x.first_stack :])
    ]
    after = dependents(block, trained)
    ahead = [x for x in loops if after.isdisjoint(x.inputs)]
    if len(ahead) != 1:
        return None
    (loop,) = ahead
    others = [x for x in block.operations if x is not loop]
    read = {x for operation in others for x in operation.values} | {*block.outputs}
    passed = tuple(x for x in loop.outputs if x in read)
    first = Block(block.inputs, passed, tuple(operations_for(block, passed, block.inputs)))
    rest = Block((*block.inputs, *passed), block.outputs, tuple(others))
    return FrozenCut(loop, first, without_dead_code(rest), passed)
