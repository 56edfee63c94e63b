"""A mesh of H200s that are not there: programs for it are compiled and read, never run.

Needs `jaxzero[aot]`. The compiler asks nothing of the machine; `cuInit` complaining that there
is no GPU does no harm.
"""

from __future__ import annotations

from pathlib import Path

import jax
from jax.experimental import topologies

import jaxzero as jz

_TARGET = Path(__file__).with_name("h200.txtpb")  # what XLA must know of one


def h200_mesh(nodes: int, local: int) -> jax.sharding.Mesh:
    """`nodes` x `local` of them, each node one host; before any other use of JAX's devices."""
    jax.config.update("jax_platforms", "cpu")  # or JAX, finding no GPU, drops its compiler too
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x{nodes}x{local}", target_config=_TARGET.read_text()
    )
    return jz.make_mesh(nodes, devices=topology.devices)
