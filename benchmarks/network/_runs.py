"""Execute one run of the race over a slow network: new processes on two hosts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.shared._peers import Size

from ._hosts import ADDRESSES, Hosts

Peer = Literal[
    "jaxzero zero3",
    "jaxzero zeropp",
    "jaxzero zeropp4",
    "gspmd",
    "fsdp2",
    "deepspeed zero3",
    "deepspeed hpz",
    "deepspeed qwz",
    "deepspeed qgz",
]
Rate = Literal["none", "1gbit", "100mbit"]
SizeName = Literal["9m", "40m", "tiny"]

HOSTS = 2
DEVICES_PER_HOST = 2
LEARNING_RATE = 2e-4
WARMUP_STEPS = 1
ONLY_ON_GPUS = ("deepspeed qwz", "deepspeed qgz")
QUANTISED = ("jaxzero zeropp", "jaxzero zeropp4")

_BATCH = {"rows": 8, "length": 64, "layers_in": "loop", "remat": False}
SIZES: dict[str, Size] = {
    "9m": Size(layers=10, width=256, heads=4, vocabulary=4096, **_BATCH),
    "40m": Size(layers=12, width=512, heads=8, vocabulary=4096, **_BATCH),
    "tiny": Size(layers=2, width=32, heads=2, vocabulary=64, **_BATCH),
}
TIMED_STEPS = {"9m": 3, "40m": 2, "tiny": 3}

# How far a curve of losses may lie from that of one device, as a part of it. In float32 sums of
# some thousand terms in another order differ by 1e-6 of themselves; Adam divides gradients by
# their size, so no error grows but that of elements that hardly matter. 4 to 8 bits on the wire
# move single gradients by 10%, and with it what Adam's first steps change of the loss: a tenth of
# it with 9M parameters, a third with 40M, where they overshoot. Errors of single gradients are
# of both signs and mostly cancel: allowed is a tenth of what the smaller change lets expect.
_TOLERANCES = {"exact": 2e-5, "quantised": 1e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Which run: a row's `settings`."""

    peer: Peer
    size: SizeName
    microbatches: int
    rate: Rate
    round: int


class Failed(RuntimeError):
    """A worker ended with an error; its message is the worker's."""


class Runner:
    """Makes runs on two hosts, in a folder of its own for weights, data and compiled programs.

    Compiled programs are kept for the next run with the same peer, so that fresh processes
    start quickly; no compilation is timed in any case.
    """

    def __init__(self, hosts: Hosts, folder: Path, timeout_seconds: int):
        self._hosts = hosts
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._references: dict[tuple[str, int], list[float]] = {}
        self._count = 0

    def measure(self, run: Run) -> dict[str, Any]:
        """Run it; what its row holds.

        Raises:
            Failed: a worker failed, or the run took too long.
        """
        reference = self._reference(run.size, run.microbatches)
        self._hosts.shape(run.rate)
        workers = self._work(run.peer, run.size, run.microbatches)
        return summary(run, workers, reference)

    def _reference(self, size: str, microbatches: int) -> list[float]:
        key = size, microbatches
        if key not in self._references:
            (worker,) = self._work("single", size, microbatches)
            self._references[key] = worker["losses"]
        return self._references[key]

    def _work(self, peer: str, size: str, microbatches: int) -> list[dict[str, Any]]:
        """What the first worker of each host measured."""
        self._count += 1
        results = self._folder / f"run{self._count}"
        results.mkdir()
        spec = self._spec(peer, size, microbatches, results)
        file = results / "run.json"
        file.write_text(json.dumps(spec))
        processes = self._start(peer, file)
        try:
            _wait(processes, self._timeout_seconds, results)
        finally:
            self._hosts.stop()
        hosts = 1 if peer == "single" else HOSTS
        return [json.loads((results / f"{host}.json").read_text()) for host in range(hosts)]

    def _spec(self, peer: str, size: str, microbatches: int, results: Path) -> dict[str, Any]:
        weights = self._folder / f"{size}.npz"
        if not weights.exists():
            leaves: dict[str, Any] = make_weights(SIZES[size])
            np.savez(weights, **leaves)
        tokens = self._folder / f"{size}_{microbatches}.npy"
        if not tokens.exists():
            np.save(
                tokens, make_tokens(SIZES[size], microbatches, WARMUP_STEPS + TIMED_STEPS[size])
            )
        return {
            "peer": peer,
            "size": dataclasses.asdict(SIZES[size]),
            "microbatches": microbatches,
            "hosts": HOSTS,
            "devices_per_host": DEVICES_PER_HOST,
            "learning_rate": LEARNING_RATE,
            "warmup": WARMUP_STEPS,
            "weights": str(weights),
            "tokens": str(tokens),
            "results": str(results),
            # Another port for each run: the last one's may still be closing.
            "address": f"{ADDRESSES[0]}:{20000 + self._count % 10000}",
            "timeout_seconds": self._timeout_seconds,
        }

    def _start(self, peer: str, file: Path) -> dict[str, subprocess.Popen]:
        root = Path(__file__).resolve().parents[2]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled")}  # unless given
        env = (
            compiled
            | os.environ
            | {
                "PYTHONPATH": os.pathsep.join(paths),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "DS_ACCELERATOR": "cpu",
            }
        )
        is_torch = peer == "fsdp2" or peer.startswith("deepspeed")
        module = f"benchmarks.network.{'_torch' if is_torch else '_jax'}"
        started = {}
        for host in range(1 if peer == "single" else HOSTS):
            for device in range(DEVICES_PER_HOST if is_torch else 1):
                name = f"{host}.{device}"
                command = [sys.executable, "-m", module, str(file), str(host)]
                command += [str(device)] if is_torch else []
                with open(file.with_name(f"{name}.log"), "w") as log:
                    started[name] = self._hosts.start(host, command, env, stdout=log, stderr=log)
        return started


