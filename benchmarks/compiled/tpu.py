"""Compile one training step ahead of time for TPUs: compile time, memory, bytes, overlap.

    python -m benchmarks.compiled.tpu                                  # TinyLlama (1B), v5e:2x4
    python -m benchmarks.compiled.tpu --settings.model 7b --settings.topology v6e:2x4

Needs `libtpu` on the path (`make test-aot-tpu` installs it). Nothing is run. Programs of GSPMD and
of jaxzero are compiled in turn, `rounds` times each, and a row is appended after each program; a
row that is there already is not made again. On a machine with other work the time of the CPU is
the better one to compare, and only ratios within one run are.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._models import SIZES, LlamaName, llama
from benchmarks.shared._rows import append_row, read_rows

from ._tpu import tpu_mesh, traffic
from .aot import Variant, lowered_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A model on a slice of TPUs.

    Attributes:
        model: which.
        layers: of the model; None for its own number.
        topology: generation and shape of the slice.
        nodes: of the mesh, in which all links are fast.
        batch: sequences of a step, over all devices.
        tokens: of each sequence.
        prefetch: of the schedule of jaxzero's variants.
        switched_on: options of XLA that are off by default, to see what they do.
        switched_off: options of XLA that are on by default.
    """

    model: LlamaName = "1b"
    layers: int | None = None
    topology: str = "v5e:2x4"
    nodes: int = 2
    batch: int = 8
    tokens: int = 2048
    prefetch: int = 1
    switched_on: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()

    @property
    def size(self) -> _llama.LlamaSize:
        size = SIZES[self.model]
        return dataclasses.replace(size, layers=self.layers or size.layers)


def main(
    settings: Settings = Settings(),  # noqa: B008
    variants: Sequence[Variant] = ("gspmd-by-hand", "zero3"),
    rounds: int = 1,
) -> None:
    """Compile, read, and append a row for each variant and round that has none.

    Args:
        settings: the model and the slice.
        variants: of the program.
        rounds: how often each is compiled.
    """
    mesh = tpu_mesh(settings.topology, settings.nodes)
    for number in range(rounds):
        for variant in variants:
            key = {**dataclasses.asdict(settings), "variant": variant, "round": number}
            if not read_rows("tpu", key):
                append_row("tpu", {"settings": key, **measured(mesh, settings, variant)})


def measured(mesh: jax.sharding.Mesh, settings: Settings, variant: Variant) -> dict[str, Any]:
    """Compile one program; return the figures of its row."""
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.tokens), jnp.int32)
    schedule = jz.CommSchedule(prefetch=settings.prefetch)
    is_gspmd = variant.startswith("gspmd")
    options = {} if is_gspmd else jz.compiler_options("tpu")
    options |= dict.fromkeys(settings.switched_on, True)
    options |= dict.fromkeys(settings.switched_off, False)
    start = time.perf_counter()
    model = llama(settings.model, settings.size)
    lowered = lowered_step(variant, model, mesh, tokens, schedule)
    between, cpu = time.perf_counter(), time.process_time()
    compiled = lowered.compile(compiler_options=options)
    end, cpu_end = time.perf_counter(), time.process_time()
    memory = compiled.memory_analysis()
    return {
        "parameters": _llama.num_parameters(settings.size),
        "compiler_options": options,
        "lower_seconds": round(between - start, 2),
        "compile_seconds": round(end - between, 2),
        "compile_cpu_seconds": round(cpu_end - cpu, 2),
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 3),
        "output_gib": round(memory.output_size_in_bytes / 2**30, 3),
        # GSPMD's loops do not show how often they run (`traffic`).
        **({} if is_gspmd else _sent(compiled.as_text())),
    }


def _sent(text: str) -> dict[str, Any]:
    """What a program receives, and which part of it beside compute."""
    sent = traffic(text)
    return {
        "received_gib_per_device": round(sent.received_bytes / 2**30, 3),
        "received_gib_by_dtype": {k: round(v / 2**30, 3) for k, v in sent.dtypes.items()},
        "asynchronous_share": round(sent.asynchronous_bytes / sent.received_bytes, 4),
        "launches_by_collective": sent.launches,
    }


if __name__ == "__main__":
    tyro.cli(main)
