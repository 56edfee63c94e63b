"""An abstract mesh of H200s, for compiling programs ahead of time on a machine without GPUs.

Needs `jaxzero[aot]`. The compiler needs no GPU; the error message of `cuInit` about the missing
GPU can be ignored.
"""

from __future__ import annotations

import jax

import jaxzero as jz
from jaxzero._planner import absent_mesh


def h200_mesh(
    nodes: int, local: int, tokens: int | None = None, stages: int | None = None
) -> jax.sharding.Mesh:
    """`nodes` x `local` of them, each node one host; before any other use of JAX's devices.

    With `tokens`, so many neighbours of a node share each row; `stages` as in `jz.make_mesh`.
    """
    jax.config.update("jax_platforms", "cpu")  # or JAX, finding no GPU, drops its compiler too
    return absent_mesh(jz.Cluster(nodes=nodes, local=local, device="h200"), stages, tokens)
