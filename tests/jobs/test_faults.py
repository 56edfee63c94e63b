"""What the job does when numbers are not finite, or devices drift apart."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxzero import jobs
from jaxzero.distributed import ReplicasDiffer, Watchdog
from jaxzero.jobs import _loop
from jaxzero.jobs._journal import plot_run
from jaxzero.jobs._loop import run_steps
from jaxzero.jobs._session import begin, open_session
from jaxzero.jobs._step import make_step

from .tiny_job import with_run, with_wire

pytestmark = pytest.mark.standard_promotion  # optax


@pytest.mark.parametrize("what", ["loss", pytest.param("gradients", marks=pytest.mark.ci)])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    settings: jobs.Train, console: Console, what: str
):
    settings = with_wire(settings, "zeropp4")  # whose wire state would carry it on
    with open_session(settings, console) as session:
        state, tokens = begin(session), next(session.batches)

        def steep(params, tokens):
            loss, metrics = session.loss(params, tokens)
            return loss + jnp.sqrt(0 * jnp.sum(jax.tree.leaves(params)[0])), metrics

        before = jax.tree.map(np.asarray, (state.params, state.wire_state, state.opt_state))
        bad = make_step(session.setup, _infinite(session.loss) if what == "loss" else steep)
        *after, metrics = bad(state.params, state.opt_state, state.wire_state, tokens)
    params, opt_state, wire_state = jax.tree.map(np.asarray, after)
    jax.tree.map(np.testing.assert_array_equal, (params, wire_state), before[:2])
    jax.tree.map(np.testing.assert_array_equal, opt_state.inner_state, before[2].inner_state)
    assert metrics["skipped"] == metrics["skipped_in_a_row"] == 1
    assert np.isfinite(metrics["loss"]) == (what == "gradients")


def test_steps_that_are_not_finite_are_no_points_of_the_plot(tmp_path: Path):
    whole = {"loss": 1.0, "accuracy": 0.5, "similarity": 0.5, "similarity_others": 0.1}
    rows = [{"step": 1, **whole}, {"step": 2, "accuracy": 0.5}]
    for name, shown in {"a.png": rows, "b.png": rows[:1]}.items():
        plot_run(shown, tmp_path / name, title="", curves={"accuracy": "a", "similarity": "s"})
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_too_many_steps_that_are_not_finite_end_the_run(
    settings: jobs.Train, console: Console, monkeypatch: pytest.MonkeyPatch
):
    def poisoned(setup, loss):
        step = make_step(setup, _infinite(loss))
        # One program for both: two steps are taken for good ones by what counts.
        return lambda params, opt_state, *rest: step(params, next(counts)(opt_state), *rest)

    counts = itertools.chain([_forget] * 2, itertools.repeat(lambda opt_state: opt_state))
    monkeypatch.setattr(_loop, "make_step", poisoned)
    settings = dataclasses.replace(settings, faults=jobs.Faults(max_skipped=3))
    message = "3 steps in a row .* the last was step 4 .* The last good checkpoint .* of step 2"
    with (
        pytest.raises(jobs.Diverged, match=message),
        open_session(settings, console) as session,
    ):
        run_steps(session, begin(session), Watchdog())
    lines = (settings.run.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["skipped_in_a_row"] for line in lines] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("part", "check_every", "save_every"),
    [("opt_state", 4, 50), ("wire_state", 50, 2)],
    ids=["every so many steps", "before a save"],
)
def test_replicas_are_compared_now_and_then(
    part: str,
    check_every: int,
    save_every: int,
    settings: jobs.Train,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
):
    """And never saved unseen: a checkpoint holds one of them, which all would take up."""
    saved = []

    def drift(session, state, step_fn):
        step = state.step + 1
        changed = _on_one_device(getattr(state, part)) if step == 3 else getattr(state, part)
        numbers = collections.defaultdict(float)
        return dataclasses.replace(state, step=step, **{part: changed}), numbers

    monkeypatch.setattr(_loop, "_one_step", drift)
    monkeypatch.setattr(_loop, "save", lambda session, state: saved.append(state.step))
    settings = with_run(with_wire(settings, "zeropp4"), save_every=save_every)
    settings = dataclasses.replace(settings, faults=jobs.Faults(check_every=check_every))
    with (
        pytest.raises(ReplicasDiffer, match=rf"After step 4 .*`{part}\."),
        open_session(settings, console) as session,
    ):
        run_steps(session, begin(session), Watchdog())
    assert saved == [step for step in range(1, 3) if step % save_every == 0]


def _on_one_device(tree: Any) -> Any:
    """Other bits on one device, in a leaf that another device holds as well."""
    leaves, treedef = jax.tree.flatten(tree)
    index = next(i for i, x in enumerate(leaves) if any(s.replica_id for s in x.addressable_shards))
    pieces = [shard.data for shard in leaves[index].addressable_shards]
    pieces[1] = jnp.ones_like(pieces[1]) - pieces[1]
    leaves[index] = jax.make_array_from_single_device_arrays(
        leaves[index].shape, leaves[index].sharding, pieces
    )
    return jax.tree.unflatten(treedef, leaves)


def _forget(opt_state: Any) -> Any:
    """As after a step that was finite."""
    return opt_state._replace(notfinite_count=jnp.zeros_like(opt_state.notfinite_count))


def _infinite(loss):
    """The same gradients, and a loss that has none."""

    def infinite(params, tokens):
        value, metrics = loss(params, tokens)
        return value + jnp.inf, metrics

    return infinite
