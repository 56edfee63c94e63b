"""Print the memory per device and the communication per step at the start of a run."""

import jax
from rich.console import Console

from ..._collectives import readable_bytes
from ..._mesh import NODE
from ..._report import Traffic
from .session import Session, State


def print_overview(session: Session, state: State) -> None:
    """Print the bytes that a device holds between steps and the bytes that a step communicates.

    Communication is printed as bytes into each node, and bytes to each device from its own node.

    Args:
        session: the session that will train.
        state: the training state before the first step of this session.
    """
    zero = session.setup.zero
    report = zero.report(state.params, state.opt_state, plan=session.plan)
    kinds = {name: report.device_bytes(name) for name in ("parameters", "optimizer state")}
    kinds["wire state"] = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.wire_state)
    )
    held = [f"{readable_bytes(size)} of {name}" for name, size in kinds.items() if size]
    _say(session.console, f"A device holds {_listed(held)}")
    assert report.traffic is not None
    sent = _sent(report.traffic, zero.mesh.shape[NODE])
    if zero.config.stage in (1, 2):  # the optimizer makes shards, and the compiler gathers them
        sent += ", and the whole weights"
    _say(session.console, f"A step sends {sent}")


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
