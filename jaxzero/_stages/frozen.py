"""Layers that are not trained, before those that are: computed ahead, and shared out by rows.

Where the first layers are frozen, no stage divides them. Each stage has all of them, and computes
them for its share of the micro-batches, as data parallelism would, before the pipeline of the
active layers starts. What they return is sent to all stages once, and is an input of the program of
the active layers. With `P` of `L` layers frozen, `m` micro-batches take on `S` stages the time of

    ceil(m / S) P F + (m + S - 1) / S (L - P) (F + B)

of forwards `F` and backwards `B` of a layer. Their weights do not change, so each stage keeps them
whole, split over its devices.
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
    """A program, cut behind its frozen layers.

    Attributes:
        loop: the loop over the frozen layers.
        first: the program of the frozen layers; its outputs are `passed`.
        rest: the program of everything else. It has `passed` as further inputs, and the outputs of
            the whole program.
        passed: the results of the frozen layers that the rest reads.
    """

    loop: Loop
    first: Block
    rest: Block
    passed: tuple[Value, ...]

    def run(
        self, weights: Mapping[Value, Any], rows: Mapping[Value, Array], microbatches: int
    ) -> list[Array]:
        """What the frozen layers return, `[microbatches, ...]`, on all stages.

        Args:
            weights: for each input of the program that is the same in all micro-batches, the array.
            rows: for its other inputs, arrays `[microbatches, ...]`.
            microbatches: the number of micro-batches.
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
    """Cut a program of one micro-batch behind its frozen layers; None if it has none.

    Frozen layers through which gradients pass are not cut off. They run on the first stage, before
    the layers that stages divide, and after them in backward.

    Args:
        block: the program.
        frozen: its inputs that are stacks of frozen layers.
        trained: its inputs that gradients are of.
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
