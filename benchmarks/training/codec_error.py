"""Round-trip error of each codec, on synthetic numbers and on weights and gradients of a model.

    python -m benchmarks.training.codec_error

The error is the root mean square of what a round trip changes, over that of the numbers, in
float64. The model is the checkpoint of `jaxzero train`, its gradients those of the first
batch; each of its arrays is a row, and the median over them is given. Arrays of fewer than
2**14 numbers are left out: they are not quantised. Bits are all that is sent, scales too. The
standards of `mx` and `nv` have blocks of 32 and of 16; other sizes are there to compare.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import jaxzero as jz
from benchmarks.shared._rows import RESULTS, append_row
from jaxzero.jobs import Data, Devices, Optimization, Sharding, set_up
from jaxzero.jobs._data import training_batches
from jaxzero.jobs._retrieval import contrastive_loss, make_embed

_NAME = "codec_error"
_CODECS = {
    "int4": jz.Int4(),
    "int8": jz.Int8(),
    "e4m3": jz.Float8(dtype=jnp.float8_e4m3fn),
    "e5m2": jz.Float8(dtype=jnp.float8_e5m2),
    "mx e4m3": jz.MXFloat8(dtype=jnp.float8_e4m3fn),
    "mx e5m2": jz.MXFloat8(dtype=jnp.float8_e5m2),
    "nv e2m1": jz.NVFloat4(),
}
_BLOCKS = tuple(2**i for i in range(4, 14))
_SMALLEST_BLOCK = 32  # of codecs that may rotate, which takes as many numbers
_SMALLEST = jz.ZeroConfig().min_quantized_size
_TITLES = {
    "normal": "normal",
    "student_t3": "Student's t, 3 degrees of freedom",
    "weights": "weights of all-MiniLM-L6-v2",
    "gradients": "gradients of all-MiniLM-L6-v2",
}

Rows = list[np.ndarray]  # float32 [arrays, numbers in each]
Errors = dict[str, dict[str, float]]  # of each codec, for each size of its blocks


def _made_up(size: int) -> dict[str, Rows]:
    rng = np.random.default_rng(0)
    return {
        "normal": [rng.standard_normal((1, size)).astype(np.float32)],
        "student_t3": [rng.standard_t(3, (1, size)).astype(np.float32)],
    }


def _of_a_model(optimization: Optimization) -> dict[str, Rows]:
    """The checkpoint's weights, and the gradients of the job's first batch, on one device."""
    console, one = Console(), Devices(nodes=1, devices=1)
    setup = set_up(None, one, Sharding(stage=0), optimization, max_tokens=None, console=console)
    pairs = setup.task.load_examples(Data(), console).train
    first = next(training_batches(pairs, setup.zero, optimization))
    embed = make_embed(setup.task.loaded.graph)

    def loss(params, tokens):
        return contrastive_loss(embed(params, tokens), temperature=optimization.temperature)[0]

    _, grads = jax.jit(setup.zero.value_and_grad(loss))(setup.params, first)
    return {"weights": _stack(setup.params), "gradients": _stack(grads)}


def _stack(tree: Any) -> Rows:
    """The arrays of a tree, flat; those of one size as rows, for they compile together."""
    by_size = collections.defaultdict(list)
    for leaf in jax.tree.leaves(tree):
        if leaf.size >= _SMALLEST:
            by_size[leaf.size].append(np.asarray(leaf, np.float32).reshape(-1))
    return [np.stack(rows) for rows in by_size.values()]


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: Any, x: jax.Array) -> jax.Array:
    return codec.decode(codec.encode(x), x.shape[-1], x.dtype)


def _error(codec: Any, data: Rows) -> float:
    """The median over arrays of |decoded - x| / |x|."""
    errors = []
    for x in data:
        for row, back in zip(x, np.asarray(_round_trip(codec, x)), strict=True):
            change = back.astype(np.float64) - row
            errors.append(np.sqrt(change @ change / np.dot(row, row.astype(np.float64))))
    return float(f"{np.median(errors):.4g}")


def _errors(data: Rows, blocks: tuple[int, ...]) -> Errors:
    """Of every codec; with stochastic rounding at the size of blocks that it has by itself."""
    errors: Errors = {}
    for name, codec in _CODECS.items():
        mine = _blocks(codec, blocks)
        if not _may_rotate(codec):
            each = {str(x): _error(dataclasses.replace(codec, block=x), data) for x in mine}
            errors[name] = each
            continue
        for label, hadamard in ((name, None), (f"{name}+H32", 32)):
            rotated = dataclasses.replace(codec, hadamard=hadamard)
            random = dataclasses.replace(rotated, rounding="stochastic")
            errors[label] = {
                str(block): _error(dataclasses.replace(rotated, block=block), data)
                for block in mine
            }
            errors[f"{label}+SR"] = {str(codec.block): _error(random, data)}
    casts = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
    for name, dtype in casts.items():
        errors[f"cast {name}"] = {"none": _error(jz.Cast(dtype), data)}
    return errors


def _may_rotate(codec: Any) -> bool:
    return hasattr(codec, "hadamard")


def _blocks(codec: Any, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of blocks, out of `blocks`, that a codec accepts."""
    least = _SMALLEST_BLOCK if _may_rotate(codec) else 0
    return tuple(block for block in blocks if block >= least)


