"""Compile one training step ahead of time for H200s: memory, launches, bytes, overlap.

    python -m benchmarks.compiled.aot                          # Llama-7B, 2 x 8 H200, all variants
    python -m benchmarks.compiled.aot --model 7b-unrolled --variants gspmd zero3
    python -m benchmarks.compiled.aot --variants zeropp --batch 128 --microbatches 8
    python -m benchmarks.compiled.aot --model tiny

Needs jaxzero[aot]. The same model is compiled ahead of time with GSPMD, once as a user would
first write it and once with sharding constraints on the activations, and with jaxzero. Nothing is
run. The time of a step is predicted by a cost model over the scheduled program with assumed rates
(`jaxzero._hlo.Rates`), for comparisons only.
"""

from __future__ import annotations

import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from benchmarks.shared import _gspmd, _linen_llama, _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._rows import append_row
from jaxzero._hlo import Rates, parse, timeline

from ._h200 import h200_mesh

Model = Literal[
    "7b", "7b-unrolled", "1b", "1b-unrolled", "moe", "70b", "70b-unrolled", "tiny", "tiny-unrolled"
]
Variant = Literal["gspmd", "gspmd-by-hand", "zero3", "zeropp", "zeropp4"]

_LARGE = LlamaSize(layers=80, width=8192, hidden=28672, heads=64, kv_heads=8, vocabulary=128256)
_TINY_LLAMA = LlamaSize(layers=22, width=2048, hidden=5632, kv_heads=4)
_TINY = LlamaSize(layers=4, width=256, hidden=512, heads=4, vocabulary=512)
SIZES: dict[Model, LlamaSize] = {
    "7b": LlamaSize(),
    "7b-unrolled": LlamaSize(unrolled=True),
    "1b": _TINY_LLAMA,
    "1b-unrolled": dataclasses.replace(_TINY_LLAMA, unrolled=True),
    "moe": LlamaSize(layers=16, width=2048, hidden=4096, heads=16, kv_heads=4, experts=8),
    "70b": _LARGE,
    "70b-unrolled": dataclasses.replace(_LARGE, unrolled=True),
    "tiny": _TINY,
    "tiny-unrolled": dataclasses.replace(_TINY, unrolled=True),
}
_FORMS = {"plain": _llama, "linen": _linen_llama}
_SLOW = 12.5e9  # bytes a second that enter a node, beside the default


def main(
    model: Model = "7b",
    variants: Sequence[Variant] = ("gspmd", "gspmd-by-hand", "zero3", "zeropp", "zeropp4"),
    nodes: int = 2,
    local: int = 8,
    batch: int = 32,
    tokens: int = 2048,
    schedule: jz.CommSchedule = jz.CommSchedule(),  # noqa: B008
    options: bool = True,
    durations: bool = False,
    form: Literal["plain", "linen"] = "plain",
    microbatches: int = 1,
    keep_hlo: Path | None = None,
) -> None:
    """Compile, read, and append a row for each variant.

    Args:
        model: which.
        variants: of the program.
        nodes: of the mesh.
        local: devices of a node.
        batch: sequences of a step, over all devices.
        tokens: of each sequence.
        schedule: of jaxzero's variants.
        options: compile with `jz.compiler_options("cuda")`; GSPMD without, unless none.
        durations: compile twice, the second time with predicted durations (`jz.compile_for`) at
            50 GB/s into a node. Times to compile are of both.
        form: how the model is written: as `_llama`, or in Flax Linen (scanned and dense only).
        microbatches: that the rows of a device are cut into (jaxzero's variants only).
        keep_hlo: a folder for the compiled programs.
    """
    mesh = h200_mesh(nodes, local)
    cluster = jz.Cluster(nodes=nodes, local=local, device="h200") if durations else None
    size = SIZES[model]
    struct = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    run = dict(nodes=nodes, local=local, batch=batch, tokens=tokens, microbatches=microbatches)
    for variant in variants:
        ours = not variant.startswith("gspmd")
        chosen = jz.compiler_options("cuda") if options and ours else {}
        args = variant, size, mesh, struct, schedule, form, microbatches
        lower = functools.partial(lowered_step, *args)
        compiled, seconds = _timed(lower, chosen, cluster)
        text = compiled.as_text()
        if keep_hlo is not None:
            _keep(keep_hlo / f"{model}_{variant}.hlo", text)
        append_row(
            "aot",
            {
                "model": model,
                "form": form,
                "variant": variant,
                **run,
                "parameters": _llama.num_parameters(size),
                "schedule": dataclasses.asdict(schedule) if ours else None,
                "compiler_options": chosen,
                "durations": durations,
                **figures(compiled, text, local),
                **seconds,
            },
        )


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _timed(
    lower: Callable[[], Any], options: dict[str, Any], cluster: jz.Cluster | None
) -> tuple[Any, dict[str, float]]:
    """The compiled program, and how long it took to lower and compile."""
    times = [(time.perf_counter(), _user_seconds())]
    lowered = lower()
    times.append((time.perf_counter(), _user_seconds()))
    compiled = _compiled(lowered, options, cluster)
    times.append((time.perf_counter(), _user_seconds()))
    (start, user_start), (between, user_between), (end, user_end) = times
    return compiled, {
        "lower_seconds": round(between - start, 2),
        "compile_seconds": round(end - between, 2),
        "lower_user_seconds": round(user_between - user_start, 2),
        "compile_user_seconds": round(user_end - user_between, 2),
    }


