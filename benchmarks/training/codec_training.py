"""Effect of each codec on quality: a byte decoder trained from scratch, with several seeds.

    python -m benchmarks.training.codec_training  # all runs, then the table and the figure
    python -m benchmarks.training.codec_training --summary  # of the runs that are there

A seed decides initial parameters and the order of the data, the same for every variant, so
variants are compared seed by seed. All are judged alike: the float32 parameters, gathered
whole, on held-out modules, on one device. A row is appended as each run ends; a run whose
row is there, for the same settings and code, is not run again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import jaxzero as jz
from benchmarks.shared._byte_decoder import Size, init, losses
from benchmarks.shared._byte_training import WARMUP_STEPS, held_out_losses, optimizer
from benchmarks.shared._corpus import random_windows, read_corpus
from benchmarks.shared._rows import RESULTS, append_row, is_current, read_rows, rounded
from benchmarks.training._fp8_matrix import Fp8Matrix

_NAME = "codec_training"
_BASELINE = "zero3"
_CODE = (
    "jaxzero",
    "benchmarks/training/codec_training.py",
    "benchmarks/training/_fp8_matrix.py",
    "benchmarks/shared/_byte_decoder.py",
    "benchmarks/shared/_byte_training.py",
    "benchmarks/shared/_corpus.py",
)

_ROTATED4 = jz.Int4(block=128, hadamard=32)
_PLAIN4 = jz.PerAxis(node=jz.Int4(block=128), local=jz.Int4(block=128))
# The largest block there is: as large as the largest message of weights between nodes, so that
# most messages have one scale, and none has more than two.
_NAIVE4 = jz.PerAxis(node=jz.Int4(block=8192), local=jz.Int4(block=8192))
_DIRECT4 = jz.PerAxis(node=_ROTATED4, local=jz.zeropp4().weights.local)


class Variant(NamedTuple):
    """One configuration.

    Attributes:
        label: in the table and the figure.
        config: what is trained with.
        has_fp8_layers: whether the matrices of the layers multiply in 8 bits.
        baseline: the variant that it is compared with, seed by seed.
    """

    label: str
    config: jz.ZeroConfig
    has_fp8_layers: bool = False
    baseline: str = _BASELINE


VARIANTS: dict[str, Variant] = {
    "zero3": Variant("ZeRO-3, float32", jz.zero3()),
    "zeropp": Variant("zeropp()", jz.zeropp()),
    "zeropp4": Variant("zeropp4()", jz.zeropp4()),
    "qwz": Variant("qwZ only (int8 weights)", jz.zero3(weights=jz.zeropp().weights)),
    "hpz": Variant("hpZ only (int8 slices)", jz.ZeroConfig(hpz=jz.zeropp().hpz)),
    "qgz": Variant("qgZ only (int4 gradients)", jz.zero3(gradients=jz.zeropp().gradients)),
    "differences": Variant(
        "int4 weight differences only",
        jz.ZeroConfig(weights=jz.zeropp4().weights, hpz=jz.zeropp4().hpz),
    ),
    "direct": Variant(
        "int4 rotated weights only",
        jz.ZeroConfig(weights=_DIRECT4, hpz=jz.zeropp4().hpz),
    ),
    "mixed": Variant(
        "int8 and int4 gradients only",
        jz.zero3(gradients=jz.zeropp4().gradients),
    ),
    "unrotated": Variant("int4 gradients, not rotated", jz.zero3(gradients=_PLAIN4)),
    "naive": Variant(
        "naive int4, a scale per 8192",
        jz.zero3(weights=_NAIVE4, gradients=_NAIVE4),
    ),
    "messages": Variant(
        "int8 messages of stages only",
        dataclasses.replace(jz.pipeline(2, messages=jz.Int8()), min_quantized_size=1024),
    ),
    "fp8": Variant("fp8 layers", jz.zero3(), has_fp8_layers=True),
    "fp8_zeropp": Variant(
        "zeropp() over ZeRO-3, both with fp8 layers",
        jz.zeropp(),
        has_fp8_layers=True,
        baseline="fp8",
    ),
}

_STEPS_PER_CALL = 20  # dispatch to all devices costs more than a small step
_CURVE = f"train_loss_mean_of_{_STEPS_PER_CALL}_steps"
_SMALL_PERCENT = 4.0  # differences that the figure shows to scale
_COLORS = [f"C{i}" for i in range(10)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained, and where.

    Attributes:
        steps: of the optimizer, a multiple of 20.
        seeds: one run for each, of every variant.
        variants: their names; none: all.
        nodes: of the mesh.
        local: devices in each node.
        simulate: run the program of all devices on one, vectorised.
        rows: windows in a step, over all devices.
        learning_rate: the highest, after the warm-up.
        size: of the model.
        summary: run nothing; print the table and draw the figure.
    """

    steps: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    variants: tuple[str, ...] = ()
    nodes: int = 2
    local: int = 4
    simulate: bool = False
    rows: int = 8
    learning_rate: float = 2e-3
    size: Size = Size()
    summary: bool = False

    def __post_init__(self):
        if self.steps % _STEPS_PER_CALL or self.steps <= WARMUP_STEPS:
            raise ValueError(
                f"`steps` must be a multiple of {_STEPS_PER_CALL} and more than the "
                f"{WARMUP_STEPS} of the warm-up; got {self.steps}."
            )
        unknown = sorted(set(self.variants) - set(VARIANTS))
        if unknown:
            raise ValueError(f"`variants` must be among {', '.join(VARIANTS)}; got {unknown}.")

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs must share to be compared."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if name not in _NOT_SETTINGS}


