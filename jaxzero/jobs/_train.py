"""`jaxzero train`: fine-tune a PyTorch checkpoint.

Load the checkpoint shard by shard, measure retrieval on held-out modules, train, measure again,
export, and check the export against PyTorch.
"""

import contextlib
import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from .._processes import barrier, of_first, process_index
from ..distributed import Watchdog, check_same, initialize, time_limit
from ..interop import embed_with_transformers, export_encoder
from ._data import PairTokens
from ._journal import Journal, plot_run
from ._loop import run_steps
from ._printed import NodeBytes, node_bytes, print_overview, print_summary
from ._retrieval import Retrieval, embed_in_batches, make_embed, retrieval_scores
from ._session import Session, begin, latest_step, open_session, restore
from ._settings import Train
from ._setup import Setup
from ._step import make_sharded_embed
from ._verified import print_verified

_MEETING_SECONDS = 60.0
_EVALUATED_PAIRS = 16  # per device and forward pass: a pass gathers every weight, so not too few
TOLERANCE = 1e-4  # largest difference of any component of two unit vectors
_NUM_COMPARED = 32  # pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Retrieval scores before and after a run, and what the run cost.

    The scores are computed on pairs from Python modules that are not in the training data.
    """

    before: Retrieval
    after: Retrieval
    directory: Path
    node_bytes: NodeBytes | None  # of one step; None if nothing was trained, or on one node
    torch_difference: float | None  # None if PyTorch is not installed
    seconds: float


def train(settings: Train, console: Console) -> Outcome:
    """Run the job, or the rest of one that is resumed. All processes must call it.

    Only the first process writes metrics, plots and the export, and prints progress.

    Raises:
        ValueError: a setting does not fit the machine, the data, or the run to resume; or the
            processes have different settings.
        TimeoutError: another process did not take part, or is lost.
        Interrupted: Ctrl-C was pressed while training, or SIGTERM came; the run was saved and can
            be resumed.
        Diverged: losses or gradients stay non-finite.
        RuntimeError: the export does not compute what was trained.
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
    print_summary(
        console,
        scores={"before": dataclasses.asdict(before), "after": dataclasses.asdict(after)},
        rows=session.journal.rows("step"),
        node_bytes=entered,
        directory=directory,
        torch_difference=difference,
        seconds=outcome.seconds,
    )
    return outcome


def _agreed(settings: Train) -> Train:
    """Check that settings are equal on all processes; return them with one name for the run."""
    check_same(settings=dataclasses.asdict(settings))
    name = of_first("run name", settings.run.named().name or "", _MEETING_SECONDS)
    return dataclasses.replace(settings, run=dataclasses.replace(settings.run, name=name))


def _export(session: Session, params: Any) -> float | None:
    """Plot the curves, and write and check the PyTorch checkpoint (see `export_and_compare`)."""
    directory, held_out = session.settings.run.directory, session.examples.held_out
    if process_index() == 0:
        rows = session.journal.rows("step")
        plot_run(rows, directory / "loss.png", title=f"{session.settings.run.name}")
    limit = session.settings.faults.phase_seconds
    with time_limit("the export", limit):
        difference = export_and_compare(session.setup, params, held_out, directory / "export")
        barrier("the export", limit)
    return difference


def _evaluated_training(session: Session) -> tuple[Retrieval, Any, Retrieval]:
    """Train; return the scores before, the trained parameters and their scores."""
    evaluate, run, faults = _Evaluation(session), session.settings.run, session.settings.faults
    if run.resume or (run.resume_or_start and latest_step(session) is not None):
        with time_limit("restoring", faults.phase_seconds):
            state = restore(session)
        session.console.print(f"Resumed after step {state.step}", highlight=False)
        before = _noted(session.journal, faults.phase_seconds)
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


def _noted(journal: Journal, seconds: float) -> Retrieval | None:
    """The scores before training, from the journal of process 0; None if it has none."""
    found = journal.rows("evaluation")[:1] if process_index() == 0 else []
    rows = json.loads(of_first("before training", json.dumps(found), seconds))
    names = [field.name for field in dataclasses.fields(Retrieval)]
    return Retrieval(**{name: rows[0][name] for name in names}) if rows else None


class _Evaluation:
    """A function that scores parameters on the held-out pairs; it compiles once for all calls."""

    def __init__(self, session: Session):
        self._session = session
        self._embed = make_sharded_embed(session.setup)

    def __call__(self, label: str, params: Any, step: int) -> Retrieval:
        session = self._session
        with session.console.status(f"{label}: embedding held-out pairs"):
            embeddings = embed_in_batches(
                lambda tokens: self._embed(params, tokens),
                session.examples.held_out,
                _EVALUATED_PAIRS * session.setup.num_devices,
            )
        scores = retrieval_scores(embeddings)
        session.journal.append("evaluation", step, **dataclasses.asdict(scores))
        session.console.print(
            f"{label}: MRR@10 {scores.mrr_at_10:.3f}, recall@1 {scores.recall_at_1:.3f}",
            highlight=False,
        )
        return scores


def export_and_compare(
    setup: Setup, params: Any, tokens: PairTokens, directory: Path
) -> float | None:
    """Write a PyTorch checkpoint, load it with transformers, and compare embeddings.

    All processes must call it, since it gathers the parameters.

    Returns:
        The largest difference in any component, or None if torch or transformers is not installed,
        and on processes other than the first.

    Raises:
        RuntimeError: the embeddings differ by more than `TOLERANCE`; the export is not deleted.
    """
    full = jax.tree.map(np.asarray, setup.zero.unshard(params))
    export_encoder(full, directory, source=setup.checkpoint)
    if process_index() != 0 or not all(
        importlib.util.find_spec(name) for name in ("torch", "transformers")
    ):
        return None
    sample = tokens.rows(slice(_NUM_COMPARED))
    ours = np.asarray(jax.jit(make_embed(setup.graph))(full, sample))
    flat = (array.reshape(-1, array.shape[-1]) for array in sample)
    theirs = embed_with_transformers(directory, *flat).reshape(ours.shape)
    difference = float(np.abs(ours - theirs).max())
    if not difference <= TOLERANCE:  # also when it is NaN
        raise RuntimeError(
            f"The PyTorch checkpoint in {str(directory)!r} does not compute what was trained: "
            f"embeddings differ by {difference:.1e}, more than {TOLERANCE:.0e}. Do not use it; "
            "this is an error in jaxzero, please report it."
        )
    return difference