def _compiled(
    lowered: jax.stages.Lowered, options: dict[str, Any], cluster: jz.Cluster | None
) -> Any:
    if cluster is None:
        return lowered.compile(compiler_options=options)
    return jz.compile_for(lowered, cluster, compiler_options=options)


def lowered_step(
    variant: Variant,
    size: LlamaSize,
    mesh: jax.sharding.Mesh,
    tokens: Any,
    schedule: jz.CommSchedule,
    form: Literal["plain", "linen"] = "plain",
    microbatches: int = 1,
) -> Any:
    """One step's loss and gradients, split as the parameters are."""
    written = _FORMS[form]
    loss, init = functools.partial(written.loss, size), functools.partial(written.init, size)
    if variant.startswith("gspmd"):
        if microbatches > 1:
            raise ValueError(
                f"`microbatches` must be 1 for {variant!r}, which has none; got {microbatches}. "
                "Leave it out, or compile jaxzero's variants only."
            )
        params = jax.eval_shape(init, jax.random.key(0))
        split = _gspmd.shardings(params, mesh)
        params = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), params, split)
        rows = NamedSharding(mesh, jz.Zero(mesh).batch_spec)
        if variant == "gspmd-by-hand":
            loss = functools.partial(
                loss, constrain=lambda x: jax.lax.with_sharding_constraint(x, rows)
            )
        whole = NamedSharding(mesh, PartitionSpec())
        tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=rows)
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(whole, split))
        return step.lower(params, tokens)
    config = dataclasses.replace(getattr(jz, variant)(), schedule=schedule)
    zero = jz.Zero(mesh, config)
    params = zero.abstract(init, jax.random.key(0))
    state = {}
    if config.needs_wire_state:
        state["wire_state"] = jax.eval_shape(zero.init_wire_state, params)
    step = zero.value_and_grad(loss, microbatches=microbatches)
    return jax.jit(step).lower(params, tokens, **state)


def _user_seconds() -> float:
    """CPU seconds of this process outside of the kernel, which other load changes little."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def figures(compiled: Any, text: str, local: int) -> dict[str, Any]:
    """Memory, collectives and predicted time of the compiled program."""
    memory = compiled.memory_analysis()
    rates = Rates(num_local=local)
    program = parse(text)
    fast = timeline(program, rates)
    slow = timeline(program, dataclasses.replace(rates, node=_SLOW))
    return {
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 3),
        "output_gib": round(memory.output_size_in_bytes / 2**30, 3),
        "launches": sum(fast.launches.values()),
        "launches_by_collective": dict(fast.launches),
        "received_gib_per_device": round(fast.received_bytes / 2**30, 3),
        "gib_into_a_node": round(fast.node_bytes / 2**30, 3),
        "asynchronous_share": round(fast.asynchronous_share, 4),
        "predicted": {
            f"{node / 1e9:g} GB/s between nodes": {
                "step_seconds": round(line.seconds, 4),
                "compute_seconds": round(line.compute_seconds, 4),
                "communication_seconds": round(line.communication_seconds, 4),
                "exposed_seconds": round(line.exposed_seconds, 4),
                "hidden_share": round(line.hidden_share, 4),
            }
            for node, line in ((rates.node, fast), (_SLOW, slow))
        },
    }


if __name__ == "__main__":
    tyro.cli(main)
