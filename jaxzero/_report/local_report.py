"""The report of local steps: bytes that a device holds between rounds, and bytes between nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._collectives import readable_bytes
from .text_table import TextTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalReport:
    """Memory and traffic of rounds of local steps (`LocalSteps`); `print` it.

    Attributes:
        every: steps in a round.
        fragments: parts of the parameters, each sent by one message in a round.
        delay: steps between the sending of a message and its use.
        codec: the codec of the pseudo-gradients, by name; None if all of them are sent as floats.
        num_nodes: the number of nodes.
        num_elements: elements of the parameters that are exchanged.
        device_bytes: bytes that one device holds between rounds, by field of `LocalState`.
        message_bytes: bytes of messages that a device holds, besides `device_bytes`, while a
            fragment travels: the messages of all nodes, or one if an all-reduce sums them.
        kept_bytes: bytes of a copy of the node's own parameters in a fragment, as it sent them,
            which a device holds while the fragment travels: the progress since then is added to
            the new outer parameters. 0 without a delay, when there is no such progress, and with
            `mixing`, which takes a weighted sum of the parameters.
        bytes_between_nodes: bytes that enter one node in a round.
    """

    every: int
    fragments: int
    delay: int
    codec: str | None
    num_nodes: int
    num_elements: int
    device_bytes: Mapping[str, int]
    message_bytes: int
    kept_bytes: int
    bytes_between_nodes: int

    @property
    def timeline(self) -> tuple[tuple[int, int], ...]:
        """For each fragment `(sent, used)`, both in steps since the round began."""
        steps = self.every // self.fragments
        ends = range(steps, self.every + 1, steps)
        return tuple((end - self.delay, end) for end in ends)

    @property
    def travelling_bytes(self) -> int:
        """Bytes that a device holds while a fragment travels, in addition to `device_bytes`."""
        return self.message_bytes + self.kept_bytes

    @property
    def bytes_per_step(self) -> float:
        """Bytes that enter one node in a step, on average."""
        return self.bytes_between_nodes / self.every

    @property
    def models_per_step(self) -> float:
        """`bytes_per_step`, divided by the bytes of the exchanged parameters in 16 bits."""
        return self.bytes_per_step / (2 * self.num_elements) if self.num_elements else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as dicts, strings and numbers that JSON can hold."""
        return {
            **dataclasses.asdict(self),
            "device_bytes": dict(self.device_bytes),
            "timeline": self.timeline,
            "bytes_per_step": self.bytes_per_step,
            "models_per_step": self.models_per_step,
        }

    def __str__(self) -> str:
        held = [
            (name.replace("_", " "), readable_bytes(size))
            for name, size in self.device_bytes.items()
        ]
        memory = TextTable(
            title=f"Local steps: {self.num_nodes} nodes, rounds of {self.every} steps",
            headings=("Held between rounds", "On a device"),
            rows=[*held, ("total", readable_bytes(sum(self.device_bytes.values())))],
            footer=(f"While a fragment travels: {readable_bytes(self.travelling_bytes)} more.",),
        )
        size = readable_bytes(self.bytes_between_nodes // self.fragments)
        exchanges = TextTable(
            headings=("Fragment", "Sent after step", "Used after step", "Into a node"),
            rows=[
                (f"{number} in {self.codec or 'floats'}", str(sent), str(used), size)
                for number, (sent, used) in enumerate(self.timeline)
            ],
            footer=(
                f"Into a node: {readable_bytes(self.bytes_between_nodes)} in a round, "
                f"{readable_bytes(int(self.bytes_per_step))} in a step, which is "
                f"{self.models_per_step:.4f} of the exchanged parameters in 16 bits.",
                *(() if self.delay else ("Nodes wait for each fragment (`delay=0`).",)),
            ),
        )
        return "\n".join([*memory.lines(100), "", *exchanges.lines(100)])
