"""Several GPUs of a node: whether exchanges compute what XLA's do, and what they and steps take.

    python -m benchmarks.measured.several_gpus --part bits
    python -m benchmarks.measured.several_gpus --part rates
    python -m benchmarks.measured.several_gpus --part steps

`make gpu` runs all three, in this order. A quantized all-gather or reduce-scatter is made in three
ways (`implementation` of a codec): "xla"; "mosaic_gpu", kernels around XLA's collective; "nvlink",
one kernel. Each has a row of its own, appended as soon as it ends: a kernel that has never run on
GPUs may wait for ever, and costs only the rows after it. "nvlink" comes last. Where an
implementation does not take the devices, or its program fails, its row says why (`refused`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from benchmarks.shared._models import MODELS, ModelName, step_config
from benchmarks.shared._rows import RESULTS, append_row, measured_rates
from jaxzero import pallas_kernels as pk
from jaxzero._hlo import Rates, timeline

Implementation = Literal["xla", "mosaic_gpu", "nvlink"]
Exchange = Callable[[jax.Array], jax.Array]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("xla", "mosaic_gpu", "nvlink")
AXIS = "local"
_CALLS = 5  # of an exchange, issued together
# What devices refuse, and what XLA cannot compile or run.
_ERRORS = (NotImplementedError, jax.errors.JaxRuntimeError)
FORMATS = {
    "int8": pk.Format(kind="int8", block=256),
    "int4": pk.Format(kind="int4", block=128),
    "int4-stochastic": pk.Format(kind="int4", block=128, rounding="stochastic"),
    "float8": pk.Format(kind="float8_e4m3fn", block=256),
}
OPERATIONS = ("all_gather", "reduce_scatter")


def _mesh() -> Mesh:
    return jz.make_mesh(1)


def stated_cluster(local: int) -> jz.Cluster:
    """So many devices of one node, with the planner's rates of the kind that is here.

    Of a kind that the planner does not know: those of an H100.
    """
    kind = jax.devices()[0].device_kind.lower()
    known = [name for name in ("a100", "h100", "h200", "b200") if name in kind]
    return jz.Cluster(nodes=1, local=local, device=known[0] if known else "h100")


def exchange(operation: str, format: pk.Format, implementation: Implementation) -> Exchange:
    """Gather rows `[n]` of all devices, or sum and divide rows `[devices, n]`; in `shard_map`."""
    gathers = operation == "all_gather"
    if implementation != "mosaic_gpu":
        function = pk.quantized_all_gather if gathers else pk.quantized_reduce_scatter
        how: Any = "mosaic_gpu" if implementation == "nvlink" else "xla"

        def whole(x: jax.Array) -> jax.Array:
            rows = x[None] if gathers else x
            return function(rows, AXIS, format, seed=3, implementation=how)

        return whole
    how = {"implementation": "mosaic_gpu"}

    def in_steps(x: jax.Array) -> jax.Array:
        num = x.shape[-1]
        messages = pk.quantize(x[None, None] if gathers else x[None], format, seed=3, **how)
        if gathers:
            messages = lax.all_gather(lax.optimization_barrier(messages)[0], AXIS)
            full = pk.dequantize(messages, format, outer=1, inner=num, dtype=x.dtype, **how)
            return full.reshape(-1, num)
        messages = lax.all_to_all(lax.optimization_barrier(messages), AXIS, 0, 0, tiled=True)
        return pk.dequantize_sum(messages, format, num=num, **how)[None]

    return in_steps


def _in_bfloat16(operation: str) -> Exchange:
    """The collective without a codec, which on GPUs is NCCL's."""
    if operation == "all_gather":
        return lambda x: lax.all_gather(x, AXIS)
    return lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)


def _on(mesh: Mesh, function: Exchange) -> Exchange:
    specs: Any = {"in_specs": P(AXIS), "out_specs": P(AXIS)}
    each = jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, check_vma=False, **specs)
    return jax.jit(each)


def _numbers(mesh: Mesh, operation: str, num: int) -> jax.Array:
    """Numbers of each device: one row that is gathered, or one for each device."""
    devices = mesh.shape[AXIS]
    shape = (devices, num) if operation == "all_gather" else (devices, devices, num)
    make = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    return jax.jit(make, out_shardings=NamedSharding(mesh, P(AXIS)))(jax.random.key(0))


