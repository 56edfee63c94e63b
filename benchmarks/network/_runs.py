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
from ._local import METHODS

Peer = Literal[
    "jaxzero zero3",
    "jaxzero zeropp",
    "jaxzero zeropp4",
    "jaxzero pipeline",
    "jaxzero streaming_diloco",
    "jaxzero streaming_diloco100",
    "jaxzero diloco",
    "gspmd",
    "fsdp2",
    "deepspeed zero3",
    "deepspeed hpz",
    "deepspeed qwz",
    "deepspeed qgz",
]
Rate = Literal["none", "1gbit", "100mbit", "10mbit"]
SizeName = Literal["9m", "40m", "tiny"]
BYTES_PER_SECOND: dict[str, float | None] = {
    "none": None,
    "1gbit": 125e6,
    "100mbit": 12.5e6,
    "10mbit": 1.25e6,
}

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
TIMED_ROUNDS = {"9m": 2, "40m": 1, "tiny": 2}  # of local steps

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
        self._losses: dict[tuple[str, int, bool], list[list[float]]] = {}
        self._count = 0

    def measure(self, run: Run) -> dict[str, Any]:
        """Run it; what its row holds.

        Raises:
            Failed: a worker failed, or the run took too long.
        """
        references = self._references(run)
        self._hosts.shape(run.rate)
        spec = self._spec(run.size, run.microbatches)
        spec["bytes_per_second"] = BYTES_PER_SECOND[run.rate]
        if run.peer in METHODS:
            num = METHODS[run.peer].every * (WARMUP_STEPS + TIMED_ROUNDS[run.size])
            spec["tokens"] = self._tokens(run.size, run.microbatches, num)
            workers = self._work(run.peer, spec)
            return summary_of_rounds(run, workers, references)
        return summary(run, self._work(run.peer, spec), references[0])

    def _references(self, run: Run) -> list[list[float]]:
        """The losses of one device: on all rows; or for local steps on those of each host."""
        is_local = run.peer in METHODS
        key = run.size, run.microbatches, is_local
        if key not in self._losses:
            spec = self._spec(run.size, run.microbatches)
            files = [spec["tokens"]]
            if is_local:
                files = self._tokens_of_hosts(spec["tokens"])
            self._losses[key] = [
                self._work("single", spec | {"tokens": file})[0]["losses"] for file in files
            ]
        return self._losses[key]

    def _work(self, peer: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
        """What the first worker of each host measured."""
        self._count += 1
        results = self._folder / f"run{self._count}"
        results.mkdir()
        # Another port for each run: the last one's may still be closing.
        address = f"{ADDRESSES[0]}:{20000 + self._count % 10000}"
        file = results / "run.json"
        whole = {**spec, "peer": peer, "results": str(results), "address": address}
        file.write_text(json.dumps(whole))
        processes = self._start(peer, file)
        try:
            wait(processes, self._timeout_seconds, results)
        finally:
            self._hosts.stop()
        hosts = 1 if peer == "single" else HOSTS
        return [json.loads((results / f"{host}.json").read_text()) for host in range(hosts)]

    def _spec(self, size: str, microbatches: int) -> dict[str, Any]:
        weights = self._folder / f"{size}.npz"
        if not weights.exists():
            leaves: dict[str, Any] = make_weights(SIZES[size])
            np.savez(weights, **leaves)
        return {
            "size": dataclasses.asdict(SIZES[size]),
            "microbatches": microbatches,
            "hosts": HOSTS,
            "devices_per_host": DEVICES_PER_HOST,
            "learning_rate": LEARNING_RATE,
            "warmup": WARMUP_STEPS,
            "weights": str(weights),
            "tokens": self._tokens(size, microbatches, WARMUP_STEPS + TIMED_STEPS[size]),
            "timeout_seconds": self._timeout_seconds,
        }

    def _tokens(self, size: str, microbatches: int, steps: int) -> str:
        file = self._folder / f"{size}_{microbatches}_{steps}.npy"
        if not file.exists():
            np.save(file, make_tokens(SIZES[size], microbatches, steps))
        return str(file)

    def _tokens_of_hosts(self, file: str) -> list[str]:
        """The tokens in `file` in one file for each host; a host has neighbouring rows."""
        tokens = np.load(file)
        shape = *tokens.shape[:2], tokens.shape[2] // HOSTS, tokens.shape[3]
        rows = tokens.reshape(len(tokens), -1, tokens.shape[-1])
        files = [f"{file}.host{host}.npy" for host in range(HOSTS)]
        for name, part in zip(files, np.split(rows, HOSTS, axis=1), strict=True):
            np.save(name, part.reshape(shape))
        return files

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
        kind = "_torch" if is_torch else "_local" if peer in METHODS else "_jax"
        module = f"benchmarks.network.{kind}"
        started = {}
        for host in range(1 if peer == "single" else HOSTS):
            for device in range(DEVICES_PER_HOST if is_torch else 1):
                name = f"{host}.{device}"
                command = [sys.executable, "-m", module, str(file), str(host)]
                command += [str(device)] if is_torch else []
                with open(file.with_name(f"{name}.log"), "w") as log:
                    started[name] = self._hosts.start(host, command, env, stdout=log, stderr=log)
        return started


def wait(processes: dict[str, subprocess.Popen], seconds: float, logs: Path) -> None:
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
    seconds = workers[0]["seconds"]
    losses = workers[0]["losses"]
    kind = "quantised" if run.peer in QUANTISED else "exact"
    return {
        **_constants(run),
        **_times(seconds, workers, len(seconds)),
        "link": [worker["link"] for worker in workers],
        **_losses(losses, _deviation(losses, reference), _TOLERANCES[kind]),
    }


def summary_of_rounds(
    run: Run, workers: list[dict[str, Any]], references: list[list[float]]
) -> dict[str, float | Any]:
    """The same of rounds of local steps, whose steps alternate with those of hosts alone.

    A step takes the time of a round divided by its steps, on the slower host. Losses are means
    over hosts. Those of each host are compared with one device's on the host's rows, over as many
    steps as other peers make, which is before anything from the other host arrives.
    """
    exchanging, alone = ([worker[kind] for worker in workers] for kind in ("exchanging", "alone"))
    method = METHODS[run.peer]
    assert len(references[0]) <= method.steps_per_fragment
    deviation = max(
        _deviation(worker["losses"][: len(losses)], losses)
        for kind in (exchanging, alone)
        for worker, losses in zip(kind, references, strict=True)
    )
    steps = exchanging[0]["steps"]
    seconds, seconds_alone = (
        np.max([worker["seconds"] for worker in kind], axis=0).tolist()
        for kind in (exchanging, alone)
    )
    losses = np.mean([worker["losses"] for worker in exchanging], axis=0).tolist()
    ratios = [x / y for x, y in zip(seconds, seconds_alone, strict=True)]
    return {
        **_constants(run),
        "method": {name: getattr(method, name) for name in ("every", "fragments", "delay")}
        | {"codec": method.codec and str(method.codec), "mixing": method.mixing},
        **_times(seconds, exchanging, steps),
        "received_bytes_per_step_by_report": round(
            exchanging[0]["received_bytes_by_report"] / method.every
        ),
        "alone": _times(seconds_alone, alone, steps),
        "step_over_alone": [round(x, 4) for x in ratios],
        "step_over_alone_median": round(statistics.median(ratios), 4),
        **_losses(losses, deviation, _TOLERANCES["exact"]),
    }


def _constants(run: Run) -> dict[str, Any]:
    size = SIZES[run.size]
    return {
        "settings": dataclasses.asdict(run),
        "model": dataclasses.asdict(size),
        "parameters": sum(leaf.size for leaf in make_weights(size).values()),
        "hosts": HOSTS,
        "devices_per_host": DEVICES_PER_HOST,
        "tokens_per_step": run.microbatches * size.rows * size.length,
        "warmup_steps": WARMUP_STEPS,
    }


def _times(seconds: list[float], workers: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    return {
        "step_seconds": [round(x, 4) for x in seconds],
        "step_seconds_median": round(statistics.median(seconds), 4),
        "sent_bytes_per_step": [round(w["sent_bytes"] / steps) for w in workers],
        "busy_seconds_per_step": [round(w["busy_seconds"] / steps, 4) for w in workers],
    }


def _losses(losses: list[float], deviation: float, tolerance: float) -> dict[str, Any]:
    return {
        "losses": [round(x, 7) for x in losses],
        "loss_first": round(losses[0], 7),
        "loss_last": round(losses[-1], 7),
        "loss_deviation": float(f"{deviation:.3g}"),
        "agrees": deviation <= tolerance,
    }


def _deviation(losses: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
