"""Compile one round of local steps ahead of time for H200s: what travels between nodes, and when.

    python -m benchmarks.compiled.local_steps                        # Llama-7B, 2 x 8 H200
    python -m benchmarks.compiled.local_steps --settings.model tiny

Needs jaxzero[aot]. The round of `Zero.local_steps` with AdamW inside is compiled as a user would,
and nothing is run. A collective between nodes spans a loop of local steps if the loop lies between
its start and its end. The time of a step is predicted by `timeline.py` with assumed rates
(`jaxzero._hlo.Rates`), for comparisons only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._models import SIZES, LlamaName
from benchmarks.shared._rows import append_row
from jaxzero._hlo import Rates, timeline

from ._h200 import h200_mesh
from ._spans import crossings, num_asynchronous

Preset = Literal["hsdp", "zero3", "zeropp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A model on a mesh, and how its nodes exchange.

    Attributes:
        model: which.
        nodes: of the mesh.
        local: devices of a node.
        rows_per_device: sequences of a step on each device.
        tokens: of each sequence.
        every: steps in a round.
        fragments: parts of the parameters that are exchanged in turn.
        delay: steps between sending and using a fragment.
        bits: of a pseudo-gradient: 4, 8, or 32 without a codec.
    """

    model: LlamaName = "7b"
    nodes: int = 2
    local: int = 8
    rows_per_device: int = 2
    tokens: int = 2048
    every: int = 30
    fragments: int = 3
    delay: int = 5
    bits: Literal[4, 8, 32] = 4

    def method(self) -> jz.LocalSteps:
        codec = {4: jz.Int4(block=128), 8: jz.Int8(block=256), 32: None}[self.bits]
        return jz.LocalSteps(
            every=self.every, fragments=self.fragments, delay=self.delay, codec=codec, mixing=0.5
        )


def lowered(mesh: jax.sharding.Mesh, settings: Settings, preset: Preset) -> tuple[Any, Any]:
    """One round, lowered for the devices of `mesh`, and its report."""
    zero = jz.Zero(mesh, getattr(jz, preset)())
    size = SIZES[settings.model]
    tx = optax.adamw(1e-4)
    loss = functools.partial(_llama.loss, size)

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        value, grads = zero.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value}

    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    rounds = zero.local_steps(step, settings.method())
    state = rounds.abstract(params, zero.init_optimizer(tx, params))
    rows = settings.rows_per_device * settings.nodes * settings.local
    batches = jax.ShapeDtypeStruct((settings.every, rows, settings.tokens), jnp.int32)
    return jax.jit(rounds, donate_argnums=0).lower(state, batches), rounds.report()


def main(
    settings: Settings = Settings(),  # noqa: B008
    presets: Sequence[Preset] = ("zero3", "zeropp"),
    node_rate: float = 3e9,
) -> None:
    """Compile, read, and append a row for each preset.

    Args:
        settings: model, mesh and exchange.
        presets: configurations inside a node.
        node_rate: bytes a second that enter a node.
    """
    mesh = h200_mesh(settings.nodes, settings.local)
    for preset in presets:
        start = time.perf_counter()
        program, report = lowered(mesh, settings, preset)
        options = jz.compiler_options("cuda", local_steps=True)
        compiled = program.compile(compiler_options=options)
        append_row(
            "local_steps_compiled",
            {
                **dataclasses.asdict(settings),
                "preset": preset,
                "parameters": _llama.num_parameters(SIZES[settings.model]),
                "compiler_options": options,
                "held_by_a_device": dict(report.device_bytes),
                **figures(compiled, settings, node_rate),
                "seconds_to_compile": round(time.perf_counter() - start, 1),
            },
        )


def figures(compiled: Any, settings: Settings, node_rate: float) -> dict[str, Any]:
    """What crosses between nodes, what that hides behind, memory and predicted time."""
    text, memory = compiled.as_text(), compiled.memory_analysis()
    crossing = crossings(text, settings.local)
    total = sum(x.node_bytes * x.trips for x in crossing)
    hidden = sum(x.node_bytes * x.trips for x in crossing if sum(x.spans) >= settings.delay)
    model = 2 * _llama.num_parameters(SIZES[settings.model])
    rates = Rates(num_local=settings.local, node=node_rate)
    line = timeline(text, rates)
    without = timeline(text, dataclasses.replace(rates, node=math.inf))
    waited = line.seconds - without.seconds
    return {
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 3),
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "collectives_between_nodes": [dataclasses.asdict(x) for x in crossing],
        "share_of_bytes_that_span_the_delay": round(hidden / total, 4),
        "gib_into_a_node_per_round": round(total / 2**30, 4),
        "models_into_a_node_per_step": round(total / settings.every / model, 5),
        "asynchronous_collectives": num_asynchronous(text),
        "predicted": {
            "node_rate": node_rate,
            "step_seconds": round(line.seconds / settings.every, 4),
            "waited_for_other_nodes_seconds": round(waited / settings.every, 5),
            "share_waited_for_other_nodes": round(waited / line.seconds, 5),
            "waited_for_collectives_seconds": round(line.exposed_seconds / settings.every, 4),
        },
    }


if __name__ == "__main__":
    tyro.cli(main)
