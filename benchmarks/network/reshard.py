"""Time `jz.reshard` between two processes with a slow network: ZeRO's shards to tensor parallelism.

    nice -n -10 python -m benchmarks.network.reshard
    nice -n -10 python -m benchmarks.network.reshard --sizes 200m --sent-as bfloat16 --rounds 1

Two network namespaces on one machine are the hosts (`_hosts.py`: Linux, root, iproute2), with two
devices each. A model of 40M or 200M parameters in float32 goes from the shards of ZeRO over all
four devices to tensor parallelism over `local`, replicated over `node`, and back by `zero.shard`.
Bytes are those of the interface; the lower bound of the time is the lower bound of the bytes at the
link's rate. A row also has the CPU seconds of each process and the load of the machine, which tell
whether the link bounds the time or the cores.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.shared._rows import append_row

from ._hosts import ADDRESSES, Hosts
from ._runs import DEVICES_PER_HOST, HOSTS, Rate, wait

_BYTES_PER_SECOND = {"1gbit": 125e6, "100mbit": 12.5e6, "10mbit": 1.25e6}


def main(
    sizes: Sequence[Literal["40m", "200m"]] = ("40m", "200m"),
    sent_as: Sequence[Literal["float32", "bfloat16", "int8"]] = ("float32", "bfloat16"),
    rate: Rate = "1gbit",
    rounds: int = 3,
    repeats: int = 5,
    timeout_seconds: int = 600,
) -> None:
    """Append a row for each size, type and round.

    Args:
        sizes: of the model, in parameters.
        sent_as: the type of what is sent.
        rate: of the link, in each direction.
        rounds: how often all of them run, each time in new processes.
        repeats: of each move in a run, after one that compiles.
        timeout_seconds: of a run.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        hosts.shape(rate)
        count = 0
        for number in range(rounds):
            for size in sizes:
                for kind in sent_as:
                    count += 1
                    settings = {"size": size, "sent_as": kind, "rate": rate, "round": number}
                    results = Path(folder, str(count))
                    results.mkdir()
                    run = {**settings, "repeats": repeats, "timeout_seconds": timeout_seconds}
                    run["address"] = f"{ADDRESSES[0]}:{20000 + count}"
                    append_row("reshard_network", summary(settings, _measure(hosts, run, results)))


def _measure(hosts: Hosts, run: dict[str, Any], results: Path) -> list[dict[str, Any]]:
    """What the process of each host measured."""
    shared = {"peer": "reshard", "hosts": HOSTS, "devices_per_host": DEVICES_PER_HOST}
    file = results / "run.json"
    file.write_text(json.dumps({**run, **shared, "results": str(results)}))
    command = [sys.executable, "-m", "benchmarks.network._reshard", str(file)]
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = {}
    try:
        for host in range(HOSTS):
            with open(results / f"{host}.log", "w") as log:
                process = hosts.start(host, [*command, str(host)], env, stdout=log, stderr=log)
                started[str(host)] = process
        wait(started, run["timeout_seconds"], results)
    finally:
        hosts.stop()
    return [json.loads((results / f"{host}.json").read_text()) for host in range(HOSTS)]


def summary(settings: dict[str, Any], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row holds, of what the processes of both hosts measured."""
    least = workers[0]["least_into_node_bytes"]
    row: dict[str, Any] = {
        "settings": settings,
        "into_node_bytes_planned": workers[0]["into_node_bytes"],
        "least_into_node_bytes": least,
        "programs": workers[0]["programs"],
        "load_average": round(os.getloadavg()[0], 1),
    }
    for way in ("there", "back"):
        moves = [worker[way] for worker in workers]
        seconds = [max(x["seconds"] for x in each) for each in zip(*moves, strict=True)]
        row[way] = {
            "seconds": [round(x, 4) for x in seconds],
            "seconds_median": round(statistics.median(seconds), 4),
            "sent_bytes": [round(statistics.median(x["sent_bytes"] for x in w)) for w in moves],
            "cpu_seconds": [
                round(statistics.median(x["cpu_seconds"] for x in w), 3) for w in moves
            ],
        }
    row["least_over_sent_bytes"] = round(least / max(row["there"]["sent_bytes"]), 4)
    if (rate := _BYTES_PER_SECOND.get(settings["rate"])) is not None:
        row["least_seconds"] = round(least / rate, 4)
        row["seconds_over_least"] = round(row["there"]["seconds_median"] * rate / least, 3)
    return row


if __name__ == "__main__":
    tyro.cli(main)
