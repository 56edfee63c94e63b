"""What forward keeps for backward: budgets beside policies of `jax.checkpoint`, compiled for H200s.

    python -m benchmarks.compiled.activations                      # Llama-1.1B, 2 x 8
    python -m benchmarks.compiled.activations --model 7b --budgets 0 2 4 8 16 32 --resume
    python -m benchmarks.compiled.activations --hosts 1 2
    python -m benchmarks.compiled.activations_table                # the table and the plot

Needs jaxzero[aot]. The step is `zero3()`. A policy is given to `jax.checkpoint` around each layer;
a budget is `jz.Activations` of a model without any `jax.checkpoint`. Nothing is run: memory is what
XLA reports, times are predicted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import Policy
from benchmarks.shared._models import SIZES, LlamaName
from benchmarks.shared._rows import append_row, is_current, read_rows
from jaxzero._activations import kept_bytes

from ._h200 import h200_mesh
from .aot import figures

_POLICIES: tuple[Policy, ...] = (
    "nothing",
    "everything",
    "dots",
    "dots_without_batch_dims",
    "names",
    "offload",
)


def main(
    model: LlamaName = "1b",
    policies: Sequence[Policy] = _POLICIES,
    budgets: Sequence[float] = (0, 1, 2, 4, 8, 64),
    hosts: Sequence[float] = (),
    layers: int | None = None,
    nodes: int = 2,
    local: int = 8,
    batch: int = 32,
    tokens: int = 2048,
    resume: bool = False,
) -> None:
    """Compile, and append a row for each policy and budget.

    Args:
        model: which.
        policies: of `jax.checkpoint`.
        budgets: of `jz.Activations`, in GiB.
        hosts: likewise, with `host=True`.
        layers: of the model; None: as many as it has.
        nodes: of the mesh.
        local: devices of a node.
        batch: sequences of a step, over all devices.
        tokens: of each sequence.
        resume: leave out programs that have a row of the same code and version of JAX.
    """
    size = SIZES[model]
    size = dataclasses.replace(size, layers=layers or size.layers)
    mesh = h200_mesh(nodes, local)
    run = dict(model=model, layers=size.layers, nodes=nodes, local=local, batch=batch)
    kinds: list[dict[str, Any]] = [{"policy": x} for x in policies]
    kinds += [{"budget_gib": x, "host": False} for x in budgets]
    kinds += [{"budget_gib": x, "host": True} for x in hosts]
    for kind in kinds:
        program = {**run, "tokens": tokens, **kind}
        if resume and _has_row(program):
            continue
        row = _compiled(program, size, mesh, jax.ShapeDtypeStruct((batch, tokens), jnp.int32))
        append_row("activations", program | row)


def _compiled(
    program: dict[str, Any], size: _llama.LlamaSize, mesh: Any, tokens: Any
) -> dict[str, Any]:
    size = dataclasses.replace(size, keeps=program.get("policy", "everything"))
    activations = None
    if "budget_gib" in program:
        budget = int(program["budget_gib"] * 2**30)
        activations = jz.Activations(budget_bytes=budget, host=program["host"])
    zero = jz.Zero(mesh, dataclasses.replace(jz.zero3(), activations=activations))
    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    loss = functools.partial(_llama.loss, size)
    lowered = jax.jit(zero.value_and_grad(loss)).lower(params, tokens)
    options: dict[str, Any] = {**jz.compiler_options("cuda")}
    compiled = lowered.compile(compiler_options=options)
    residuals = zero.plan(loss, params, tokens).residuals
    promised = {
        f"{action}_gib": round(kept_bytes(residuals, action) / 2**30, 3)
        for action in ("keep", "host", "recompute")
    }
    return figures(compiled, compiled.as_text() or "", mesh.shape["local"]) | promised


def _has_row(program: dict[str, Any]) -> bool:
    wanted = json.loads(json.dumps(program)).items()
    return any(
        wanted <= row["results"].items()
        and row["versions"]["jax"] == jax.__version__
        and is_current(row, "jaxzero", "benchmarks/shared")
        for row in read_rows("activations")
    )


if __name__ == "__main__":
    tyro.cli(main)
