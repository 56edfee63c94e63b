"""Temporary memory per device of one training step: GSPMD FSDP and jaxzero.

    python -m benchmarks.compiled.memory --size.layers 24

The figure is XLA's own, for the compiled program. XLA:CPU drops optimisation barriers
before its last elimination of common subexpressions, and so would merge the gathers of
forward and backward, which GPUs and TPUs do not; that pass, and a scheduler that trades
memory for concurrency, are switched off, for both peers alike.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    "--xla_disable_hlo_passes=cse --xla_cpu_enable_concurrency_optimized_scheduler=false "
    + os.environ.get("XLA_FLAGS", "")
)

import collections
import re

import jax
import tyro

import jaxzero as jz
from benchmarks.shared._peers import Size, device_bytes, peers
from benchmarks.shared._rows import append_row

_COLLECTIVE = re.compile(r" (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\(")


def main(size: Size = Size(layers=24), nodes: int = 2) -> None:  # noqa: B008
    """Measure and append a row.

    Args:
        size: the model.
        nodes: of the mesh.
    """
    zero = jz.Zero(jz.make_mesh(nodes))
    results = {"nodes": nodes, "devices": jax.device_count(), **vars(size)}
    for peer in peers(size, zero, ("gspmd", "jaxzero")):
        results[peer.name] = {
            "temporary_bytes_per_device": peer.compiled.memory_analysis().temp_size_in_bytes,
            "state_bytes_per_device": device_bytes(peer),
            "collectives_in_program": dict(
                collections.Counter(_COLLECTIVE.findall(peer.compiled.as_text()))
            ),
        }
    append_row("memory", results)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    tyro.cli(main)