def bits(
    sizes: Sequence[int] = (1000, 2**20 + 3, 2**23),
    formats: Sequence[str] = tuple(FORMATS),
    calls: int = 20,
    directory: Path = RESULTS,
) -> int:
    """Compare every exchange with XLA's, bit by bit, and append a row for each.

    Both collectives of a size follow each other in one program, `calls` times, each time with other
    numbers: of a small array, of one that does not fill its last tile, and of one so large that
    places in the inbox are used again.

    Args:
        sizes: numbers in the row of a device.
        formats: in `FORMATS`.
        calls: how often, in one loop.
        directory: of the rows.

    Returns:
        How many differ or fail.
    """
    mesh, wrong = _mesh(), 0

    @functools.cache
    def by_xla(num: int, name: str) -> jax.Array:
        return _repeated(mesh, FORMATS[name], "xla", calls)(_numbers(mesh, "all_gather", num))

    for implementation in IMPLEMENTATIONS[1:]:
        for num in sizes:
            for name in formats:
                settings = {
                    "implementation": implementation,
                    "devices": mesh.shape[AXIS],
                    "format": name,
                    "numbers": num,
                    "calls": calls,
                }
                want = jax.block_until_ready(by_xla(num, name))
                x = _numbers(mesh, "all_gather", num)
                try:
                    got = _repeated(mesh, FORMATS[name], implementation, calls)(x)
                    results = {"equal": bool(_have_equal_bits(want, got))}
                except _ERRORS as error:
                    results = _refused(error)
                wrong += _is_wrong(results)
                append_row("exchange_bits", settings | results, directory=directory)
    return wrong


def _refused(error: Exception) -> dict[str, Any]:
    """Why there is no result, and whether that is a failure: a refusal for the devices is none."""
    why = f"{type(error).__name__}: {error}"[:160]
    return {"refused": why, "failed": not isinstance(error, NotImplementedError)}


def _is_wrong(results: dict[str, Any]) -> bool:
    return results.get("failed", False) or results.get("equal") is False


def _repeated(
    mesh: Mesh, format: pk.Format, implementation: Implementation, calls: int
) -> Exchange:
    gather, scatter = (exchange(each, format, implementation) for each in OPERATIONS)
    signs = jnp.resize(jnp.asarray([1, -1, -1], jnp.bfloat16), (calls,))

    def both(x: jax.Array, sign: jax.Array) -> tuple[jax.Array, jax.Array]:
        full = gather(x * sign)
        # Devices add other numbers than their peers do.
        mine = full * (1 + lax.axis_index(AXIS)).astype(full.dtype)
        total = scatter(mine)[0]
        return (total / jnp.max(jnp.abs(total))).astype(x.dtype), total

    return _on(mesh, lambda x: lax.scan(both, x, signs)[1])


@jax.jit
def _have_equal_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.all(
        lax.bitcast_convert_type(x, jnp.uint32) == lax.bitcast_convert_type(y, jnp.uint32)
    )


def rates(
    sizes_mb: Sequence[float] = (64, 4, 0.25),
    formats: Sequence[str] = ("int8", "int4"),
    repeats: int = 10,
    directory: Path = RESULTS,
) -> int:
    """Time every exchange in turn with the same numbers sent as bfloat16; a row for each.

    Calls are issued together and waited for once. A call that takes the devices less time than
    Python takes to issue it is measured as long as that.

    Args:
        sizes_mb: of the bfloat16 numbers that go from one device to another, in millions of bytes.
        formats: in `FORMATS`.
        repeats: how often each has its turn of `_CALLS` calls; rows have the median of turns,
            divided by these.
        directory: of the rows.

    Returns:
        How many fail.
    """
    mesh, wrong = _mesh(), 0
    for implementation in IMPLEMENTATIONS:
        for size_mb in sizes_mb:
            for operation in OPERATIONS:
                for name in formats:
                    results = _timed(
                        mesh, operation, name, implementation, round(size_mb * 5e5), repeats
                    )
                    wrong += _is_wrong(results)
                    append_row("exchange_rates", results, directory=directory)
    return wrong


def _timed(
    mesh: Mesh, operation: str, name: str, implementation: Implementation, num: int, repeats: int
) -> dict[str, Any]:
    devices, x = mesh.shape[AXIS], _numbers(mesh, operation, num)
    settings = {
        "operation": operation,
        "format": name,
        "implementation": implementation,
        "devices": devices,
        "received_bfloat16_bytes": 2 * num * (devices - 1),
    }
    try:
        runs = {
            "bfloat16": _on(mesh, _in_bfloat16(operation)),
            "quantized": _on(mesh, exchange(operation, FORMATS[name], implementation)),
        }
        calls = {key: functools.partial(run, x) for key, run in runs.items()}
        seconds = in_turn(calls, repeats, _CALLS)
    except _ERRORS as error:
        return settings | _refused(error)
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    return {
        **settings,
        **{f"{key}_us": float(f"{1e6 * value:.4g}") for key, value in medians.items()},
        "bfloat16_gb_per_s": float(f"{2e-9 * num * (devices - 1) / medians['bfloat16']:.4g}"),
        "time_over_bfloat16": float(f"{medians['quantized'] / medians['bfloat16']:.4g}"),
    }


