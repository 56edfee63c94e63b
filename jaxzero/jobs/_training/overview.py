"""Print the memory per device and the communication per step at the start of a run."""

from typing import Any

import jax
from rich.console import Console

from ..._collectives import readable_bytes
from ..._mesh import NODE, in_host
from ..._report import LocalReport, Traffic
from .._local_settings import Local
from .session import Session, State

_KINDS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "wire_state": "wire state",
    "outer_params": "outer parameters",
    "outer_state": "outer optimizer state",
    "residuals": "residuals",
}


def print_overview(session: Session, state: State) -> None:
    """Print the bytes held for a device between steps and the bytes that a step communicates.

    Communication is printed as bytes into each node, and bytes to each device from its own node;
    with local steps, as what nodes exchange in a round.

    Args:
        session: the session that will train.
        state: the training state before the first step of this session.
    """
    zero = session.setup.zero
    _say(session.console, f"A device holds {_held(state, on_host=False) or 'nothing'}")
    if offloaded := _held(state, on_host=True):
        _say(session.console, f"Host memory holds for each device {offloaded}")
    if session.rounds is not None:
        _say(session.console, _exchanged(session.rounds.report(), session.settings.local))
        return
    report = zero.report(state.params, state.opt_state, plan=session.plan)
    assert report.traffic is not None
    sent = _sent(report.traffic, zero.mesh.shape[NODE])
    if zero.config.stage in (1, 2):  # the optimizer makes shards, and the compiler gathers them
        sent += ", and the whole weights"
    _say(session.console, f"A step sends {sent}")


def _held(state: State, *, on_host: bool) -> str:
    """Format the bytes of one device's shards that are in host memory, or in device memory."""
    sizes = {name: _bytes(tree, on_host) for name, tree in state.trees.items()}
    held = [f"{readable_bytes(size)} of {_KINDS[name]}" for name, size in sizes.items() if size]
    return _listed(held) if held else ""


def _bytes(tree: Any, on_host: bool) -> int:
    found = [x for x in jax.tree.leaves(tree) if in_host(x) == on_host]
    return sum(x.addressable_shards[0].data.nbytes for x in found)


def _exchanged(report: LocalReport, local: Local) -> str:
    """Format what nodes exchange, and when."""
    sent = readable_bytes(round(report.bytes_per_step))
    plural = "s" if report.delay > 1 else ""
    when = f"used {report.delay} step{plural} later" if report.delay else "for which nodes wait"
    return (
        f"A step sends {sent} into each node on average: all parameters once in {report.every} "
        f"steps, in {report.fragments} messages of {local.local_codec}, {when}"
    )


def _sent(traffic: Traffic, num_nodes: int) -> str:
    """Format the communication in the plan, which excludes that of the loss itself."""
    amounts = []
    if num_nodes > 1:
        amounts.append(f"{readable_bytes(traffic.node_bytes)} into each node")
    inside = sum((t.entering_bytes - t.node_bytes) * t.trips for t in traffic.transfers)
    amounts.append(f"{readable_bytes(inside)} to each device from its own node")
    return _listed(amounts)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
