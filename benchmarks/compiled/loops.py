"""Compile a loss that adds up micro-batches in a scan of its own, ahead of time for 2 x 8 H200.

    python -m benchmarks.compiled.loops

Needs jaxzero[aot]. The loops have the full model as constants. It is compiled with them held from
the first iteration to the last, by the default rule, and, for comparison, with `microbatches=` in
place of the scan. Nothing is run.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._models import SIZES, LlamaName
from benchmarks.shared._rows import append_row

from ._h200 import h200_mesh
from .aot import figures

Form = Literal["held", "default", "microbatches"]


def main(
    model: LlamaName = "1b",
    forms: Sequence[Form] = ("held", "default", "microbatches"),
    nodes: int = 2,
    local: int = 8,
    batch: int = 128,
    tokens: int = 2048,
    steps: int = 4,
) -> None:
    """Compile, and append a row for each form.

    Args:
        model: which.
        forms: of the program.
        nodes: of the mesh.
        local: devices of a node.
        batch: sequences of a step, over all devices.
        tokens: of each sequence.
        steps: micro-batches of a step.
    """
    mesh, size = h200_mesh(nodes, local), SIZES[model]
    struct = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    one = functools.partial(_llama.loss, size)
    for form in forms:
        limit = sys.maxsize if form == "held" else None
        schedule = jz.CommSchedule(loop_constant_bytes=limit)
        zero = jz.Zero(mesh, dataclasses.replace(jz.zero3(), schedule=schedule))
        params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
        by_us = form == "microbatches"
        loss = one if by_us else _summed(one, steps)
        step = jax.jit(zero.value_and_grad(loss, microbatches=steps if by_us else 1))
        options: Any = jz.compiler_options("cuda")  # JAX's type has no numbers
        compiled = step.lower(params, struct).compile(compiler_options=options)
        append_row(
            "loops",
            {
                "model": model,
                "form": form,
                "nodes": nodes,
                "local": local,
                "batch": batch,
                "tokens": tokens,
                "steps": steps,
                "parameters": _llama.num_parameters(size),
                **figures(compiled, compiled.as_text() or "", local),
            },
        )


def _summed(loss: Callable, steps: int) -> Callable:
    """The mean of a loss over micro-batches, in a scan."""

    def summed(params: Any, tokens: jax.Array) -> jax.Array:
        def add(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.checkpoint(loss)(params, part), None

        parts = tokens.reshape(steps, -1, tokens.shape[-1])
        total, _ = jax.lax.scan(add, jnp.zeros(()), parts)
        return total / steps

    return summed


if __name__ == "__main__":
    tyro.cli(main)
