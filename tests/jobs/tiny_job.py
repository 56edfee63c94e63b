"""The training job on an encoder so small that it compiles in seconds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from jaxzero import jobs
from tests.interop import tiny_checkpoint

WIDTH = 2**12  # times the hidden size of 16: four times the least that is quantised
OPTIMIZATION = jobs.Optimization(steps=4, batch_size=16, learning_rate=1e-2, warmup_steps=1)


def write_checkpoint(directory: Path) -> Path:
    """One layer; its perceptron is wide enough to travel in blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_checkpoint, "INTERMEDIATE", WIDTH)
        held = {name: x for name, x in tiny_checkpoint.tensors().items() if ".layer.1." not in name}
    held["encoder.layer.0.output.dense.weight"] *= (tiny_checkpoint.INTERMEDIATE / WIDTH) ** 0.5
    return tiny_checkpoint.write(directory, held, num_hidden_layers=1, intermediate_size=WIDTH)


def write_data(directory: Path) -> Path:
    """Modules of five pairs each."""
    for module in range(20):
        (directory / f"module_{module}.py").write_text(
            "\n".join(
                f'def f():\n    "Return {name} of {module} quickly."\n'
                f"    return compute_the_{name}_of(argument_{module}, {name})\n"
                for name in ("width", "height", "name", "colour", "weight")
            )
        )
    return directory


def make_settings(checkpoint: Path, data: Path, runs: Path) -> jobs.Train:
    """Of a run called `run`."""
    return jobs.Train(
        checkpoint=checkpoint,
        data=jobs.Data(data=data, max_tokens=10),
        optimization=OPTIMIZATION,
        run=jobs.Run(name="run", runs=runs, save_every=2),
    )


def with_run(settings: jobs.Train, **changes) -> jobs.Train:
    """The same with other settings of the run."""
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, **changes))


def with_wire(settings: jobs.Train, wire: jobs.Wire) -> jobs.Train:
    """The same with another wire."""
    return dataclasses.replace(settings, sharding=jobs.Sharding(wire=wire))


def losses(directory: Path) -> list[float]:
    """Of every step of the run in `directory`."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


def exported(directory: Path) -> dict[str, bytes]:
    """The bits of what a run exported, by name."""
    tensors = load_file(directory / "export" / "model.safetensors")
    return {name: array.tobytes() for name, array in tensors.items()}