_NOT_SETTINGS = ("seeds", "variants", "summary")


# One run.


@functools.cache
def _zero(study: Study, variant: str) -> jz.Zero:
    """Fake devices, or their program on one device."""
    simulate: dict[str, Any] = {"simulate": study.nodes * study.local} if study.simulate else {}
    return jz.Zero(jz.make_mesh(study.nodes, **simulate), VARIANTS[variant].config)


def _optimizer(study: Study) -> optax.GradientTransformation:
    return optimizer(study.learning_rate, study.steps, end=study.learning_rate / 100)


@functools.cache
def _steps(study: Study, variant: str) -> Callable:
    """Many steps in one call: `(state, tokens) -> (state, losses)`; compiled for all seeds."""
    tx, zero = _optimizer(study), _zero(study, variant)
    value_and_grad = zero.value_and_grad(
        lambda params, tokens: losses(study.size, params, tokens).mean()
    )

    def step(state, tokens):
        params, opt_state, wire_state = state
        if wire_state is None:
            loss, grads = value_and_grad(params, tokens)
        else:
            loss, grads, wire_state = value_and_grad(params, tokens, wire_state=wire_state)
        params, opt_state = zero.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state, wire_state), loss

    return jax.jit(lambda state, tokens: jax.lax.scan(step, state, tokens))


def _init(size: Size, variant: str, key: jax.Array) -> dict[str, Any]:
    params = init(size, key)
    if VARIANTS[variant].has_fp8_layers:
        layers = params["layers"]
        for name in layers.keys() - {"norm_attention", "norm_mlp"}:
            layers[name] = Fp8Matrix.of(layers[name])
    return params


