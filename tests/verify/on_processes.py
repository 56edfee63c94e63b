"""One of several processes that verify two losses together; prints the verdicts as JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import jaxzero as jz


def main() -> None:
    address, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=count, process_id=number)
    zero = jz.Zero(jz.make_mesh(nodes=count))
    draw = np.random.default_rng(0)
    params = zero.shard({"w": draw.standard_normal((8, 3), np.float32)})
    rows = NamedSharding(zero.mesh, zero.batch_spec)
    batch = {
        name: jax.make_array_from_callback(x.shape, rows, lambda at, x=x: x[at])
        for name, x in (
            ("x", draw.standard_normal((16, 8), np.float32)),
            ("y", draw.standard_normal((16, 3), np.float32)),
        )
    }

    def right(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    def wrong(params, batch):
        return jnp.sqrt(right(params, batch))

    reports = [zero.verify(loss, params, batch, tx=optax.sgd(0.1)) for loss in (right, wrong)]
    print(json.dumps([[x.ok, x.cause, x.checks[0].difference] for x in reports]))


if __name__ == "__main__":
    main()
