"""Throughput of the quantization kernels, compared with the memory bandwidth.

    python -m benchmarks.measured.kernels  # on a GPU, about ten minutes
    python -m benchmarks.measured.kernels --sizes-mb 0.01 --interpret --repeats 1  # anywhere, tiny

For each operation, format and size one row in `benchmarks/results/kernels.jsonl`: GB/s of the
bytes that must move (the input once, the output once), for the kernel, for XLA's fusion of the
same `jax.numpy`, and for torch.compile of the same in torch, where torch sees the GPU; beside
them the bandwidth of a copy on the device in the same run, which is the ceiling. All take turns
in each repeat, so that a clock that changes changes all.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from benchmarks.shared import _rows
from jaxzero import pallas_kernels as pk

FORMATS = {
    "int8": pk.Format(kind="int8", block=256),
    "int4": pk.Format(kind="int4", block=128),
    "int4-stochastic": pk.Format(kind="int4", block=128, rounding="stochastic"),
    "int4-hadamard": pk.Format(kind="int4", block=128, hadamard=32),
    "float8": pk.Format(kind="float8_e4m3fn", block=256),
}
Operation = Literal["quantize", "dequantize", "dequantize_sum", "dequantize_sum_requantize"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
PEERS = 8  # whose messages are summed


def main(
    sizes_mb: Sequence[float] = (1, 4, 16, 64, 256, 1000),
    formats: Sequence[str] = tuple(FORMATS),
    operations: Sequence[Operation] = OPERATIONS,
    repeats: int = 20,
    interpret: bool = False,
    directory: Path = _rows.RESULTS,
) -> list[dict]:
    """Measure and append a row for each.

    Args:
        sizes_mb: of the bfloat16 numbers, in millions of bytes; of each peer if they are summed.
        formats: int8, int4, int4-stochastic, int4-hadamard, float8.
        operations: of the kernels.
        repeats: how often each has its turn.
        interpret: run the kernels in Pallas' interpreter, on a CPU: for tests.
        directory: of the rows.
    """
    rows = []
    for size_mb in sizes_mb:
        for name in formats:
            for operation in operations:
                results = measure(operation, name, size_mb, repeats, interpret)
                rows.append(_rows.append_row("kernels", results, directory=directory))
    return rows


def measure(
    operation: Operation, name: str, size_mb: float, repeats: int, interpret: bool
) -> dict[str, Any]:
    """The row of one operation, format and size."""
    format = FORMATS[name]
    num = max(1, round(size_mb * 1e6 / 2 / 8192)) * 8192
    x = jax.random.normal(jax.random.key(0), (1, 1, num), jnp.bfloat16)
    codec = functools.partial(pk.quantize, format=format, implementation="xla")
    message = jax.block_until_ready(jax.jit(codec)(x))
    if operation.startswith("dequantize_sum"):
        message = jnp.tile(message, (PEERS, 1))
    argument = x if operation == "quantize" else message
    moved = argument.nbytes + _output(operation, format, num, "xla")(argument).nbytes
    runs = {"copy": _copy(moved // 2)}
    for implementation in ("xla", "mosaic_gpu"):
        function = _output(operation, format, num, implementation)
        runs[implementation] = functools.partial(function, argument)
    if operation == "quantize" and name == "int8" and (compiled := _torch(num, format)):
        runs["torch_compile"] = compiled
    with _interpreted(interpret):
        for run in runs.values():  # compiles
            jax.block_until_ready(run())
        seconds = _take_turns(runs, repeats)
    rate = {key: moved / value / 1e9 for key, value in seconds.items()}
    return {
        "operation": operation,
        "format": name,
        "numbers": num,
        "peers": PEERS if operation.startswith("dequantize_sum") else 1,
        "moved_bytes": moved,
        "interpreted": interpret,
        **{f"{key}_gb_per_s": float(f"{value:.4g}") for key, value in rate.items()},
        "mosaic_gpu_share_of_copy": round(rate["mosaic_gpu"] / rate["copy"], 4),
        "mosaic_gpu_over_xla": round(rate["mosaic_gpu"] / rate["xla"], 4),
    }


def _output(
    operation: str, format: pk.Format, num: int, implementation: pk.Implementation
) -> Callable[[Any], Any]:
    how: dict[str, Any] = {"implementation": implementation}
    functions = {
        "quantize": lambda x: pk.quantize(x, format, **how),
        "dequantize": lambda m: pk.dequantize(
            m, format, outer=1, inner=num, dtype=jnp.bfloat16, **how
        ),
        "dequantize_sum": lambda m: pk.dequantize_sum(m, format, num=num, **how),
        "dequantize_sum_requantize": lambda m: pk.dequantize_sum_requantize(
            m, format, format, shape=(1, 1, num), divisor=PEERS, **how
        ),
    }
    return jax.jit(functions[operation])


def _copy(num_bytes: int) -> Callable[[], Any]:
    """A copy on the device: it reads so many bytes, and writes as many."""
    x = jnp.zeros(num_bytes // 4, jnp.int32)
    # The sum keeps XLA from leaving it out; it moves what a copy moves.
    add = jax.jit(lambda x: x + 1)
    return lambda: add(x)


def _torch(num: int, format: pk.Format) -> Callable[[], Any] | None:
    """The same int8 blocks by torch.compile (Triton); None without torch and a GPU for it."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    x = torch.randn(num, device="cuda", dtype=torch.bfloat16)

    @torch.compile
    def encode(x):
        blocks = x.float().reshape(-1, format.block)
        scale = blocks.abs().amax(dim=1, keepdim=True) / format.limit
        return torch.round(blocks / scale).to(torch.int8), scale.to(torch.bfloat16)

    def run():
        encode(x)
        torch.cuda.synchronize()

    return run


def _take_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            jax.block_until_ready(run())  # what lies in the cache is its own
            start = time.perf_counter()
            calls = [run() for _ in range(5)]
            jax.block_until_ready(calls)
            seconds[name].append((time.perf_counter() - start) / 5)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _interpreted(wanted: bool) -> contextlib.AbstractContextManager[None]:
    if not wanted:
        return contextlib.nullcontext()
    from jaxzero.pallas_kernels import _memory

    return _memory.interpreted()


if __name__ == "__main__":
    import tyro  # `gpu` calls `main` on machines without it

    tyro.cli(main)
