"""Choose a plan by `jz.tune` for a Llama on H200s: what it takes, how long it searches.

    python -m benchmarks.compiled.plans                      # Llama-7B, 2 x 8, 50 GB/s
    python -m benchmarks.compiled.plans --model 1b --link 3e9

Needs jaxzero[aot]. Nothing is run; nothing is read from the cache of compiled programs. CPU
seconds, those of child processes included, change less than wall time with other load.
"""

from __future__ import annotations

import functools
import os
import time

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._models import SIZES, LlamaName
from benchmarks.shared._rows import append_row


def main(
    model: LlamaName = "7b",
    nodes: int = 2,
    local: int = 8,
    device: str = "h200",
    link: float = 50e9,
    memory: float | None = None,
    rows_per_device: int = 2,
    tokens: int = 2048,
) -> None:
    """Search, print the plans, and append a row.

    Args:
        model: which.
        nodes: of the cluster.
        local: devices of a node.
        device: their kind.
        link: bytes a second that enter a node.
        memory: bytes of a device that a plan may take; by default 95% of what it has.
        rows_per_device: sequences of a step on each device.
        tokens: of each sequence.
    """
    jax.config.update("jax_platforms", "cpu")
    size = SIZES[model]
    cluster = jz.Cluster(nodes=nodes, local=local, device=device, link=link)
    batch = jax.ShapeDtypeStruct((rows_per_device * nodes * local, tokens), jnp.int32)
    start, cpu = time.perf_counter(), cpu_seconds()
    plans = jz.tune(
        functools.partial(_llama.loss, size),
        functools.partial(_llama.init, size, jax.random.key(0)),
        batch,
        cluster,
        memory=memory,
        budget=1800.0,
        cache=None,
    )
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    plans.print()
    append_row(
        "plans",
        {
            "model": model,
            "parameters": _llama.num_parameters(size),
            "rows_per_device": rows_per_device,
            "tokens": tokens,
            "memory_limit": memory,
            "search_seconds": round(seconds, 1),
            "search_cpu_seconds": round(cpu, 1),
            "best": plans.best.candidate.name,
            **plans.as_dict(),
        },
    )


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    tyro.cli(main)
