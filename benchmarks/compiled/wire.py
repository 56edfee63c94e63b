"""Bytes that enter a node in one optimizer step, read from the compiled program.

    python -m benchmarks.compiled.wire --nodes 2 --local 8
    python -m benchmarks.compiled.wire --target h200           # needs jaxzero[aot]

The model is compiled for simulated CPU devices or for H200s, and never run. The bytes of every
collective whose groups span nodes are counted (times the trip counts of loops), including scales
and small leaves. The unit is M (nodes - 1) / nodes, where M is the model in 16 bits: the bytes
that one all-gather of it sends into a node.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._rows import append_row
from jaxzero._hlo.collectives import collectives

from ._h200 import h200_mesh

_CONFIGS = {"zero3": jz.zero3(), "zeropp": jz.zeropp(), "zeropp4": jz.zeropp4()}


def main(
    size: LlamaSize = LlamaSize(),  # noqa: B008
    nodes: int = 2,
    local: int = 8,
    microbatches: Sequence[int] = (1, 8),
    tokens: int = 128,
    target: Literal["cpu", "h200"] = "cpu",
    prefetch: int = 1,
) -> None:
    """Compile, count, and append a row for each config and number of micro-batches.

    Args:
        size: of the model.
        nodes: of the mesh.
        local: devices of a node.
        microbatches: of an optimizer step.
        tokens: of each sequence; one sequence for each device and micro-batch.
        target: what to compile for.
        prefetch: of the schedule. With more than 0 a loop gathers and reduces a layer or two
            more than it has.
    """
    if target == "h200":
        mesh = h200_mesh(nodes, local)
    else:
        mesh = jz.make_mesh(nodes, devices=jax.devices()[: nodes * local])
    unit = 2 * _llama.num_parameters(size) * (nodes - 1) / nodes
    for name, config in _CONFIGS.items():
        for num in microbatches:
            schedule = jz.CommSchedule(prefetch=prefetch)
            zero = jz.Zero(mesh, dataclasses.replace(config, schedule=schedule))
            text, planned = compiled(zero, size, num, tokens)
            crossing = [c for c in collectives(text) if c.crosses(local)]
            bytes_by_type: Counter[str] = Counter()
            for c in crossing:
                for shape in c.results:  # XLA:GPU combines collectives of several types
                    one = dataclasses.replace(c, results=(shape,))
                    bytes_by_type[shape.dtype] += one.node_bytes(local) * c.trips * local
            entering = sum(bytes_by_type.values())
            append_row(
                "wire",
                {
                    "config": name,
                    "target": target,
                    "nodes": nodes,
                    "local": local,
                    "microbatches": num,
                    "prefetch": prefetch,
                    "parameters": _llama.num_parameters(size),
                    "node_bytes": entering,
                    "node_bytes_in_units_of_16_bit_model": round(entering / unit, 4),
                    "node_bytes_by_wire_type": dict(bytes_by_type),
                    "node_bytes_planned": planned,
                    "collectives_between_nodes": sum(c.trips for c in crossing),
                    **dataclasses.asdict(size),
                },
            )


def compiled(zero: jz.Zero, size: LlamaSize, microbatches: int, tokens: int) -> tuple[str, int]:
    """The HLO of one step's loss and gradients, and what the plan says enters a node."""
    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((zero.mesh.size * microbatches, tokens), jnp.int32)
    loss = functools.partial(_llama.loss, size)
    state = {}
    if zero.config.needs_wire_state:
        state["wire_state"] = jax.eval_shape(zero.init_wire_state, params)
    step = jax.jit(zero.value_and_grad(loss, microbatches=microbatches))
    text = step.lower(params, batch, **state).compile().as_text()
    plan = zero.plan(loss, params, batch, microbatches=microbatches, **state)
    traffic = zero.report(params, plan=plan).traffic
    assert text is not None and traffic is not None
    return text, traffic.node_bytes


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 32)
    tyro.cli(main)
