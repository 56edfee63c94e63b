"""A run with arrays in host memory is the run without, and each resumes the other."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxzero import Checkpoints, jobs
from jaxzero.distributed import Watchdog
from jaxzero.jobs import _retrieval
from jaxzero.jobs._loop import run_steps
from jaxzero.jobs._session import begin, open_session, restore

from .tiny_job import OPTIMIZATION, exported, losses, make_settings, with_run

pytestmark = pytest.mark.standard_promotion  # optax

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ALL = (WEIGHTS, GRADIENTS, OPTIMIZER)


def with_offload(settings: jobs.Train, *offload: jobs.Offloaded, **changes: Any) -> jobs.Train:
    sharding = jobs.Sharding(offload=offload, offload_min_size=64, **changes)
    return dataclasses.replace(settings, sharding=sharding)


def in_host(tree: Any) -> int:
    return sum(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def finish(
    tiny_encoder: Path, tiny_code: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], tuple[jobs.Train, str]]:
    """Settings and text of a finished run, with everything offloaded or nothing."""

    @functools.cache
    def run(is_offloaded: bool) -> tuple[jobs.Train, str]:
        settings = make_settings(tiny_encoder, tiny_code, tmp_path_factory.mktemp("runs"))
        settings = with_offload(settings, *(ALL if is_offloaded else ()))
        output = io.StringIO()
        with jax.numpy_dtype_promotion("standard"):
            jobs.train(settings, Console(file=output, width=120))
        return settings, output.getvalue()

    return run


@pytest.mark.ci
def test_a_run_with_offload_is_the_run_without(finish: Callable[[bool], tuple[jobs.Train, str]]):
    found, expected = (finish(is_offloaded)[0].run.directory for is_offloaded in (True, False))
    assert losses(found) == losses(expected)
    assert exported(found) == exported(expected)


@pytest.mark.ci
def test_the_first_lines_say_where_arrays_are(finish: Callable[[bool], tuple[jobs.Train, str]]):
    (_, text), (_, plain) = finish(True), finish(False)
    for what in ("parameters", "optimizer state"):
        held = re.compile(rf"([\d.]+) (B|KiB) of {what}")
        sizes = [
            float(number) * {"B": 1, "KiB": 2**10}[unit]
            for printed in (text, plain)
            for number, unit in held.findall(printed)
        ]
        on_device, on_host, alone = sizes
        assert on_host > 10 * on_device
        assert on_device + on_host == pytest.approx(alone, abs=0.02 * 2**10)  # two decimals
    assert "Host memory holds for each device" in text and "Host memory" not in plain


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(True, True, marks=pytest.mark.ci),
        pytest.param(True, False, marks=pytest.mark.exhaustive),
        pytest.param(False, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_resumes_with_and_without_offload(
    finish: Callable[[bool], tuple[jobs.Train, str]],
    first: bool,
    then: bool,
    console: Console,
    tmp_path: Path,
):
    (given, _), (plain, _) = finish(first), finish(False)
    shutil.copytree(given.run.runs, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    settings = with_run(given, runs=tmp_path, resume=True)
    settings = with_offload(settings, *(ALL if then else ()))
    with open_session(settings, console) as session:
        state = restore(session)
        assert state.step == 2
        like = {"params": session.setup.params, "opt_state": session.setup.opt_state}
        for name, tree in like.items():
            found = getattr(state, name)
            assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, found, tree))
            assert bool(in_host(found)) == then
        state = run_steps(session, state, Watchdog())
        whole = session.setup.zero.unshard
        with Checkpoints(plain.run.directory / "checkpoints", session.setup.zero) as saved:
            expected = saved.restore(like).state
        for name, tree in expected.items():
            got = whole(getattr(state, name))
            jax.tree.map(np.testing.assert_array_equal, got, whole(tree))


@pytest.mark.ci
def test_a_loss_that_is_not_finite_changes_nothing_in_host_memory(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    contrastive_loss = _retrieval.contrastive_loss

    def not_a_number(*args, **options):
        loss, metrics = contrastive_loss(*args, **options)
        return loss * np.nan, metrics

    monkeypatch.setattr(_retrieval, "contrastive_loss", not_a_number)
    settings = with_offload(settings, *ALL, wire="float32")
    with open_session(settings, console) as session:
        state = begin(session)
        zero = session.setup.zero
        before = jax.tree.map(np.asarray, zero.unshard(state.params))
        optimization = dataclasses.replace(settings.optimization, steps=1)
        stopped = dataclasses.replace(settings, optimization=optimization)
        state = run_steps(dataclasses.replace(session, settings=stopped), state, Watchdog())
        assert int(state.opt_state.total_notfinite) == 1
        jax.tree.map(np.testing.assert_array_equal, zero.unshard(state.params), before)


def test_refusals(settings: jobs.Train):
    adaptive = dataclasses.replace(OPTIMIZATION, adaptive_batch=0.5)
    with pytest.raises(ValueError, match="`offload` does not go with `adaptive_batch`"):
        dataclasses.replace(with_offload(settings, OPTIMIZER), optimization=adaptive)
    with pytest.raises(ValueError, match="`offload_min_size` cannot be negative; got -1"):
        jobs.Sharding(offload_min_size=-1)
    with pytest.raises(ValueError, match="`stage` of at least 3; got 2"):
        jobs.train(with_offload(settings, WEIGHTS, stage=2, wire="float32"), Console(quiet=True))
