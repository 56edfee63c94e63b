"""A step measured on one GPU, beside the time that the planner's cost model predicts for it.

    python -m benchmarks.measured.walked_step                              # on a GPU of 80 GB
    python -m benchmarks.measured.walked_step --models tiny --size 64      # anywhere, says nothing

The step is that of docs/measured/compiled.md: loss and gradients, of a device's share of the rows.
The model walks the same compiled program with stated rates and, if there is a row of
`measured_rates`, with measured ones. Matrix products of a model's shapes, and other kernels that
touch as many bytes, are measured too.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxzero as jz
from benchmarks.shared._models import MODELS, SIZES, Model, ModelName
from benchmarks.shared._rows import RESULTS, append_row
from jaxzero._hlo import Rates

from .several_gpus import in_turn, predicted_ms, stated_cluster

_DEVICES = 16  # over which tables divide the rows of a model
_CALLS = 5  # of a product or an update, issued together


def main(
    models: Sequence[ModelName] = ("7b", "1b", "moe", "mamba", "gemma"),
    rows: int | None = None,
    size: int | None = None,
    repeats: int = 5,
    directory: Path = RESULTS,
) -> list[dict]:
    """Measure and append a row for each model.

    Args:
        models: in `benchmarks.shared._models`, in the order of worth.
        rows: of a batch. None: those of one device in the tables.
        size: of a row. None: likewise.
        repeats: how often a step is timed, each waited for; and, for the rates that are reached,
            five calls, issued together and waited for once. Rows have the median.
        directory: of the rows.
    """
    cluster = stated_cluster(1)
    appended = []
    for name in models:
        model = MODELS[name]
        settings = {
            "model": name,
            "rows": rows or max(1, model.rows // _DEVICES),
            "size": size or model.size,
            "assumed_rates": cluster.kind.name,
        }
        batch = _batch(model, settings["rows"], settings["size"])
        results = settings | _measure(model, batch, repeats, cluster.rates, directory)
        if name in SIZES:
            num_tokens = settings["rows"] * settings["size"]
            width, hidden = SIZES[name].width, SIZES[name].hidden
            results |= _reached(width, hidden, num_tokens, repeats, cluster.kind)
        appended.append(append_row("walked_step", results, directory=directory))
    return appended


def _batch(model: Model, rows: int, size: int) -> Any:
    """Random tokens, or numbers."""

    def drawn(x: jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.key(0)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jax.random.randint(key, x.shape, 0, 256, x.dtype)
        return jax.random.normal(key, x.shape, x.dtype)

    return jax.tree.map(drawn, model.batch(rows, size))


def _measure(
    model: Model, batch: Any, repeats: int, stated: Rates, directory: Path
) -> dict[str, Any]:
    zero = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:1]))
    params = zero.init(model.init, jax.random.key(0))
    compiled = jax.jit(zero.value_and_grad(model.loss)).lower(params, batch).compile()
    measured = 1e3 * _median_seconds(functools.partial(compiled, params, batch), repeats)
    predicted = predicted_ms(compiled.as_text() or "", stated, directory)
    memory: Any = compiled.memory_analysis()
    return {
        "measured_ms": round(measured, 3),
        **predicted,
        "predicted_over_measured": round(predicted["predicted_ms"] / measured, 4),
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def _reached(
    width: int, hidden: int, num_tokens: int, repeats: int, device: jz.Device
) -> dict[str, float]:
    """The rates of a matrix product of the model, and of an update that only touches memory."""
    # Random numbers: with zeros a GPU needs less power, and may run at a higher clock.
    x = jax.random.normal(jax.random.key(0), (num_tokens, width), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (width, hidden), jnp.bfloat16)
    product = jax.jit(lambda x, weight: x @ weight)
    long = jnp.zeros(2**28 if device.memory > 1e10 and jax.default_backend() == "gpu" else 2**20)
    add = jax.jit(lambda x: x + 1)
    flops = 2 * num_tokens * width * hidden
    of_product = flops / _median_seconds(lambda: product(x, weight), repeats, _CALLS)
    of_update = 2 * long.nbytes / _median_seconds(lambda: add(long), repeats, _CALLS)
    return {
        "product_flops_per_s": float(f"{of_product:.4g}"),
        "product_over_assumed": float(f"{of_product / device.flops:.4g}"),
        "memory_bytes_per_s": float(f"{of_update:.4g}"),
        "memory_over_assumed": float(f"{of_update / device.memory_bandwidth:.4g}"),
    }


def _median_seconds(run: Callable[[], Any], repeats: int, calls: int = 1) -> float:
    return statistics.median(in_turn({"": run}, repeats, calls)[""])


if __name__ == "__main__":
    import tyro  # `gpu` calls `main` on machines without it

    tyro.cli(main)
