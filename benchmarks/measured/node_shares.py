"""Two nodes of different speeds: a step with equal rows, and with `shares` of micro-batches.

    nice -n -10 python -m benchmarks.measured.node_shares

Two processes of this machine are two nodes of one device, each on a core of its own, of which a
control group (cgroup v1) gives the second only a fraction. Steps with equal rows, steps with
shares, and the same computation without communication run in turn in one run. The last gives the
nodes' speeds, in rows a second, and with them the ideal, in which all nodes always compute.

    ideal gain = (rows / 2 / lowest speed) / (rows / sum of speeds).

Needs Linux, root and two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils

import jaxzero as jz
from benchmarks.shared._peers import Size, init, loss
from benchmarks.shared._rows import append_row

_ROOT = Path(__file__).resolve().parents[2]
_TOLERANCE = 1e-4  # of gradients, relative; float32 sums in another order
_PERIOD_US = 10_000  # of the limit; shorter than what is computed between two collectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        size: the model; `rows` are those of a batch of both nodes.
        preset: of `jaxzero`, without codecs.
        shares: of the two nodes.
        microbatches: of the first node, in the step with shares. Steps with equal rows have one.
        fraction: of its core that the second node may use.
        rounds: how often each step runs, in turn.
    """

    size: Size = Size(
        layers=2, width=512, vocabulary=512, rows=24, length=64, layers_in="scan", remat=True
    )
    preset: str = "zero3"
    shares: tuple[int, int] = (2, 1)
    microbatches: int = 4
    fraction: float = 0.33
    rounds: int = 9


def main(settings: Settings = Settings()) -> None:  # noqa: B008
    """Measure and append a row."""
    if len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise RuntimeError("two nodes need two cores, and this process may use one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    task = json.dumps({"address": address, "settings": dataclasses.asdict(settings)})
    command = [sys.executable, "-m", "benchmarks.measured.node_shares", "node", task]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "4"}
    started: list[subprocess.Popen] = []

    def start(number: int, out: int | None) -> subprocess.Popen:
        bound = ["taskset", "--cpu-list", str(cores[number]), *command, str(number)]
        started.append(subprocess.Popen(bound, cwd=_ROOT, env=environment, stdout=out, text=True))
        return started[-1]

    with _limited_group(settings.fraction) as group:
        try:
            first, second = start(0, subprocess.PIPE), start(1, None)
            (group / "cgroup.procs").write_text(str(second.pid))
            printed = _output_of_first(first, second)
        finally:
            for process in started:
                process.kill()
                process.wait()
    append_row("node_shares", _summary(settings, json.loads(printed.splitlines()[-1])))


def _output_of_first(first: subprocess.Popen, second: subprocess.Popen) -> str:
    """What the first node prints; an error as soon as either fails, which leaves the other waiting.

    Raises:
        RuntimeError: a node ended with an error.
    """
    printed = None
    while printed is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = first.communicate(timeout=1.0)
        for number, process in enumerate((first, second)):
            if process.poll():
                raise RuntimeError(f"node {number} ended with status {process.returncode}")
    return printed


@contextlib.contextmanager
def _limited_group(fraction: float) -> Iterator[Path]:
    """A control group whose processes may use a fraction of one core, at this priority."""
    group = Path("/sys/fs/cgroup/cpu", f"jaxzero_node_{os.getpid()}")
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(fraction * _PERIOD_US)))
        (group / "cpu.shares").write_text(str(round(1024 * 1.25 ** -os.nice(0))))
        yield group
    finally:
        group.rmdir()


