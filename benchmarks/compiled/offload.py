"""Compile one training step with arrays in host memory ahead of time for H200s.

    python -m benchmarks.compiled.offload                       # Llama-7B, 2 x 8 H200
    python -m benchmarks.compiled.offload --model 70b --nodes 1

Needs jaxzero[aot]. Each variant is compiled twice: resident (nothing in host memory), and with
weights, gradients and optimizer state in host memory. A step is two programs, the gradients and the
update by AdamW; with `--settings.update overlap`, the offloaded step is one program, in which the
update of a layer runs in the backward loop. Nothing is run: memory is the compiler's, the time of a
step is predicted by `timeline.py` with assumed rates (`jaxzero._hlo.Rates`, 50 GB/s each way
between host and device), for comparisons only. A copy counts as hidden if a matrix product lies
between its start and its end. It is done by a copy engine if XLA knows its address before the loop
runs, and by a kernel otherwise, which then competes with matrix products for the device; the
prediction knows nothing of that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._models import SIZES, LlamaName
from benchmarks.shared._rows import append_row
from jaxzero._hlo import Rates, timeline
from jaxzero._hlo.host_memory import compile_with_host_memory, on_abstract_mesh

from ._h200 import h200_mesh
from ._host_copies import host_copies, host_to_host

Preset = Literal["zero3", "zeropp", "zeropp4"]
TX = optax.adamw(1e-4)
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A model on a mesh.

    Attributes:
        model: which.
        nodes: of the mesh.
        local: devices of a node.
        rows_per_device: sequences of a step on each device.
        tokens: of each sequence.
        window: layers that are copied ahead.
        gradients: whether gradients go to host memory too; never if the update overlaps.
        update: of the offloaded step, apart or in the backward loop.
    """

    model: LlamaName = "7b"
    nodes: int = 2
    local: int = 8
    rows_per_device: int = 2
    tokens: int = 2048
    window: int = 1
    gradients: bool = True
    update: Literal["apart", "overlap"] = "apart"

    @property
    def overlaps(self) -> bool:
        return self.update == "overlap"

    def offload(self) -> jz.Offload:
        min_size = 2**10 if self.model.startswith("tiny") else 2**20
        return jz.Offload(
            weights=True,
            gradients=self.gradients and not self.overlaps,
            optimizer=True,
            window=self.window,
            min_size=min_size,
        )


def main(
    settings: Settings = Settings(),  # noqa: B008
    presets: Sequence[Preset] = ("zero3", "zeropp"),
) -> None:
    """Compile, read, and append a row for each preset.

    Args:
        settings: model and mesh.
        presets: configurations.
    """
    mesh = h200_mesh(settings.nodes, settings.local)
    for preset in presets:
        resident = figures(*compiled(mesh, settings, preset, None), settings.local)
        offload = settings.offload()
        if settings.overlaps:
            step = compiled_step(mesh, settings, preset, offload)
            offloaded = {"step": _program(step, settings.local)}
        else:
            offloaded = figures(*compiled(mesh, settings, preset, offload), settings.local)
        append_row(
            "offload",
            {
                **dataclasses.asdict(settings),
                "preset": preset,
                "parameters": _llama.num_parameters(SIZES[settings.model]),
                "resident": resident,
                "offloaded": offloaded,
                "step_over_resident": {
                    part: round(offloaded[part]["seconds"] / resident[part]["seconds"], 4)
                    for part in ("gradients", "step")
                    if part in offloaded
                },
                "least_step_over_resident": least_step_over_resident(resident, offloaded),
            },
        )


def least_step_over_resident(resident: dict[str, Any], offloaded: dict[str, Any]) -> float | None:
    """What the step takes if only the update's copies were added to it, both ways at once.

    That is the resident gradients' time and the update's bytes in the fuller direction at the
    assumed rate, over the resident step. None if the update is no program of its own.
    """
    if "update" not in offloaded:
        return None
    update = offloaded["update"]
    copies = max(update["gib_from_host"], update["gib_to_host"]) * _GIB / Rates().host
    least = resident["gradients"]["seconds"] + copies
    return round(least / resident["step"]["seconds"], 4)


