"""Everything that the GPUs of a node can show, in one call of at most nine minutes: `make gpu`.

    python -m benchmarks.measured.gpu --directory OUT
    python -m benchmarks.measured.gpu --directory OUT --summary         # only the page, from rows
    python -m benchmarks.measured.gpu --directory OUT --part kernels    # only one part

Each part runs in a process of its own, which is ended when its share of the time is over; rows are
written as they are made. Where JAX finds several GPUs, their exchanges come first, and the last
parts get what is left of the nine minutes. At last it writes `gpu.md` and `gpu.png`, which sum the
rows up. Needs no network, and no tyro. Exits with 1 if a part failed, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.shared._rows import RESULTS

from . import gpu_step, host_copies, kernels, several_gpus, walked_step
from ._gpu_summary import write_summary

_ROOT = Path(__file__).resolve().parents[2]


def _tests(directory: Path) -> int:
    import pytest

    # The project's filters name a class of beartype, which may not be there.
    options = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
    return pytest.main(["tests/gpu", *options])


def _host_copies(directory: Path) -> None:
    host_copies.main(directory=directory)


def _gpu_step(directory: Path) -> None:
    gpu_step.main(rounds=8, directory=directory)


def _walked_step(directory: Path) -> None:
    walked_step.main(directory=directory)


def _kernels(directory: Path) -> None:
    # What says most comes first: what the time does not suffice for is the end.
    formats = ("int8", "int4", "int4-hadamard", "float8")
    kernels.main((64, 256, 4, 1000, 16), formats, repeats=8, directory=directory)


def _measured_rates(directory: Path) -> None:
    several_gpus.measure_rates(directory)


def _exchange_bits(directory: Path) -> int:
    return several_gpus.bits(directory=directory)


def _exchange_rates(directory: Path) -> int:
    return several_gpus.rates(directory=directory)


def _exchange_steps(directory: Path) -> int:
    return several_gpus.steps(directory=directory)


@dataclasses.dataclass(frozen=True)
class Part:
    """What one process runs, for at most so many seconds; it returns an exit status or None."""

    run: Callable[[Path], int | None]
    seconds: int
    of_several: bool = False  # whether it needs more than one GPU


SECONDS = 520  # of all parts; the page takes some more
_LEAST = 15  # seconds in which a part can do anything
# In the order of worth.
PARTS = {
    "measured_rates": Part(_measured_rates, 40),
    "exchange_bits": Part(_exchange_bits, 80, of_several=True),
    "exchange_rates": Part(_exchange_rates, 80, of_several=True),
    "exchange_steps": Part(_exchange_steps, 110, of_several=True),
    "tests": Part(_tests, 130),
    "walked_step": Part(_walked_step, 120),
    "kernels": Part(_kernels, 110),
    "gpu_step": Part(_gpu_step, 90),
    "host_copies": Part(_host_copies, 30),
}


def main(directory: Path, num_gpus: int) -> int:
    """Run the parts that so many GPUs can, and write the page; return how many failed."""
    directory.mkdir(parents=True, exist_ok=True)
    outcomes, end = [], time.perf_counter() + SECONDS
    for name, part in PARTS.items():
        if part.of_several and num_gpus < 2:
            continue
        seconds = min(part.seconds, int(end - time.perf_counter()))
        if seconds < _LEAST:
            outcome = {"part": name, "ended": "no time left", "seconds": 0, "last_line": ""}
        else:
            outcome = _outcome(name, seconds, directory)
        outcomes.append(outcome)
        (directory / "gpu.json").write_text(json.dumps(outcomes, indent=1))
    write_summary(directory)
    return sum(outcome["ended"] == "failed" for outcome in outcomes)


def _outcome(name: str, seconds: int, directory: Path) -> dict[str, object]:
    """Run a part in a process of its own; what became of it."""
    platforms = "cpu,cuda" if name == "tests" else "cuda,cpu"  # the default device comes first
    log, start = directory / f"gpu-{name}.log", time.perf_counter()
    command = [sys.executable, "-u", "-m", "benchmarks.measured.gpu"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--directory", str(directory), "--part", name],
            cwd=_ROOT,
            env={**os.environ, "JAX_PLATFORMS": platforms},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            ended = "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"ended after its {seconds} s"
    taken = round(time.perf_counter() - start)
    lines = [x for x in log.read_text(errors="replace").splitlines() if x and x[0] != "{"]
    last = lines[-1][:200] if lines else ""
    print(f"{name}: {ended}, {taken} s. {last}", flush=True)
    return {"part": name, "ended": ended, "seconds": taken, "last_line": last}


def _gpus() -> tuple[int, str]:
    """How many GPUs JAX finds; and if none, why."""
    check = "import jax; print(len(jax.devices('cuda')))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    if done.returncode == 0:
        return int(done.stdout.split()[-1]), ""
    return 0, (done.stderr.strip().splitlines() or ["?"])[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Tests and benchmarks of GPUs.")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="of rows, logs and page")
    parser.add_argument("--summary", action="store_true", help="only write the page again")
    parser.add_argument("--part", choices=list(PARTS), help="run one part, in this process")
    chosen = parser.parse_args()
    if chosen.summary:
        write_summary(chosen.directory)
    elif chosen.part:
        sys.exit(PARTS[chosen.part].run(chosen.directory))
    else:
        found, why = _gpus()
        if not found:
            print(
                f"`make gpu` needs an NVIDIA GPU, and JAX finds none here: {why}", file=sys.stderr
            )
            sys.exit(2)
        sys.exit(min(1, main(chosen.directory.absolute(), found)))
