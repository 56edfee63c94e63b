"""CPU time to trace a training step of unrolled layers, over that of plain `jax.jit`.

    python -m benchmarks.measured.tracing --layers 126

Both trace the loss and gradients of the same decoder layers, in turn, in one process.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import tyro

import jaxzero as jz
from benchmarks.shared._rows import append_row

_WIDTH, _HIDDEN, _TOKENS = 64, 256, 8
_SHAPES = {
    **dict.fromkeys("qkvo", (_WIDTH, _WIDTH)),
    **dict.fromkeys(("up", "gate"), (_WIDTH, _HIDDEN)),
    "down": (_HIDDEN, _WIDTH),
    **dict.fromkeys(("attention_norm", "mlp_norm"), (_WIDTH,)),
}


def _norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * gain


def _layer(x, w):
    h = _norm(x, w["attention_norm"])
    q, k, v = (h @ w[name] for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    x = x + jnp.einsum("bqk,bkd->bqd", weights, v) @ w["o"]
    h = _norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def _seconds(transform, params, x) -> float:
    """The CPU time to trace a function of new layers, of which JAX has nothing cached."""
    layer = jax.checkpoint(lambda x, w: _layer(x, w))

    def loss(params, x):
        for w in params:
            x = layer(x, w)
        return jnp.mean(x**2)

    step = jax.jit(transform(loss))
    start = time.process_time()
    step.trace(params, x)
    return time.process_time() - start


def main(layers: int = 126, nodes: int = 2, rounds: int = 5) -> None:
    """Measure and append a row.

    Args:
        layers: of the model.
        nodes: of the mesh.
        rounds: how often each is traced, in turn.
    """
    zero = jz.Zero(jz.make_mesh(nodes))
    arrays = [{name: jnp.ones(shape) for name, shape in _SHAPES.items()} for _ in range(layers)]
    params, x = zero.abstract(lambda: arrays), jnp.ones((16, _TOKENS, _WIDTH))
    times = []
    for _ in range(rounds + 1):  # the first round warms up
        plain = _seconds(jax.value_and_grad, arrays, x)
        times.append((plain, _seconds(zero.value_and_grad, params, x)))
    plain, ours = (statistics.median(each) for each in zip(*times[1:], strict=True))
    ratios = [b / a for a, b in times[1:]]
    results = {"layers": layers, "nodes": nodes, "rounds": rounds}
    results |= {"plain_cpu_s": round(plain, 2), "jaxzero_cpu_s": round(ours, 2)}
    append_row("tracing", results | {"ratio_median": round(statistics.median(ratios), 2)})


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    tyro.cli(main)
