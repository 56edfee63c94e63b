"""One of several processes that sum gradients of known values, over and over.

    python sum_by_processes.py ADDRESS NUMBER COUNT

It prints "sharded" when it has parameters; and, as JSON, how many of its shards were wrong, and the
collectives that were compiled.
"""

from __future__ import annotations

import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

import jaxzero as jz
from jaxzero import distributed

DEVICES, TIMES = 4, 20
SHAPES = {"large": (4096, 1024), "small": (8, 4)}
GRADIENTS = {"large": 1.5, "small": 1.5 + 6.0}  # in every element: the mean of 0 to 3, their sum


def main(address: str, number: int, count: int) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    distributed.initialize(coordinator_address=address, num_processes=count, process_id=number)
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zero3())
    params = zero.shard({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    print("sharded", flush=True)
    batch = np.arange(DEVICES, dtype=np.float32)  # row i is on device i
    sharding = NamedSharding(zero.mesh, zero.batch_spec)
    batch = jax.make_array_from_callback(batch.shape, sharding, batch.__getitem__)

    def loss_fn(params, batch):
        features = lax.all_gather(batch * params["small"].sum(), ("node", "local"), tiled=True)
        return sum(jnp.sum(w) for w in params.values()) * batch.mean() + features.sum()

    compiled = jax.jit(zero.value_and_grad(loss_fn)).lower(params, batch).compile()
    wrong = 0
    for _ in range(TIMES):
        _, grads = compiled(params, batch)
        for name, x in grads.items():
            shards = [np.asarray(shard.data) for shard in x.addressable_shards]
            wrong += sum(bool((shard != GRADIENTS[name]).any()) for shard in shards)
    found = set(re.findall(r" (all-to-all|reduce-scatter)\(", compiled.as_text()))
    print(json.dumps({"wrong": wrong, "collectives": sorted(found)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