def in_turn(
    runs: dict[str, Callable[[], Any]], repeats: int, calls: int = 1
) -> dict[str, list[float]]:
    """Seconds of a call, one number for each turn; a first turn, which compiles, is left out.

    Args:
        runs: what is called, each in its turn.
        repeats: turns of each.
        calls: of a turn, which are issued together and waited for once, so that short ones follow
            each other on the device. The results of all are held: one for what fills the memory.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready([run() for _ in range(calls)])
            if i:
                seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def steps(
    model: ModelName = "1b",
    rows: int = 2,
    size: int = 2048,
    repeats: int = 10,
    directory: Path = RESULTS,
) -> int:
    """Loss and gradients in bfloat16, and with each implementation; measured beside predicted.

    Where "xla" itself is refused, the others' gradients are compared with none (`equal` is null).

    Args:
        model: in `benchmarks.shared._models`, of tokens.
        rows: of a device.
        size: tokens of a row.
        repeats: how often a step is timed, each waited for; rows have the median.
        directory: of the rows, and of the measured rates that times are predicted with too.

    Returns:
        How many steps have other gradients than "xla", or fail.
    """
    mesh, wrong, want = _mesh(), 0, None
    cluster = stated_cluster(mesh.size)
    settings = {"model": model, "devices": mesh.size, "shape": (rows * mesh.size, size)}
    settings |= {"assumed_rates": cluster.kind.name}
    for name in ("bfloat16", *IMPLEMENTATIONS):
        results = settings | {"implementation": name}
        try:
            step, args = _compiled_step(mesh, name, model, settings["shape"])
            got = jax.block_until_ready(step(*args))
            results["loss"] = float(got[0])
            if name == "xla":
                want = got
            elif name != "bfloat16":
                results["equal"] = None if want is None else _are_equal(got, want)
            got = None  # its gradients' memory is needed
            seconds = in_turn({"step": functools.partial(step, *args)}, repeats)["step"]
            results |= {"measured_ms": round(1e3 * statistics.median(seconds), 3)}
            results |= predicted_ms(step.as_text() or "", cluster.rates, directory)
        except _ERRORS as error:
            results |= _refused(error)
        wrong += _is_wrong(results)
        append_row("exchange_steps", results, directory=directory)
    return wrong


def _compiled_step(mesh: Mesh, name: str, model: ModelName, shape: tuple[int, int]) -> Any:
    """The step of a configuration (`step_config`), and its arguments."""
    zero, written = jz.Zero(mesh, step_config(name)), MODELS[model]
    params = zero.init(written.init, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 256, shape, np.int32)
    batch = jax.device_put(tokens, NamedSharding(mesh, zero.batch_spec))
    options: Any = jz.compiler_options(jax.devices()[0].platform, nvlink=name == "nvlink")
    lowered = jax.jit(zero.value_and_grad(written.loss)).lower(params, batch)
    step = lowered.compile(compiler_options=options)
    return step, (params, batch)


def _are_equal(got: Any, want: Any) -> bool:
    same = jax.tree.map(lambda x, y: bool(_have_equal_bits(x, y)), got, want)
    return all(jax.tree.leaves(same))


def predicted_ms(text: str, stated: Rates, directory: Path) -> dict[str, float]:
    """A program walked with stated rates and, if they are in a row, with measured ones."""
    measured, row = measured_rates(stated, directory=directory)
    used = {"predicted_ms": stated}
    if row is not None:
        used["predicted_by_measured_rates_ms"] = measured
    return {name: round(1e3 * timeline(text, each).seconds, 3) for name, each in used.items()}


def measure_rates(directory: Path = RESULTS) -> None:
    """Append a row with the rates that short programs reach here (`jz.Cluster.measured`)."""
    cluster = jz.Cluster.measured(_mesh())
    found = dataclasses.asdict(cluster.rates)
    named = ["flops", "memory", *(["local"] if cluster.local > 1 else [])]
    if cluster.host_memory:
        named.append("host")
    figures = {name: float(f"{found[name]:.4g}") for name in named}
    append_row("measured_rates", {"devices": cluster.local} | figures, directory=directory)


PARTS = {"bits": bits, "rates": rates, "steps": steps}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Exchanges of several GPUs of a node.")
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--directory", type=Path, default=RESULTS, help="of rows")
    chosen = parser.parse_args()
    raise SystemExit(PARTS[chosen.part](directory=chosen.directory))
