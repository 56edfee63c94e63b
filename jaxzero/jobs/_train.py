"""`jaxzero train`: from a PyTorch checkpoint to a better one.

Load the checkpoint shard by shard, measure retrieval on held-out modules, train, measure again,
export, and check the export against PyTorch.
"""

import dataclasses
import time
from pathlib import Path

from rich.console import Console

from ._export import export_and_compare
from ._journal import Journal
from ._loop import run_steps
from ._metrics import Retrieval, embed_in_batches, retrieval_scores
from ._node_bytes import NodeBytes, abstract_tokens, node_bytes, plan_step
from ._overview import print_overview
from ._plot import plot_run
from ._progress import print_summary
from ._resume import begin, restore
from ._session import Session, State, open_session
from ._settings import Train
from ._step import make_sharded_embed
from ._tokens import PairTokens

_EVALUATED_PAIRS = 16  # per device and forward pass: a pass gathers every weight, so not too few


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run achieved, on pairs of modules that training never saw."""

    before: Retrieval
    after: Retrieval
    directory: Path
    node_bytes: NodeBytes | None  # of one step; None: nothing was trained, or there is one node
    torch_difference: float | None  # None: PyTorch is not installed, nothing was compared
    seconds: float


def train(settings: Train, console: Console) -> Outcome:
    """Run the whole job, or the rest of one.

    Raises:
        ValueError: a setting does not fit the machine, the data, or the run to resume.
        Interrupted: Ctrl-C was pressed while training; the run was saved and can be resumed.
        RuntimeError: the export does not compute what was trained.
    """
    began = time.perf_counter()
    settings = dataclasses.replace(settings, run=settings.run.named())
    directory = settings.run.directory
    with open_session(settings, console) as session:
        before, state, after = _evaluated_training(session)
        entered = _note_node_bytes(session) if state.step else None
    plot_run(session.journal.rows("step"), directory / "loss.png", title=f"{settings.run.name}")
    difference = export_and_compare(
        session.setup, state.params, session.examples.held_out, directory / "export"
    )
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


def _evaluated_training(session: Session) -> tuple[Retrieval, State, Retrieval]:
    evaluate = _Evaluation(session)
    if session.settings.run.resume:
        state = restore(session)
        session.console.print(f"Resumed after step {state.step}", highlight=False)
        before = _noted(session.journal)
    else:
        state = begin(session)
        before = None
    if state.step < session.settings.optimization.steps:
        plan = plan_step(session.setup.zero, state.params, session.loss, _tokens(session))
        print_overview(session, state, plan)
    before = before or evaluate("Before training", state)
    state = run_steps(session, state)
    return before, state, evaluate("After training", state)


def _note_node_bytes(session: Session) -> NodeBytes | None:
    entered = node_bytes(session.setup, session.loss, _tokens(session))
    if entered is not None:
        steps = session.settings.optimization.steps
        session.journal.append("node_bytes", steps, **dataclasses.asdict(entered))
    return entered


def _tokens(session: Session) -> PairTokens:
    return abstract_tokens(session.settings.optimization.pairs, session.settings.data.max_tokens)


def _noted(journal: Journal) -> Retrieval:
    row = journal.rows("evaluation")[0]
    names = [field.name for field in dataclasses.fields(Retrieval)]
    return Retrieval(**{name: row[name] for name in names})


class _Evaluation:
    """Scores on the held-out pairs; compiles once and is called before and after."""

    def __init__(self, session: Session):
        self._session = session
        self._embed = make_sharded_embed(session.setup)

    def __call__(self, label: str, state: State) -> Retrieval:
        session = self._session
        with session.console.status(f"{label}: embedding held-out pairs"):
            embeddings = embed_in_batches(
                lambda tokens: self._embed(state.params, tokens),
                session.examples.held_out,
                _EVALUATED_PAIRS * session.setup.num_devices,
            )
        scores = retrieval_scores(embeddings)
        session.journal.append("evaluation", state.step, **dataclasses.asdict(scores))
        session.console.print(
            f"{label}: MRR@10 {scores.mrr_at_10:.3f}, recall@1 {scores.recall_at_1:.3f}",
            highlight=False,
        )
        return scores
