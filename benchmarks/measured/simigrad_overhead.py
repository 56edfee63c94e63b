"""Overhead of measuring gradient similarity: `jz.simigrad` against `optax.MultiSteps`.

    python -m benchmarks.measured.simigrad_overhead

Both take the same micro-batches of a byte decoder and update after the same number of them; the
batch of `simigrad` is pinned, so that only the measuring differs. They run in turn in one
process, and what is reported is the ratio of their times for a whole batch, and its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxzero as jz
from benchmarks.shared._byte_decoder import Size, init, losses
from benchmarks.shared._corpus import random_windows, read_corpus
from benchmarks.shared._rows import append_row


def whole_batch(
    tx: optax.GradientTransformationExtraArgs, size: Size
) -> Callable[[Any, jax.Array], Any]:
    """`(state, micro-batches) -> state`, compiled; one micro-batch after another."""

    def one(state, tokens):
        params, opt_state = state
        grads = jax.grad(lambda params: losses(size, params, tokens).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.jit(lambda state, several: jax.lax.scan(one, state, several)[0], donate_argnums=0)


def main(
    size: Size = Size(),  # noqa: B008
    rows: int = 32,
    microbatches: int = 4,
    rounds: int = 30,
) -> None:
    """Measure and append a row.

    Args:
        size: the model.
        rows: windows in a micro-batch.
        microbatches: in a batch.
        rounds: how often each of the two runs a batch, in turn.
    """
    inner = optax.adamw(1e-3)
    peers = {
        "multi_steps": optax.MultiSteps(inner, microbatches).gradient_transformation(),
        "simigrad": jz.simigrad(
            inner,
            target_similarity=0.5,
            initial=microbatches,
            min_steps=microbatches,
            max_steps=microbatches,
        ),
    }
    generator = np.random.default_rng(0)
    tokens = jnp.asarray(
        random_windows(read_corpus().train, (microbatches, rows), size.length, generator)
    )
    states, compiled = {}, {}
    for name, tx in peers.items():
        params = init(size, jax.random.key(0))
        states[name] = params, tx.init(params)
        compiled[name] = whole_batch(tx, size)
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for i in range(rounds + 2):
        for name in list(peers)[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            states[name] = jax.block_until_ready(compiled[name](states[name], tokens))
            if i >= 2:  # the first rounds warm up
                seconds[name].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["simigrad"], seconds["multi_steps"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    results = {
        "rows": rows,
        "microbatches": microbatches,
        "rounds": rounds,
        "size": vars(size),
        "parameters": sum(x.size for x in jax.tree.leaves(states["simigrad"][0])),
        "time_over_multi_steps_median": round(statistics.median(ratios), 4),
        "time_over_multi_steps_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "seconds_median": {name: round(statistics.median(x), 4) for name, x in seconds.items()},
    }
    append_row("simigrad_overhead", results)


if __name__ == "__main__":
    tyro.cli(main)
