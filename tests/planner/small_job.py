"""A model, its loss and a cluster, for which plans are quickly made."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxzero as jz

CLUSTER = jz.Cluster(nodes=2, local=2, device="h100", link=1e9)
BATCH = jax.ShapeDtypeStruct((16, 64), jnp.float32)


def init():
    return {"layers": jnp.ones((4, 64, 64)), "head": jnp.ones((64, 8))}


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def averaged(params, batch):
    return jax.lax.pmean(jnp.mean(batch @ params["head"]), ("node", "local"))


def absent(size):
    """A cluster for which nothing is compiled, of 2 x 2 devices."""
    rates = {"flops": 1e12, "memory_bandwidth": 1e11, "local_link": 1e10, "host_link": 1e10}
    device = jz.Device(name="mine", memory=size, **rates)
    return jz.Cluster(nodes=2, local=2, device=device, link=1e15)
