"""Kill a process of a run at random moments, and check that no progress is lost.

    python -m benchmarks.faults.kill --kills 20

`examples/several_hosts.py` trains on two hosts of this machine under `jaxzero launch --restart`.
In each run a randomly chosen process gets SIGKILL at a random moment, in every second run shortly
after a save has begun. The launcher restarts the run. A row records if the final parameters are
bitwise equal to those of a run without a kill, and if the run resumed from a checkpoint at least
as new as the last one that was reported as saved, before the kill or after it.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from pathlib import Path

import tyro

from benchmarks.shared._rows import append_row, is_current, read_rows

from ._kills import HOSTS, SAVE_EVERY, STEPS, random_kill, train

_CODE = ("jaxzero", "examples/several_hosts.py", "benchmarks/faults")


def main(kills: int = 20) -> None:
    """Measure, and append a row for each kill; those of the code that is here are not done again.

    Args:
        kills: how many.
    """
    settings = {"steps": STEPS, "save_every": SAVE_EVERY, "hosts": HOSTS}
    rows = [row for row in read_rows("kill", settings) if is_current(row, *_CODE)]
    done = {row["results"]["kill"]["seed"] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        expected = train(run, None).digest
        for seed in range(kills):
            if seed in done:
                continue
            kill = random_kill(seed, during_save=bool(seed % 2))
            after = train(run, kill)
            results = {
                "settings": settings,
                "kill": {"seed": seed, **dataclasses.asdict(kill)},
                "same_bits": after.digest == expected,
                "last_reported": after.saved,
                "resumed_after": after.resumed,
                "restarted": after.restarted,
                "exit_status": after.status,
                "nothing_lost": after.nothing_lost,
                "was_saving": after.was_saving,
                "seconds_to_next_step": after.seconds and round(after.seconds, 2),
            }
            rows.append(append_row("kill", results))
    _summarise([row["results"] for row in rows])


def _summarise(results: list[dict]) -> None:
    seconds = [result["seconds_to_next_step"] for result in results]
    known = [x for x in seconds if x is not None]
    print(
        f"{len(results)} kills, {sum(r['was_saving'] for r in results)} during a save: "
        f"{sum(r['restarted'] for r in results)} started again, "
        f"{sum(r['same_bits'] for r in results)} ended with the same bits, "
        f"{sum(not r['nothing_lost'] for r in results)} lost a checkpoint that was reported; "
        f"median {statistics.median(known):.1f} s to the next step"
    )


if __name__ == "__main__":
    tyro.cli(main)
