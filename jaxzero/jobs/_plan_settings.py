"""Settings of `jaxzero plan` and `verify`. Field docstrings are the command line's help texts."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ._local_settings import Local

_MOST_GIGABYTES = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Choose config, micro-batches, rematerialisation and offload for a cluster that is not here.

    Nothing is run. With the extra `aot` programs are compiled for the cluster's GPUs, and their
    memory and time read off; without it plans are ranked by lower bounds alone.
    """

    model: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder with the `config.json` of a decoder; its weights are not read."""

    function: Annotated[str | None, arg(metavar="MODULE:NAME")] = None
    """In place of `model`: a Python function without arguments that returns `(loss_fn, init_fn,
    batch)`, as `jz.tune` takes them."""

    nodes: int = 2
    """Nodes of the cluster."""

    local: int = 8
    """Devices of a node."""

    device: Literal["a100", "h100", "h200", "b200"] = "h100"
    """Kind of the devices."""

    link: float = 50.0
    """Gigabytes a second that enter a node from other nodes, over all its links."""

    memory: float | None = None
    """Gigabytes of a device that a plan may take. Left out, 95 percent of what the device has."""

    host_memory: float = 0.0
    """Gigabytes of host memory for each device; 0: nothing is offloaded."""

    rows: int = 2
    """Sequences of a step on each device (`model` only)."""

    tokens: int = 2048
    """Tokens of a sequence (`model` only)."""

    objective: Literal["step_time", "tokens_per_second", "memory"] = "step_time"
    """What the best plan is best in."""

    unquantized: bool = False
    """Send weights and gradients in full precision only. Otherwise 4 and 8 bits are tried, too."""

    rounds: Local = Local()
    """Compare local steps too, which are another training algorithm: losses differ."""

    budget: float = 180.0
    """Seconds after which no further program is compiled."""

    limit: int = 10
    """Plans to show; 0: all."""

    def __post_init__(self):
        for name in ("nodes", "local", "link", "memory", "rows", "tokens", "budget"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive; got {value!r}.")
        if not self.host_memory >= 0:
            raise ValueError(f"`host_memory` must not be negative; got {self.host_memory!r}.")
        for name in ("link", "memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and value > _MOST_GIGABYTES:
                raise ValueError(
                    f"`{name}` is in gigabytes, so {value:g} is more than any machine has. Give "
                    f"{value / 1e9:g} for {value:g} bytes."
                )
        if (self.model is None) == (self.function is None):
            raise ValueError(
                "Give one of `--model DIR` and `--function MODULE:NAME`: what is to be planned."
            )
        if self.function is not None:
            _check_name(self.function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Compare one step with plain JAX on one device: is this run right?

    Losses, gradients and updated parameters are compared under bounds that follow from roundings
    and codecs. It ends with 0 if all holds, and with 1 otherwise.
    """

    function: Annotated[Positional[str], arg(metavar="MODULE:NAME")]
    """A Python function without arguments that returns `(loss_fn, init_fn, batch)`, or these and an
    optax optimizer."""

    preset: Literal["zero3", "zeropp", "zeropp4"] = "zero3"
    """How arrays are split and sent."""

    nodes: int = 2
    """Groups that the devices form."""

    devices: Annotated[int | None, arg(metavar="INT")] = None
    """How many to use. Left out, all accelerators, or 8 fake devices if there is only a CPU."""

    microbatches: int = 1
    """Equal parts into which the rows of a device are cut."""

    has_aux: bool = False
    """The loss returns `(loss, aux)`."""

    weighted: bool = False
    """The loss is `(sum, weight)`."""

    reference: Annotated[str | None, arg(metavar="PLATFORM")] = None
    """Where plain JAX runs, such as cpu. Left out, on one of the devices if it has the room."""

    float64: bool = False
    """Also run plain JAX in float64: whose rounding is a difference?"""

    limit: int = 12
    """Results to show, those nearest to their bounds first; 0: all."""

    def __post_init__(self):
        _check_name(self.function)
        for name in ("nodes", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}.")


def _check_name(function: str) -> None:
    if function.count(":") != 1:
        raise ValueError(f"`function` must be MODULE:NAME, such as train:job; got {function!r}.")
