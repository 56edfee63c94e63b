"""Compile one training step ahead of time for H200s: memory, launches, bytes, overlap.

    python -m benchmarks.compiled.aot                          # Llama-7B, 2 x 8 H200, all variants
    python -m benchmarks.compiled.aot --model 7b-unrolled --variants gspmd zero3
    python -m benchmarks.compiled.aot --variants zeropp --batch 128 --microbatches 8
    python -m benchmarks.compiled.aot --model tiny --resume
    python -m benchmarks.compiled.aot --model unet --variants one-device zero3
    python -m benchmarks.compiled.aot_table                    # the table and the plot of all rows

Needs jaxzero[aot]. The same model is compiled ahead of time with GSPMD, once as a user would
first write it and once with sharding constraints on the activations, and with jaxzero. The program
with constraints is compiled with each set of XLA options in `OPTION_SETS`; on each link its best
set is what jaxzero is compared with (`aot_table`). `one-device` is the step of one device by
itself: the same loss, without collectives, of a device's share of the rows. Nothing is run. The
time of a step is predicted by a cost model over the scheduled program with assumed rates
(`jaxzero._hlo.Rates`), for comparisons only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import SingleDeviceSharding

import jaxzero as jz
from benchmarks.shared import _gspmd
from benchmarks.shared._llama import EXPERTS
from benchmarks.shared._models import SIZES, Model, ModelName, in_form, step_config
from benchmarks.shared._rows import append_row, is_current, read_rows
from jaxzero._hlo import Rates, parse, timeline
from jaxzero._xla_of_jax import IS_BEFORE_0_11

from ._even_choices import if_even
from ._h200 import h200_mesh
from ._kernel_reports import kernel_reports
from ._message_kernels import message_seconds

Variant = Literal[
    "gspmd",
    "gspmd-by-hand",
    "gspmd-experts",
    "one-device",
    "zero3",
    "zero3-slices",
    "zero3-experts",
    "zeropp",
    "zeropp-experts",
    "zeropp-no-slices",
    "zeropp-no-slices-experts",
    "zeropp4",
    "local8-xla",
    "local8-mosaic_gpu",
    "local8-nvlink",
    "pipeline",
    "pipeline-int8",
]

LINKS = (400e9, 50e9, 12.5e9)  # bytes a second that enter a node
_SLOW_LINK = 1.25e9
_CODE = ("jaxzero", "benchmarks/shared")  # what a row depends on, of `--resume`; GSPMD's the last

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_OURS = jz.compiler_options("cuda")
# Ours without what fits our messages only: several collectives under way, each from when its
# operands exist.
_EARLY = {name: value for name, value in _OURS.items() if "combine_threshold" not in name}
# A loop sends during an iteration what the next one needs, or the last one made.
_PIPELINED: dict[str, Any] = (
    {f"xla_gpu_enable_pipelined_{kind}": True for kind in _KINDS}
    if IS_BEFORE_0_11
    else {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS}
)
_DOUBLE_BUFFERED = {"xla_gpu_enable_while_loop_double_buffering": True}


def _joined(mib: int) -> dict[str, int]:
    """Collectives of one kind are joined up to a size; by default XLA joins them up to 30 MiB."""
    return {f"xla_gpu_{kind}_combine_threshold_bytes": mib * 2**20 for kind in _KINDS}


OPTION_SETS: dict[str, dict[str, Any]] = {
    "xla": {},
    "joined to 128 MiB": _joined(128),
    "pipelined, double-buffered": _PIPELINED | _DOUBLE_BUFFERED,
    "jaxzero": _OURS,
    "early": _EARLY,
    "early, joined to 128 MiB": _EARLY | _joined(128),
    "early, pipelined": _EARLY | _PIPELINED,
    "early, double-buffered": _EARLY | _DOUBLE_BUFFERED,
    "early, pipelined, double-buffered": _EARLY | _PIPELINED | _DOUBLE_BUFFERED,
    "early, pipelined, joined to 128 MiB": _EARLY | _PIPELINED | _joined(128),
}


def main(
    model: ModelName = "7b",
    variants: Sequence[Variant] = ("gspmd", "gspmd-by-hand", "zero3", "zeropp", "zeropp4"),
    nodes: int = 2,
    local: int = 8,
    batch: int | None = None,
    tokens: int | None = None,
    schedule: jz.CommSchedule = jz.CommSchedule(),  # noqa: B008
    options: Sequence[str] = (),
    durations: bool = False,
    form: Literal["plain", "linen"] = "plain",
    microbatches: int = 1,
    frozen: int = 0,
    token_parts: int | None = None,
    stages: int | None = None,
    resume: bool = False,
    keep_hlo: Path | None = None,
) -> None:
    """Compile, read, and append a row for each variant and set of XLA options.

    Args:
        model: in `benchmarks.shared._models`.
        variants: of the program.
        nodes: of the mesh.
        local: devices of a node.
        batch: rows of a step, over all devices. None: as many as the model has by default.
        tokens: of each row; of an image the pixels on a side. None: likewise.
        schedule: of jaxzero's variants.
        options: names in `OPTION_SETS` to compile each variant with. If empty, all of them for
            `gspmd-by-hand` and `gspmd-experts`, XLA's defaults for `gspmd`, jaxzero's for its own
            variants.
        durations: compile twice, the second time with predicted durations (`jz.compile_for`) at
            50 GB/s into a node. Times to compile are of both.
        form: how the model is written: as `_llama`, or in Flax Linen (scanned and dense only).
        microbatches: that the rows of a device are cut into (jaxzero's variants only); with
            `pipeline`, of S stages, between one and 2 S - 1 are in flight.
        frozen: layers of a plain scanned decoder that `zero.freeze` freezes, with the embedding
            (jaxzero's variants only); rows are those of `aot_frozen`.
        token_parts: devices of a node that share each row (models of long rows only); rows are
            those of `aot_long`.
        stages: of `pipeline`. None: each node is one.
        resume: leave out programs that have a row of the same code and version of JAX.
        keep_hlo: a folder for the compiled programs.

    Raises:
        ValueError: a name in `options` is not known.
    """
    if unknown := [name for name in options if name not in OPTION_SETS]:
        raise ValueError(
            f"`options` must be of {', '.join(map(repr, OPTION_SETS))}; got {unknown}. "
            "Leave it out, or add a set to `OPTION_SETS`."
        )
    mesh = h200_mesh(nodes, local, token_parts, stages)
    cluster = jz.Cluster(nodes=nodes, local=local, device="h200") if durations else None
    written = in_form(model, form)
    rows, size = batch or written.rows, tokens or written.size
    run = dict(nodes=nodes, local=local, batch=rows, tokens=size, microbatches=microbatches)
    run |= {"frozen": frozen} if frozen else {}
    run |= {"token_parts": token_parts} if token_parts else {}
    run |= {"stages": stages} if stages else {}
    table = "aot_long" if token_parts else "aot_frozen" if frozen else "aot"
    for variant in variants:
        ours = _is_ours(variant)
        step = {
            "model": model,
            "form": form,
            "variant": variant,
            **run,
            "schedule": dataclasses.asdict(schedule) if ours else None,
            "durations": durations,
        }
        programs = [step | {"option_set": name} for name in options or _default_sets(variant)]
        missing = [each for each in programs if not (resume and _has_row(each, table))]
        if not missing:
            continue
        args = variant, written, mesh, written.batch(rows, size), schedule, microbatches, frozen
        lowered, lower_seconds = timed("lower", lambda args=args: lowered_step(*args))
        for program in missing:
            chosen = OPTION_SETS[program["option_set"]]
            if variant == "local8-nvlink" and program["option_set"] == "jaxzero":
                chosen = jz.compiler_options("cuda", nvlink=True)
            if variant.startswith("pipeline") and chosen is _OURS:
                chosen = jz.compiler_options("cuda", stages=True)
            with kernel_reports() as reports:
                compiled, compile_seconds = timed(
                    "compile", functools.partial(_compiled, lowered, chosen, cluster)
                )
            text = compiled.as_text()
            if keep_hlo is not None:
                _keep(keep_hlo / f"{model}_{variant}_{program['option_set']}.hlo", text)
            append_row(
                table,
                {
                    **program,
                    "parameters": written.num_parameters,
                    "compiler_options": chosen,
                    **(figures if ours else _figures_if_priced)(compiled, text, local),
                    **(_even(model, text, run) if variant.endswith("-experts") else {}),
                    **({"kernels": reports()} if reports() else {}),
                    **lower_seconds,
                    **compile_seconds,
                    "peak_memory_gib": round(_peak_bytes() / 2**30, 2),
                },
            )


def _is_ours(variant: str) -> bool:
    return not variant.startswith(("gspmd", "one-device"))


def _default_sets(variant: Variant) -> Sequence[str]:
    if variant == "gspmd":
        return ("xla",)
    return tuple(OPTION_SETS) if variant.startswith("gspmd") else ("jaxzero",)


def _has_row(program: dict[str, Any], table: str) -> bool:
    """Whether the program was compiled by the same code and version of JAX."""
    wanted = json.loads(json.dumps(program)).items()
    return any(
        wanted <= row["results"].items()
        and row["versions"]["jax"] == jax.__version__
        and is_current(row, *_CODE[not _is_ours(program["variant"]) :])
        for row in read_rows(table)
    )


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def timed(name: str, function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What the function returns, and the seconds that it took, all and of this process."""
    start, user_start = time.perf_counter(), _user_seconds()
    result = function()
    return result, {
        f"{name}_seconds": round(time.perf_counter() - start, 2),
        f"{name}_user_seconds": round(_user_seconds() - user_start, 2),
    }


def _compiled(
    lowered: jax.stages.Lowered, options: dict[str, Any], cluster: jz.Cluster | None
) -> Any:
    if cluster is None:
        return lowered.compile(compiler_options=options)
    return jz.compile_for(lowered, cluster, compiler_options=options)


def lowered_step(
    variant: Variant,
    model: Model,
    mesh: jax.sharding.Mesh,
    batch: Any,
    schedule: jz.CommSchedule,
    microbatches: int = 1,
    num_frozen: int = 0,
) -> Any:
    """One step's loss and gradients, split as the parameters are."""
    if not _is_ours(variant):
        if microbatches > 1:
            raise ValueError(
                f"`microbatches` must be 1 for {variant!r}, which has none; got {microbatches}. "
                "Leave it out, or compile jaxzero's variants only."
            )
        if variant == "one-device":
            return _lowered_alone(model, mesh, batch)
        return _gspmd.lowered(variant, model, mesh, batch)
    config = dataclasses.replace(_config(variant, microbatches), schedule=schedule)
    zero = jz.Zero(mesh, config)
    key = jax.random.key(0)
    params = zero.abstract(model.init, key)
    frozen = () if model.frozen is None else (zero.abstract(model.frozen, key),)
    state = {}
    if config.needs_wire_state:
        state["wire_state"] = jax.eval_shape(zero.init_wire_state, params)
    loss = model.per_device or model.loss
    if num_frozen:
        freezing = zero.freeze(params, num_frozen, layers="layers", before="embedding")
        loss, (params, *frozen) = freezing.wrap(loss), freezing.split(params)
    step = zero.value_and_grad(loss, microbatches=microbatches)
    return jax.jit(step).lower(params, *frozen, batch, **state)


def _config(variant: str, microbatches: int) -> jz.ZeroConfig:
    if variant.startswith("pipeline"):
        return jz.pipeline(microbatches, messages=jz.Int8() if "int8" in variant else None)
    if variant.startswith("local8-"):
        return step_config(variant.removeprefix("local8-"))
    if variant == "zero3-slices":
        return jz.zero3(hpz=jz.HpZ(codec=jz.Cast(jnp.bfloat16)))
    if variant.endswith("-no-slices"):
        return dataclasses.replace(_config(variant.removesuffix("-no-slices"), 1), hpz=None)
    if variant.endswith("-experts"):
        config = _config(variant.removesuffix("-experts"), 1)
        leaves = jz.Ungathered(tuple(f"layers.{x}" for x in EXPERTS), dim=1)
        return dataclasses.replace(config, ungathered=leaves)
    return getattr(jz, variant)()


def _lowered_alone(model: Model, mesh: jax.sharding.Mesh, batch: Any) -> Any:
    """The step of a device's share of the rows on one device, which has all weights."""
    share = jax.tree.map(lambda x: x.update(shape=(x.shape[0] // mesh.size, *x.shape[1:])), batch)
    trees = [jax.eval_shape(make, jax.random.key(0)) for make in (model.init, model.frozen) if make]
    device = SingleDeviceSharding(mesh.devices.flat[0])
    args = jax.tree.map(lambda x: x.update(sharding=device), (*trees, share))
    return jax.jit(jax.value_and_grad(model.loss)).lower(*args)


def _user_seconds() -> float:
    """CPU seconds of this process outside of the kernel, which other load changes little."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def _peak_bytes() -> int:
    """The most that this process ever had in memory, all its programs before included."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _even(model: Any, text: str, run: dict[str, Any]) -> dict[str, Any]:
    size = SIZES[model]
    tokens_of_node = run["batch"] * run["tokens"] // run["nodes"]
    return if_even(text, LINKS, tokens_of_node, size.experts, size.choices, run["local"])


def figures(compiled: Any, text: str, local: int) -> dict[str, Any]:
    """Memory, collectives and predicted time of the compiled program."""
    memory = compiled.memory_analysis()
    rates = Rates(num_local=local)
    program = parse(text)
    links = (*LINKS, _SLOW_LINK)
    lines = {node: timeline(program, dataclasses.replace(rates, node=node)) for node in links}
    line = lines[rates.node]  # what is counted, and not predicted, is the same on all links
    return {
        "temporary_gib": round(memory.temp_size_in_bytes / 2**30, 3),
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 3),
        "output_gib": round(memory.output_size_in_bytes / 2**30, 3),
        "launches": sum(line.launches.values()),
        "launches_by_collective": dict(line.launches),
        "received_gib_per_device": round(line.received_bytes / 2**30, 3),
        "gib_into_a_node": round(line.node_bytes / 2**30, 3),
        "asynchronous_share": round(line.asynchronous_share, 4),
        "message_seconds": round(message_seconds(program, rates), 5),
        "predicted": {
            f"{node / 1e9:g} GB/s between nodes": {
                "step_seconds": round(line.seconds, 4),
                "compute_seconds": round(line.compute_seconds, 4),
                "communication_seconds": round(line.communication_seconds, 4),
                "exposed_seconds": round(line.exposed_seconds, 4),
                "hidden_share": round(line.hidden_share, 4),
            }
            for node, line in lines.items()
        },
    }


def _figures_if_priced(compiled: Any, text: str, local: int) -> dict[str, Any]:
    """Or why not: XLA leaves some pipelined loops without the trip count that a walk needs."""
    try:
        return figures(compiled, text, local)
    except ValueError as error:
        return {"not_priced": str(error)[:100]}


if __name__ == "__main__":
    tyro.cli(main)
