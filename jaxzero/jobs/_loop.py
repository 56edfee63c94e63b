"""Run the steps of a job: train, log, save, compare replicas, stop when asked, and profile."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from ..distributed import StopRequest, Watchdog, check_replicas
from ._ends import Diverged, Interrupted
from ._printed import progress_bar
from ._session import Session, State, save
from ._step import RoundFn, StepFn, make_round, make_step

Numbers = dict[str, float]
# Runs a program, a step or a round of local steps; returns the state and the metrics of each step.
Advance = Callable[[State], tuple[State, list[Numbers]]]


class StepProfiler:
    """Traces the requested steps by JAX's profiler, as a context manager around all steps."""

    def __init__(self, steps: range, directory: Path):
        """Prepare to trace `steps` (numbers of optimizer steps); the traces go to `directory`."""
        self._steps = steps
        self._directory = directory
        self._is_tracing = False

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def step(self, number: int, num_steps: int = 1) -> Iterator[None]:
        """Mark a `with` block as step `number`, and trace it if that was requested.

        Args:
            number: the number of the first step that the block runs.
            num_steps: how many steps the block runs.
        """
        following = number + num_steps
        if self._has_any(number, following) and not self._is_tracing:
            jax.profiler.start_trace(self._directory)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if not self._has_any(following, following + num_steps):
            self._stop()

    def _has_any(self, first: int, following: int) -> bool:
        """Return True if a step from `first` to `following - 1` is to be traced."""
        return first < self._steps.stop and self._steps.start < following

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def run_steps(session: Session, state: State, watchdog: Watchdog) -> State:
    """Train up to the last step, and save a checkpoint there. Every step calls `watchdog.beat`.

    With local steps, checkpoints, comparisons and stop requests wait for the end of a round.

    Raises:
        Interrupted: Ctrl-C was pressed, or SIGTERM came. The step was finished and the state saved.
        Diverged: too many steps in a row had a loss or gradients that were not finite.
        ReplicasDiffer: devices hold different bits in copies of one array.
    """
    optimization, run = session.settings.optimization, session.settings.run
    check_every, at_once = session.settings.faults.check_every, session.steps_at_once
    advance_state = _make_advance(session)
    bar = progress_bar(session.console, completed=state.step, total=optimization.steps)
    profiled = run.profiled_steps if jax.process_index() == 0 else range(0)
    with StopRequest() as stop:
        with bar as advance, StepProfiler(profiled, run.directory / "profile") as profiler:
            # The step of the newest checkpoint: a state after step 0 was restored from one.
            is_asked, saved = False, state.step or None
            while state.step < optimization.steps and not is_asked:
                first = state.step + 1
                with profiler.step(first, at_once):
                    state, rows = advance_state(state)
                watchdog.beat(state.step)
                for step, numbers in enumerate(rows, first):
                    session.journal.append("step", step, **_finite(numbers))
                    advance(numbers)
                    _check_finite(session, step, numbers)
                if state.step % run.save_every < at_once:  # it is, or has passed, a multiple
                    _save_compared(session, state)
                    saved = state.step
                elif check_every and state.step % check_every < at_once:
                    _compare(session, state)
                is_asked = stop.reached()
        if saved != state.step:
            _save_compared(session, state)
        session.checkpoints.close()  # wait for it, before a second signal may end this process
        if is_asked and state.step < optimization.steps:
            raise Interrupted(run.name, state.step, by_ctrl_c=stop.interrupted)
    return state


def _make_advance(session: Session) -> Advance:
    if session.rounds is not None:
        session.setup.free()  # the state of local steps holds copies, one for each node
        round_fn = make_round(session.setup, session.rounds)
        return lambda state: _one_round(session, state, round_fn)
    step_fn = make_step(session.setup, session.loss)
    return lambda state: _one_step(session, state, step_fn)


def _one_step(session: Session, state: State, step_fn: StepFn) -> tuple[State, list[Numbers]]:
    began = time.perf_counter()
    params, opt_state, wire_state, metrics = step_fn(
        state.params, state.opt_state, state.wire_state, next(session.batches)
    )
    numbers = {name: float(x) for name, x in metrics.items()}  # waits for the step
    num_rows, seconds = session.settings.optimization.batch_size, time.perf_counter() - began
    numbers[f"{session.setup.task.unit}_per_second"] = num_rows / seconds
    state = State(step=state.step + 1, params=params, opt_state=opt_state, wire_state=wire_state)
    return state, [numbers]


def _one_round(session: Session, state: State, round_fn: RoundFn) -> tuple[State, list[Numbers]]:
    began, every = time.perf_counter(), session.steps_at_once
    local, metrics = round_fn(state.local, next(session.batches.rounds(every)))
    columns = {name: np.asarray(x) for name, x in metrics.items()}  # waits for the round
    seconds = time.perf_counter() - began
    num_rows = every * session.settings.optimization.batch_size
    speed = {f"{session.setup.task.unit}_per_second": num_rows / seconds}
    rows = [{**{name: float(x[i]) for name, x in columns.items()}, **speed} for i in range(every)]
    return State.of_local(state.step + every, local), rows


def _finite(numbers: Numbers) -> Numbers:
    """Return the metrics whose values are finite, since JSON cannot represent NaN or infinity.

    A loss may overflow, and SimiGrad's similarity is NaN before the first update.
    """
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _save_compared(session: Session, state: State) -> None:
    """Compare the replicas of each array on all devices, then save a checkpoint.

    A checkpoint holds only one replica, so after saving a difference would be lost.
    """
    if session.settings.faults.check_every:
        _compare(session, state)
    save(session, state)


def _compare(session: Session, state: State) -> None:
    check_replicas(state.trees, step=state.step, seconds=session.settings.faults.step_seconds)


def _check_finite(session: Session, step: int, numbers: Numbers) -> None:
    """Raise `Diverged` after too many steps in a row with a non-finite loss or gradients."""
    if numbers["skipped_in_a_row"] >= session.settings.faults.max_skipped:
        raise Diverged(
            f"{numbers['skipped_in_a_row']:.0f} steps in a row had a loss or gradients that are "
            f"not finite, the last was step {step} (loss {numbers['loss']}). "
            f"{_last_good(session)}"
        )


def _last_good(session: Session) -> str:
    session.checkpoints.close()  # waits for a checkpoint that is being written
    step = session.checkpoints.latest_step()
    remedy = "Start a new run with a lower `learning_rate`, or look at the data."
    if step is None:
        return f"There is no checkpoint yet. {remedy}"
    where = str(session.checkpoints.directory)
    return (
        f"The last good checkpoint is that of step {step}, in {where!r}; `resume` goes on from it, "
        f"which helps if a device or a file was to blame. {remedy}"
    )
