"""What adaptive batches do to training: a byte decoder from scratch, at equal numbers of examples.

    python benchmarks/simigrad.py              # all runs, then the table and the figure
    python benchmarks/simigrad.py --summary    # of the runs that are there

Every variant sees the same windows in the same order and differs only in how many of them one
update takes: always as many, doubled at fixed times, or as SimiGrad finds. Learning rates go
with the square root of the batch over the smallest, and fall with the windows seen. A row is
appended as each run ends; a run whose row is there, for the same settings and code, is not run
again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _byte_decoder import Size, even_windows, init, losses, random_windows, read_corpus
from _rows import RESULTS, append_row, is_current
from rich.console import Console
from rich.table import Table

import jaxzero as jz

_NAME = "simigrad"
_CODE = ("jaxzero", "benchmarks/simigrad.py", "benchmarks/_byte_decoder.py")
_ADAPTIVE = ("doubling", "walk", "jump", "noise_scale")
_MICROBATCHES_PER_CALL = 32
_WARMUP_PART = 0.05  # of the budget
_HELD_OUT_PARTS, _WINDOWS_PER_PART = 32, 96
_AT_NOISE_SCALE = 1 / 3  # the similarity at which a batch is as large as the noise scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained.

    Attributes:
        budget: windows in all, a multiple of 32 micro-batches.
        rows: windows in a micro-batch.
        sizes: fixed batches, in micro-batches; the first and last bound the others.
        target: similarity for the walk and the jump.
        seeds: one run for each, of every variant.
        variants: their names ("fixed 8", "doubling", "walk", "jump", "noise_scale"); none: all.
        learning_rate: the highest, for the smallest batch.
        size: of the model.
        summary: run nothing; print the table and draw the figure.
    """

    budget: int = 2**16
    rows: int = 4
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    target: float = 0.5
    seeds: tuple[int, ...] = (0, 1, 2)
    variants: tuple[str, ...] = ()
    learning_rate: float = 1e-3
    size: Size = Size()
    summary: bool = False

    def __post_init__(self):
        if self.budget % (self.rows * _MICROBATCHES_PER_CALL):
            raise ValueError(
                f"`budget` must be a multiple of {self.rows} rows x {_MICROBATCHES_PER_CALL} "
                f"micro-batches; got {self.budget}."
            )
        if min(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(
                f"`sizes` must rise, from 2 micro-batches (two halves) or more; got {self.sizes}."
            )
        unknown = sorted(set(self.variants) - set(self.all_variants))
        if unknown:
            raise ValueError(
                f"`variants` must be among {', '.join(self.all_variants)}; got {unknown}."
            )

    @property
    def all_variants(self) -> tuple[str, ...]:
        return (*(f"fixed {size}" for size in self.sizes), *_ADAPTIVE)

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs must share to be compared."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if name not in _NOT_SETTINGS}


_NOT_SETTINGS = ("seeds", "variants", "summary")


@dataclasses.dataclass(frozen=True)
class Doubling:
    """A rule that measures nothing: twice the batch after each of `parts` of the budget."""

    initial: int
    budget: int
    parts: tuple[float, ...] = (0.2, 0.4, 0.6)

    def init(self):
        return jnp.zeros([], jnp.float32)  # windows seen

    def wanted(self, similarity, steps, weight, target, memory):
        seen = memory + weight
        passed = sum((seen >= part * self.budget).astype(jnp.float32) for part in self.parts)
        return self.initial * 2**passed, seen


# One run.


def _optimizer(study: Study, variant: str) -> optax.GradientTransformationExtraArgs:
    smallest, largest = study.sizes[0], study.sizes[-1]
    rules = {
        "doubling": (Doubling(smallest, study.budget), study.target),
        "walk": (jz.Walk(), study.target),
        "jump": (jz.Jump(), study.target),
        "noise_scale": (jz.Jump(), _AT_NOISE_SCALE),
    }
    fixed = None if variant in rules else int(variant.removeprefix("fixed "))
    rule, target = rules.get(variant, (jz.Walk(), study.target))
    # A batch that stays is its own initial one, so its learning rate is set here.
    scale = 1.0 if fixed is None else math.sqrt(fixed / smallest)
    inner = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(study.learning_rate * scale, b2=0.95, weight_decay=0.1),
    )
    warmup = _WARMUP_PART * study.budget
    cosine = optax.warmup_cosine_decay_schedule(0.0, 1.0, int(warmup), study.budget, 0.01)
    return jz.simigrad(
        inner,
        target_similarity=target,
        initial=fixed or smallest,
        min_steps=fixed or smallest,
        max_steps=fixed or largest,
        rule=rule,
        lr_scaling="sqrt",
        # The warm-up starts at 0, where the first batch would be lost.
        schedule=lambda seen: cosine(seen + study.rows),
    )


@functools.cache
def _several(study: Study, variant: str) -> Callable:
    """Many micro-batches in one call: `(state, tokens) -> (state, losses)`; for all seeds."""
    tx = _optimizer(study, variant)

    def one(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: losses(study.size, params, tokens).mean())(
            params
        )
        updates, opt_state = tx.update(grads, opt_state, params, weight=study.rows)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(lambda state, tokens: jax.lax.scan(one, state, tokens))


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(size: Size, params: Any, windows: jax.Array) -> jax.Array:
    """The mean loss of each part of the held-out windows."""
    return jax.lax.map(lambda tokens: losses(size, params, tokens).mean(), windows)


