"""Overhead of jaxzero and of its codecs in a training step on one GPU, without communication.

    python -m benchmarks.measured.gpu_step  # on a GPU with 80 GB, a few minutes
    python -m benchmarks.measured.gpu_step --model tiny --rounds 2 --batch 2 --tokens 32  # anywhere

Peers take turns in one process, round by round: plain `jit`; jaxzero on a mesh of one device; and
plain `jit` with a simulated wire: every weight is quantized to 8 bits and dequantized before the
step, and every gradient to 4 bits after it, by XLA and by the GPU kernels. The additional time of
the last two is the cost of quantization in a real step, without any link.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import optax

import jaxzero as jz
from benchmarks.shared import _llama
from benchmarks.shared._llama import LlamaSize
from benchmarks.shared._rows import RESULTS, append_row

Peer = Literal["jit", "jaxzero", "fake-wire-xla", "fake-wire-mosaic_gpu"]
Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]

SIZES = {
    "1b": LlamaSize(layers=22, width=2048, hidden=5632, kv_heads=4),  # TinyLlama
    "tiny": LlamaSize(layers=2, width=64, hidden=128, heads=2, vocabulary=256),
}
_TX = optax.adamw(1e-4)


def main(
    model: Literal["1b", "tiny"] = "1b",
    peers: Sequence[Peer] = ("jit", "jaxzero", "fake-wire-xla", "fake-wire-mosaic_gpu"),
    batch: int = 4,
    tokens: int = 2048,
    rounds: int = 12,
    steps: int = 3,
    directory: Path = RESULTS,
) -> None:
    """Measure and append a row.

    Args:
        model: which.
        peers: the first is what the others are compared with.
        batch: sequences of a step.
        tokens: of each sequence.
        rounds: how often each peer has its turn; a first one warms up.
        steps: of a turn.
        directory: of the rows.
    """
    size = SIZES[model]
    key = jax.random.key(0)
    rows = jax.random.randint(key, (batch, tokens), 0, size.vocabulary)
    turns = {name: _turn(name, size, key, rows, steps) for name in peers}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for i in range(rounds + 1):
        for name in peers if i % 2 else peers[::-1]:
            taken = turns[name]()
            if i:
                seconds[name].append(taken)
    append_row(
        "gpu_step",
        {
            "model": model,
            "parameters": _llama.num_parameters(size),
            "batch": batch,
            "tokens": tokens,
            "rounds": rounds,
            **{name: _figures(seconds[name], seconds[peers[0]]) for name in peers},
        },
        directory=directory,
    )


def _figures(seconds: list[float], first: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(seconds, first, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "step_ms_median": round(statistics.median(seconds) * 1e3, 3),
        "time_over_first_median": round(statistics.median(ratios), 4),
        "time_over_first_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
    }


def _turn(name: Peer, size: LlamaSize, key: Any, rows: Any, steps: int) -> Callable[[], float]:
    """What takes a few steps, and returns the seconds of one."""
    loss, init = functools.partial(_llama.loss, size), functools.partial(_llama.init, size)
    if name == "jaxzero":
        zero = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:1]))
        params = zero.init(init, key)
        state = [params, zero.init_optimizer(_TX, params)]
        step = _step(zero.value_and_grad(loss))
    else:
        params = jax.jit(init)(key)
        state = [params, _TX.init(params)]
        step = _step(_on_fake_wire(loss, name) if name != "jit" else jax.value_and_grad(loss))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, rows).compile()

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            state[0], state[1], value = compiled(*state, rows)
        jax.block_until_ready((state, value))
        return (time.perf_counter() - start) / steps

    return run


def _step(value_and_grad: Callable) -> Step:
    def step(params, opt_state, rows):
        value, grads = value_and_grad(params, rows)
        updates, opt_state = _TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def _on_fake_wire(loss: Callable, name: Peer) -> Callable:
    """Weights and gradients as they come off a wire that is not there."""
    implementation: Any = name.removeprefix("fake-wire-")
    weights = jz.Int8(block=256, implementation=implementation)
    gradients = jz.Int4(block=128, hadamard=32, implementation=implementation)

    def value_and_grad(params, rows):
        arrived = jax.tree.map(functools.partial(_sent, weights), params)
        value, grads = jax.value_and_grad(loss)(arrived, rows)
        return value, jax.tree.map(functools.partial(_sent, gradients), grads)

    return value_and_grad


def _sent(codec: jz.Int8 | jz.Int4, x: Any) -> Any:
    if x.ndim < 2:  # norms are not quantised
        return x
    message = codec.encode(x.reshape(1, x.size))
    return codec.decode(message, x.size, x.dtype).reshape(x.shape)


if __name__ == "__main__":
    import tyro  # `gpu` calls `main` on machines without it

    tyro.cli(main)
