"""The temporary memory of a step whose activations are small, in layers and over all weights.

    python -m benchmarks.compiled.held

That is what is gathered, on its way or not yet reduced. Losses over equal layers are compiled for
fake CPU devices and not run, with the options of XLA that `memory` explains. The rows have what the
plan says is held whole, and why.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    "--xla_disable_hlo_passes=cse --xla_cpu_enable_concurrency_optimized_scheduler=false "
    + os.environ.get("XLA_FLAGS", "")
)

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared._rows import append_row

_WIDTH, _ROWS = 256, 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: a loss `(params, rows)`, and how many layers its scan's body has."""

    loss: Callable[[Any, jax.Array], jax.Array]
    in_body: int = 1  # layers in the body of the scan
    is_tangent: bool = False  # the product of the Hessian with a vector, not the gradient


def _layer(x: jax.Array, w: Any) -> jax.Array:
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


def _network(params: Any, x: jax.Array) -> jax.Array:
    """The mean square of what a scan over layers, or over pairs of them, returns."""

    def body(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        for layer in w:
            x = jax.checkpoint(_layer)(x, layer)
        return x, None

    return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)


def _penalized(params: Any, x: jax.Array) -> jax.Array:
    loss, slope = jax.value_and_grad(_network, argnums=1)(params, x)
    return loss + jnp.mean(slope**2)


CASES = {
    "one layer in the body": Case(_network),
    "two layers in the body": Case(_network, in_body=2),
    "gradient penalty": Case(_penalized),
    "Hessian-vector product": Case(_network, is_tangent=True),
}


def main(layers: int = 24, nodes: int = 2) -> None:
    """Compile each step, and append a row.

    Args:
        layers: of the network, an even number.
        nodes: of the mesh.
    """
    zero = jz.Zero(jz.make_mesh(nodes))
    for name, case in CASES.items():
        num = layers // case.in_body
        shapes = {"up": (num, _WIDTH, 4 * _WIDTH), "down": (num, 4 * _WIDTH, _WIDTH)}

        def init(shapes: Any = shapes, case: Case = case) -> Any:
            return [{key: jnp.zeros(x) for key, x in shapes.items()}] * case.in_body

        params = zero.abstract(init)
        x = jax.ShapeDtypeStruct((_ROWS, _WIDTH), jnp.float32)
        step = zero.value_and_grad(case.loss)
        if case.is_tangent:
            plan = zero.plan(case.loss, params, x, tangent_argnums=0)
            lowered = jax.jit(functools.partial(_product, step)).lower(params, params, x)
        else:
            plan, lowered = zero.plan(case.loss, params, x), jax.jit(step).lower(params, x)
        memory: Any = lowered.compile().memory_analysis()
        num_bytes = memory.temp_size_in_bytes
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
        results = {"case": name, "layers": layers, "in_body": case.in_body, "nodes": nodes}
        results["share"] = round(num_bytes / weights, 3)
        results["in_layers"] = round(layers * num_bytes / weights, 2)
        append_row("held", results | {"held_whole": [str(each) for each in plan.held_whole]})


def _product(step: Callable[..., Any], params: Any, vector: Any, x: jax.Array) -> Any:
    """The product of the Hessian with a vector."""
    return jax.jvp(lambda params: step(params, x)[1], (params,), (vector,))[1]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    tyro.cli(main)
