"""Bytes and memory of an update by Muon, compiled ahead of time for H200s.

    python -m benchmarks.compiled.matrix_optimizer      # q, up and down of Llama-7B, 2 x 8 H200
    python -m benchmarks.compiled.matrix_optimizer --unrolled       # each matrix is a leaf

Needs jaxzero[aot]. Only the update is compiled: gradients, state and parameters are float32, as
`jz.zero3()` lays them out. It is compiled for `optax.contrib.muon` as it is,
and in `zero.optimizer`. Nothing is run: bytes are those of the compiled program's collectives, and
times are predicted by `timeline.py` with assumed rates.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxzero as jz
from benchmarks.shared._rows import append_row

from ._h200 import h200_mesh
from .aot import figures

_GIB = 2**30


def main(
    layers: int = 32,
    features: int = 4096,
    hidden: int = 11008,
    nodes: int = 2,
    local: int = 8,
    unrolled: bool = False,
) -> None:
    """Compile, read, and append a row for each variant.

    Args:
        layers: of each stack.
        features: rows and columns of `query`, rows of `up` and columns of `down`.
        hidden: the other dim of `up` and `down`.
        nodes: of the mesh.
        local: devices of a node.
        unrolled: each matrix is a leaf, in place of stacks of them.
    """
    mesh = h200_mesh(nodes, local)
    shapes = {"query": (features, features), "up": (features, hidden), "down": (hidden, features)}
    trees = {
        name: [jax.ShapeDtypeStruct(x, jnp.float32)] * layers
        if unrolled
        else jax.ShapeDtypeStruct((layers, *x), jnp.float32)
        for name, x in shapes.items()
    }
    share = sum(x.size for x in jax.tree.leaves(trees)) * 4 / (nodes * local) / _GIB
    zero = jz.Zero(mesh, jz.zero3())
    params = zero.abstract(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), trees))
    muon = optax.contrib.muon(0.02, muon_weight_dimension_numbers=_per_layer)
    for variant, tx in {"optax": muon, "zero.optimizer": zero.optimizer(muon)}.items():
        start = time.perf_counter()
        compiled = compiled_update(tx, zero, params)
        seconds = time.perf_counter() - start
        found = figures(compiled, compiled.as_text() or "", local)
        received = found["received_gib_per_device"]
        append_row(
            "matrix_optimizer",
            {
                "variant": variant,
                "layers": layers,
                "features": features,
                "hidden": hidden,
                "nodes": nodes,
                "local": local,
                "unrolled": unrolled,
                "compile_seconds": round(seconds, 1),
                "share_gib": round(share, 3),
                "received_over_share": round(received / share, 3),
                **found,
            },
        )


def _per_layer(params: Any) -> Any:
    numbers = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda x: numbers(len(x.shape) - 2, len(x.shape) - 1), params)


def compiled_update(
    tx: optax.GradientTransformation, zero: jz.Zero, params: Any
) -> jax.stages.Compiled:
    """The update of `params` by gradients like them; parameters and state are donated."""

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    arguments = (params, zero.init_optimizer(tx, params), params)
    lowered = jax.jit(update, donate_argnums=(0, 1)).lower(*arguments)
    options: dict[str, Any] = {**jz.compiler_options("cuda")}
    return lowered.compile(compiler_options=options)


if __name__ == "__main__":
    tyro.cli(main)
