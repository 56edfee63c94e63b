"""The objects of a training run that stay fixed (`Session`), and its training state (`State`)."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from .._checkpoint import Checkpoints
from .._plan import Plan
from .._zero import LocalRounds, LocalState
from ..data import Batches
from ._data import Examples, PairTokens, abstract_tokens, load_examples, training_batches
from ._journal import Journal
from ._retrieval import AXES, NODE_AXES, LossFn, make_loss
from ._settings import Train
from ._setup import Setup, describe_devices, plan_step, set_up
from ._step import make_rounds
from ._trackers import make_trackers


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
    def tokens(self) -> PairTokens:
        """Shapes and dtypes of the tokens of a step."""
        return abstract_tokens(self.settings.optimization.pairs, self.settings.data.max_tokens)

    @property
    def steps_at_once(self) -> int:
        """The steps that one program runs: those of a round with local steps, else 1."""
        return 1 if self.rounds is None else self.rounds.method.every

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of a step of all nodes together; the first access traces the model."""
        assert self.rounds is None
        return plan_step(self.setup.zero, self.setup.params, self.loss, self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The training state. Together with the settings it determines all later steps bit for bit."""

    step: int  # number of steps done
    params: Any  # with local steps, those of every node, on a leading dim
    opt_state: Any  # likewise
    wire_state: Any  # from `zero.init_wire_state`; None if the config needs none
    exchange: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # rest of a `LocalState`

    @property
    def trees(self) -> dict[str, Any]:
        """All arrays, as trees by name."""
        named = {name: getattr(self, name) for name in ("params", "opt_state", "wire_state")}
        return {**named, **self.exchange}

    @classmethod
    def of_local(cls, step: int, local: LocalState) -> "State":
        """The training state with local steps."""
        fields = {x.name: getattr(local, x.name) for x in dataclasses.fields(local)}
        params, opt_state = fields.pop("params"), fields.pop("opt_state")
        return cls(step=step, params=params, opt_state=opt_state, wire_state=None, exchange=fields)

    @property
    def local(self) -> LocalState:
        """The `LocalState` given to `of_local`."""
        return LocalState(params=self.params, opt_state=self.opt_state, **self.exchange)


@contextlib.contextmanager
def open_session(settings: Train, console: Console) -> Iterator[Session]:
    """Context manager that loads checkpoint and data, and opens the folder of the run.

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
    console.print(
        f"{setup.checkpoint}\non {describe_devices(setup)}", highlight=False, soft_wrap=True
    )
    method = settings.local.method
    temperature = settings.optimization.temperature
    loss = make_loss(setup.graph, temperature=temperature, axes=NODE_AXES if method else AXES)
    rounds = make_rounds(setup, loss, method) if method else None
    examples = load_examples(settings.data, setup.checkpoint, console)
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
