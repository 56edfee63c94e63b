"""Fine-tune MiniLM with its first layers frozen step by step: time and FLOPs of epochs, retrieval.

    python -m benchmarks.training.freezing

The model, the pairs and the loss are those of `jaxzero train`; an epoch is the same few batches in
another order, so that activations of frozen layers can be cached. Three variants train with one
seed in one process: nothing frozen, layers frozen by `jz.freeze_schedule`, and the same with the
cache. They take turns at each batch, so other load on the machine slows all of them alike. A time
is given as its ratio to that of the variant in which nothing is frozen, as are FLOPs, which XLA
counts in the compiled programs. Compiling is timed apart. Appends a row as each seed ends, and one
for all seeds; a seed whose row is there, for the same settings and code, is not run again.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxzero as jz
from benchmarks.shared._rows import append_row, is_current, read_rows, rounded
from jaxzero._zero.activation_cache import ActivationCache
from jaxzero._zero.freezing import Freezing
from jaxzero.interop import load_encoder
from jaxzero.jobs._data import PairTokens, load_examples
from jaxzero.jobs._retrieval import contrastive_loss, in_batches, make_embed, retrieval_scores
from jaxzero.jobs._setup import packaged_checkpoint

Name = Literal["plain", "frozen", "cached"]
_NAME = "freezing"
_NAMES: tuple[Name, ...] = ("plain", "frozen", "cached")
_CODE = ("jaxzero/_zero", "jaxzero/_program", "benchmarks/training/freezing.py")
_TEMPERATURE = 0.05
_EVALUATED = 64  # pairs embedded at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What all seeds have in common.

    Attributes:
        epochs: of training.
        batches: of an epoch.
        pairs: of a batch, over all devices.
        tokens: of each text.
        alpha: of `jz.freeze_schedule`.
        learning_rate: after warming up; from there it falls to 0.
        warmup_steps: over which it rises.
        devices: fake devices, all in one node.
    """

    epochs: int = 6
    batches: int = 4
    pairs: int = 32
    tokens: int = 32
    alpha: float = 0.25
    learning_rate: float = 2e-4
    warmup_steps: int = 5
    devices: int = 2

    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of `jaxzero train`, for as many steps."""
        steps, peak = self.epochs * self.batches, self.learning_rate
        rise = optax.linear_schedule(peak / (self.warmup_steps + 1), peak, self.warmup_steps)
        fall = optax.linear_schedule(peak, 0, max(steps - self.warmup_steps, 1))
        rate = optax.join_schedules([rise, fall], [self.warmup_steps])
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


class Task:
    """The model, the pairs, and the programs, which all seeds and variants share."""

    def __init__(self, settings: Settings):
        checkpoint = packaged_checkpoint()
        loaded = load_encoder(checkpoint, dtype=np.dtype(np.float32))
        self.settings, self.weights = settings, loaded.params
        self.zero = jz.Zero(jz.make_mesh(1, devices=jax.devices()[: settings.devices]))
        self.tx = settings.optimizer()
        self.examples = load_examples(None, checkpoint, settings.tokens, Console(quiet=True))
        embed = make_embed(loaded.graph)

        def loss(params: Any, batch: PairTokens) -> jax.Array:
            return contrastive_loss(embed(params, batch), temperature=_TEMPERATURE)[0]

        self.loss = loss
        self._embed = jax.jit(self.zero.apply(embed))
        self._steps: dict[tuple[int, bool], tuple[jax.stages.Compiled, float]] = {}

    def batches(self, seed: int) -> list[PairTokens]:
        """Those of an epoch: pairs drawn without replacement."""
        train, size = self.examples.train, self.settings.pairs
        order = np.random.default_rng(seed).permutation(len(train))
        parts = (order[i * size : (i + 1) * size] for i in range(self.settings.batches))
        return [PairTokens(train.ids[part], train.mask[part]) for part in parts]

    def scores(self, params: Any) -> dict[str, float]:
        """Held-out retrieval."""
        embeddings = in_batches(
            lambda batch: self._embed(params, batch), self.examples.held_out, _EVALUATED
        )
        return dataclasses.asdict(retrieval_scores(embeddings))

    def step(
        self, freezing: Freezing, cache: ActivationCache | None, args: Sequence[Any]
    ) -> tuple[jax.stages.Compiled, float]:
        """The compiled step for `args`, and its FLOPs over all devices."""
        key = freezing.prefix, cache is not None
        if key not in self._steps:
            run = (
                self.zero.value_and_grad(freezing.wrap(self.loss))
                if cache is None
                else self.zero.value_and_grad(cache.rest, batch_argnums=(2, 3))
            )

            def step(active: Any, opt_state: Any, frozen: Any, *batch: Any) -> Any:
                value, grads = run(active, frozen, *batch)
                updates, opt_state = self.tx.update(grads, opt_state, active)
                return optax.apply_updates(active, updates), opt_state, value

            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
            costs: Any = compiled.cost_analysis()
            self._steps[key] = compiled, costs["flops"] * self.settings.devices
        return self._steps[key]


class Variant:
    """One way to train, and its state."""

    def __init__(self, task: Task, name: Name):
        self._task, self._name = task, name
        self._schedule = jz.freeze_schedule(6, task.settings.alpha)
        params = task.zero.shard(task.weights)
        self._freezing = self._freeze(params, 0)
        self._active, self._frozen = self._freezing.split(params)
        state = task.zero.init_optimizer(task.tx, params)
        self._state, self._frozen_state = self._freezing.split_optimizer(task.tx, state)
        self._cache: ActivationCache | None = None
        self.epochs: list[dict[str, Any]] = []

    def _freeze(self, params: Any, prefix: int) -> Freezing:
        return self._task.zero.freeze(params, prefix, layers="layers.*", before="embeddings")

    def start_epoch(self, epoch: int, batch: PairTokens) -> None:
        """Freeze what the schedule says, and compile the step if it is another one."""
        prefix = 0 if self._name == "plain" else self._schedule(epoch)
        began = time.perf_counter()
        if prefix != self._freezing.prefix:
            params, tx = self.params(), self._task.tx
            state = self._freezing.join_optimizer(tx, self._state, self._frozen_state)
            self._freezing = self._freeze(params, prefix)
            self._active, self._frozen = self._freezing.split(params)
            self._state, self._frozen_state = self._freezing.split_optimizer(tx, state)
            if self._name == "cached":
                self._cache = self._freezing.cache(self._task.loss, self._frozen)
                self._cache("to compile", batch)
        self._call(batch, "to compile", is_run=False)
        spent = time.perf_counter() - began
        self.epochs.append(
            {"prefix": prefix, "seconds": 0.0, "cpu_seconds": 0.0, "flops": 0.0, "hits": 0}
            | {"seconds_to_compile": spent, "losses": []}
        )

    def _call(self, batch: PairTokens, key: Any, *, is_run: bool = True) -> float:
        """Run a step, or only compile it. Return its FLOPs, without those that fill the cache."""
        found = () if self._cache is None else (self._cache(key, batch),)
        args = (self._active, self._state, self._frozen, *found, batch)
        step, flops = self._task.step(self._freezing, self._cache, args)
        if is_run:
            self._active, self._state, loss = jax.block_until_ready(step(*args))
            self.epochs[-1]["losses"].append(float(loss))
        return flops

    def run(self, number: int, batch: PairTokens) -> None:
        """Run one step, and add its time to the epoch's, that of the cache included."""
        record, hits = self.epochs[-1], 0 if self._cache is None else self._cache.hits
        wall, cpu = time.perf_counter(), time.process_time()
        record["flops"] += self._call(batch, number)
        record["seconds"] += time.perf_counter() - wall
        record["cpu_seconds"] += time.process_time() - cpu
        record["hits"] += 0 if self._cache is None else self._cache.hits - hits

    def params(self) -> Any:
        """The whole parameters."""
        return self._freezing.join(self._active, self._frozen)


