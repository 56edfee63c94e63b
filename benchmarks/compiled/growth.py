"""How the time to trace, plan, lower and compile a step grows with devices, layers and leaves.

    python -m benchmarks.compiled.growth                       # measure, a row for each point
    python -m benchmarks.compiled.growth --axes layers --counts 16 32 64 128 --no-compiles
    python -m benchmarks.compiled.growth --plot-only           # the plot of the newest rows

Needs jaxzero[aot]. Programs are compiled for H200s with `jz.zero3()`; nothing is run. Times are CPU
seconds, those of child processes included, which change less than wall time with other load.

- devices: 4 scanned layers of `_llama`, on nodes of 8 devices.
- layers: unrolled layers of `_llama`, on 2 x 8 devices; also with GSPMD.
- leaves: matrices of one layer, which 4 scanned layers have each, on 2 x 8 devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from matplotlib.figure import Figure

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._models import Model, llama
from benchmarks.shared._rows import RESULTS, append_row, read_rows

from ._h200 import h200_mesh
from .aot import lowered_step
from .plans import cpu_seconds

Axis = Literal["devices", "layers", "leaves"]
COUNTS: dict[Axis, tuple[int, ...]] = {
    "devices": (16, 64, 256, 1024, 4096, 32768),
    "layers": (8, 16, 32),
    "leaves": (8, 32, 128),
}
_PARTS = {
    "plain_trace": "trace by JAX alone",
    "trace_and_plan": "trace and plan",
    "lower": "lower",
    "compile": "compile",
    "gspmd_compile": "compile with GSPMD",
}
_SMALL = LlamaSize(layers=4, width=256, hidden=512, heads=4, vocabulary=512)
_LOCAL, _TOKENS, _WIDTH = 8, 128, 64


def main(
    axes: Sequence[Axis] = ("devices", "layers", "leaves"),
    counts: Sequence[int] = (),
    compiles: bool = True,
    plot_only: bool = False,
) -> None:
    """Measure, append a row for each point, and draw the plot.

    Args:
        axes: what grows.
        counts: how many of it; if empty, those of `COUNTS`.
        compiles: whether XLA compiles the programs, which takes most of the time.
        plot_only: draw the rows that are there.
    """
    for axis in () if plot_only else axes:
        chosen = tuple(counts) or COUNTS[axis]
        _point(axis, chosen[0], compiles)  # warms up
        for count in chosen:
            append_row("growth", {"axis": axis, "count": count, **_point(axis, count, compiles)})
    rows = [row["results"] for row in read_rows("growth") if _is_of(row, jax.__version__)]
    figure(rows).savefig(RESULTS / "growth.png", dpi=150)


def _is_of(row: dict[str, Any], version: str) -> bool:
    return row["versions"]["jax"] == version


def _point(axis: Axis, count: int, compiles: bool) -> dict[str, float]:
    """CPU seconds of each part."""
    num_devices = count if axis == "devices" else 16
    mesh = h200_mesh(num_devices // _LOCAL, _LOCAL)
    model = _model(axis, count)
    batch = model.batch(num_devices, _TOKENS)
    zero = jz.Zero(mesh, jz.zero3())
    params = zero.abstract(model.init, jax.random.key(0))
    found: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = cpu_seconds()
        result = function()
        found[name] = round(cpu_seconds() - start, 3)
        return result

    plain = jax.eval_shape(model.init, jax.random.key(0))
    timed("plain_trace", lambda: _traced(jax.value_and_grad, model, plain, batch))
    traced = timed("trace_and_plan", lambda: _traced(zero.value_and_grad, model, params, batch))
    lowered = timed("lower", traced.lower)
    options: Any = jz.compiler_options("cuda")
    if compiles:
        timed("compile", lambda: lowered.compile(compiler_options=options))
    if axis == "layers" and compiles:
        by_xla = lowered_step("gspmd-by-hand", model, mesh, batch, jz.CommSchedule())
        timed("gspmd_compile", by_xla.compile)
    return {"num_leaves": len(jax.tree.leaves(params)), **found}


def _traced(transform: Callable[..., Any], model: Model, params: Any, batch: Any) -> Any:
    """A new function, of which nothing is in a cache."""
    return jax.jit(transform(lambda *args: model.loss(*args))).trace(params, batch)


def _model(axis: Axis, count: int) -> Model:
    if axis == "leaves":
        return Model(
            label=f"{count} matrices",
            init=functools.partial(_init_matrices, count),
            loss=_loss_of_matrices,
            batch=lambda rows, size: jax.ShapeDtypeStruct((rows, size, _WIDTH), jnp.float32),
        )
    if axis == "devices":
        return llama("small, scanned", _SMALL, _llama)
    size = dataclasses.replace(_SMALL, layers=count, unrolled=True)
    return llama(f"{count} layers, unrolled", size, _llama)


def _init_matrices(count: int, key: jax.Array) -> dict[str, jax.Array]:
    del key
    return {f"w{i}": jnp.ones((_SMALL.layers, _WIDTH, _WIDTH)) for i in range(count)}


def _loss_of_matrices(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        for w in weights.values():
            x = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return x, None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """One panel for each axis: CPU seconds over counts, and a line of what is linear."""
    drawn = Figure(figsize=(12, 4), layout="constrained")
    for axes, axis in zip(drawn.subplots(1, len(COUNTS)), COUNTS, strict=True):
        newest: dict[int, dict[str, Any]] = {}
        for row in rows:
            if row["axis"] == axis:
                newest[row["count"]] = newest.get(row["count"], {}) | row
        points = [newest[count] for count in sorted(newest)]
        for part, label in _PARTS.items():
            known = [(row["count"], row[part]) for row in points if part in row]
            if known:
                axes.loglog(*zip(*known, strict=True), "o-", markersize=4, label=label)
        if axis != "devices" and points:
            first, last = points[0]["count"], points[-1]["count"]
            start = points[0]["trace_and_plan"]
            axes.loglog(
                [first, last], [start, start * last / first], "k:", linewidth=1, label="linear"
            )
        axes.set_xticks(list(newest), [str(count) for count in newest], minor=False)
        axes.minorticks_off()
        axes.set_xlabel({"layers": "unrolled layers", "leaves": "leaves"}.get(axis, axis))
        axes.set_ylabel("CPU seconds")
        axes.grid(alpha=0.3)
    drawn.axes[-1].legend(fontsize=8)
    return drawn


if __name__ == "__main__":
    tyro.cli(main)
