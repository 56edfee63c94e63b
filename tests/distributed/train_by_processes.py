"""One of the processes that train a small network together, or the only one.

    python train_by_processes.py ADDRESS NUMBER COUNT DEVICES DIRECTORY LAST

It makes steps of plain ZeRO-3 on `DEVICES` devices, from the last checkpoint in `DIRECTORY` up to
step `LAST`, and saves. `DIRECTORY/LAST.npz` gets the losses of its steps, and the parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS, ROWS, WIDTH = 6, 16, 24
EPOCH = 40  # no multiple of a batch


def init() -> dict[str, np.ndarray]:
    """Parameters; one has a dim that no number of devices here divides."""
    rng = np.random.default_rng(0)
    shapes = {"up": (7, WIDTH), "down": (WIDTH, 3), "bias": (3,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def examples() -> grain.MapDataset:
    """Rows of seven inputs and three targets, in another order in each epoch."""
    rows = np.random.default_rng(1).normal(size=(EPOCH, 10)).astype(np.float32)
    return grain.MapDataset.source(list(rows)).seed(5).shuffle().repeat(3)


def loss_fn(params: dict[str, Any], rows: Any) -> Any:
    """Mean squared error over the rows."""
    out = jnp.tanh(rows[:, :7] @ params["up"]) @ params["down"] + params["bias"][None]
    return jnp.mean((out - rows[:, 7:]) ** 2)


def main(address: str, number: int, count: int, devices: int, directory: Path, last: int) -> None:
    """Train, and let process 0 write."""
    import jaxzero as jz
    from jaxzero import distributed
    from jaxzero.data import Batches

    jax.config.update("jax_num_cpu_devices", devices // count)
    if count > 1:
        distributed.initialize(coordinator_address=address, num_processes=count, process_id=number)
    zero = jz.Zero(jz.make_mesh(nodes=2))
    tx = optax.adam(1e-2)
    params = zero.shard(init())
    state = {"params": params, "opt_state": zero.init_optimizer(tx, params)}
    batches = Batches(examples(), zero, batch_size=ROWS)

    @jax.jit
    def train_step(state, rows):
        loss, grads = zero.value_and_grad(loss_fn)(state["params"], rows)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    losses, first = [], 0
    with jz.Checkpoints(directory, zero) as checkpoints:
        if restored := checkpoints.restore_or_none(state):
            first, state, extra = restored
            batches.set_state(extra["batches"])
        for _ in range(first, last):
            state, loss = train_step(state, next(batches))
            losses.append(float(loss))
        checkpoints.save(last, state, extra={"batches": batches.get_state()})
    full = jax.tree.map(np.asarray, zero.unshard(state["params"]))
    if number == 0:
        np.savez(directory / f"{last}.npz", losses=np.array(losses, np.float64), **full)


if __name__ == "__main__":
    address, number, count, devices, directory, last = sys.argv[1:]
    main(address, int(number), int(count), int(devices), Path(directory), int(last))
