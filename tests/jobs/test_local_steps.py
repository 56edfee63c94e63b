"""Runs whose nodes train by themselves: what they compute, and how they go on."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxzero import interop, jobs
from jaxzero._sharding import StoredArray
from jaxzero.distributed import Watchdog
from jaxzero.jobs._loop import run_steps
from jaxzero.jobs._retrieval import make_embed
from jaxzero.jobs._session import Session, open_session, restore

from .test_retrieval import loss_by_hand
from .tiny_job import OPTIMIZATION, losses, make_settings, with_run

pytestmark = pytest.mark.standard_promotion  # optax

LOCAL = jobs.LocalOptions(local_steps=2, local_fragments=2, local_codec="int4")
OPTIMIZATION = dataclasses.replace(OPTIMIZATION, learning_rate=1e-3)


@pytest.fixture(scope="module")
def finished(
    tiny_encoder: Path, tiny_code: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[jobs.Train, str]:
    """Settings and text of a run of two rounds on two nodes."""
    settings = make_settings(tiny_encoder, tiny_code, tmp_path_factory.mktemp("runs"))
    settings = dataclasses.replace(
        settings,
        optimization=OPTIMIZATION,
        sharding=jobs.Sharding(wire="float32"),
        local=LOCAL,
        devices=jobs.Devices(nodes=2, devices=4),
    )
    output = io.StringIO()
    with jax.numpy_dtype_promotion("standard"):
        jobs.train(settings, Console(file=output, width=200))
    return settings, output.getvalue()


def resumed(settings: jobs.Train, **changes: Any) -> jobs.Train:
    return dataclasses.replace(with_run(settings, resume=True), **changes)


def loss_of_nodes(session: Session, nodes: int) -> float:
    """The loss of the first step, where each pair has those of its node as negatives."""
    params = session.setup.zero.unshard(session.setup.params)
    embed = jax.jit(make_embed(session.setup.task.loaded.graph))
    embeddings = np.asarray(embed(params, next(session.batches)))
    by_node = np.split(embeddings, nodes)
    return float(np.mean([loss_by_hand(x, OPTIMIZATION.temperature) for x in by_node]))


@pytest.mark.ci
def test_the_journal_has_every_step_and_the_bytes(finished: tuple[jobs.Train, str]):
    settings, text = finished
    lines = (settings.run.directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("evaluation", 0),
        *(("step", step) for step in range(1, 5)),
        ("evaluation", 4),
        ("node_bytes", 4),
    ]
    assert rows[-1]["round_steps"] == 2
    # The perceptron in 4 bits and its scales (float32 for 128 numbers), the rest in 32, of which
    # half come from the other node; in two steps.
    assert rows[-1]["sent"] < rows[-1]["zero3_bfloat16"] / 6
    assert "in 2 steps, in 2 messages of int4, for which nodes wait" in text
    assert "of outer optimizer state and" in text and "of residuals" in text


def of_nodes(tree: Any) -> list[np.ndarray]:
    """The arrays of all nodes without padding, `[nodes, ...]`."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, StoredArray))
    return [
        np.asarray(x.data)[tuple(map(slice, x.shape))]
        if isinstance(x, StoredArray)
        else np.asarray(x)
        for x in leaves
    ]


def assert_are_means(found: Sequence[np.ndarray], nodes: Sequence[np.ndarray]) -> None:
    """Fail unless `found` are the means of `nodes`; of integers, the first."""
    for mean, x in zip(found, nodes, strict=True):
        if not np.issubdtype(x.dtype, np.floating):
            np.testing.assert_array_equal(mean, x[0])
            continue
        # Three roundings here and one there, each of at most half an ulp of the larger summand.
        bound = 4 * 2**-24 * np.abs(x).max(axis=0)
        assert (np.abs(mean - x.mean(axis=0)) <= bound).all()


