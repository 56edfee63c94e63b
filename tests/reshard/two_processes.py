"""One of two processes that reshard a tree: python two_processes.py ADDRESS NUMBER COUNT."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxzero as jz
from jaxzero import distributed


def main(address: str, number: int, count: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    distributed.initialize(
        coordinator_address=address, num_processes=count, process_id=number, start_seconds=60
    )
    zero = jz.Zero(jz.make_mesh(2))
    tree = {
        "a": np.arange(96, dtype=np.float32).reshape(8, 12),
        "b": np.arange(35, dtype=np.float32).reshape(5, 7),
    }
    params = zero.shard(tree)
    line = Mesh(zero.mesh.devices.reshape(-1), ("model",))
    same = True
    for mesh, spec in (
        (None, PartitionSpec("local")),
        (None, PartitionSpec(None, "node")),
        (line, PartitionSpec("model")),
    ):
        made = jz.reshard(params, zero, specs={"a": spec, "b": PartitionSpec()}, mesh=mesh)
        for name, full in tree.items():
            shards = made[name].addressable_shards
            same &= all(np.array_equal(x.data, full[x.index]) for x in shards)
    large = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    for spec in (PartitionSpec(), PartitionSpec("local"), PartitionSpec(None, "local")):
        made = jz.reshard(zero.shard({"x": large}), zero, specs=spec)["x"]
        same &= all(np.array_equal(x.data, large[x.index]) for x in made.addressable_shards)
    many = zero.shard({str(i): tree["a"] + i for i in range(60)})
    served = jz.reshard(many, zero, specs=PartitionSpec(None, "local"))
    for name, x in zero.shard(served).items():  # and back: each array takes a collective
        same &= x.sharding == many[name].sharding
        pairs = zip(x.addressable_shards, many[name].addressable_shards, strict=True)
        same &= all(np.array_equal(a.data, b.data) for a, b in pairs)
    alone = Mesh(np.array(jax.local_devices()), ("model",))
    try:
        jz.reshard(params, zero, specs=PartitionSpec(), mesh=alone)
        same = False
    except NotImplementedError as error:
        same &= "JAX cannot copy arrays between different sets of them" in str(error)
    print(json.dumps({"same": bool(same)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
