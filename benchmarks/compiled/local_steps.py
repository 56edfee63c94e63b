"""Compile one round of local steps ahead of time for H200s: what travels between nodes, and when.

    python -m benchmarks.compiled.local_steps                        # Llama-7B, 2 x 8 H200
    python -m benchmarks.compiled.local_steps --settings.model tiny

Needs jaxzero[aot]. The round of `Zero.local_steps` with AdamW inside is compiled as a user would,
and nothing is run. A collective between nodes spans a loop of local steps if the loop lies between
its start and its end. The time of a step is predicted by `timeline.py` with assumed rates
(`_cost.Rates`), for comparisons only.
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
from benchmarks.shared._rows import append_row

from ._cost import Rates
from ._h200 import h200_mesh
from .aot import SIZES, Model
from .timeline import timeline

Preset = Literal["hsdp", "zero3", "zeropp"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A model on a mesh, and how its nodes exchange.

    Attributes:
        model: which.
        nodes: of the mesh.
        local: devices of a node.
        rows_per_device: sequences of a step on each device.
        tokens: of each sequence.
        every: steps in a round.
        fragments: parts of the parameters that are exchanged in turn.
        delay: steps between sending and using a fragment.
        bits: of a pseudo-gradient: 4, 8, or 32 without a codec.
    """

    model: Model = "7b"
    nodes: int = 2
    local: int = 8
    rows_per_device: int = 2
    tokens: int = 2048
    every: int = 30
    fragments: int = 3
    delay: int = 5
    bits: Literal[4, 8, 32] = 4

    def method(self) -> jz.LocalSteps:
        codec = {4: jz.Int4(block=128), 8: jz.Int8(block=256), 32: None}[self.bits]
        return jz.LocalSteps(
            every=self.every, fragments=self.fragments, delay=self.delay, codec=codec, mixing=0.5
        )


def lowered(mesh: jax.sharding.Mesh, settings: Settings, preset: Preset) -> Any:
    """One round, lowered for the devices of `mesh`."""
    zero = jz.Zero(mesh, getattr(jz, preset)())
    size = SIZES[settings.model]
    tx = optax.adamw(1e-4)
    loss = functools.partial(_llama.loss, size)

    def step(params: Any, opt_state: Any, tokens: Any) -> Any:
        value, grads = zero.value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value}

    params = zero.abstract(functools.partial(_llama.init, size), jax.random.key(0))
    rounds = zero.local_steps(step, settings.method())
    state = rounds.abstract(params, zero.init_optimizer(tx, params))
    rows = settings.rows_per_device * settings.nodes * settings.local
    batches = jax.ShapeDtypeStruct((settings.every, rows, settings.tokens), jnp.int32)
    return jax.jit(rounds, donate_argnums=0).lower(state, batches)


if __name__ == "__main__":
    import sys, time
    s = Settings(model=sys.argv[1], every=int(sys.argv[3]), fragments=int(sys.argv[4]), delay=int(sys.argv[5]))
    mesh = h200_mesh(s.nodes, s.local)
    t = time.time(); low = lowered(mesh, s, sys.argv[2]); print("lower", time.time()-t, flush=True)
    c = low.compile(compiler_options=jz.compiler_options("cuda", local_steps=len(sys.argv)>6)); print("compile", time.time()-t)
    text = c.as_text(); open(f"/tmp/ls/{jax.__version__}_{sys.argv[1]}_{sys.argv[2]}_{sys.argv[3]}_{sys.argv[4]}_{sys.argv[5]}{len(sys.argv)}.hlo","w").write(text)
    m = c.memory_analysis(); print("temp", m.temp_size_in_bytes/2**30, "arg", m.argument_size_in_bytes/2**30)
    line = timeline(text, Rates(num_local=s.local, node=3e9)); print(line)