@pytest.mark.ci
def test_what_is_trained_and_exported(finished: tuple[jobs.Train, str], console: Console):
    settings, _ = finished
    with open_session(resumed(settings), console) as session:
        # Ten roundings of cosines, divided by the temperature.
        assert losses(settings.run.directory)[0] == pytest.approx(
            loss_of_nodes(session, 2), abs=10 * 2**-23 / OPTIMIZATION.temperature
        )
        state = restore(session)
    assert state.step == 4
    nodes = of_nodes(state.params)
    assert any((x[0] != x[1]).any() for x in nodes), "each node has trained by itself"
    export = interop.load_encoder(settings.run.directory / "export", dtype=jnp.float32)
    tensors = jax.tree.leaves(export.params)  # in the file
    assert_are_means([x[tuple(map(slice, x.shape))] for x in tensors], nodes)


@pytest.mark.ci
def test_resumed_equals_uninterrupted(
    finished: tuple[jobs.Train, str], console: Console, tmp_path: Path
):
    settings, _ = finished
    with open_session(resumed(settings), console) as session:
        expected = restore(session)
    shutil.copytree(settings.run.runs, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    again = with_run(settings, runs=tmp_path, resume=True)
    with open_session(again, console) as session:
        state = restore(session)
        assert state.step == 2 and losses(tmp_path / "run") == losses(settings.run.directory)[:2]
        state = run_steps(session, state, Watchdog())
    assert losses(tmp_path / "run") == losses(settings.run.directory)
    jax.tree.map(np.testing.assert_array_equal, state.trees, expected.trees)


@pytest.mark.ci
def test_another_number_of_nodes_goes_on_from_the_mean(
    finished: tuple[jobs.Train, str], console: Console
):
    settings, _ = finished
    with open_session(resumed(settings), console) as session:
        saved = restore(session)
    assert "from their mean" not in console.export_text()
    devices = jobs.Devices(nodes=4, devices=8)
    with open_session(resumed(settings, devices=devices), console) as session:
        state = restore(session)
        for name in ("params", "opt_state"):
            found = of_nodes(getattr(state, name))
            assert {len(x) for x in found} == {4}
            for node in range(4):
                assert_are_means([x[node] for x in found], of_nodes(getattr(saved, name)))
        mean = session.setup.zero.unshard(session.rounds.mean(state.local))
    assert_are_means(of_nodes(mean), of_nodes(saved.params))
    text = "The run was saved by 2 nodes; the 4 nodes of this one all go on from their mean."
    assert text in console.export_text()


@pytest.mark.parametrize(("local", "got"), [(jobs.LocalOptions(), "None"), (4, "4")])
@pytest.mark.ci
def test_refuses_to_resume_with_other_rounds(
    finished: tuple[jobs.Train, str], console: Console, local: jobs.LocalOptions | int, got: str
):
    if isinstance(local, int):
        local = dataclasses.replace(LOCAL, local_steps=local)
    message = f"another `local_steps`: the run was started with 2, got {got}"
    with (
        open_session(resumed(finished[0], local=local), console) as session,
        pytest.raises(ValueError, match=message),
    ):
        restore(session)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharding": jobs.Sharding(offload=("weights",))}, "does not go with `offload`"),
        ({"sharding": jobs.Sharding(wire="zeropp4")}, "the `wire` zeropp4.*Take zeropp, and"),
        (
            {"optimization": jobs.Optimization(adaptive_batch=0.5)},
            "does not go with `adaptive_batch`",
        ),
        ({"devices": jobs.Devices(nodes=1)}, "at least 2 `nodes`, which exchange; got 1"),
        (
            {"optimization": jobs.Optimization(steps=5)},
            "`steps` must be a multiple of `local_steps`, 2, .* got 5. Take 6",
        ),
    ],
)
def test_what_does_not_go_with_local_steps(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        jobs.Train(local=LOCAL, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_steps": None}, "`local_fragments` needs `local_steps`, the steps of a round"),
        ({"local_fragments": 3}, "3 fragments for 2 steps. Given were `local_steps` 2, .*ts` 3"),
        ({"local_delay": 2}, "`every / fragments` = 1 steps, .* got 2"),
        ({"local_mixing": 1.0}, "from 0 to less than 1, .* got 1.0"),
        ({"outer_learning_rate": 0.0}, "`outer_learning_rate` must be positive; got 0.0"),
        ({"outer_momentum": 1.0}, "`outer_momentum` must be at least 0 and less than 1; got 1.0"),
    ],
)
def test_local_settings_check_themselves(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LOCAL, **changes)