def _bits(blocks: tuple[int, ...], num: int = 2**20) -> Errors:
    """Bits per number of an encoded row of `num` numbers."""
    return {
        name: {
            str(block): 8 * dataclasses.replace(codec, block=block).num_bytes(num, "float32") / num
            for block in _blocks(codec, blocks)
        }
        for name, codec in _CODECS.items()
    }


def _table(name: str, errors: Errors) -> Table:
    sizes = {int(block) for row in errors.values() for block in row if block != "none"}
    columns = [str(size) for size in sorted(sizes)]
    title = f"Relative RMS error in %, by size of blocks: {name}"
    table = Table("", *columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for label, by_block in errors.items():
        cells = [f"{100 * by_block[c]:.2f}" if c in by_block else "" for c in columns]
        if "none" in by_block:
            cells[0] = f"{100 * by_block['none']:.2f}"
        table.add_row(label, *cells)
    return table


def _draw(all_errors: Mapping[str, Errors], path: Path) -> None:
    """Error over size of blocks, one panel for each kind of numbers."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (data, errors) in zip(panels.flat, all_errors.items(), strict=True):
        for i, (name, codec) in enumerate(_CODECS.items()):
            rotated = [(f"{name}+H32", "o--")] if _may_rotate(codec) else []
            for label, style in ((name, "o-"), *rotated):
                blocks = [int(block) for block in errors[label]]
                percent = [100 * error for error in errors[label].values()]
                axes.plot(blocks, percent, style, color=f"C{i}", markersize=3, label=label)
        axes.set(title=_TITLES[data], xscale="log", yscale="log")
        blocks = sorted({int(b) for row in errors.values() for b in row if b != "none"})
        axes.set_xticks(blocks, [str(block) for block in blocks])
        axes.minorticks_off()
        ticks = [0.5, 1, 2, 5, 10, 20, 50]
        axes.set_yticks(ticks, [f"{tick}%" for tick in ticks])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes in panels[-1]:
            axes.set_xlabel("numbers in a block, which share a scale")
    figure.supylabel("relative RMS error")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=80)


def main(
    size: int = 2**20,
    blocks: tuple[int, ...] = _BLOCKS,
    optimization: Optimization = Optimization(),  # noqa: B008
) -> None:
    """Measure, print tables, append a row, and draw the figure beside it.

    Args:
        size: how many numbers are made up.
        blocks: sizes of blocks.
        optimization: gives the batch whose gradients are taken.
    """
    data = {**_made_up(size), **_of_a_model(optimization)}
    errors: dict[str, Errors] = {}
    for name, rows in data.items():
        errors[name] = _errors(rows, blocks)
        Console().print(_table(_TITLES[name], errors[name]))
    results = {
        "arrays": {name: sum(len(x) for x in rows) for name, rows in data.items()},
        "numbers": {name: sum(x.size for x in rows) for name, rows in data.items()},
        "bits_per_number": _bits(blocks),
        "relative_rms_error": errors,
    }
    append_row(_NAME, results)
    _draw(errors, RESULTS / f"{_NAME}.png")


if __name__ == "__main__":
    tyro.cli(main)
