"""Begin, save and restore a training run: its fixed objects (`Session`), and its `State`.

A run begins at step 0, or goes on from its last checkpoint. The wire state is what codecs keep from
step to step, such as the residuals of error feedback. It is saved separately, since a run can
resume without it: residuals then begin at 0. It is saved before the checkpoint of its step, and
after the previous checkpoint is complete. So that every checkpoint keeps its wire state, one more
wire state than checkpoints is kept. When a run is resumed, wire states of steps after its
checkpoint are deleted.
"""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from .._checkpoint import Checkpoints, NoCheckpoint, drop_after, list_together, say_all_damaged
from .._mesh import NODE
from .._plan import Plan
from .._processes import barrier, process_index
from .._zero import LocalRounds, LocalState
from ..data import Batches
from ._data import Examples, training_batches
from ._journal import Journal, make_trackers
from ._retrieval import AXES, NODE_AXES, LossFn
from ._settings import Train
from ._setup import Setup, plan_step, set_up
from ._step import make_rounds

_MEETING_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Objects that do not change during training: setup, data, files, trackers."""

    settings: Train
    setup: Setup
    loss: LossFn
    rounds: LocalRounds | None  # None: all nodes take each step together
    examples: Examples
    batches: Batches  # of the steps to come
    checkpoints: Checkpoints
    journal: Journal
    console: Console

    @property
    def tokens(self) -> Any:
        """Shapes and dtypes of the tokens of a step."""
        return self.setup.task.abstract_batch(self.settings.optimization.batch_size)

    @property
    def steps_at_once(self) -> int:
        """How many steps one program runs: those of a round with local steps, otherwise 1."""
        return 1 if self.rounds is None else self.rounds.method.every

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of a step, in a run without local steps; first use traces the model."""
        assert self.rounds is None
        return plan_step(self.setup.zero, self.setup.params, self.loss, self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The training state after a step; state and settings determine all later steps exactly."""

    step: int  # number of steps done
    params: Any  # with local steps, the parameters of each node, `[nodes, ...]`
    opt_state: Any  # likewise
    wire_state: Any  # from `zero.init_wire_state`; None if the config needs none
    exchange: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # rest of a `LocalState`

    @property
    def trees(self) -> dict[str, Any]:
        """All arrays of the state, as a dict from names, such as "params", to trees of arrays."""
        named = {name: getattr(self, name) for name in ("params", "opt_state", "wire_state")}
        return {**named, **self.exchange}

    @classmethod
    def of_local(cls, step: int, local: LocalState) -> "State":
        """Make the state after `step` steps from a `LocalState`, in a run with local steps."""
        fields = {x.name: getattr(local, x.name) for x in dataclasses.fields(local)}
        params, opt_state = fields.pop("params"), fields.pop("opt_state")
        return cls(step=step, params=params, opt_state=opt_state, wire_state=None, exchange=fields)

    @property
    def local(self) -> LocalState:
        """This state as a `LocalState`, in a run with local steps; the inverse of `of_local`."""
        return LocalState(params=self.params, opt_state=self.opt_state, **self.exchange)


@contextlib.contextmanager
def open_session(settings: Train, console: Console) -> Iterator[Session]:
    """Load checkpoint and data, and open the run's folder for the body of a `with` statement.

    Raises:
        ValueError: a setting does not fit the machine or the data.
    """
    directory = settings.run.directory
    setup = set_up(
        settings.checkpoint,
        settings.devices,
        settings.sharding,
        settings.optimization,
        max_tokens=settings.data.max_tokens,
        console=console,
    )
    method = settings.local.method
    loss = setup.task.make_loss(settings.optimization, NODE_AXES if method else AXES)
    rounds = make_rounds(setup, loss, method) if method else None
    examples = setup.task.load_examples(settings.data, console)
    batches = training_batches(examples.train, setup.zero, settings.optimization)
    keep = settings.run.keep_checkpoints
    journal = Journal(directory / "metrics.jsonl", make_trackers(settings, console))
    with (
        contextlib.closing(journal),
        Checkpoints(directory.absolute() / "checkpoints", setup.zero, keep=keep) as checkpoints,
    ):
        yield Session(
            settings=settings,
            setup=setup,
            loss=loss,
            rounds=rounds,
            examples=examples,
            batches=batches,
            checkpoints=checkpoints,
            journal=journal,
            console=console,
        )


def latest_step(session: Session) -> int | None:
    """Return the step of the newest checkpoint, or None; all processes get the same answer.

    Raises:
        ValueError: there are only damaged checkpoints.
    """
    directory = session.checkpoints.directory
    steps, damaged = list_together("latest step", directory, _MEETING_SECONDS)
    if damaged and not steps:
        raise ValueError(say_all_damaged(directory, damaged))
    return max(steps, default=None)


def begin(session: Session) -> State:
    """Make the state before the first step.

    Raises:
        ValueError: the run's folder already holds checkpoints of a run, complete or damaged.
    """
    step = latest_step(session)
    if step is not None:
        raise ValueError(
            f"{str(session.settings.run.directory)!r} already holds a run, at step {step}. Go on "
            "with it by `resume`, choose another `name`, or delete the folder."
        )
    session.journal.clear()  # of a run that ended before its first checkpoint
    _drop_wire_states(session)
    return _initial(session)


def save(session: Session, state: State) -> None:
    """Save a state, the position in the data, and the settings that `restore` compares."""
    if jax.tree.leaves(state.wire_state):
        # Written first and completely, so that every checkpoint has its wire state. The previous
        # checkpoint must be complete too, or one too few of the older wire states would be kept.
        session.checkpoints.close()
        with _wire_checkpoints(session) as wire_checkpoints:
            wire_checkpoints.save(state.step, {"wire_state": state.wire_state})
    tree = {name: x for name, x in state.trees.items() if name != "wire_state"}
    nodes = session.setup.zero.mesh.shape[NODE]
    extra = {**_identity(session), "batches": session.batches.get_state(), "nodes": nodes}
    session.checkpoints.save(state.step, tree, extra=extra)


def restore(session: Session) -> State:
    """Load the last checkpoint, which may come from other devices or another wire format.

    Raises:
        ValueError: there is no checkpoint, or a setting that decides the course of training differs
            from the run that saved it.
    """
    if latest_step(session) is None:
        raise ValueError(
            f"There is nothing to resume in {str(session.settings.run.directory)!r}: it holds no "
            "checkpoint. Leave out `resume`, or give the `name` of another run."
        )

    def like(saved: dict[str, Any]) -> dict[str, Any]:
        _check_same(_identity(session), saved)
        setup = session.setup
        if session.rounds is None:
            return {"params": setup.params, "opt_state": setup.opt_state}
        nodes = saved["nodes"]
        abstract = session.rounds.abstract(setup.params, setup.opt_state, nodes=nodes)
        return {x.name: getattr(abstract, x.name) for x in dataclasses.fields(abstract)}

    step, tree, saved = session.checkpoints.restore(like)
    session.batches.set_state(saved.get("batches", {}))
    session.journal.drop_after(step)
    if session.rounds is not None:
        local = _on_these_nodes(session, session.rounds, LocalState(**tree), saved["nodes"])
        return State.of_local(step, local)
    wire_state = _restored_wire_state(session, step, tree["params"])
    return State(step=step, **tree, wire_state=wire_state)


def _on_these_nodes(
    session: Session, rounds: LocalRounds, local: LocalState, nodes: int
) -> LocalState:
    """Turn a state that `nodes` nodes saved into one for the nodes of this mesh.

    If the mesh has another number of nodes, all its nodes go on from the mean of the saved nodes'
    parameters.
    """
    if nodes == rounds.num_nodes:
        return local
    session.console.print(
        f"The run was saved by {nodes} nodes; the {rounds.num_nodes} nodes of this one all go on "
        "from their mean.",
        highlight=False,
    )
    return rounds.rejoin(local)


def _restored_wire_state(session: Session, step: int, params: Any) -> Any:
    """Load the wire state of a step; make a new one if it is missing, damaged or does not fit."""
    first = _first_wire_state(session, params)
    if jax.tree.leaves(first):
        with _wire_checkpoints(session) as wire_checkpoints:
            try:
                restored = wire_checkpoints.restore({"wire_state": first}, step=step)
            except (
                NoCheckpoint,
                ValueError,
            ):  # an `OSError` of reading is raised: it may be intact
                session.console.print(
                    "The run was saved with another wire or on other devices, or its wire state is "
                    "damaged, so the wire state starts anew.",
                    highlight=False,
                )
            else:
                _drop_wire_states(session, after=step)
                return restored.state["wire_state"]
    _drop_wire_states(session)
    return first


def _first_wire_state(session: Session, params: Any) -> Any:
    zero = session.setup.zero
    return zero.init_wire_state(params) if zero.config.needs_wire_state else None


def _wire_checkpoints(session: Session) -> Checkpoints:
    """Open the checkpoints of wire states, which are kept apart from the run's checkpoints.

    A wire state is saved before the checkpoint of its step. So one more wire state is kept than
    checkpoints of the run.
    """
    keep = session.settings.run.keep_checkpoints + 1
    return Checkpoints(_wire_directory(session), session.setup.zero, keep=keep)


def _drop_wire_states(session: Session, *, after: int | None = None) -> None:
    """Delete the wire states of steps after step `after`; None: of all steps.

    The run will repeat these steps. `Checkpoints.save` skips a step that is already saved, so a
    repeated step would keep its old wire state, which may have another layout.
    """
    if process_index() == 0:
        if after is None:
            shutil.rmtree(_wire_directory(session), ignore_errors=True)
        else:
            drop_after(_wire_directory(session), after)
    barrier(f"no wire states after {after}", _MEETING_SECONDS)


def _wire_directory(session: Session) -> Path:
    return session.settings.run.directory.absolute() / "wire_state"


def _initial(session: Session) -> State:
    setup = session.setup
    if session.rounds is not None:
        return State.of_local(0, session.rounds.init(setup.params, setup.opt_state))
    return State(
        step=0,
        params=setup.params,
        opt_state=setup.opt_state,
        wire_state=_first_wire_state(session, setup.params),
    )


def _identity(session: Session) -> dict[str, Any]:
    """Return the settings in which a resumed run must agree with the saved run, as plain data.

    Devices and sharding are not among them, since they change the trained parameters only by
    rounding. Neither is the number of nodes, although with local steps it changes them more.
    """
    local = dataclasses.asdict(session.settings.local)
    return {
        **(local if session.rounds is not None else {"local_steps": None}),
        **dataclasses.asdict(session.settings.optimization),
        "max_tokens": session.setup.task.num_tokens,
        "data": session.examples.digest,
    }


def _check_same(given: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in given.items():
        if saved.get(name) != value:
            remedy = (
                "Use the Python and the `data` of the first run"
                if name == "data"
                else "Pass the value of the first run"
            )
            raise ValueError(
                f"Cannot resume with another `{name}`: the run was started with "
                f"{saved.get(name)!r}, got {value!r}. {remedy}, or start a new run under another "
                "`name`."
            )
