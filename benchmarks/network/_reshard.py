"""One of two hosts that reshard a model over a slow network (`reshard.py`).

    python -m benchmarks.network._reshard RUN.json HOST

A time is from a barrier of both hosts to the end of the move on this one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import jaxzero as jz

from ._hosts import sent_bytes
from ._jax import connect
from ._runs import SIZES, make_weights

MODELS = {"40m": SIZES["40m"], "200m": dataclasses.replace(SIZES["40m"], layers=16, width=1024)}

_COLUMNS, _ROWS = P(None, "local"), P("local")


SENT_AS = {"float32": {}, "bfloat16": {"dtype": jnp.bfloat16}, "int8": {"codec": jz.Int8()}}


def main(run: dict[str, Any], host: int) -> None:
    connect(run, host)
    weights = make_weights(MODELS[run["size"]])
    specs = {name: _spec(name) for name in weights}
    zero = jz.Zero(jz.make_mesh())
    params = zero.shard(weights)
    options = SENT_AS[run["sent_as"]]
    report = jz.reshard_report(params, zero, specs=specs, **options)

    there = _Timed("there", lambda: jz.reshard(params, zero, specs=specs, **options))
    served = there.run()
    back = _Timed("back", lambda: zero.shard(served))
    returned = back.run()
    if run["sent_as"] != "int8":  # whose errors the tests bound
        _check(served, weights)
        _check(returned, weights)
    for _ in range(run["repeats"]):
        there.time()
        back.time()
    result = {
        "there": there.results,
        "back": back.results,
        "into_node_bytes": report.into_node,
        "least_into_node_bytes": report.least_into_node,
        "programs": report.windows,
    }
    Path(run["results"], f"{host}.json").write_text(json.dumps(result))


def _spec(name: str) -> P:
    """Tensor parallelism of a leaf inside a node: columns, then rows."""
    kind = name.rpartition(".")[2]
    if kind.startswith("norm"):
        return P()
    return _COLUMNS if kind in ("q", "k", "v", "up") else _ROWS


def _check(tree: Any, full: dict[str, np.ndarray]) -> None:
    """Compare this host's shards with the parts of the full arrays that they stand for."""
    for name, x in tree.items():
        for shard in x.addressable_shards:
            wanted = full[name][shard.index].astype(x.dtype)
            np.testing.assert_array_equal(np.asarray(shard.data), wanted)


class _Timed:
    """A move, with the seconds, bytes and CPU seconds of each time that it was run."""

    def __init__(self, name: str, move: Callable[[], Any]):
        self._name, self._move = name, move
        self.results: list[dict[str, float]] = []

    def run(self) -> Any:
        return jax.block_until_ready(self._move())

    def time(self) -> None:
        multihost_utils.sync_global_devices(self._name)
        sent, busy, start = sent_bytes(), time.process_time(), time.perf_counter()
        self.run()
        seconds = time.perf_counter() - start
        busy = time.process_time() - busy
        multihost_utils.sync_global_devices(f"end of {self._name}")
        sent = sent_bytes() - sent
        self.results.append({"seconds": seconds, "cpu_seconds": busy, "sent_bytes": sent})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
