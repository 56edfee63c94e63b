"""`benchmarks/kernels.py` writes its rows; how fast an interpreter is says nothing."""

from __future__ import annotations

import kernels
import pytest
from test_kernels import needs_mosaic


@needs_mosaic
@pytest.mark.parametrize("operation", kernels.OPERATIONS)
def test_a_row_for_each_operation(operation, tmp_path):
    options = ["--sizes-mb", "0.02", "--formats", "int8", "--operations", operation]
    (row,) = kernels.main([*options, "--interpret", "--repeats", "1", "--directory", str(tmp_path)])
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
