"""A step measured on one GPU, beside the time that the planner's cost model predicts for it.

    python -m benchmarks.measured.walked_step                              # on a GPU of 80 GB
    python -m benchmarks.measured.walked_step --models tiny --tokens 64    # anywhere, says nothing

The model walks the same compiled program with the stated rates of the device (`jz.Device`). Matrix
products, other kernels that touch as many bytes, and whole steps are measured, so that the share of
each peak rate that programs reach can be set by what was measured.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._rows import RESULTS, append_row
from jaxzero._hlo import timeline

from . import gpu_step

SIZES = {
    **gpu_step.SIZES,
    "wide": LlamaSize(layers=4, width=4096, hidden=11008),  # layers of Llama-7B
    "moe": LlamaSize(layers=4, width=2048, hidden=4096, heads=16, kv_heads=4, experts=8),
}
_TX = optax.adamw(1e-4)


def main(
    models: Sequence[Literal["1b", "wide", "moe", "tiny"]] = ("wide", "1b", "moe"),
    batch: int = 4,
    tokens: int = 2048,
    repeats: int = 10,
    directory: Path = RESULTS,
) -> list[dict]:
    """Measure and append a row for each model.

    Args:
        models: which.
        batch: sequences of a step.
        tokens: of each sequence.
        repeats: how many steps are timed.
        directory: of the rows.
    """
    device = _device()
    return [
        append_row(
            "walked_step",
            {
                "model": model,
                "batch": batch,
                "tokens": tokens,
                "assumed_rates": device.name,
                **_measure(SIZES[model], batch, tokens, repeats, device),
            },
            directory=directory,
        )
        for model in models
    ]


def _device() -> jz.Device:
    """The planner's description of the device that is here."""
    kind = jax.devices()[0].device_kind.lower()
    known = [name for name in ("a100", "h100", "h200", "b200") if name in kind]
    cluster = jz.Cluster(nodes=1, local=1, device=known[0] if known else "h100")
    return cluster.kind


def _measure(
    size: LlamaSize, batch: int, tokens: int, repeats: int, device: jz.Device
) -> dict[str, Any]:
    key = jax.random.key(0)
    params = jax.jit(functools.partial(_llama.init, size))(key)
    opt_state = _TX.init(params)
    rows = jax.random.randint(key, (batch, tokens), 0, size.vocabulary)
    loss = functools.partial(_llama.loss, size)

    def step(params: Any, opt_state: Any, rows: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, opt_state = _TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, opt_state, rows).compile()
    line = timeline(compiled.as_text() or "", jz.Cluster(nodes=1, local=1, device=device).rates)
    state = (params, opt_state)

    def run() -> Any:
        nonlocal state
        *new, value = compiled(*state, rows)
        state = tuple(new)
        return value

    measured = _median_seconds(run, repeats)
    memory: Any = compiled.memory_analysis()
    return {
        "measured_ms": round(measured * 1e3, 3),
        "predicted_ms": round(line.seconds * 1e3, 3),
        "predicted_over_measured": round(line.seconds / measured, 4),
        "temporary_bytes": memory.temp_size_in_bytes,
        **_reached(size, batch * tokens, repeats, device),
    }


def _reached(size: LlamaSize, num_tokens: int, repeats: int, device: jz.Device) -> dict[str, float]:
    """The rates of a matrix product of the model, and of an update that only touches memory."""
    x = jnp.zeros((num_tokens, size.width), jnp.bfloat16)
    weight = jnp.zeros((size.width, size.hidden), jnp.bfloat16)
    product = jax.jit(lambda x, weight: x @ weight)
    long = jnp.zeros(2**28 if device.memory > 1e10 and jax.default_backend() == "gpu" else 2**20)
    add = jax.jit(lambda x: x + 1)
    flops = 2 * num_tokens * size.width * size.hidden
    of_product = flops / _median_seconds(lambda: product(x, weight), repeats)
    of_update = 2 * long.nbytes / _median_seconds(lambda: add(long), repeats)
    return {
        "product_flops_per_s": float(f"{of_product:.4g}"),
        "product_over_assumed": float(f"{of_product / device.flops:.4g}"),
        "memory_bytes_per_s": float(f"{of_update:.4g}"),
        "memory_over_assumed": float(f"{of_update / device.memory_bandwidth:.4g}"),
    }


def _median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Of one call, the first left out; five calls are timed at once."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(5)])
        taken.append((time.perf_counter() - start) / 5)
    return statistics.median(taken)


if __name__ == "__main__":
    import tyro  # `gpu` calls `main` on machines without it

    tyro.cli(main)
