"""Bandwidth between a GPU and the host's pinned memory, each way and both ways at once.

python -m benchmarks.measured.host_copies                 # on a GPU, half a minute
python -m benchmarks.measured.host_copies --sizes-mb 1    # anywhere: the memory is the same
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from benchmarks.shared._rows import RESULTS, append_row


def main(
    sizes_mb: Sequence[float] = (1, 16, 256, 1024), repeats: int = 10, directory: Path = RESULTS
) -> list[dict]:
    """Measure and append a row for each size.

    Args:
        sizes_mb: of one copy, in millions of bytes.
        repeats: how often each direction has its turn.
        directory: of the rows.
    """
    device = jax.devices()[0]
    on_device, on_host = (
        SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host")
    )
    return [
        append_row("host_copies", _measure(size, repeats, on_device, on_host), directory=directory)
        for size in sizes_mb
    ]


def _measure(
    size_mb: float, repeats: int, on_device: Sharding, on_host: Sharding
) -> dict[str, Any]:
    num = max(1, round(size_mb * 1e6 / 4))
    here = jax.device_put(jnp.zeros(num, jnp.int32), on_device)
    there = jax.device_put(here, on_host)
    runs: dict[str, Callable[[], Any]] = {
        "to_host": lambda: jax.device_put(here, on_host),
        "to_device": lambda: jax.device_put(there, on_device),
        "both": lambda: jax.device_put((here, there), (on_host, on_device)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready([run() for _ in range(4)])
            if i:  # the first allocates
                seconds[name].append((time.perf_counter() - start) / 4)
    rates = {name: 4 * num / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    return {
        "copy_bytes": 4 * num,
        "to_host_gb_per_s": round(rates["to_host"], 3),
        "to_device_gb_per_s": round(rates["to_device"], 3),
        "both_gb_per_s_each_way": round(rates["both"], 3),
    }


if __name__ == "__main__":
    import tyro  # `gpu` calls `main` on machines without it

    tyro.cli(main)
