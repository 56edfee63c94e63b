"""The objects of a training run that stay fixed (`Session`), and its training state (`State`)."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from ..._checkpoint import Checkpoints
from ..._plan import Plan
from ...data import Batches
from .._settings import Train
from .._task import Examples, PairTokens, load_examples, training_batches
from .journal import Journal
from .node_bytes import abstract_tokens, plan_step
from .setup import Setup, describe_devices, set_up
from .step import LossFn, make_loss
from .trackers import make_trackers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Objects that do not change during training: setup, data, files, trackers."""

    settings: Train
    setup: Setup
    loss: LossFn
    examples: Examples
    batches: Batches  # of the steps to come
    checkpoints: Checkpoints
    journal: Journal
    console: Console

    @property
    def tokens(self) -> PairTokens:
        """Shapes and dtypes of the tokens of a step."""
        return abstract_tokens(self.settings.optimization.pairs, self.settings.data.max_tokens)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of a step; the first access traces the model."""
        return plan_step(self.setup.zero, self.setup.params, self.loss, self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The training state. Together with the settings it determines all later steps bit for bit."""

    step: int  # number of steps done
    params: Any
    opt_state: Any
    wire_state: Any  # from `zero.init_wire_state`; None if the config needs none


@contextlib.contextmanager
def open_session(settings: Train, console: Console) -> Iterator[Session]:
    """Context manager that loads checkpoint and data, and opens the folder of the run.

    Raises:
        ValueError: a setting does not fit the machine or the data.
    """
    directory = settings.run.directory
    setup = set_up(settings.checkpoint, settings.devices, settings.sharding, settings.optimization)
    console.print(
        f"{setup.checkpoint}\non {describe_devices(setup)}", highlight=False, soft_wrap=True
    )
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
            loss=make_loss(setup, temperature=settings.optimization.temperature),
            examples=examples,
            batches=batches,
            checkpoints=checkpoints,
            journal=journal,
            console=console,
        )
