"""What forward keeps for backward: budgets beside policies of `jax.checkpoint`, compiled for H200s.

    python -m benchmarks.compiled.activations                      # Llama-1.1B, 2 x 8
    python -m benchmarks.compiled.activations --model 7b --budgets 0 2 4 8 16 32 --resume
    python -m benchmarks.compiled.activations --model gpt2 --nodes 1 --batch 256
    python -m benchmarks.compiled.activations --hosts 1 2
    python -m benchmarks.compiled.activations --model 7b-long --batch 8 --tokens 16384
        --token-parts 2
    python -m benchmarks.compiled.activations_table                # the table and the plot

Needs jaxzero[aot]. The step is `zero3()`. A policy is given to `jax.checkpoint` around each layer,
or block of a U-Net; a budget is `jz.Activations` of a model without any `jax.checkpoint`. Nothing
is run: memory is what XLA reports, times are predicted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import tyro

import jaxzero as jz
from benchmarks.shared._llama import LlamaSize, Policy
from benchmarks.shared._models import MODELS, LlamaName, Model
from benchmarks.shared._rows import append_row, is_current, read_rows
from jaxzero._activations import Chosen, choose_activations, kept_bytes

from ._h200 import h200_mesh
from .aot import figures, timed

_POLICIES: tuple[Policy, ...] = (
    "nothing",
    "everything",
    "dots",
    "dots_without_batch_dims",
    "names",
    "offload",
)


def main(
    model: LlamaName | Literal["gpt2", "unet"] = "1b",
    policies: Sequence[Policy] = _POLICIES,
    budgets: Sequence[float] = (0, 1, 2, 4, 8, 64),
    hosts: Sequence[float] = (),
    layers: int | None = None,
    nodes: int = 2,
    local: int = 8,
    batch: int | None = None,
    tokens: int | None = None,
    token_parts: int | None = None,
    resume: bool = False,
) -> None:
    """Compile, and append a row for each policy and budget.

    Args:
        model: which.
        policies: of `jax.checkpoint`.
        budgets: of `jz.Activations`, in GiB.
        hosts: likewise, with `host=True`.
        layers: of a Llama or Mamba; None: as many as it has.
        nodes: of the mesh.
        local: devices of a node.
        batch: rows of a step, over all devices. None: as many as the model has by default.
        tokens: of each row; of an image the pixels on a side. None: likewise.
        token_parts: devices of a node that share each row (models of long rows only).
        resume: leave out programs that have a row of the same code and version of JAX.
    """
    written = MODELS[model]
    batch, tokens = batch or written.rows, tokens or written.size
    mesh = h200_mesh(nodes, local, token_parts)
    layers = layers or getattr(_form(written), "layers", None)
    run = dict(model=model, layers=layers, nodes=nodes, local=local, batch=batch)
    run |= {"token_parts": token_parts} if token_parts else {}
    kinds: list[dict[str, Any]] = [{"policy": x} for x in policies]
    kinds += [{"budget_gib": x, "host": False} for x in budgets]
    kinds += [{"budget_gib": x, "host": True} for x in hosts]
    for kind in kinds:
        program = {**run, "tokens": tokens, **kind}
        if resume and _has_row(program):
            continue
        keeps = program.get("policy", "everything")
        row = _compiled(program, _that_keeps(written, keeps, layers), mesh)
        append_row("activations", program | row)


def _form(model: Model) -> Any:
    """The module, or the size, that a model is made of."""
    assert isinstance(model.loss, functools.partial)
    return model.loss.args[0]


def _that_keeps(model: Model, keeps: Policy, layers: int | None) -> Model:
    """The model with a policy, and if it is a Llama with so many layers."""
    form = _form(model)
    if isinstance(form, LlamaSize):
        form = dataclasses.replace(form, keeps=keeps, layers=layers)
    else:
        form = form.clone(keeps=keeps)
    init, loss = (functools.partial(x.func, form, *x.args[1:]) for x in (model.init, model.loss))
    return dataclasses.replace(model, init=init, loss=loss)


def _compiled(program: dict[str, Any], model: Model, mesh: Any) -> dict[str, Any]:
    activations = None
    if "budget_gib" in program:
        budget = int(program["budget_gib"] * 2**30)
        activations = jz.Activations(budget_bytes=budget, host=program["host"])
    zero = jz.Zero(mesh, dataclasses.replace(jz.zero3(), activations=activations))
    params = zero.abstract(model.init, jax.random.key(0))
    batch = model.batch(program["batch"], program["tokens"])
    step = jax.jit(zero.value_and_grad(model.loss))
    with _choices_timed() as seconds:
        lowered, lower_seconds = timed("lower", lambda: step.lower(params, batch))
    choice_seconds = {"choice_user_seconds": round(sum(seconds), 2)}
    options: dict[str, Any] = {**jz.compiler_options("cuda")}
    compiled, compile_seconds = timed("compile", lambda: lowered.compile(compiler_options=options))
    residuals = zero.plan(model.loss, params, batch).residuals
    promised = {
        f"{action}_gib": round(kept_bytes(residuals, action) / 2**30, 3)
        for action in ("keep", "host", "recompute")
    }
    found = figures(compiled, compiled.as_text() or "", program["local"])
    return found | promised | choice_seconds | lower_seconds | compile_seconds


@contextlib.contextmanager
def _choices_timed() -> Iterator[list[float]]:
    """The CPU seconds of each choice that is made inside, its program included."""
    seconds = []

    def choose(*args: Any, **options: Any) -> Chosen:
        start = time.process_time()
        chosen = choose_activations(*args, **options)
        _ = chosen.block
        seconds.append(time.process_time() - start)
        return chosen

    with mock.patch("jaxzero._execute.to_plan.choose_activations", choose):
        yield seconds


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