def _run(study: Study, variant: str, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    corpus, length = read_corpus(), study.size.length
    zero, steps = _zero(study, variant), _steps(study, variant)
    params = zero.init(functools.partial(_init, study.size, variant), jax.random.key(seed))
    wire_state = zero.init_wire_state(params) if zero.config.needs_wire_state else None
    state = (params, zero.init_optimizer(_optimizer(study), params), wire_state)
    generator = np.random.default_rng(seed)
    curve = []
    for _ in range(study.steps // _STEPS_PER_CALL):
        shape = (_STEPS_PER_CALL, study.rows)
        state, step_losses = steps(state, random_windows(corpus.train, shape, length, generator))
        # Waited for: two calls under way at once can take each other's threads and stop (XLA:CPU).
        curve.append(np.asarray(step_losses).mean())
    whole = zero.unshard(state[0])
    initial = jax.eval_shape(functools.partial(init, study.size), jax.random.key(seed))
    parts = held_out_losses(study.size, corpus, whole)
    return {
        "variant": variant,
        "seed": seed,
        "settings": study.settings,
        "config": repr(zero.config),
        "parameters": sum(x.size for x in jax.tree.leaves(initial)),
        "held_out_loss": rounded(parts.mean()),
        "held_out_loss_of_parts": [rounded(loss) for loss in parts],
        _CURVE: [rounded(loss) for loss in curve],
        "seconds": round(time.perf_counter() - start, 1),
    }


def _run_all(study: Study) -> None:
    done = {
        (row["results"]["variant"], row["results"]["seed"])
        for row in read_rows(_NAME, study.settings)
        if is_current(row, *_CODE)
    }
    for seed in study.seeds:  # outermost: when stopped, what is there can be compared
        for variant in study.variants or VARIANTS:
            if (variant, seed) not in done:
                append_row(_NAME, _run(study, variant, seed))


# All runs together.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """One variant; losses in nats per byte. A run that diverged has the loss `inf`."""

    label: str
    losses: list[float]  # one for each seed
    percent: list[float]  # over the baseline with the same seed
    curve: np.ndarray  # of the training loss, mean over seeds
    color: str

    @property
    def mean_percent(self) -> float:
        """How much worse than the baseline."""
        return statistics.mean(self.percent)

    @property
    def error_percent(self) -> float | None:
        """Standard error of `mean_percent`, from the spread over seeds; None: unknown."""
        if len(self.percent) < 2 or not math.isfinite(self.mean_percent):
            return None
        return statistics.stdev(self.percent) / len(self.percent) ** 0.5


def _summarize(rows: list[dict[str, Any]]) -> list[Summary]:
    """The newest row of each variant and seed, for seeds that its baseline has too."""
    newest = {(row["results"]["variant"], row["results"]["seed"]): row["results"] for row in rows}
    summaries = []
    for i, (variant, (label, *_, baseline)) in enumerate(VARIANTS.items()):
        runs = [
            (run, newest[baseline, seed])
            for (name, seed), run in sorted(newest.items())
            if name == variant and (baseline, seed) in newest
        ]
        if not runs:
            continue
        found = [(_number(run["held_out_loss"]), base["held_out_loss"]) for run, base in runs]
        curves = [[_number(loss) for loss in run[_CURVE]] for run, _ in runs]
        summaries.append(
            Summary(
                label=label,
                losses=[loss for loss, _ in found],
                percent=[100 * (loss / base - 1) for loss, base in found],
                curve=np.mean(curves, axis=0),
                color="black" if variant == _BASELINE else _COLORS[i % len(_COLORS)],
            )
        )
    return summaries


def _number(loss: float | None) -> float:
    return math.inf if loss is None else loss


def _table(summaries: list[Summary]) -> Table:
    table = Table(title="held-out loss, nats per byte")
    table.add_column("variant", no_wrap=True)
    for column in ("mean", "range", "over ZeRO-3", "seeds"):
        table.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        error = summary.error_percent
        table.add_row(
            summary.label,
            f"{statistics.mean(summary.losses):.4f}",
            f"{min(summary.losses):.3f}-{max(summary.losses):.3f}",
            f"{summary.mean_percent:+.2f}%" + ("" if error is None else f" ± {error:.2f}"),
            str(len(summary.losses)),
        )
    return table


def _draw(study: Study, summaries: list[Summary]) -> None:
    """Training curves, and the difference of each variant from ZeRO-3, seed by seed."""
    from matplotlib.figure import Figure  # without pyplot no display is looked for

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    curves, differences = figure.subplots(1, 2, width_ratios=(1, 1.1))
    steps = np.arange(1, 1 + study.steps // _STEPS_PER_CALL) * _STEPS_PER_CALL
    for i, summary in enumerate(summaries):
        curves.plot(steps, summary.curve, color=summary.color, linewidth=1, zorder=3 - i)
    curves.set(xlabel="step", ylabel=f"training loss, mean of {_STEPS_PER_CALL} steps")
    start = len(steps) // 10  # the fall before that would flatten what follows
    curves.set_ylim(top=1.05 * summaries[0].curve[start])
    _draw_differences(differences, summaries)
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"1M parameters, {study.steps} steps, {study.nodes} x {study.local} devices; a point is "
        "one seed, a bar the mean"
    )
    figure.savefig(RESULTS / f"{_NAME}.png", dpi=150)


def _draw_differences(axes: Any, summaries: list[Summary]) -> None:
    near = [x for summary in summaries for x in summary.percent if abs(x) < _SMALL_PERCENT]
    low, high = 1.2 * min(-0.1, *near), 1.2 * max(0.1, *near)
    for i, summary in enumerate(summaries):
        mean, color = summary.mean_percent, summary.color
        if mean < high:
            axes.plot(summary.percent, [i] * len(summary.percent), "o", color=color, alpha=0.4)
            axes.plot(mean, i, "|", color=color, markersize=16, markeredgewidth=2)
        else:  # far off: written out
            text = f"{mean:+.1f}% \N{RIGHTWARDS ARROW}"
            axes.text(high, i, text, ha="right", va="center", color=color)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="held-out loss over that of ZeRO-3, %")
    axes.set(xlim=(low, high), ylim=(-0.6, len(summaries) - 0.4))
    axes.set_yticks(range(len(summaries)), [summary.label for summary in summaries])
    for tick, summary in zip(axes.get_yticklabels(), summaries, strict=True):
        tick.set_color(summary.color)
    axes.invert_yaxis()


def main(study: Study) -> None:
    """Run what is missing, then print the table and draw the figure."""
    if not study.summary:
        # Before any device is used: afterwards their number is fixed.
        jax.config.update("jax_num_cpu_devices", 1 if study.simulate else study.nodes * study.local)
        _run_all(study)
    rows = read_rows(_NAME, study.settings)
    summaries = _summarize(rows)
    if summaries:
        Console(width=100).print(_table(summaries))
        _draw(study, summaries)
    commits = {row["commit"] for row in rows}
    if len(commits) > 1:
        print(f"rows of {len(commits)} commits; the newest of each variant and seed was taken")


if __name__ == "__main__":
    main(tyro.cli(Study))
