"""`jaxzero train`: fine-tune a PyTorch checkpoint.

Load the checkpoint shard by shard, score it on held-out files, train, score it again, export, and
check the export against PyTorch.
"""

import contextlib
import dataclasses
import json
import time
from typing import Any

from rich.console import Console

from .._processes import barrier, of_first, process_index
from .._sharding import ZeroConfig
from ..distributed import Watchdog, check_same, initialize, time_limit
from ._journal import Journal, plot_run
from ._loop import run_steps
from ._printed import (
    NodeBytes,
    Outcome,
    node_bytes,
    print_overview,
    print_summary,
    print_verified,
)
from ._session import Session, begin, latest_step, open_session, restore
from ._settings import Train
from ._tasks import Scores, Task

_MEETING_SECONDS = 60.0


def train(settings: Train, console: Console) -> Outcome:
    """Run the job, or resume it, up to its last step; all processes must call it.

    Only the first process writes metrics, plots and the export, and prints progress.

    Raises:
        ValueError: a setting does not fit the machine, the data, or the run to resume; or the
            processes have different settings.
        TimeoutError: another process did not take part, or is lost.
        Interrupted: Ctrl-C was pressed while training, or SIGTERM came; the run was saved and can
            be resumed.
        Diverged: losses or gradients stay non-finite.
        RuntimeError: the export does not compute what was trained, or a checkpoint cannot be saved.
        ReplicasDiffer: devices hold different bits in copies of one array.
    """
    began = time.perf_counter()
    initialize()
    if process_index() != 0:
        console = Console(quiet=True)
    settings = _agreed(settings)
    directory = settings.run.directory
    with contextlib.ExitStack() as stack:
        with time_limit("loading", settings.faults.phase_seconds):
            session = stack.enter_context(open_session(settings, console))
        before, params, after = _evaluated_training(session)
        entered = _note_node_bytes(session) if settings.optimization.steps else None
    difference = _export(session, params)
    outcome = Outcome(
        before=before,
        after=after,
        directory=directory,
        node_bytes=entered,
        torch_difference=difference,
        seconds=time.perf_counter() - began,
    )
    print_summary(session, outcome)
    return outcome


def _agreed(settings: Train) -> Train:
    """Raise unless all processes have the same settings; return them with a name for the run."""
    check_same(settings=dataclasses.asdict(settings))
    name = of_first("run name", settings.run.named().name or "", _MEETING_SECONDS)
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, name=name))


def _export(session: Session, params: Any) -> float | None:
    """Plot the metrics, and export the parameters; return the result of `Task.export`."""
    directory, held_out = session.settings.run.directory, session.examples.held_out
    task, zero = session.setup.task, session.setup.zero
    if process_index() == 0:
        rows, title = session.journal.rows("step"), f"{session.settings.run.name}"
        plot_run(rows, directory / "loss.png", title=title, curves=task.curves)
    limit = session.settings.faults.phase_seconds
    with time_limit("the export", limit):
        difference = task.export(zero, params, held_out, directory / "export")
        barrier("the export", limit)
    return difference


def _evaluated_training(session: Session) -> tuple[Scores, Any, Scores]:
    """Train; return the scores before training, the trained parameters, and their scores."""
    evaluate, run, faults = _Evaluation(session), session.settings.run, session.settings.faults
    if run.resume or (run.resume_or_start and latest_step(session) is not None):
        with time_limit("restoring", faults.phase_seconds):
            state = restore(session)
        session.console.print(f"Resumed after step {state.step}", highlight=False)
        before = _noted(session.journal, session.setup.task, faults.phase_seconds)
    else:
        state = begin(session)
        before = None
    if state.step < session.settings.optimization.steps:
        print_overview(session, state)
        if run.verify and state.step == 0:
            print_verified(session, state)
    watchdog = Watchdog(
        step_seconds=faults.step_seconds, heartbeat_seconds=faults.heartbeat_seconds
    )
    with watchdog:
        with watchdog.waiting(faults.phase_seconds):
            before = before or evaluate("Before training", session.setup.params, 0)
        state = run_steps(session, state, watchdog)
        with watchdog.waiting(faults.phase_seconds):
            rounds = session.rounds
            params = state.params if rounds is None else rounds.mean(state.local)
            return before, params, evaluate("After training", params, state.step)


def _note_node_bytes(session: Session) -> NodeBytes | None:
    work = session.plan if session.rounds is None else session.rounds
    entered = node_bytes(session.setup, session.loss, session.tokens, work)
    if entered is not None:
        steps = session.settings.optimization.steps
        session.journal.append("node_bytes", steps, **dataclasses.asdict(entered))
    return entered


def _noted(journal: Journal, task: Task, seconds: float) -> Scores | None:
    """Read the scores before training from process 0's journal; return them on all processes.

    Return None if the journal has none. `seconds` is how long a process waits for process 0.
    """
    first_row = journal.rows("evaluation")[:1] if process_index() == 0 else []
    rows = json.loads(of_first("before training", json.dumps(first_row), seconds))
    return task.scores(**{name: rows[0][name] for name in task.labels}) if rows else None


class _Evaluation:
    """A function that scores parameters on the held-out rows; it compiles once for all calls.

    Weights are gathered without a codec: the scores are those of the weights that are exported.
    """

    def __init__(self, session: Session):
        self._session, self._task = session, session.setup.task
        config = session.setup.zero.config
        exact = ZeroConfig(stage=config.stage, offload=config.offload)
        zero, _ = session.setup.other_zero(exact)
        self._scores = self._task.make_scores(zero)

    def __call__(self, label: str, params: Any, step: int) -> Scores:
        session = self._session
        with session.console.status(f"{label}: held-out {self._task.unit}"):
            scores = self._scores(params, session.examples.held_out)
        session.journal.append("evaluation", step, **dataclasses.asdict(scores))
        session.console.print(f"{label}: {self._task.said(scores)}", highlight=False)
        return scores
