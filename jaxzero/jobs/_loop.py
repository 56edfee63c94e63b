"""The training loop: step, note, save now and then, stop when asked to."""

import math
import time

import jax

from ._interrupt import polite_interrupt
from ._profile import StepProfiler
from ._progress import progress_bar
from ._resume import save
from ._retrieval import Metrics
from ._session import Session, State
from ._step import SOMETIMES_UNKNOWN, StepFn, make_step


class Interrupted(Exception):
    """Ctrl-C was pressed; the run was saved after `step` steps and can be resumed under `name`."""

    def __init__(self, name: str | None, step: int):
        super().__init__(f"Run {name!r} was interrupted after step {step} and saved.")
        self.name = name
        self.step = step


def run_steps(session: Session, state: State) -> State:
    """Train up to the last step, and leave a checkpoint of it.

    Raises:
        Interrupted: Ctrl-C was pressed. The step was finished and the state saved.
    """
    optimization, run = session.settings.optimization, session.settings.run
    step_fn = make_step(session.setup, session.loss)
    bar = progress_bar(session.console, completed=state.step, total=optimization.steps)
    steps = run.profiled_steps if jax.process_index() == 0 else range(0)
    with polite_interrupt() as interrupted:
        with bar as advance, StepProfiler(steps, run.directory / "profile") as profiler:
            while state.step < optimization.steps and not interrupted():
                with profiler.step(state.step + 1):
                    state, numbers = _one_step(session, state, step_fn)
                session.journal.append("step", state.step, **numbers)
                advance(numbers)
                if state.step % run.save_every == 0:
                    save(session, state)
        if session.checkpoints.latest_step() != state.step:
            save(session, state)
        if interrupted() and state.step < optimization.steps:
            raise Interrupted(run.name, state.step)
    return state


def _one_step(session: Session, state: State, step_fn: StepFn) -> tuple[State, dict[str, float]]:
    began = time.perf_counter()
    params, opt_state, wire_state, metrics = step_fn(
        state.params, state.opt_state, state.wire_state, next(session.batches)
    )
    numbers = _known(metrics)  # waits for the step
    numbers["pairs_per_second"] = session.settings.optimization.pairs / (
        time.perf_counter() - began
    )
    state = State(step=state.step + 1, params=params, opt_state=opt_state, wire_state=wire_state)
    return state, numbers


def _known(metrics: Metrics) -> dict[str, float]:
    """As numbers; JSON has none for those that are not known."""
    numbers = {name: float(value) for name, value in metrics.items()}
    unknown = {name for name in SOMETIMES_UNKNOWN if not math.isfinite(numbers.get(name, 0.0))}
    return {name: value for name, value in numbers.items() if name not in unknown}
