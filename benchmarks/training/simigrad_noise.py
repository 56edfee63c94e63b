"""Fraction of the gradient noise measured by SimiGrad that is caused by codecs, on known noise.

    python -m benchmarks.training.simigrad_noise

Gradients have heavy tails (Student's t, 3 degrees of freedom), as has the spread of their noise.
Simulated devices send them in each codec, and the noise scale that `jz.simigrad` then finds is
put beside the one it finds in the same gradients sent whole: by halves of the devices, where a
batch is one micro-batch, and by micro-batches, where it is several. Once as it is, once with
`codec_noise=zero.codec_noise(grads)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import jaxzero as jz
from benchmarks.shared._rows import append_row

_NAME = "simigrad_noise"
_ROTATED_INT4 = jz.Int4(block=128, hadamard=32)
_ROTATED_INT8 = jz.Int8(block=128, hadamard=32)
_CODECS = {  # of the axes node and local
    "zeropp": (_ROTATED_INT4, _ROTATED_INT4),
    "zeropp4": (_ROTATED_INT4, _ROTATED_INT8),
    "int8": (jz.Int8(), jz.Int8()),
    "int4": (jz.Int4(), jz.Int4()),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is measured.

    Attributes:
        dim: numbers in a gradient.
        updates: that the noise scale is averaged over.
        nodes: of the simulated mesh.
        devices: on all nodes.
        microbatches: in a batch; 1: it is measured by halves of the devices.
        noise_over_batch: noise scales N in units of the weight B of a batch. The similarity s of
            a batch has N / B = (1 - s) / 2s: here it is 0.98, 0.83, 0.5, 0.2 and 0.06.
    """

    dim: int = 2**15
    updates: int = 16
    nodes: int = 2
    devices: int = 8
    microbatches: tuple[int, ...] = (1, 4)
    noise_over_batch: tuple[float, ...] = (0.01, 0.1, 0.5, 2.0, 8.0)


def _problem(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A gradient, and the standard deviations of a noise with the same sum of squares."""
    random = np.random.default_rng(0)
    gradient, spread = random.standard_t(3, dim), np.abs(random.standard_t(3, dim))
    spread *= np.sqrt(np.sum(gradient**2) / np.sum(spread**2))
    return gradient.astype(np.float32), spread.astype(np.float32)


def _noise_scales(study: Study, gradients: jz.PerAxis, microbatches: int) -> np.ndarray:
    """`[ratios, 2, 2]`: as it is and corrected; the noise scale over the batch, and its error."""
    mesh = jz.make_mesh(nodes=study.nodes, simulate=study.devices)
    zero = jz.Zero(mesh, jz.zero3(gradients=gradients))
    tx = jz.simigrad(
        optax.sgd(0.0),
        target_similarity=0.5,
        initial=microbatches,
        min_steps=microbatches,
        max_steps=microbatches,
        noise_window=1e6,
    )
    gradient, spread = _problem(study.dim)
    params = zero.shard({"w": np.zeros(study.dim, np.float32)})
    rows = np.zeros((study.devices, 1), np.float32)

    def loss(params, rows, key, deviation):
        noise = jax.random.normal(jz.fold_in_device(key), (study.dim,))
        return params["w"] @ (gradient + deviation * spread * noise) + jnp.sum(rows)

    value_and_grad = zero.value_and_grad(loss, halves=microbatches == 1)

    @jax.jit
    def run(ratio):
        deviation = jnp.sqrt(ratio * microbatches * study.devices)  # of a device's gradient

        def one(states, key):
            _, grads, *halves = value_and_grad(params, rows, key, deviation)
            extras: dict[str, Any] = {"halves": halves[0]} if halves else {}
            noises = (None, zero.codec_noise(grads))
            return [
                tx.update(grads, state, params, codec_noise=noise, **extras)[1]
                for state, noise in zip(states, noises, strict=True)
            ], None

        keys = jax.random.split(jax.random.key(1), study.updates * microbatches)
        states, _ = jax.lax.scan(one, [tx.init(params)] * 2, keys)
        stats = [jz.simigrad_stats(state) for state in states]
        found = [[s["noise_scale"], s["noise_scale_error"]] for s in stats]
        return jnp.asarray(found) / microbatches

    return np.stack([np.asarray(run(jnp.float32(x))) for x in study.noise_over_batch])


def _table(study: Study, results: list[dict[str, Any]]) -> Table:
    title = "Noise scale with a codec over that without, less 1, in %: as it is, corrected"
    columns = [f"N = {x} B" for x in study.noise_over_batch]
    table = Table("", "micro-batches", *columns, title=title, box=box.SIMPLE_HEAD)
    for row in results:
        pairs = zip(row["bias"], row["bias_corrected"], strict=True)
        cells = [f"{100 * x:+.1f} {100 * y:+.1f}" for x, y in pairs]
        table.add_row(row["gradients"], str(row["microbatches"]), *cells)
    return table


def main(study: Study = Study()) -> None:  # noqa: B008
    """Measure, print a table, and append a row."""
    wanted = np.asarray(study.noise_over_batch)
    results, plain = [], []
    for microbatches in study.microbatches:
        whole = _noise_scales(study, jz.PerAxis(), microbatches)[:, 0]
        plain.append(
            {
                "microbatches": microbatches,
                "bias": _short(whole[:, 0] / wanted - 1),
                "standard_error": _short(whole[:, 1] / wanted),
            }
        )
        for name, codecs in _CODECS.items():
            for rounding in ("nearest", "stochastic"):
                node, local = (dataclasses.replace(x, rounding=rounding) for x in codecs)
                scales = _noise_scales(study, jz.PerAxis(node=node, local=local), microbatches)
                bias = scales[:, :, 0] / whole[:, :1] - 1
                label = name if rounding == "nearest" else f"{name}, stochastic"
                results.append(
                    {
                        "gradients": label,
                        "microbatches": microbatches,
                        "bias": _short(bias[:, 0]),
                        "bias_corrected": _short(bias[:, 1]),
                    }
                )
    Console().print(_table(study, results))
    settings = dataclasses.asdict(study)
    append_row(_NAME, {**settings, "without_codec": plain, "with_codec": results})


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{x:.3g}") for x in values]


if __name__ == "__main__":
    tyro.cli(main)
