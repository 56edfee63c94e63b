"""What a training run has open, and the state that changes while it trains."""

import dataclasses
from typing import Any

from rich.console import Console

from .._checkpoint import Checkpoints
from ._examples import Examples
from ._journal import Journal
from ._settings import Train
from ._setup import Setup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Everything that stays the same from the first step to the last."""

    settings: Train
    setup: Setup
    examples: Examples
    checkpoints: Checkpoints
    journal: Journal
    console: Console


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """All that changes: it decides, with the settings, every later step bit for bit."""

    step: int  # steps done
    params: Any
    opt_state: Any
