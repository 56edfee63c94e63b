"""Every test sees 8 CPU devices, strict promotion of dtypes and ranks, and warnings as errors.

The warnings are set in `pyproject.toml`; `make test-latest` also checks annotations at each call.
"""

from __future__ import annotations

import collections
import gc
import importlib
import importlib.metadata
import io
import math
import os
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Tests look at values and at HLO, never at CPU speed: LLVM without optimization compiles in half
# the time, and XLA's older code generation for fusions, which only old versions have, in half of
# that. XLA would fuse multiply-adds where it likes, which AVX does not have: tests that compare the
# bits of two programs need one rounding for each operation. Cutting each program into modules that
# LLVM compiles side by side gains nothing where every core runs tests, and costs a tenth more. All
# of it comes after HLO, so collectives and memory figures are those of a default run. On a busy
# machine a device may come late to a collective; by default XLA ends the process after 40 s.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
        "--xla_cpu_use_fusion_emitters=false"
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else "",
        os.environ.get("XLA_FLAGS", ""),
    ]
).strip()
# Fake devices are what the suite is about, so a GPU does not become the default by being there.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two pytest workers already use both cores, so NumPy and torch get one thread each. OpenBLAS
# threads busy-wait: with more of them the planner's tests took twice the CPU time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Models come from files here; a library that would ask a hub for one fails at once instead.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Plots are files; on a machine without a screen nothing may look for one.
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest
from rich.console import Console

# Tests import from `benchmarks`. Last on the path, so that an installed wheel comes before sources.
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

# Before any backend exists: afterwards the number of devices is fixed.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# What compiles here is what is tested, not what an earlier run left on disk.
jax.config.update("jax_enable_compilation_cache", False)

# JAX keeps millions of objects of traced programs alive. With Python's thresholds, looking through
# all of them for garbage would take a twentieth of the time of the tests.
gc.set_threshold(50_000, 10, 100)

# The first example of a property compiles, so time per example says nothing; and the same examples
# on every run: a red run must be red again.
hypothesis.settings.register_profile("jaxzero", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxzero")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of the cases in each file, run the first and each Nth after it",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Choose a part of the cases, and skip GPU tests where there is no GPU."""
    _mark_exhaustive(items)
    yield
    _leave_out_cases(config, items)  # what markers leave out is no case
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        skip = pytest.mark.skip(reason="needs a GPU: JAX_PLATFORMS=cpu,cuda where there is one")
        for item in marked:
            item.add_marker(skip)


_FEW = 4  # cases


def _mark_exhaustive(items: list[pytest.Item]) -> None:
    """Leave one in `n` cases of the tests marked `one_in(n)`; the others are exhaustive.

    They are drawn by their names, so that no value of a parameter is left out throughout. Of few
    cases one may be left out that is like no other: those are CI's.
    """
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        marked = item.get_closest_marker("exhaustive") or item.get_closest_marker("ci")
        if isinstance(item, pytest.Function) and item.get_closest_marker("one_in") and not marked:
            cases.setdefault((item.path, item.originalname), []).append(item)
    for drawn in cases.values():
        marker = drawn[0].get_closest_marker("one_in")
        assert marker is not None
        drawn.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in drawn[math.ceil(len(drawn) / marker.args[0]) :]:
            item.add_marker(pytest.mark.ci if len(drawn) <= _FEW else pytest.mark.exhaustive)


def _leave_out_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = int(config.getoption("every", 1))
    cases: collections.Counter[Path] = collections.Counter()  # of each file so far
    kept, left_out = [], []
    for item in items:
        (left_out if cases[item.path] % every else kept).append(item)
        cases[item.path] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _has_gpu() -> bool:
    if "cuda" not in os.environ["JAX_PLATFORMS"]:
        return False
    return bool(jax.devices("gpu"))


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's ordinary dtype promotion for tests marked `standard_promotion`.

    optax computes `decay**count` from a float and an int32, and Flax normalizes bfloat16 with
    float32 statistics; strict promotion refuses both. In one dtype Flax and Equinox are
    strict-clean, and no library needs implicit promotion of ranks.
    """
    if request.node.get_closest_marker("standard_promotion"):
        with jax.numpy_dtype_promotion("standard"):
            yield
    else:
        yield


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint for `jaxzero train`, which tests of it only read."""
    return tiny_job().write_checkpoint(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def tiny_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What to train it on, likewise."""
    return tiny_job().write_data(tmp_path_factory.mktemp("code"))


@pytest.fixture
def settings(tiny_encoder: Path, tiny_code: Path, tmp_path: Path) -> Any:
    """Of a run of `jaxzero train` on these."""
    return tiny_job().make_settings(tiny_encoder, tiny_code, tmp_path)


@pytest.fixture
def console() -> Console:
    """What was printed on it can be read."""
    return Console(file=io.StringIO(), width=120, record=True)


def tiny_job() -> Any:
    """The module of that name: what imports jaxzero here already would go unchecked by types."""
    return importlib.import_module("tests.jobs.tiny_job")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which JAX ran, and how many tests were skipped for want of a GPU or of torch."""
    counts = collections.Counter(
        _wanted(report.longrepr) for report in terminalreporter.stats.get("skipped", [])
    )
    terminalreporter.write_line(
        f"JAX {jax.__version__}; skipped for want of a GPU: {counts['gpu']}, of torch: "
        f"{counts['torch']}, for another reason: {counts['other']}"
    )


def _wanted(skip: Any) -> str:
    reason = str(skip[2] if isinstance(skip, tuple) else skip).lower()  # (file, line, reason)
    if "torch" in reason or "transformers" in reason:
        return "torch"
    return "gpu" if "gpu" in reason else "other"
