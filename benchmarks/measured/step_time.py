"""Step time and bytes per device: single device, GSPMD FSDP and jaxzero, side by side.

    python -m benchmarks.measured.step_time
    python -m benchmarks.measured.step_time --size.layers 50 --size.width 64 --names gspmd jaxzero

On fake devices of a CPU a time says nothing about GPUs. What is reported is the ratio of
peers that ran in turn in one process, round by round, and its spread: of wall time, and of the
CPU time of all threads, which other load on the machine changes less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import jax
import tyro

import jaxzero as jz
from benchmarks.shared._peers import Peer, Size, device_bytes, peers
from benchmarks.shared._rows import append_row


def _seconds(peer: Peer) -> tuple[float, float]:
    """Of a step: on the clock, and of the CPU."""
    start, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(peer.compiled(*peer.state, peer.batch))
    return time.perf_counter() - start, time.process_time() - cpu


def main(
    size: Size = Size(),  # noqa: B008
    nodes: int = 2,
    rounds: int = 15,
    names: Sequence[str] = ("single", "gspmd", "jaxzero"),
) -> None:
    """Measure and append a row.

    Args:
        size: the model.
        nodes: of the mesh.
        rounds: how often each peer runs a step, in turn.
        names: of the peers; "gspmd" is what the others are compared with.
    """
    zero = jz.Zero(jz.make_mesh(nodes))
    all_peers = peers(size, zero, tuple(names))
    times: dict[str, list[tuple[float, float]]] = {peer.name: [] for peer in all_peers}
    for i in range(rounds + 1):
        order = all_peers if i % 2 else all_peers[::-1]
        for peer in order:
            seconds = _seconds(peer)
            if i:  # the first round warms up
                times[peer.name].append(seconds)
    leaves = len(jax.tree.leaves(all_peers[0].state[0]))
    results = {"nodes": nodes, "devices": jax.device_count(), "rounds": rounds, **vars(size)}
    results["leaves"] = leaves
    for peer in all_peers:
        pairs = list(zip(times[peer.name], times["gspmd"], strict=True))
        ratios = [a / b for (a, _), (b, _) in pairs]
        quartiles = statistics.quantiles(ratios, n=4)
        results[peer.name] = {
            "state_bytes_per_device": device_bytes(peer),
            "time_over_gspmd_median": round(statistics.median(ratios), 3),
            "time_over_gspmd_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            "cpu_over_gspmd_median": round(statistics.median(a / b for (_, a), (_, b) in pairs), 3),
            "seconds_median": round(statistics.median(x for x, _ in times[peer.name]), 4),
        }
    append_row("step_time", results)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there are no GPUs
    tyro.cli(main)