def main(
    seeds: tuple[int, ...] = (0, 1, 2),
    settings: Settings = Settings(),  # noqa: B008
) -> None:
    """Train with each seed, then append the ratios over all seeds.

    Args:
        seeds: which decide the pairs and their order.
        settings: everything else.
    """
    jax.config.update("jax_num_cpu_devices", settings.devices)
    described = dataclasses.asdict(settings)
    done = {
        row["results"]["seed"]: row["results"]
        for row in read_rows(_NAME, described)
        if "seed" in row["results"] and is_current(row, *_CODE)
    }
    task = None
    for seed in seeds:
        if seed not in done:
            task = task or Task(settings)
            done[seed] = {"settings": described, "seed": seed, **_train(task, seed)}
            append_row(_NAME, done[seed])
    summary = _summary([done[seed] for seed in seeds])
    append_row(_NAME, {"settings": described, "seeds": list(seeds), **summary})


def _train(task: Task, seed: int) -> dict[str, Any]:
    batches = task.batches(seed)
    variants = {name: Variant(task, name) for name in _NAMES}
    before = task.scores(variants["plain"].params())
    for epoch in range(task.settings.epochs):
        for variant in variants.values():
            variant.start_epoch(epoch, batches[0])
        order = np.random.default_rng((seed, epoch)).permutation(len(batches))
        for turn, number in enumerate(order.tolist()):
            for i in range(len(_NAMES)):
                name = _NAMES[(turn + i) % len(_NAMES)]
                variants[name].run(number, batches[number])
        print(f"seed {seed}, epoch {epoch}: done", flush=True)
    return {
        "before": before,
        **{
            name: {"after": task.scores(variant.params()), "epochs": _rounded(variant.epochs)}
            for name, variant in variants.items()
        },
    }


def _rounded(epochs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    means = [{**epoch, "loss": statistics.mean(epoch["losses"])} for epoch in epochs]
    return [
        {name: rounded(x) if isinstance(x, float) else x for name, x in epoch.items()}
        for epoch in [{k: v for k, v in epoch.items() if k != "losses"} for epoch in means]
    ]


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each variant the scores, and of each of its epochs the ratios to the plain one's."""

    def of_seeds(values: list[float]) -> dict[str, float | None]:
        found = {"mean": statistics.mean(values), "min": min(values), "max": max(values)}
        return {name: rounded(x) for name, x in found.items()}

    def ratios(name: Name, epoch: int) -> dict[str, Any]:
        pairs = [(run[name]["epochs"][epoch], run["plain"]["epochs"][epoch]) for run in runs]
        kinds = ("seconds", "cpu_seconds", "flops")
        found = {kind: of_seeds([one[kind] / base[kind] for one, base in pairs]) for kind in kinds}
        return {"prefix": pairs[0][0]["prefix"], "hits": pairs[0][0]["hits"], **found}

    return {
        "before": of_seeds([run["before"]["mrr_at_10"] for run in runs]),
        **{
            name: {
                "mrr_at_10": of_seeds([run[name]["after"]["mrr_at_10"] for run in runs]),
                "epochs": [ratios(name, i) for i in range(len(runs[0][name]["epochs"]))],
            }
            for name in _NAMES
        },
    }


if __name__ == "__main__":
    tyro.cli(main)
