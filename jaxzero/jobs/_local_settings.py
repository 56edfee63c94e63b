"""Settings of local steps. Field docstrings are the help texts of the command line."""

import dataclasses
from typing import Annotated, Literal

import optax
from tyro.conf import arg

from .._codecs import Int4, Int8
from .._local_steps import LocalSteps

_CODECS = {"float32": None, "int8": Int8(), "int4": Int4()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Local steps (DiLoCo): each node trains by itself, and now and then nodes exchange parameters.

    Every node has its own parameters and optimizer state. The difference between the outer
    parameters and a node's own is averaged over nodes and given to an outer optimizer."""

    local_steps: Annotated[int | None, arg(metavar="INT")] = None
    """Steps of a round, in which every parameter is exchanged once between nodes. Left out, all
    nodes take each step together. In `jaxzero train`, `steps` must be a multiple. A round is one
    program: checkpoints, comparisons, Ctrl-C and SIGTERM wait for its end. A pair then has the
    pairs of its own node as negatives. Not with `offload`, `adaptive_batch` or the wire zeropp4."""

    local_fragments: int = 1
    """Parts of the parameters that are exchanged in turn, evenly over a round; a divisor of
    `local_steps`."""

    local_delay: int = 0
    """Steps for which a fragment travels while nodes go on; at most `local_steps` /
    `local_fragments`. 0: nodes wait for it."""

    local_codec: Literal["float32", "int8", "int4"] = "float32"
    """How the differences travel; what rounding takes away is added to the next ones."""

    local_mixing: Annotated[float | None, arg(metavar="FLOAT")] = None
    """Weight of a node's own parameters when the new outer ones arrive, from 0 to less than 1. Left
    out, the node keeps all progress that it made during the delay."""

    outer_learning_rate: float = 0.7
    """Learning rate of the outer optimizer, SGD. With 1 and no momentum, nodes take the mean."""

    outer_momentum: float = 0.9
    """Its Nesterov momentum."""

    def __post_init__(self):
        if not self.outer_learning_rate > 0:
            raise ValueError(
                f"`outer_learning_rate` must be positive; got {self.outer_learning_rate!r}."
            )
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"`outer_momentum` must be at least 0 and less than 1; got {self.outer_momentum!r}."
            )
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [f.name for f in dataclasses.fields(self) if given[f.name] != f.default]
        if self.local_steps is None and changed:
            raise ValueError(
                f"`{changed[0]}` needs `local_steps`, the steps of a round; it was left out."
            )
        try:
            _ = self.method
        except ValueError as error:
            names = ", ".join(f"`{name}` {given[name]}" for name in given if name[:5] == "local")
            raise ValueError(f"{error} Given were {names}.") from None

    @property
    def method(self) -> LocalSteps | None:
        """The method of local steps; None if all nodes take each step together."""
        if self.local_steps is None:
            return None
        momentum = self.outer_momentum or None  # with 0, optax would keep a trace of no use
        return LocalSteps(
            every=self.local_steps,
            delay=self.local_delay,
            fragments=self.local_fragments,
            outer=optax.sgd(self.outer_learning_rate, momentum, nesterov=momentum is not None),
            codec=_CODECS[self.local_codec],
            mixing=self.local_mixing,
        )
