"""Step time and bytes per device: single device, GSPMD FSDP and jaxzero, side by side.

    python -m benchmarks.measured.step_time

On fake devices of a CPU a time says nothing about GPUs. What is reported is the ratio of
peers that ran in turn in one process, round by round, and its spread.
"""

from __future__ import annotations

import statistics
import time

import jax
import tyro

import jaxzero as jz
from benchmarks.shared._peers import Peer, Size, device_bytes, peers
from benchmarks.shared._rows import append_row


def _seconds(peer: Peer) -> float:
    start = time.perf_counter()
    jax.block_until_ready(peer.compiled(*peer.state, peer.batch))
    return time.perf_counter() - start


def main(size: Size = Size(), nodes: int = 2, rounds: int = 15) -> None:  # noqa: B008
    """Measure and append a row.

    Args:
        size: the model.
        nodes: of the mesh.
        rounds: how often each peer runs a step, in turn.
    """
    zero = jz.Zero(jz.make_mesh(nodes))
    all_peers = peers(size, zero, ("single", "gspmd", "jaxzero"))
    times: dict[str, list[float]] = {peer.name: [] for peer in all_peers}
    for i in range(rounds + 1):
        order = all_peers if i % 2 else all_peers[::-1]
        for peer in order:
            seconds = _seconds(peer)
            if i:  # the first round warms up
                times[peer.name].append(seconds)
    results = {"nodes": nodes, "devices": jax.device_count(), "rounds": rounds, **vars(size)}
    for peer in all_peers:
        ratios = [a / b for a, b in zip(times[peer.name], times["gspmd"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        results[peer.name] = {
            "state_bytes_per_device": device_bytes(peer),
            "time_over_gspmd_median": round(statistics.median(ratios), 3),
            "time_over_gspmd_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            "seconds_median": round(statistics.median(times[peer.name]), 4),
        }
    append_row("step_time", results)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    tyro.cli(main)
