"""The benchmarks of the kernels write their rows; how fast a CPU is says nothing."""

from __future__ import annotations

import jax
import pytest

from benchmarks.measured import gpu_step, kernels

from .test_kernels import needs_mosaic


@needs_mosaic
@pytest.mark.parametrize("operation", kernels.OPERATIONS)
def test_a_row_for_each_operation(operation, tmp_path):
    (row,) = kernels.main([0.02], ["int8"], [operation], 1, interpret=True, directory=tmp_path)
    results = row["results"]
    assert (tmp_path / "kernels.jsonl").exists()
    assert results["operation"] == operation and results["interpreted"]
    numbers = results["numbers"]
    message = numbers + numbers // 256 * 2
    moved = {
        "quantize": 2 * numbers + message,
        "dequantize": message + 2 * numbers,
        "dequantize_sum": 8 * message + 4 * numbers,
        "dequantize_sum_requantize": 8 * message + message,
    }
    assert results["moved_bytes"] == moved[operation]
    for name in ("copy", "xla", "mosaic_gpu"):
        assert results[f"{name}_gb_per_s"] > 0


@pytest.mark.ci
def test_a_step_is_measured_against_plain_jit(monkeypatch):
    rows = []
    monkeypatch.setattr(
        gpu_step, "append_row", lambda name, results, directory: rows.append(results)
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        peers = ("jit", "jaxzero", "fake-wire-xla")
        gpu_step.main("tiny", peers, batch=2, tokens=16, rounds=2, steps=1)
    (row,) = rows
    assert row["jit"]["time_over_first_quartiles"] == [1, 1]
    assert all(row[name]["step_ms_median"] > 0 for name in peers)
