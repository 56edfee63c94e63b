"""Turn a function of one micro-batch into a function of all micro-batches on one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._activations import Chosen, choose_activations
from .._mesh import STAGE, microbatch_index
from .._program import Atom, Block, dtype_of, shape_of, trace
from .._sharding import Activations
from .cut import cut_at_layers, dtypes_read
from .frozen import cut_behind_frozen
from .messages import Encoding
from .state import num_slots
from .ticks import Pipeline


class Staged:
    """A function that runs all micro-batches of a step on one stage.

    It takes and returns flat lists of arrays, like the function `flat` of one micro-batch.

    Args:
        flat: `(parameters, inputs) -> (loss, weight, gradients, others)` for one micro-batch. The
            first three are None, None and [] in a forward-only program.
        parameters: shapes and dtypes of the parameters; stacks have all layers.
        inputs: shapes and dtypes of the inputs; those with rows are `[microbatches, ...]`.
        paths: for each parameter its path if it is a stack of layers, otherwise None.
        frozen: the indices of parameters that are stacks of frozen layers, which stages do not
            divide.
        differentiated: the indices of the parameters whose gradients `flat` returns.
        is_rows: for each input, whether it has a value of its own in each micro-batch.
        microbatches: the number of micro-batches.
        share: the factor that gradients are multiplied by, if examples have no weights.
        activations: what forward of a micro-batch keeps for backward.
        num_combined: how many of the last outputs of `flat` are gradients too.
        encoding: how arrays are encoded that are sent between stages.

    Attributes:
        block: the program of one micro-batch, as it was traced.
        program: the traced program with the arrays that it closes over.
        chosen: what forward keeps for backward.
    """

    def __init__(
        self,
        flat: Callable[[list[Any], list[Any]], Any],
        parameters: Sequence[jax.ShapeDtypeStruct],
        inputs: Sequence[Any],
        paths: Sequence[str | None],
        frozen: Sequence[int],
        differentiated: Sequence[int],
        is_rows: Sequence[bool],
        microbatches: int,
        share: float,
        activations: Activations | None = None,
        num_combined: int = 0,
        encoding: Encoding = Encoding(),  # noqa: B008
    ):
        self.paths = paths
        self.is_rows = is_rows
        self.microbatches = microbatches
        self.share = share
        self._encoding = encoding
        self._numbers = [jnp.arange(microbatches)] if microbatches > 1 else []

        def function(*arrays: Any) -> Any:
            index, arrays = (arrays[0], arrays[1:]) if microbatches > 1 else (None, arrays)
            with microbatch_index(index):
                return flat([*arrays[: len(parameters)]], [*arrays[len(parameters) :]])

        pairs = zip(inputs, is_rows, strict=True)
        one = [jax.eval_shape(lambda x: x[0], x) if rows else x for x, rows in pairs]
        numbers = (x[0] for x in self._numbers)
        self.block, self.program = trace(function, *numbers, *parameters, *one)
        self._parameters = self.block.inputs[len(self._numbers) :][: len(parameters)]
        stacks = zip(self._parameters, paths, strict=True)
        first = len(jax.tree.leaves(self.program.shapes[:2]))  # gradients follow loss and weight
        gradients = dict(enumerate(differentiated, first))
        of_stacks = {k: self._parameters[i] for k, i in gradients.items() if paths[i]}
        self._outer = [k for k in gradients if k not in of_stacks]
        named = {x: path for x, path in stacks if path}
        self._frozen = cut_behind_frozen(
            self.block,
            [self._parameters[i] for i in frozen],
            [self._parameters[i] for i in differentiated],
        )
        rest = self.block if self._frozen is None else self._frozen.rest
        end = len(rest.outputs) - num_combined
        results = [*rest.outputs[:first], *rest.outputs[first + len(differentiated) : end]]
        self.chosen = self._choose(rest, results, activations)
        self._cut = cut_at_layers(self.chosen.block, named, of_stacks)

    def _choose(
        self, block: Block, results: Sequence[Atom], activations: Activations | None
    ) -> Chosen:
        """Choose the activations that forward keeps for backward.

        A stage holds them for its layers and for all micro-batches in flight.

        Args:
            block: the program of one micro-batch.
            results: the outputs of `block` that are no gradients.
            activations: the config; None: what the loss keeps.
        """
        pairs = zip(self._parameters, self.paths, strict=True)
        layers = max(x.shape[0] for x, path in pairs if path)
        num = lax.axis_size(STAGE)
        times = num_slots(num, self.microbatches) * -(-layers // num) / layers
        return choose_activations(block, self._parameters, results, activations, times)

    def dtype_read(self, i: int) -> Any:
        """Return the dtype in which the program reads parameter `i`.

        It is a narrower float if all operations that read the parameter round it to this dtype.
        """
        value = self._parameters[i]
        dtypes = dtypes_read(self._cut.block, value)
        if self._frozen is not None:
            dtypes |= dtypes_read(self._frozen.first, value)
        if len(dtypes) == 1 and None not in dtypes:
            return dtypes.pop()
        return value.dtype

    @property
    def is_weighted(self) -> bool:
        """Whether examples have weights."""
        return self.program.shapes[1] is not None

    @property
    def described(self) -> tuple[str, ...]:
        """Lines of a plan's text: the stages, their idle time, and what is sent between them."""
        num, microbatches, cut = lax.axis_size(STAGE), self.microbatches, self._cut
        ticks = microbatches + num - 1
        first = (
            f"{num} stages of {'at most ' if cut.forward.length % num else ''}"
            f"{-(-cut.forward.length // num)} layers, {microbatches} micro-batches: "
            f"{num - 1}/{ticks} of the time idle"
        )
        sent = {
            "to the next stage, in each micro-batch": cut.activations,
            "to the stage before": cut.cotangents,
        }
        arrays = {to: ", ".join(map(self._described, atoms)) for to, atoms in sent.items()}
        lines = [first, *(f"{to}: {named}" for to, named in arrays.items() if named)]
        if self._frozen is not None:
            lines.insert(
                1,
                f"before them {self._frozen.loop.length} frozen layers, of which each stage "
                f"computes all for {-(-microbatches // num)} micro-batches",
            )
        return tuple(lines)

    def _described(self, atom: Atom) -> str:
        like = jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom))
        codec = self._encoding.codec_of(like)
        return f"{like.dtype}{list(like.shape)}{'' if codec is None else f' as {codec}'}"

    def __call__(self, parameters: list[Any], inputs: list[Any]) -> Any:
        """Run all micro-batches on this stage.

        Args:
            parameters: for a stack, this stage's layers, padded with zeros if other stages have
                more; any other parameter in full.
            inputs: the inputs; those with rows are `[microbatches, ...]`.

        Returns:
            A tuple of loss, weight, gradients and other outputs:
            - the sum of the losses of all micro-batches; if there are no weights, their mean;
            - the sum of the weights, or None;
            - a list of gradients, summed over micro-batches. A stack's gradient is of this stage's
              layers. Any other gradient is this stage's term of a sum over stages. If there are no
              weights, gradients are multiplied by `share`;
            - the other outputs, `[microbatches, ...]`, and last the element of a message that
              `Pipeline.run` returns, if there is one.
        """
        weights = dict(zip(self._parameters, parameters, strict=True))
        rows = dict(zip(self.block.inputs, self._numbers, strict=False))
        values = self.block.inputs[len(self._numbers) + len(parameters) :]
        for x, array, has_rows in zip(values, inputs, self.is_rows, strict=True):
            (rows if has_rows else weights)[x] = array
        if self._frozen is not None:
            made = self._frozen.run(weights, rows, self.microbatches)
            rows |= zip(self._frozen.passed, made, strict=True)
        outputs, arrived = Pipeline(
            self._cut,
            weights,
            rows,
            self._outer,
            self.microbatches,
            self.share if not self.is_weighted else 1.0,
            self._encoding,
        ).run()
        program = self.program
        *results, others = self._combined(
            jax.tree.unflatten(program.treedef, outputs), program.shapes
        )
        return *results, [*others, *([] if arrived is None else [arrived])]

    def _combined(self, outputs: Any, shapes: Any) -> Any:
        loss, weight, gradients, others = outputs
        if loss is None:
            return loss, weight, gradients, others
        gradients = [x.astype(like.dtype) for x, like in zip(gradients, shapes[2], strict=True)]
        if weight is None:
            return jnp.mean(loss, axis=0), None, gradients, others
        return jnp.sum(loss, axis=0), jnp.sum(weight, axis=0), gradients, others
