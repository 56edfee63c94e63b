"""Train on any number of hosts, and continue after the failure of any of them.

    python examples/several_hosts.py run                    # one process
    jaxzero launch --nodes 2 --devices-per-proc 2 --restart 3 -- \
        examples/several_hosts.py run                       # as if on two hosts
    srun python examples/several_hosts.py run               # SLURM: examples/slurm.sh

A small network learns the next byte of Python's own library from the bytes before it. Parameters,
optimizer state, the key for dropout and the place in the data are in each checkpoint, so a run that
was killed ends, bit for bit, with what it would have ended with.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from jaxzero import distributed
from jaxzero.data import Batches

CONTEXT = 16  # bytes that the next one is predicted from
WIDTH = 256


class Windows(Sequence):
    """Every place in a text: the bytes before it, and the byte there."""

    def __init__(self, text: bytes):
        self._bytes = np.frombuffer(text, np.uint8).astype(np.int32)

    def __len__(self) -> int:
        return len(self._bytes) - CONTEXT

    def __getitem__(self, place: Any) -> np.ndarray:
        return self._bytes[place : place + CONTEXT + 1]


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Parameters of the network."""
    keys = jax.random.split(key, 3)
    shapes = {"embed": (256, 32), "hidden": (CONTEXT * 32, WIDTH), "out": (WIDTH, 256)}
    return {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(params: dict[str, jax.Array], windows: jax.Array, key: jax.Array) -> jax.Array:
    """Mean cross-entropy of the last byte of each of `windows`, int32 `[rows, CONTEXT + 1]`."""
    x = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    x = jax.nn.gelu(x @ params["hidden"])
    x *= jax.random.bernoulli(jz.fold_in_device(key), 0.9, x.shape) / 0.9
    logits = x @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


def main(directory: Path, steps: int, save_every: int, batch_size: int) -> None:
    """Train to the last step; from the last checkpoint, if there is one."""
    distributed.initialize()
    text = b"".join(path.read_bytes() for path in sorted(_library().glob("*.py")))
    digest = hashlib.sha256(text).hexdigest()
    distributed.check_same(steps=steps, save_every=save_every, rows=batch_size, text=digest)
    zero = jz.Zero(jz.make_mesh(), jz.zeropp())
    tx = optax.apply_if_finite(optax.adamw(1e-3), max_consecutive_errors=2**31 - 1)
    params = zero.init(init, jax.random.key(0))
    whole = NamedSharding(zero.mesh, PartitionSpec())
    state = {
        "params": params,
        "opt_state": zero.init_optimizer(tx, params),
        "key": jax.jit(jax.random.key, out_shardings=whole)(1),
    }
    examples = grain.MapDataset.source(Windows(text)).shuffle(seed=0).repeat()
    in_memory = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = Batches(examples, zero, batch_size=batch_size, read_options=in_memory)

    @jax.jit
    def train_step(state: dict[str, Any], windows: jax.Array):
        key, dropout = jax.random.split(state["key"])
        loss, grads = zero.value_and_grad(loss_fn)(state["params"], windows, dropout)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": key}, loss

    first = 0
    with distributed.StopRequest() as stop, jz.Checkpoints(directory, zero) as checkpoints:
        if restored := checkpoints.restore_or_none(state):
            first, state, extra = restored
            batches.set_state(extra["batches"])
            _say(f"resumed after {first}")
        with distributed.Watchdog() as watchdog:
            for step in range(first + 1, steps + 1):
                state, loss = train_step(state, next(batches))
                _say(f"step {step} loss {float(loss):.4f} saved {checkpoints.latest_step()}")
                watchdog.beat(step)
                is_asked = stop.reached()
                if is_asked or step == steps or step % save_every == 0:
                    distributed.check_replicas(state, step=step)
                    checkpoints.save(step, state, extra={"batches": batches.get_state()})
                if state["opt_state"].notfinite_count >= 10:
                    _say(
                        f"losses stay non-finite; the last checkpoint: {checkpoints.latest_step()}"
                    )
                    raise SystemExit(distributed.DIVERGED)
                if is_asked and step < steps:
                    raise SystemExit(distributed.STOPPED)  # once the checkpoint is written
    final = jax.tree.map(np.asarray, zero.unshard(state["params"]))
    bits = b"".join(x.tobytes() for x in jax.tree.leaves(final))
    _say(f"parameters {hashlib.sha256(bits).hexdigest()}")


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    main(given.directory, given.steps, given.save_every, given.batch_size)
