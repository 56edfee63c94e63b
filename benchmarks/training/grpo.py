"""Rewards of `examples/grpo_digits.py` over several seeds, and the time of each part of a step.

    python -m benchmarks.training.grpo

One row for each seed. Times are of a CPU with fake devices: they compare the parts of one run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks.shared._rows import append_row, rounded

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_digits.py"


def main(seeds: Sequence[int] = (0, 1, 2), steps: int = 60) -> None:
    """Train with each seed, and append a row.

    Args:
        seeds: of weights, prompts and samples.
        steps: of GRPO.
    """
    example = _module()
    for seed in seeds:
        settings = example.Settings(seed=seed, steps=steps)
        began = time.perf_counter()
        result = example.learn(settings)
        rewards = np.array(result.rewards)
        tenth = max(1, steps // 10)
        append_row(
            "grpo",
            {
                "settings": dataclasses.asdict(settings),
                "reward_in_first_tenth": rounded(rewards[:tenth].mean()),
                "reward_in_last_tenth": rounded(rewards[-tenth:].mean()),
                "rewards": [rounded(x) for x in rewards],
                "median_ms": {name: rounded(ms) for name, ms in result.ms.items()},
                "seconds": round(time.perf_counter() - began, 1),
            },
        )


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("grpo_digits", _EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    tyro.cli(main)
