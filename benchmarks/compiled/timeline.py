"""Predict the timeline of a compiled program that was written to a file.

    python -m benchmarks.compiled.timeline step.hlo                  # from aot.py --keep-hlo
    python -m benchmarks.compiled.timeline step.hlo --rates.node 12.5e9

It is a model, for comparing programs: nothing is run. Rates are those of the last row that `make
gpu` appended to `measured_rates.jsonl` in `benchmarks/results/`, and stated where there is none.
The first line says which were used.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from benchmarks.shared._rows import measured_rates
from jaxzero._hlo import Rates, timeline


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Predict what a compiled program takes."""

    # The text of a scheduled module (`compiled.as_text()`).
    program: tyro.conf.Positional[Path]
    # Of the machine.
    rates: Rates = dataclasses.field(default_factory=lambda: measured_rates(Rates())[0])


def main(settings: Timeline) -> None:
    """Print the timeline and the rates that it was predicted with."""
    line = timeline(settings.program.read_text(), settings.rates)
    print(f"rates               {_origin(settings.rates, *measured_rates(Rates()))}")
    print(f"step                {line.seconds:.4f} s")
    print(f"  computing         {line.compute_seconds:.4f} s")
    print(f"  waiting           {line.exposed_seconds:.4f} s")
    if line.host_seconds:
        print(f"  waiting for host  {line.host_exposed_seconds:.4f} s")
    print(f"collectives take    {line.communication_seconds:.4f} s, {line.hidden_share:.1%} hidden")
    for name, num in sorted(line.launches.items()):
        print(f"  {name:18}{num}")
    print(f"into a node         {line.node_bytes / 2**30:.3f} GiB")
    print(f"to a device in it   {line.local_bytes / 2**30:.3f} GiB")
    if line.host_seconds:
        print(f"host copies take    {line.host_seconds:.4f} s, {line.host_hidden_share:.1%} hidden")
        print(f"from the host       {line.host_bytes_in / 2**30:.3f} GiB")
        print(f"to the host         {line.host_bytes_out / 2**30:.3f} GiB")


def _origin(rates: Rates, default: Rates, row: dict | None) -> str:
    """Which rates were measured, on what and when; stated; or given by the caller.

    Args:
        rates: those that were used.
        default: those without the caller's.
        row: has the measured ones of `default`; None: all are stated.
    """
    used, defaults = dataclasses.asdict(rates), dataclasses.asdict(default)
    given = [name for name in used if used[name] != defaults[name]]
    origin = "stated"
    if row is not None:
        measured = [name for name in used if name in row["results"] and name not in given]
        where = f"{row['hardware']['accelerator']}, {row['date'][:10]}"
        origin = f"measured on {where}: {', '.join(measured) or 'none'}; the others stated"
    return origin + (f"; given: {', '.join(given)}" if given else "")


if __name__ == "__main__":
    main(tyro.cli(Timeline))