def _run(study: Study, variant: str, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    corpus, length = read_corpus(), study.size.length
    several = _several(study, variant)
    params = init(study.size, jax.random.key(seed))
    state = params, _optimizer(study, variant).init(params)
    generator = np.random.default_rng(seed)
    track = []
    for _ in range(study.budget // (study.rows * _MICROBATCHES_PER_CALL)):
        shape = (_MICROBATCHES_PER_CALL, study.rows)
        state, step_losses = several(state, random_windows(corpus.train, shape, length, generator))
        stats = jz.simigrad_stats(state[1])
        track.append(
            [
                _rounded(np.asarray(step_losses).mean()),
                int(stats["steps"]) * study.rows,
                _rounded(stats["similarity"]),
                _rounded(stats["noise_scale"]),
            ]
        )
    windows = even_windows(corpus.held_out, _HELD_OUT_PARTS * _WINDOWS_PER_PART, length)
    parts = _evaluate(study.size, state[0], windows.reshape(_HELD_OUT_PARTS, -1, length + 1))
    stats = jz.simigrad_stats(state[1])
    updates = int(stats["updates"])
    return {
        "variant": variant,
        "seed": seed,
        "settings": study.settings,
        "held_out_loss": _rounded(parts.mean()),
        "updates": updates,
        "mean_batch_windows": float(stats["seen"]) / max(1, updates),
        "skipped": int(stats["skipped"]),
        "loss_batch_similarity_noise_scale": track,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _rounded(number: Any) -> float | None:
    """None: not finite, which JSON has no number for."""
    return round(float(number), 5) if math.isfinite(number) else None


def _rows(study: Study) -> list[dict[str, Any]]:
    """All rows with these settings, oldest first."""
    file = RESULTS / f"{_NAME}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    settings = json.loads(json.dumps(study.settings))
    return [row for row in rows if row["results"]["settings"] == settings]


def _run_all(study: Study) -> None:
    done = {
        (row["results"]["variant"], row["results"]["seed"])
        for row in _rows(study)
        if is_current(row, *_CODE)
    }
    for seed in study.seeds:  # outermost: when stopped, what is there can be compared
        for variant in study.variants or study.all_variants:
            if (variant, seed) not in done:
                append_row(_NAME, _run(study, variant, seed))


# All runs together.


def _by_variant(study: Study) -> dict[str, list[dict[str, Any]]]:
    """The newest run of each seed that ended with a finite loss."""
    newest = {(r["results"]["variant"], r["results"]["seed"]): r["results"] for r in _rows(study)}
    found: dict[str, list[dict[str, Any]]] = {}
    for variant in study.all_variants:
        runs = [run for (name, _), run in sorted(newest.items()) if name == variant]
        runs = [run for run in runs if run["held_out_loss"] is not None]
        if runs:
            found[variant] = runs
    return found


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), error


def _table(found: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table(title="held-out loss, nats per byte")
    table.add_column("variant", no_wrap=True)
    for column in ("loss", "windows in a batch, mean", "updates", "seeds"):
        table.add_column(column, justify="right", no_wrap=True)
    for variant, runs in found.items():
        loss, error = _mean_and_error([run["held_out_loss"] for run in runs])
        table.add_row(
            variant,
            f"{loss:.4f} ± {error:.4f}",
            f"{statistics.mean(run['mean_batch_windows'] for run in runs):.1f}",
            f"{statistics.mean(run['updates'] for run in runs):.0f}",
            str(len(runs)),
        )
    return table


def _draw(study: Study, found: dict[str, list[dict[str, Any]]]) -> None:
    """The final loss against the mean batch, and the batch over the windows seen."""
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    front, sizes = figure.subplots(1, 2)
    points = []
    for i, (variant, runs) in enumerate(found.items()):
        loss, error = _mean_and_error([run["held_out_loss"] for run in runs])
        batch = statistics.mean(run["mean_batch_windows"] for run in runs)
        is_fixed = variant not in _ADAPTIVE
        color = "gray" if is_fixed else f"C{i % 10}"
        if is_fixed:
            points.append((batch, loss))
        bar = None if math.isnan(error) else error
        label = None if is_fixed else variant
        front.errorbar(batch, loss, yerr=bar, fmt="o", color=color, capsize=3, label=label)
        if not is_fixed:
            track = runs[0]["loss_batch_similarity_noise_scale"]
            seen = np.arange(1, 1 + len(track)) * study.budget / len(track)
            sizes.step(seen, [size for _, size, *_ in track], color=color, label=variant)
    front.plot(*zip(*sorted(points), strict=True), "--", color="gray", label="fixed")
    front.set(xlabel="windows in a batch, mean", ylabel="held-out loss, nats per byte")
    front.set_xscale("log", base=2)
    sizes.set(xlabel="windows seen", ylabel=f"windows in a batch, seed {study.seeds[0]}")
    sizes.set_yscale("log", base=2)
    for axes in (front, sizes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
    figure.savefig(RESULTS / f"{_NAME}.png", dpi=150)


def main(study: Study) -> None:
    if not study.summary:
        _run_all(study)
    found = _by_variant(study)
    if not any(variant not in _ADAPTIVE for variant in found):
        raise SystemExit("No run of a fixed batch with these settings: there is nothing to draw.")
    Console().print(_table(found))
    _draw(study, found)


if __name__ == "__main__":
    main(tyro.cli(Study))
