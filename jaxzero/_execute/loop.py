"""Run loops over stacked layers, plain or pipelined ([Note: loops] in `schedule`).

A plain loop gathers and reduces each layer within its own iteration; a pipelined one overlaps the
layers (`pipelined_loop`).
"""

from __future__ import annotations

from typing import Any

from .._collectives import repeated
from .._mesh import in_host
from .loop_layers import LoopLayers, Prologue, Runner
from .mean_gradients import mean_of_one_microbatch
from .pipelined_loop import PipelinedLoop
from .weight_buckets import Bind


def run_loop(outer: Runner, index: int) -> list[Any]:
    """Run a loop of a block; return its outputs, with None for those that are views of weights."""
    layers = LoopLayers(outer, index)
    constants, carry, stacks = layers.inputs()
    if layers.plan.is_pipelined:
        return PipelinedLoop(layers, constants, stacks).run(carry)
    return _run_plain(layers, constants, carry, stacks)


def loop_prologue(outer: Runner, index: int, tie: Bind) -> Prologue:
    """Start to gather the layers of a loop's first iterations."""
    return LoopLayers(outer, index).prologue(tie)


def _run_plain(
    layers: LoopLayers, constants: list[Any], carry: list[Any], stacks: list[Any]
) -> list[Any]:
    """Run a loop with each layer gathered and reduced in its own iteration."""
    loop, uses, templates = layers.loop, layers.uses, {}

    def body(carry, scanned):
        stacks, data, iteration = scanned
        scanned = {layer: shards.layer(*x) for (layer, shards), x in zip(known, data, strict=True)}
        fetched = layers.host.fetch(layers.layer_index(iteration), 0)
        inside = layers.inside(layers.constants_from | scanned | fetched)
        outputs = inside.run([*constants, *carry, *stacks], uses.view_outputs)
        for number, leaf in layers.plan.means.items():
            divisor = layers.outer.comm.divisor
            outputs[number] = mean_of_one_microbatch(outputs[number], leaf.dtype, divisor)
        # `scan` stacks only the data; codec and layout are read from the traced body.
        templates.update({x: inside.weights.sources[x] for x in layers.kept_in_iteration})
        slices = {x: templates[x].data for x in layers.kept_in_iteration}
        return outputs[: loop.num_carry], (outputs[loop.num_carry :], list(slices.values()))

    traced, note = repeated(body, loop.length)
    pairs = zip(uses.stacks, layers.stacks, strict=True)
    known = [(stack.layer, x) for stack, x in pairs if not in_host(x.data)]
    data = [(x.data, None if x.kept is None else x.kept.data) for _, x in known]
    iterations = layers.iterations(0, loop.length)
    carry, (stacked, slices) = loop.scan(traced, carry, (stacks, data, iterations))
    note()
    kept = zip(layers.kept_in_iteration, slices, strict=True)
    layers.keep_slices({x: templates[x].stack(data) for x, data in kept})
    return [*carry, *stacked]
