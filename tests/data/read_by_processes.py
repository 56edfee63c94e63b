"""One of several processes that read batches together, from where a state says.

    python read_by_processes.py ADDRESS NUMBER COUNT DEVICES

Each line of its input is a state (null: from the start) and a number of batches. For each line it
prints, as JSON, the rows that its devices hold of every batch, the batches' sums over all devices,
the state after them, and which examples were read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax

EPOCH, EPOCHS, ROWS = 20, 2, 8


class Source:
    """Squares of numbers, and a note of which were asked for."""

    def __init__(self):
        self.asked: list[int] = []

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.asked.append(i)
        return {"number": i, "powers": [i, i**2]}


def dataset(source: Any) -> grain.MapDataset:
    return grain.MapDataset.source(source).seed(5).shuffle().repeat(EPOCHS)


def main(address: str, number: int, count: int, num_devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.distributed.initialize(address, num_processes=count, process_id=number)
    import jaxzero as jz
    from jaxzero.data import Batches

    zero = jz.Zero(jz.make_mesh())
    for line in sys.stdin:
        state, num = json.loads(line)
        source = Source()
        with Batches(dataset(source), zero, batch_size=ROWS) as batches:
            if state is not None:
                batches.set_state(state)
            some = [next(batches) for _ in range(num)]
            after = batches.get_state()
        said = {
            "rows": [dict(held_rows(batch["number"])) for batch in some],
            "sums": [int(jax.jit(lambda x: x["powers"][1].sum())(batch)) for batch in some],
            "state": after,
            "asked": source.asked,
        }
        print(json.dumps(said), flush=True)


def held_rows(x: jax.Array) -> Iterator[tuple[int, int]]:
    """The rows of an array on devices of this process, by number."""
    for shard in x.addressable_shards:
        start = shard.index[0].start or 0
        yield from enumerate(shard.data.tolist(), start)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