def _summary(settings: Settings, measured: dict[str, Any]) -> dict[str, Any]:
    """The row's results."""
    rows, seconds = settings.size.rows, measured["seconds"]
    speeds = [measured["alone_rows"] / statistics.median(each) for each in measured["alone"]]
    gain = statistics.median(seconds["equal"]) / statistics.median(seconds["shares"])
    ideal = (rows / 2 / min(speeds)) * sum(speeds) / rows
    return {
        **dataclasses.asdict(settings),
        "equal_seconds": _quartiles(seconds["equal"]),
        "shares_seconds": _quartiles(seconds["shares"]),
        "rows_per_second_alone": [round(speed, 3) for speed in speeds],
        "gain": round(gain, 3),
        "ideal_gain": round(ideal, 3),
        "gain_over_ideal": round(gain / ideal, 3),
        "gradient_difference": measured["gradient_difference"],
        "nice": os.nice(0),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _quartiles(seconds: list[float]) -> list[float]:
    return [round(x, 4) for x in statistics.quantiles(seconds, n=4)]


def _node(task: dict[str, Any], number: int) -> None:
    """One node: compile, check gradients, and time."""
    given = task["settings"]
    settings = Settings(
        **{**given, "size": Size(**given["size"]), "shares": tuple(given["shares"])}
    )
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(task["address"], 2, number)
    zero = jz.Zero(jz.make_mesh(nodes=2), getattr(jz, settings.preset)())
    steps = {name: _step(settings, zero, **plan) for name, plan in _plans(settings).items()}
    alone = _alone(settings)
    difference = _difference(settings, [run() for run in steps.values()])
    runs: dict[str, Callable] = {**steps, "alone": alone}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(settings.rounds + 1):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            multihost_utils.sync_global_devices(f"{name} {i}")
            start = time.perf_counter()
            jax.block_until_ready(runs[name]())
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    each = multihost_utils.process_allgather(np.asarray(seconds.pop("alone")))
    measured = {
        "seconds": seconds,
        "alone": np.asarray(each).tolist(),
        "alone_rows": settings.size.rows // 2,
        "gradient_difference": difference,
    }
    print(json.dumps(measured), flush=True)


def _plans(settings: Settings) -> dict[str, dict[str, Any]]:
    shares = {"shares": settings.shares, "microbatches": settings.microbatches}
    return {"equal": {"shares": (1, 1)}, "shares": shares}


def _tokens(settings: Settings) -> np.ndarray:
    shape = settings.size.rows, settings.size.length + 1
    return np.random.default_rng(0).integers(0, settings.size.vocabulary, shape)


def _weighted(size: Size) -> Callable:
    def weighted(params, batch):
        tokens, weights = batch  # every row that is computed counts
        return loss(size, params, tokens) * len(weights), len(weights)

    return weighted


def _step(
    settings: Settings, zero: jz.Zero, shares: tuple[int, int], microbatches: int = 1
) -> Callable:
    """A compiled step that returns loss and gradients."""
    options = {"shares": shares, "microbatches": microbatches}
    params = zero.init(lambda: init(settings.size, jax.random.key(0)))
    batch = jz.pad_batch(_tokens(settings), zero, **options)
    if batch[1].sum() != settings.size.rows or len(batch[1]) * sum(shares) != (
        settings.size.rows * 2 * max(shares)
    ):
        raise ValueError(f"{settings.size.rows} rows cannot be divided as {shares}")
    sharding = jax.sharding.NamedSharding(zero.mesh, zero.batch_spec)
    batch = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i]), batch
    )
    step = zero.value_and_grad(_weighted(settings.size), weighted=True, **options)
    compiled = jax.jit(step).lower(params, batch).compile()
    return lambda: compiled(params, batch)


def _alone(settings: Settings) -> Callable:
    """The same computation of half of the rows, by each node without the other."""
    device = jax.local_devices()[0]
    params = jax.device_put(init(settings.size, jax.random.key(0)), device)
    tokens = jax.device_put(_tokens(settings)[: settings.size.rows // 2], device)
    gradients = jax.value_and_grad(lambda p, t: loss(settings.size, p, t))
    compiled = jax.jit(gradients).lower(params, tokens).compile()
    return lambda: compiled(params, tokens)


def _difference(settings: Settings, results: list[tuple[Any, Any]]) -> float:
    """The largest relative difference from the gradients of all rows on one device, over leaves."""
    params, tokens = init(settings.size, jax.random.key(0)), _tokens(settings)
    oracle = jax.jit(jax.value_and_grad(lambda p, t: loss(settings.size, p, t)))(params, tokens)
    found = []
    for result in results:
        for x, want in zip(jax.tree.leaves(result), jax.tree.leaves(oracle), strict=True):
            shard = x.addressable_shards[0]
            want = np.asarray(want)[shard.index]
            found.append(float(np.linalg.norm(shard.data - want) / np.linalg.norm(want)))
    if max(found) > _TOLERANCE:
        raise AssertionError(f"gradients differ by {max(found):.2e} of their norm")
    return max(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        _node(json.loads(sys.argv[2]), int(sys.argv[3]))
    else:
        tyro.cli(main)
