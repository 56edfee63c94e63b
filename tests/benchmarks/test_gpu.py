"""The one call for a GPU: its parts are ended in time and reported, and the page is of GPU rows."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks.measured import gpu
from benchmarks.measured._gpu_summary import write_summary


def fake_row(name, accelerator, **results):
    return {
        "benchmark": name,
        "commit": "0",
        "versions": {"jax": "0.11.2"},
        "hardware": {"accelerator": accelerator},
        "results": results,
    }


def write_rows(directory, name, *rows):
    lines = [json.dumps(fake_row(name, *row[:1], **row[1])) for row in rows]
    (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def test_a_part_that_takes_too_long_is_ended(tmp_path):
    start = time.perf_counter()
    outcome = gpu._outcome("kernels", 1, tmp_path)
    assert outcome["ended"] == "ended after its 1 s"
    assert time.perf_counter() - start < 30


def test_a_part_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.sys, "executable", "/bin/false")
    assert gpu._outcome("host_copies", 30, tmp_path)["ended"] == "failed"


def test_the_page_is_of_rows_from_gpus(tmp_path):
    copies = {"to_host_gb_per_s": 50.0, "to_device_gb_per_s": 51.5, "both_gb_per_s_each_way": 40.0}
    rates = {"copy_gb_per_s": 3000.0, "xla_gb_per_s": 1000.0, "mosaic_gpu_gb_per_s": 2400.0}
    kernel = {"operation": "quantize", "format": "int8", "moved_bytes": 10**8, **rates}
    write_rows(
        tmp_path,
        "host_copies",
        (None, {"copy_bytes": 10**6, **copies}),
        ("NVIDIA H200", {"copy_bytes": 16 * 10**6, **copies}),
    )
    write_rows(tmp_path, "kernels", ("NVIDIA H200", kernel))
    write_summary(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "| 16 | 50.0 | 51.5 | 40.0 |" in text and "| 1 |" not in text
    assert "| quantize | int8 | 100 | 3000 | 1000 | 2400 |  |" in text
    assert (tmp_path / "gpu.png").stat().st_size > 1000


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_parts_share_the_time(tmp_path, monkeypatch, num_gpus):
    """Exchanges come first where there are several GPUs, and the last parts get what is left."""
    clock, given = [0.0], {}

    def outcome(name, seconds, directory):
        given[name] = seconds
        clock[0] += seconds
        return {"part": name, "ended": "done", "seconds": seconds, "last_line": ""}

    monkeypatch.setattr(gpu, "_outcome", outcome)
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])
    assert gpu.main(tmp_path, num_gpus) == 0
    exchanges = [name for name, part in gpu.PARTS.items() if part.of_several]
    assert sum(given.values()) == gpu.SECONDS <= 9 * 60 - 20
    assert [name in given for name in exchanges] == [num_gpus > 1] * 3
    if num_gpus == 1:
        assert given == {k: x.seconds for k, x in gpu.PARTS.items() if not x.of_several}
    else:
        assert given["tests"] == gpu.PARTS["tests"].seconds and "host_copies" not in given
        assert "| host_copies | no time left | 0 s |" in (tmp_path / "gpu.md").read_text()
