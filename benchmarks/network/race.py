r"""The race over a slow network: jaxzero, GSPMD, PyTorch FSDP2 and DeepSpeed on two small hosts.

    python -m benchmarks.network.race run                       # all runs that have no row yet
    python -m benchmarks.network.race run --sizes 9m --rates 100mbit --microbatches 1
    python -m benchmarks.network.race run --rates 100mbit 10mbit --microbatches 1 --peers \
        "jaxzero streaming_diloco" "jaxzero diloco" "jaxzero zeropp"   # local steps
    python -m benchmarks.network.race run --sizes 40m --rates 10mbit --microbatches 1 --peers \
        "jaxzero streaming_diloco100" --timeout-seconds 3600   # rounds of 100 steps: four of them
    python -m benchmarks.network.race run --rates 100mbit --peers "jaxzero pipeline"
    python -m benchmarks.network.race table                     # of the rows, as Markdown
    python -m benchmarks.network.race plot                      # its figure

Two network namespaces on one machine are the hosts (`_hosts.py`: Linux, root, iproute2). All
peers train the same decoder from the same weights on the same tokens in float32, with Adam, on
two devices of each host: a JAX peer has one process on a host, a PyTorch peer one for each
device, with one thread. A batch is small, 512 tokens for each micro-batch of all devices, so
that the network is what is measured. Every run is fresh processes; in a round all peers take
turns, in the opposite order in the next. Their losses are compared with those of one device.

What each peer does with micro-batches is what it does unasked. jaxzero gathers and reduces
between hosts once for all of them under hpZ; the others once for each. A host is a stage of
`jz.pipeline`, whose micro-batches have one row of a device, and whose layers are a stack that a
scan runs through; those of the others are a list. jaxzero is compiled with
`jz.compiler_options`, GSPMD as XLA does by default.

A run of local steps (`_local.py`) alternates rounds with as many steps without exchange between
hosts, in the same processes; its row has the times of both and their ratio.

The environment: Python 3.11; `pip install torch` (a CPU build), then `pip install -e
".[benchmarks]"`, then `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8`, which
needs `setuptools` and `wheel` and finds torch where it is. Without a package, leave its peers
out. A folder for compiled programs in `JAX_COMPILATION_CACHE_DIR` makes an invocation start
quicker; no compilation is timed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tyro

from benchmarks.shared._rows import RESULTS, append_row, is_current, read_rows

from ._hosts import Hosts
from ._runs import ONLY_ON_GPUS, Failed, Peer, Rate, Run, Runner, SizeName
from ._summary import NAME, draw, print_table

PEERS: tuple[Peer, ...] = (
    "jaxzero zero3",
    "gspmd",
    "jaxzero zeropp",
    "fsdp2",
    "jaxzero zeropp4",
    "deepspeed zero3",
    "deepspeed hpz",
)
_PICTURE = RESULTS / "slow_network.png"
_SHARED = ("benchmarks/shared/_peers.py", "benchmarks/shared/_gspmd.py")
_SCRIPTS = (
    f"benchmarks/network/_{name}.py" for name in ("hosts", "jax", "link", "local", "runs", "torch")
)
_CODE = ("jaxzero", *_SHARED, *_SCRIPTS)


def run(
    sizes: Sequence[SizeName] = ("9m", "40m"),
    rates: Sequence[Rate] = ("100mbit", "1gbit", "none"),
    microbatches: Sequence[int] = (1, 4),
    peers: Sequence[Peer] = PEERS,
    first_round: int = 0,
    rounds: int = 5,
    timeout_seconds: int = 900,
    again: bool = False,
) -> None:
    """Make all runs that have no row yet, and append a row as each ends.

    Args:
        sizes: of the model, in parameters.
        rates: of the link, in each direction.
        microbatches: of an optimizer step.
        peers: those to run; deepspeed qwz and qgz, which cannot, say why in their row.
        first_round: the number of the first round; rows of earlier ones stay out of it.
        rounds: how often all of them run.
        timeout_seconds: of a run.
        again: make runs anew whose row is of other code than what is here.
    """
    wanted = list(plan(sizes, rates, microbatches, peers, range(first_round, first_round + rounds)))
    failed = []
    with _exit_at_sigterm(), tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        runner = Runner(hosts, Path(folder), timeout_seconds)
        for one in wanted:
            if is_done(one, again=again):
                continue
            start = time.monotonic()
            try:
                row = runner.measure(one)
            except Failed as error:
                if one.peer not in ONLY_ON_GPUS:
                    failed.append(one)
                    print(f"{one}: {error}", file=sys.stderr, flush=True)
                    continue
                row = {"settings": vars(one), "not_run": str(error)}
            append_row(NAME, {**row, "run_seconds": round(time.monotonic() - start, 1)})
    if failed:
        sys.exit(f"{len(failed)} of {len(wanted)} runs failed.")


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that no host is left behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def plan(
    sizes: Sequence[SizeName],
    rates: Sequence[Rate],
    microbatches: Sequence[int],
    peers: Sequence[Peer],
    rounds: Sequence[int],
) -> Iterator[Run]:
    """The runs in their order: rounds outermost, and peers in turn within them, there and back."""
    for number in rounds:
        for size in sizes:
            for rate in rates:
                for count in microbatches:
                    for peer in peers[:: -1 if number % 2 else 1]:
                        yield Run(peer=peer, size=size, microbatches=count, rate=rate, round=number)


def is_done(one: Run, *, again: bool = False) -> bool:
    """Whether the run has a row; with `again`, one of the code that is here."""
    rows = read_rows(NAME, vars(one))
    return any(is_current(row, *_CODE) for row in rows) if again else bool(rows)


def table(rounds: Sequence[int] = ()) -> None:
    """Print medians with quartiles, speed-ups, bytes and use of the link, as Markdown.

    Args:
        rounds: those to take; all if none is given.
    """
    rows = read_rows(NAME)
    if rounds:
        rows = [row for row in rows if row["results"]["settings"]["round"] in rounds]
    print_table(rows)


def plot(size: SizeName = "9m", file: Path = _PICTURE) -> None:
    """Draw step times against bandwidth.

    Args:
        size: of the model.
        file: the picture.
    """
    draw(read_rows(NAME), size, file)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "table": table, "plot": plot})
