"""An abstract mesh of H200s, for compiling programs ahead of time on a machine without GPUs.

Needs `jaxzero[aot]`. The compiler needs no GPU; the error message of `cuInit` about the missing
GPU can be ignored.
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