def _wait(processes: dict[str, subprocess.Popen], seconds: float, logs: Path) -> None:
    """Until all have ended well; the first that has not, or a lack of time, is the end."""
    deadline = time.monotonic() + seconds
    while True:
        codes = {name: process.poll() for name, process in processes.items()}
        for name, code in codes.items():
            if code:
                raise Failed(f"worker {name} ended with {code}: {last_error(logs / f'{name}.log')}")
        if all(code == 0 for code in codes.values()):
            return
        if time.monotonic() > deadline:
            raise Failed(f"no end within {seconds:.0f} s")
        time.sleep(0.1)


def last_error(log: Path) -> str:
    """The last error that a worker printed, in one line, without folders of this machine."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"(\[.*\]: ?)?[\w.]*(Error|Exception)\b", line)]
    line = (errors or [line for line in lines if line.strip()] or ["nothing was printed"])[-1]
    return re.sub(r"(/[\w.+-]+)+/", "", line).strip()[:400]


# What every peer gets.


def make_weights(size: Size) -> dict[str, np.ndarray]:
    """The initial parameters, float32, named as in the tree of `_peers.init`."""
    generator = np.random.default_rng(0)
    width = size.width

    def normal(rows: int, columns: int, scale: float) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32)

    leaves = {"embedding": normal(size.vocabulary, width, 0.02)}
    for i in range(size.layers):
        for name in ("q", "k", "v", "o"):
            leaves[f"layers.{i}.{name}"] = normal(width, width, width**-0.5)
        leaves[f"layers.{i}.up"] = normal(width, 4 * width, width**-0.5)
        leaves[f"layers.{i}.down"] = normal(4 * width, width, (4 * width) ** -0.5)
        for name in ("norm1", "norm2"):
            leaves[f"layers.{i}.{name}"] = np.ones(width, np.float32)
    return leaves


def make_tokens(size: Size, microbatches: int, steps: int) -> np.ndarray:
    """int32 `[steps, microbatches, rows, length + 1]`; some are rare, which can be learnt."""
    shape = (steps, microbatches, size.rows, size.length + 1)
    share = 1 / np.arange(1, size.vocabulary + 1)
    generator = np.random.default_rng(1)
    return generator.choice(size.vocabulary, shape, p=share / share.sum()).astype(np.int32)


# What a row holds.


def summary(
    run: Run, workers: list[dict[str, Any]], reference: list[float]
) -> dict[str, float | Any]:
    """Times, bytes and losses of one run, from what the first process of each host measured."""
    size = SIZES[run.size]
    seconds = workers[0]["seconds"]
    losses = workers[0]["losses"]
    deviation = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    kind = "quantised" if run.peer in QUANTISED else "exact"
    return {
        "settings": dataclasses.asdict(run),
        "model": dataclasses.asdict(size),
        "parameters": sum(leaf.size for leaf in make_weights(size).values()),
        "hosts": HOSTS,
        "devices_per_host": DEVICES_PER_HOST,
        "tokens_per_step": run.microbatches * size.rows * size.length,
        "warmup_steps": WARMUP_STEPS,
        "step_seconds": [round(x, 4) for x in seconds],
        "step_seconds_median": round(statistics.median(seconds), 4),
        "sent_bytes_per_step": [round(w["sent_bytes"] / len(seconds)) for w in workers],
        "busy_seconds_per_step": [round(w["busy_seconds"] / len(seconds), 4) for w in workers],
        "losses": [round(x, 7) for x in losses],
        "loss_first": round(losses[0], 7),
        "loss_last": round(losses[-1], 7),
        "loss_deviation": float(f"{deviation:.3g}"),
        "agrees": deviation <= _TOLERANCES[kind],
    }