def compiled(
    mesh: jax.sharding.Mesh, settings: Settings, preset: Preset, offload: jz.Offload | None
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The compiled programs of a step: loss and gradients, and the update.

    Args:
        mesh: of a topology's devices.
        settings: the model.
        preset: the configuration.
        offload: what is in host memory; None: nothing.
    """
    zero, params, tokens = _arguments(mesh, settings, preset, offload)
    config, size = zero.config, SIZES[settings.model]
    options = jz.compiler_options("cuda", offload=offload is not None)
    compile_step = functools.partial(compile_with_host_memory, mesh=mesh, options=options)
    state = {}
    if config.needs_wire_state:
        with jax.set_mesh(mesh):
            state["wire_state"] = jax.eval_shape(zero.init_wire_state, params)
    step = jax.jit(zero.value_and_grad(functools.partial(_llama.loss, size)))
    gradients = compile_step(step, (params, tokens), **state)

    tx = TX
    opt_state = zero.init_optimizer(tx, params)
    in_host = offload is not None and offload.gradients
    like = None if in_host else dataclasses.replace(config, offload=None)
    grads = params if like is None else _abstract(jz.Zero(mesh, like), size)

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        return zero.apply_gradients(tx, grads, opt_state, params)

    donated = jax.jit(update, donate_argnums=(0, 1))
    arguments = (params, opt_state, grads)
    return gradients, compile_step(donated, on_abstract_mesh(arguments) if offload else arguments)


def compiled_step(
    mesh: jax.sharding.Mesh, settings: Settings, preset: Preset, offload: jz.Offload
) -> jax.stages.Compiled:
    """The compiled step with the update in the backward loop; arguments as of `compiled`."""
    zero, params, tokens = _arguments(mesh, settings, preset, offload)
    loss = functools.partial(_llama.loss, SIZES[settings.model])
    step = jax.jit(zero.value_and_update(loss, TX), donate_argnums=(0, 1))
    arguments = (params, zero.init_optimizer(TX, params), tokens)
    options = jz.compiler_options("cuda", offload=True)
    return compile_with_host_memory(step, arguments, mesh, options=options)


def _arguments(
    mesh: jax.sharding.Mesh, settings: Settings, preset: Preset, offload: jz.Offload | None
) -> tuple[jz.Zero, Any, jax.ShapeDtypeStruct]:
    """The configured `Zero`, the parameters and the tokens of a step."""
    zero = jz.Zero(mesh, dataclasses.replace(getattr(jz, preset)(), offload=offload))
    rows = settings.rows_per_device * settings.nodes * settings.local
    tokens = jax.ShapeDtypeStruct((rows, settings.tokens), jnp.int32)
    return zero, _abstract(zero, SIZES[settings.model]), tokens


def _abstract(zero: jz.Zero, size: _llama.LlamaSize) -> Any:
    return zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))


def figures(
    gradients: jax.stages.Compiled, update: jax.stages.Compiled, local: int
) -> dict[str, Any]:
    """Memory, host copies and predicted time of the two programs of a step."""
    found: dict[str, Any] = {
        "gradients": _program(gradients, local),
        "update": _program(update, local),
    }
    found["step"] = {
        "seconds": round(found["gradients"]["seconds"] + found["update"]["seconds"], 4),
        "device_peak_gib": round(
            max(part["argument_gib"] + part["temporary_gib"] for part in found.values()), 3
        ),
    }
    return found


def _program(compiled: Any, local: int) -> dict[str, Any]:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    line = timeline(text, Rates(num_local=local))
    copies = host_copies(text)
    total = sum(x.total for x in copies)
    hidden = sum(x.total for x in copies if x.spans)
    by_engine = sum(x.total for x in copies if x.addresses or x.name.startswith("copy"))
    return {
        "argument_gib": round(memory.argument_size_in_bytes / _GIB, 3),
        "temporary_gib": round(memory.temp_size_in_bytes / _GIB, 3),
        "output_gib": round(memory.output_size_in_bytes / _GIB, 3),
        "host_argument_gib": round(memory.host_argument_size_in_bytes / _GIB, 3),
        "host_temporary_gib": round(memory.host_temp_size_in_bytes / _GIB, 3),
        "copies_within_host_memory": len(host_to_host(text)),
        "gib_from_host": round(line.host_bytes_in / _GIB, 3),
        "gib_to_host": round(line.host_bytes_out / _GIB, 3),
        "hidden_share_of_host_bytes": round(hidden / total, 4) if total else None,
        "copy_engine_share_of_host_bytes": round(by_engine / total, 4) if total else None,
        "seconds": round(line.seconds, 4),
        "compute_seconds": round(line.compute_seconds, 4),
        "waited_for_collectives_seconds": round(line.exposed_seconds, 4),
        "waited_for_host_seconds": round(line.host_exposed_seconds, 4),
    }


if __name__ == "__main__":
    tyro.cli(main)
