"""What a training step costs with the first layers frozen, and with their activations cached.

    python -m benchmarks.training.freezing

The step is that of `jaxzero train` (MiniLM, contrastive loss), here on fake devices with few short
rows. Programs take turns in one process; a row has the ratio of each to the step in which nothing
is frozen, of the CPU time of this process, which other load on the machine changes little, and of
the FLOPs that XLA counts in the compiled programs. Seconds of fake devices say nothing of GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import tyro

from benchmarks.shared._rows import append_row, rounded
from jaxzero import Zero, make_mesh
from jaxzero._zero import Freezing
from jaxzero.interop import load_encoder
from jaxzero.jobs._task import PairTokens, contrastive_loss, make_embed, packaged_checkpoint

_TX = optax.adamw(1e-4)


def main(
    prefixes: tuple[int, ...] = (0, 2, 4),
    pairs: int = 16,
    tokens: int = 64,
    repeats: int = 5,
    devices: int = 2,
) -> None:
    """Measure the steps.

    Args:
        prefixes: numbers of frozen layers, 0 first.
        pairs: in a batch.
        tokens: of each text.
        repeats: steps of each program that are timed.
        devices: fake devices, all in one node.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    loaded = load_encoder(packaged_checkpoint(), dtype=np.dtype(np.float32))
    zero = Zero(make_mesh(1, devices=jax.devices()[:devices]))
    params = zero.shard(loaded.params)
    embed = make_embed(loaded.graph)

    def loss(params: Any, batch: PairTokens) -> jax.Array:
        return contrastive_loss(embed(params, batch), temperature=0.05)[0]

    ids = np.random.default_rng(0).integers(1000, 20000, (pairs, 2, tokens), np.int32)
    batch = PairTokens(ids, np.ones(ids.shape, bool))
    steps: dict[str, Callable[[], Any]] = {}
    flops: dict[str, float] = {}
    for prefix in prefixes:
        freezing = zero.freeze(params, prefix, layers="layers.*", before="embeddings")
        for is_cached in (False, True) if prefix else (False,):
            name = f"prefix {prefix}" + (", cached" if is_cached else "")
            steps[name], flops[name] = _step(zero, freezing, loss, params, batch, is_cached)
            print(name, f"{flops[name]:.3g} FLOPs per device", flush=True)
    _append(steps, flops, repeats, {"pairs": pairs, "tokens": tokens, "devices": devices})


def _step(
    zero: Zero, freezing: Freezing, loss: Any, params: Any, batch: PairTokens, is_cached: bool
) -> tuple[Callable[[], Any], float]:
    """A step that can be called again and again, and its FLOPs on a device."""
    active, frozen = freezing.split(params)
    opt_state = zero.init_optimizer(_TX, active)
    cache = freezing.cache(loss, frozen) if is_cached else None
    run = (
        zero.value_and_grad(freezing.wrap(loss))
        if cache is None
        else zero.value_and_grad(cache.rest, batch_argnums=(2, 3))
    )

    @jax.jit
    def step(active: Any, opt_state: Any, frozen: Any, *batch: Any) -> Any:
        value, grads = run(active, frozen, *batch)
        updates, opt_state = _TX.update(grads, opt_state, active)
        return value, optax.apply_updates(active, updates), opt_state

    def given() -> tuple[Any, ...]:
        return (batch,) if cache is None else (cache(0, batch), batch)

    compiled = step.lower(active, opt_state, frozen, *given()).compile()
    costs = compiled.cost_analysis()
    assert costs is not None

    def call() -> Any:  # the cache is asked in each step, as in a run
        return jax.block_until_ready(compiled(active, opt_state, frozen, *given()))

    return call, costs["flops"]


def _append(
    steps: dict[str, Callable[[], Any]],
    flops: dict[str, float],
    repeats: int,
    settings: dict[str, Any],
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: float(step()[0]) for name, step in steps.items()}  # also the first run of each
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    base = next(iter(steps))
    ratios = {
        name: [x / y for x, y in zip(found, seconds[base], strict=True)]
        for name, found in seconds.items()
    }
    append_row(
        "freezing",
        {
            "settings": {"model": "MiniLM-L6", "repeats": repeats, **settings},
            "programs": {
                name: {
                    "loss": rounded(losses[name]),
                    "cpu_time_ratio": rounded(statistics.median(ratios[name])),
                    "cpu_time_ratio_min": rounded(min(ratios[name])),
                    "cpu_time_ratio_max": rounded(max(ratios[name])),
                    "flops_ratio": rounded(flops[name] / flops[base]),
                }
                for name in steps
            },
        },
    )


if __name__ == "__main__":
    tyro.cli(main)
