"""One of several processes that verify losses and a round together; prints the verdicts as JSON."""

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

    def centred(params, batch):
        y = batch["y"] - jax.lax.pmean(batch["y"].mean(), "local")
        return right(params, batch | {"y": y})

    def same_dropout(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return right(params, batch | {"x": jnp.where(kept, batch["x"], 0)})

    reports = [
        zero.verify(right, params, batch, tx=optax.sgd(0.1)),
        zero.verify(wrong, params, batch, variations=False),
        zero.verify(centred, params, batch, variations=False),
        zero.verify(same_dropout, params, batch, jax.random.key(0), variations=False),
        zero.verify(
            right,
            params,
            jax.tree.map(lambda x: x[None], batch),
            tx=optax.sgd(0.1),
            local_steps=jz.diloco(every=1),
        ),
    ]
    print(json.dumps([[x.ok, x.cause, x.first, x.checks[0].difference] for x in reports]))


if __name__ == "__main__":
    main()
