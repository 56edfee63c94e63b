"""The job's checkpoints: what is kept, and that damage is neither forgotten nor trained over."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import jaxzero as jz
from jaxzero import jobs
from jaxzero._checkpoint import saver
from jaxzero.jobs._session import Session, State, begin, open_session, restore, save

from .tiny_job import with_run, with_wire

pytestmark = pytest.mark.standard_promotion  # optax


def damage(folder: Path) -> None:
    (folder / "extra" / "metadata").write_text("{}")


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_that_all_checkpoints_are_damaged_is_not_forgotten(settings: jobs.Train, console: Console):
    directory = settings.run.directory
    with open_session(settings, console) as session:
        save(session, dataclasses.replace(begin(session), step=1))
        session.journal.append("step", 1, loss=1.0)
    damage(directory / "checkpoints" / "1")
    with (
        pytest.warns(jz.Checkpoints.Damaged),
        pytest.raises(ValueError, match="Every checkpoint in .* is damaged"),
    ):
        jobs.train(with_run(settings, resume_or_start=True), console)
    for again in ({"resume_or_start": True}, {"resume": True}, {}):
        with pytest.raises(ValueError, match="Every checkpoint .* is damaged: 1.damaged.*backup"):
            jobs.train(with_run(settings, **again), console)
    assert '"loss": 1.0' in (directory / "metrics.jsonl").read_text()


def first_state(session: Session) -> State:
    state = begin(session)
    assert len(jax.tree.leaves(state.wire_state)) == 2
    return state


def at_step(state: State, step: int) -> State:
    """Later, with a wire state that shows it."""
    wire_state = jax.tree.map(lambda x: x + step, state.wire_state)
    return dataclasses.replace(state, step=step, wire_state=wire_state)


def test_as_many_checkpoints_are_kept_as_asked_for(settings: jobs.Train, console: Console):
    """And one wire state more."""
    settings = with_run(with_wire(settings, "zeropp4"), keep_checkpoints=3)
    with open_session(settings, console) as session:
        state = first_state(session)
        for step in range(1, 6):
            save(session, at_step(state, step))
    assert steps(settings.run.directory / "checkpoints") == [3, 4, 5]
    assert steps(settings.run.directory / "wire_state") == [2, 3, 4, 5]


@pytest.mark.ci
def test_two_saves_back_there_is_a_wire_state(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    """Killed while a checkpoint was written, where the one before it is damaged."""

    def publish(folder: Path, step: int) -> None:
        if (folder.parent.name, step) == ("checkpoints", 30):
            raise OSError("killed")
        _publish(folder, step)

    _publish = saver.publish
    monkeypatch.setattr(saver, "publish", publish)
    settings = with_wire(settings, "zeropp4")
    directory = settings.run.directory
    with (
        pytest.raises(RuntimeError, match="step 30 could not be saved"),
        open_session(settings, console) as session,
    ):
        state = first_state(session)
        for step in (10, 20, 30):
            save(session, at_step(state, step))
    assert steps(directory / "wire_state") == [10, 20, 30]
    damage(directory / "checkpoints" / "20")
    with pytest.warns(jz.Checkpoints.Damaged):
        found = restored(settings, console)
    assert found.step == 10 and "starts anew" not in console.export_text()
    jax.tree.map(np.testing.assert_array_equal, found.wire_state, at_step(state, 10).wire_state)
    assert steps(directory / "wire_state") == [10]  # the others will come again


def test_a_wire_state_waits_for_the_checkpoint_before(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    """Or those of older checkpoints would go while these are still needed."""

    def publish(folder: Path, step: int) -> None:
        if (folder.parent.name, step) == ("checkpoints", 1):
            ahead.wait(3)
        _publish(folder, step)
        published.append((folder.parent.name, step))
        if (folder.parent.name, step) == ("wire_state", 2):
            ahead.set()

    _publish, published, ahead = saver.publish, [], threading.Event()
    monkeypatch.setattr(saver, "publish", publish)
    with open_session(with_wire(settings, "zeropp4"), console) as session:
        state = first_state(session)
        for step in (1, 2):
            save(session, at_step(state, step))
    in_order = [(name, step) for step in (1, 2) for name in ("wire_state", "checkpoints")]
    assert published == in_order


def saved_after_one_step(settings: jobs.Train, console: Console) -> State:
    """As a run would."""
    with open_session(settings, console) as session:
        state = at_step(begin(session), 1)
        save(session, state)
    return state


def restored(settings: jobs.Train, console: Console) -> State:
    with open_session(with_run(settings, resume=True), console) as session:
        return restore(session)


def same_arrays(one: Any, other: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_the_wire_state_is_saved_and_restored(settings: jobs.Train, console: Console):
    settings = with_wire(settings, "zeropp4")
    saved = saved_after_one_step(settings, console)
    assert len(jax.tree.leaves(saved.wire_state)) == 2  # of the perceptron
    found = restored(settings, console)
    assert found.step == 1
    assert same_arrays(saved.wire_state, found.wire_state)
    shardings = [jax.tree.map(lambda x: x.sharding, s.wire_state) for s in (saved, found)]
    assert shardings[0] == shardings[1]
    assert "starts anew" not in console.export_text()


@pytest.mark.ci
def test_another_wire_or_other_devices_start_a_new_wire_state(
    settings: jobs.Train, console: Console
):
    zeropp4 = with_wire(settings, "zeropp4")
    saved = saved_after_one_step(zeropp4, console)
    fewer = restored(
        dataclasses.replace(zeropp4, devices=jobs.Devices(nodes=2, devices=4)), console
    )
    assert same_arrays(saved.params, fewer.params)
    assert not same_arrays(saved.wire_state, fewer.wire_state)
    assert "the wire state starts anew" in console.export_text()

    plain = restored(with_wire(settings, "float32"), console)
    assert plain.wire_state is None
    assert "starts anew" not in console.export_text()

    again = restored(zeropp4, console)
    assert "the wire state starts anew" in console.export_text()
    assert not same_arrays(saved.wire_state, again.wire_state)
