"""A function of one micro-batch, as a function of all micro-batches on one stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._mesh import STAGE, microbatch_index
from .._program import Block, OpenProgram, trace
from .cut import cut_at_layers
from .ticks import Pipeline


class Staged:
    """The program of one stage: a function on flat lists, as the one that it is made of.

    Args:
        flat: `(parameters, inputs) -> (loss, weight, gradients, others)` for one micro-batch. The
            first three are None, None and [] in a forward-only program.
        paths: for each parameter that is a stack of layers its path; None for the others.
        differentiated: the parameters that `gradients` are of, by index.
        is_rows: for each input whether it has another value in each micro-batch.
        microbatches: how many micro-batches there are.
    """

    def __init__(
        self,
        flat: Callable[[list[Any], list[Any]], Any],
        paths: Sequence[str | None],
        differentiated: Sequence[int],
        is_rows: Sequence[bool],
        microbatches: int,
    ):
        if not any(paths):
            raise ValueError(
                "No leaf of the parameters is a stack of layers. Give `jz.Stages` the path of the "
                'stacks as `layers`, such as "params.layers".'
            )
        self.flat = flat
        self.paths = paths
        self.differentiated = differentiated
        self.is_rows = is_rows
        self.microbatches = microbatches
        # Set by a call: the program of one micro-batch, as it was traced.
        self.block: Block | None = None
        self.program: OpenProgram | None = None

    def __call__(self, parameters: list[Any], inputs: list[Any]) -> Any:
        """Run all micro-batches.

        Args:
            parameters: this stage's layers of the stacks, and the other parameters in full.
            inputs: those with rows as `[microbatches, ...]`.

        Returns:
            The loss: its mean over micro-batches, or its sum if there is a weight; the sum of the
            weights; gradients likewise, of this stage's layers and this stage's part of the others;
            and other outputs as `[microbatches, ...]`.
        """
        num, num_stages = self.microbatches, lax.axis_size(STAGE)

        def whole(x: Any, path: str | None) -> jax.ShapeDtypeStruct:
            shape = (num_stages * x.shape[0], *x.shape[1:]) if path else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype)

        def function(*arrays: Any) -> Any:
            index, arrays = (arrays[0], arrays[1:]) if num > 1 else (None, arrays)
            with microbatch_index(index):
                return self.flat([*arrays[: len(parameters)]], [*arrays[len(parameters) :]])

        numbers = [jnp.arange(num)] if num > 1 else []
        pairs = zip(inputs, self.is_rows, strict=True)
        one = [jax.eval_shape(lambda x: x[0], x) if rows else x for x, rows in pairs]
        full = [whole(x, path) for x, path in zip(parameters, self.paths, strict=True)]
        block, program = trace(function, *(x[0] for x in numbers), *full, *one)
        self.block, self.program = block, program
        values = block.inputs[len(numbers) :]
        weights = dict(zip(values[: len(parameters)], parameters, strict=True))
        stacks = {x: path for x, path in zip(weights, self.paths, strict=True) if path}
        rows = dict(zip(block.inputs, numbers, strict=False))
        for x, array, has_rows in zip(values[len(parameters) :], inputs, self.is_rows, strict=True):
            (rows if has_rows else weights)[x] = array
        first = len(jax.tree.leaves(program.shapes[:2]))
        gradients = dict(enumerate(self.differentiated, first))
        of_stacks = {k: values[i] for k, i in gradients.items() if self.paths[i]}
        cut = cut_at_layers(block, stacks, of_stacks)
        outer = [k for k in gradients if k not in of_stacks]
        outputs = Pipeline(cut, weights, rows, outer, num).run()
        return self._combined(jax.tree.unflatten(program.treedef, outputs), program.shapes)

    def _combined(self, outputs: Any, shapes: Any) -> Any:
        loss, weight, gradients, others = outputs
        if loss is None:
            return loss, weight, gradients, others
        factor = 1 if weight is not None else 1 / self.microbatches
        gradients = [
            (x * factor).astype(like.dtype) for x, like in zip(gradients, shapes[2], strict=True)
        ]
        total = functools.partial(jnp.sum, axis=0)
        loss = (total(loss) * factor).astype(loss.dtype)
        return loss, None if weight is None else total(weight), gradients, others
