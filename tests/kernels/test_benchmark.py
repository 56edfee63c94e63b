"""The benchmarks of the kernels write their rows; how fast a CPU is says nothing."""

from __future__ import annotations

import contextlib
import re

import jax
import pytest

import jaxzero as jz
from benchmarks.measured import gpu_step, kernels, several_gpus, walked_step
from benchmarks.measured._gpu_summary import write_summary
from benchmarks.shared import _models, _rows
from benchmarks.shared._llama import LlamaSize
from jaxzero._hlo import Rates

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


@pytest.fixture
def quick_rows(monkeypatch):
    """Rows as of a GPU, of no commit: git takes most of the time of a small one."""
    monkeypatch.setattr(_rows, "_hardware", lambda: {"accelerator": "a rehearsed GPU"})
    monkeypatch.setattr(_rows, "_git", lambda *arguments: "")


@needs_mosaic
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "implementations",
    [("xla", "nvlink"), pytest.param(several_gpus.IMPLEMENTATIONS, marks=pytest.mark.exhaustive)],
    ids=len,
)
def test_what_several_gpus_run_is_rehearsed(tmp_path, monkeypatch, quick_rows, implementations):
    """On two fake devices, with kernels in Pallas' interpreter: all but the numbers."""
    monkeypatch.setattr(several_gpus, "IMPLEMENTATIONS", implementations)
    tiny = LlamaSize(layers=1, width=32, hidden=64, heads=2, vocabulary=256)
    monkeypatch.setitem(_models.SIZES, "tiny", tiny)
    monkeypatch.setitem(_models.MODELS, "tiny", _models.llama("tiny", tiny))
    mesh = jz.make_mesh(1, devices=jax.devices()[:2])
    monkeypatch.setattr(several_gpus, "_mesh", lambda: mesh)
    monkeypatch.setattr(several_gpus, "_CALLS", 1)
    cluster = jz.Cluster(nodes=1, local=2, device="h100")  # short programs take seconds on a CPU
    monkeypatch.setattr(jz.Cluster, "measured", lambda mesh: cluster)
    with emulated_peers(monkeypatch), jax.numpy_rank_promotion("allow"):
        several_gpus.measure_rates(tmp_path)
        assert several_gpus.bits((5000,), ("int8",), calls=2, directory=tmp_path) == 0
        assert several_gpus.rates((0.01,), ("int4",), repeats=1, directory=tmp_path) == 0
        assert several_gpus.steps("tiny", 1, 8, repeats=1, directory=tmp_path) == 0
        walked_step.main(["tiny"], 1, 16, repeats=1, directory=tmp_path)
    write_summary(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    for wanted in (
        r"\| nvlink \| int8 \| 5000 \| equal",
        r"\| reduce_scatter \| int4 \| xla \| 0.01 \|( [\d.e+-]+ \|){4}",
        r"\| tiny \| nvlink \| .*equal",
        r"\| tiny \| bfloat16 \| [\d.]+ ms \| [\d.]+ ms \| [\d.]+ ms \|",
        r"\| tiny \| [\d.]+ ms \| [\d.]+ ms \| [\d.]+ \| [\d.]+ ms \|",
    ):
        assert re.search(wanted, text), (wanted, text)
    # Stated rates remain where nothing was measured.
    rates, row = _rows.measured_rates(Rates(), directory=tmp_path)
    assert row is not None and rates.local == row["results"]["local"] != Rates().local
    assert rates.node == Rates().node


@contextlib.contextmanager
def emulated_peers(monkeypatch):
    """Kernels in Pallas' interpreter, with an exchange in the place of stores to peers."""
    from jaxzero.pallas_kernels import _memory

    from . import _emulated_peers

    _emulated_peers.replace_stores(monkeypatch)
    with _memory.interpreted():
        yield


def test_an_exchange_with_other_bits_is_found(tmp_path, monkeypatch, quick_rows):
    """An exchange that adds a little is found, and its part ends with a status that says so."""
    right = several_gpus.exchange

    def wrong(operation, format, implementation):
        exchange = right(operation, format, "xla")
        is_wrong = implementation == "nvlink" and operation == "reduce_scatter"
        return (lambda x: exchange(x).at[0, 0].add(2.0**-10)) if is_wrong else exchange

    mesh = jz.make_mesh(1, devices=jax.devices()[:2])
    monkeypatch.setattr(several_gpus, "_mesh", lambda: mesh)
    monkeypatch.setattr(several_gpus, "exchange", wrong)
    assert several_gpus.bits((100,), ("int8",), calls=2, directory=tmp_path) == 1
    rows = _rows.read_rows("exchange_bits", directory=tmp_path)
    assert [row["results"]["equal"] for row in rows] == [True, False]


def test_what_is_refused_or_fails_has_a_row_that_says_why(tmp_path, monkeypatch, quick_rows):
    """Refused for the devices is no failure; an error of XLA's is, and the rows after it remain."""
    errors = {"xla": NotImplementedError("not here"), "mosaic_gpu": None}
    errors["nvlink"] = jax.errors.JaxRuntimeError("INTERNAL: no such\ninstruction")

    def step(mesh, name, model, shape):
        if error := errors.get(name):
            raise error
        result = jax.numpy.zeros(()), jax.numpy.ones(3)
        compiled = jax.jit(lambda: result).lower().compile()
        return compiled, ()

    def exchange(operation, format, implementation):
        if error := errors.get(implementation):
            raise error
        return several_gpus._in_bfloat16(operation)

    mesh = jz.make_mesh(1, devices=jax.devices()[:2])
    monkeypatch.setattr(several_gpus, "_mesh", lambda: mesh)
    monkeypatch.setattr(several_gpus, "_CALLS", 1)
    monkeypatch.setattr(several_gpus, "_compiled_step", step)
    monkeypatch.setattr(several_gpus, "exchange", exchange)
    assert several_gpus.steps("tiny", 1, 8, repeats=1, directory=tmp_path) == 1
    assert several_gpus.rates((0.01,), ("int4",), repeats=1, directory=tmp_path) == 2
    rows = [row["results"] for row in _rows.read_rows("exchange_steps", directory=tmp_path)]
    assert [row.get("failed") for row in rows] == [None, False, None, True]
    assert rows[2]["equal"] is None and rows[2]["measured_ms"] > 0
    assert {row["assumed_rates"] for row in rows} == {"h100"}
    write_summary(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "| refused: NotImplementedError: not here |  |  |  |" in text
    assert "| **failed**: JaxRuntimeError: INTERNAL: no such instruction |  |  |  |" in text
    assert re.search(r"\| tiny \| mosaic_gpu \| .*\| not compared \|", text)


def test_short_calls_are_waited_for_once(monkeypatch):
    """All calls of a turn are issued before the first is waited for."""
    events, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: events.append("wait") or wait(x))
    seconds = several_gpus.in_turn({"a": lambda: events.append("call")}, 2, calls=3)
    assert events == [*["call"] * 3, "wait"] * 3 and len(seconds["a"]) == 2
