"""Predicted steps of experts that stay on their devices, if all are chosen equally often.

`models.apply_by_group` passes over blocks of rows that no expert needs: its loops, which are those
with a condition inside, have a trip for each block that any choices need, as if all tokens of a
node had chosen the experts of one device. With even choices an expert has `tokens choices /
experts` rows, and its device as many blocks of each of its experts as these fill.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from jaxzero._hlo import Rates, parse, timeline

_LOOP = re.compile(r'body=%([\w.\-]+)(.*?)known_trip_count":\{"n":"(\d+)"\}')


def if_even(
    text: str, links: Sequence[float], tokens: int, experts: int, choices: int, local: int
) -> dict[str, Any]:
    """Predicted steps, by bytes a second that enter a node.

    Args:
        text: the compiled program.
        links: bytes a second that enter a node.
        tokens: of all devices of a node.
        experts: of a layer.
        choices: experts of a token.
        local: devices of a node, which divide the experts.
    """
    program = parse(text)
    skipping = {
        name
        for name, x in program.computations.items()
        if any(instruction.op == "conditional" for instruction in x.instructions)
    }
    own = experts // local

    def needed(most: int) -> int:
        """Of the blocks that any choices may need: those of even ones."""
        rows_of_block = math.ceil(tokens * min(choices, own) / (most - own + 1))
        return own * math.ceil(tokens * choices / experts / rows_of_block)

    def fewer(match: re.Match[str]) -> str:
        body, between, trips = match.groups()
        num = needed(int(trips)) if body in skipping else trips
        return f'body=%{body}{between}known_trip_count":{{"n":"{num}"}}'

    even = parse(_LOOP.sub(fewer, text))
    return {
        "predicted_if_choices_are_even": {
            f"{link / 1e9:g} GB/s between nodes": round(
                timeline(even, dataclasses.replace(Rates(num_local=local), node=link)).seconds, 4
            )
            for link in links
        }
    }
