"""One of the processes that train a small network together, or the only one.

    python train_by_processes.py ADDRESS NUMBER COUNT DEVICES OUT

It makes a few steps of plain ZeRO-3 on `DEVICES` devices and writes losses and parameters to `OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS, ROWS, WIDTH = 4, 16, 24


def init() -> dict[str, np.ndarray]:
    """Parameters; one has a dim that no number of devices here divides."""
    rng = np.random.default_rng(0)
    shapes = {"up": (7, WIDTH), "down": (WIDTH, 3), "bias": (3,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def batches() -> np.ndarray:
    """`[STEPS, ROWS, 10]`: seven inputs and three targets in each row."""
    return np.random.default_rng(1).normal(size=(STEPS, ROWS, 10)).astype(np.float32)


def loss_fn(params: dict[str, Any], rows: Any) -> Any:
    """Mean squared error over the rows."""
    out = jnp.tanh(rows[:, :7] @ params["up"]) @ params["down"] + params["bias"][None]
    return jnp.mean((out - rows[:, 7:]) ** 2)


def main(address: str, number: int, count: int, devices: int, out: Path) -> None:
    """Train, and let process 0 write."""
    import jaxzero as jz
    from jaxzero import distributed

    jax.config.update("jax_num_cpu_devices", devices // count)
    if count > 1:
        distributed.initialize(coordinator_address=address, num_processes=count, process_id=number)
    zero = jz.Zero(jz.make_mesh(nodes=2))
    tx = optax.adam(1e-2)
    params = zero.shard(init())
    opt_state = zero.init_optimizer(tx, params)
    sharding = jax.sharding.NamedSharding(zero.mesh, zero.batch_spec)

    @jax.jit
    def step(params, opt_state, rows):
        loss, grads = zero.value_and_grad(loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for rows in batches():
        rows = jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
        params, opt_state, loss = step(params, opt_state, rows)
        losses.append(float(loss))
    full = jax.tree.map(np.asarray, zero.unshard(params))
    if number == 0:
        np.savez(out, losses=np.array(losses, np.float64), **full)


if __name__ == "__main__":
    address, number, count, devices, out = sys.argv[1:]
    main(address, int(number), int(count), int(devices), Path(out))
