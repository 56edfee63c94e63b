"""One host of a peer that trains by local steps in the race over a slow network (`race.py`).

    python -m benchmarks.network._local RUN.json HOST

A round of `Zero.local_steps` takes turns with as many steps of the same kind without any exchange:
each host then trains by itself, on a mesh of its own two devices. Both are one program of a loop.
The hosts start each turn together, so that both kinds share the cores of the machine alike.
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
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from benchmarks.shared import _peers

from ._hosts import sent_bytes
from ._jax import connect, initial_state

METHODS = {
    "jaxzero streaming_diloco": jz.streaming_diloco(every=30, fragments=3, delay=5),
    "jaxzero streaming_diloco100": jz.streaming_diloco(every=100, fragments=4, delay=5),
    "jaxzero diloco": jz.diloco(every=30),
}
_OPTIONS = jz.compiler_options("cpu", local_steps=True)


@dataclasses.dataclass
class _Turns:
    """A compiled program of many steps, its state, and the batches of every turn."""

    compiled: Callable
    state: Any
    batches: list[jax.Array]

    def take(self, number: int) -> dict[str, Any]:
        """Run turn `number`; seconds of a step, bytes sent in all, losses on this host's rows."""
        multihost_utils.sync_global_devices("start of a turn")
        sent, busy, start = sent_bytes(), time.process_time(), time.perf_counter()
        self.state, losses = self.compiled(self.state, self.batches[number])
        jax.block_until_ready((self.state, losses))
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        multihost_utils.sync_global_devices("end of a turn")
        own = np.asarray(losses.addressable_data(0)).reshape(-1)
        return {
            "seconds": seconds / len(own),
            "busy_seconds": busy,
            "sent_bytes": sent_bytes() - sent,
            "losses": own.tolist(),
        }


def main(run: dict[str, Any], host: int) -> None:
    connect(run, host)
    rounds, received = _with_exchange(run)
    kinds = {"exchanging": rounds, "alone": _alone(run, host)}
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for number in range(len(rounds.batches)):
        for name in list(kinds)[:: -1 if number % 2 else 1]:
            taken[name].append(kinds[name].take(number))
    measured = {name: _measured(turns, run["warmup"]) for name, turns in taken.items()}
    measured["exchanging"]["received_bytes_by_report"] = received
    Path(run["results"], f"{host}.json").write_text(json.dumps(measured))


def _measured(turns: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    timed = turns[warmup:]
    return {
        "seconds": [turn["seconds"] for turn in timed],
        "steps": sum(len(turn["losses"]) for turn in timed),
        "busy_seconds": sum(turn["busy_seconds"] for turn in timed),
        "sent_bytes": sum(turn["sent_bytes"] for turn in timed),
        "losses": [loss for turn in turns for loss in turn["losses"]],
    }


def _with_exchange(run: dict[str, Any]) -> tuple[_Turns, int]:
    """Rounds on all nodes; and the bytes that enter a node in one, by the report."""
    zero = jz.Zero(jz.make_mesh(), jz.zero3())
    tx = optax.adam(run["learning_rate"])
    rounds = zero.local_steps(_step(run, zero, tx), METHODS[run["peer"]])
    state = rounds.init(*initial_state(run, zero, tx))
    batches = _batches(run, zero, slice(None))
    jitted = jax.jit(rounds, donate_argnums=0, compiler_options=_OPTIONS)
    compiled = jitted.lower(state, batches[0]).compile()
    return _Turns(compiled, state, batches), rounds.report().bytes_between_nodes


def _alone(run: dict[str, Any], host: int) -> _Turns:
    """The same steps on this host's devices and rows only."""
    zero = jz.Zero(jz.make_mesh(1, devices=jax.local_devices()), jz.zero3())
    tx = optax.adam(run["learning_rate"])
    step = _step(run, zero, tx)
    state = initial_state(run, zero, tx)
    rows = run["size"]["rows"] * run["microbatches"] // run["hosts"]
    batches = _batches(run, zero, slice(host * rows, (host + 1) * rows))

    def steps(state, batches):
        def one(state, tokens):
            params, opt_state, loss = step(*state, tokens)
            return (params, opt_state), loss

        return jax.lax.scan(one, state, batches)

    out = (jax.tree.map(lambda x: x.sharding, state), None)
    jitted = jax.jit(steps, donate_argnums=0, out_shardings=out, compiler_options=_OPTIONS)
    return _Turns(jitted.lower(state, batches[0]).compile(), state, batches)


def _step(run: dict[str, Any], zero: jz.Zero, tx: optax.GradientTransformation) -> Callable:
    size = _peers.Size(**run["size"])

    def loss_fn(params, tokens):
        return _peers.loss(size, params, tokens)

    def step(params, opt_state, tokens):
        value_and_grad = zero.value_and_grad(loss_fn, microbatches=run["microbatches"])
        loss, grads = value_and_grad(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def _batches(run: dict[str, Any], zero: jz.Zero, rows: slice) -> list[jax.Array]:
    """The stacked tokens of each turn, int32 `[every, rows, length + 1]`, on the devices."""
    tokens = np.load(run["tokens"])
    every = METHODS[run["peer"]].every
    tokens = tokens.reshape(-1, every, tokens.shape[1] * tokens.shape[2], tokens.shape[3])
    sharding = NamedSharding(zero.mesh, PartitionSpec(None, *zero.batch_spec))
    return [
        jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in tokens[:, :, rows]
    ]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
