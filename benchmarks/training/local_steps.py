"""Effect of local steps on quality: a byte decoder, against synchronous training on equal tokens.

    python -m benchmarks.training.local_steps  # all runs, then the table and the figure
    python -m benchmarks.training.local_steps --methods synchronous diloco30  # some of them
    python -m benchmarks.training.local_steps --summary  # of the runs that are there
    python -m benchmarks.training.local_steps --inner muon --learning-rate 0.02  # Muon in the nodes
    python -m benchmarks.training.local_steps --corpus packages  # no window comes twice

A seed decides initial parameters and the order of the data, the same for every method and number
of nodes, and so is the global batch; methods are compared seed by seed. All nodes are simulated on
one device. As in DiLoCo's own experiments, the first steps are synchronous, and every method goes
on from the same parameters and optimizer state. The learning rate is tuned for synchronous training
(`--learning-rate`); a method multiplies it, after the synchronous steps, by a factor that is tuned
for it. The mean of the nodes' parameters, in float32, is judged on held-out modules or packages. A
row is appended as each run ends; a run whose row is there, for the same settings and code, is not
run again.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxzero as jz
from benchmarks.shared._byte_decoder import Size, init, losses
from benchmarks.shared._byte_training import WARMUP_STEPS, Inner, held_out_losses, optimizer
from benchmarks.shared._corpus import (
    Corpus,
    distinct_windows,
    random_windows,
    read_corpus,
    read_packages,
)
from benchmarks.shared._rows import RESULTS, append_row, is_current, read_rows, rounded
from benchmarks.training._local_steps_methods import DEFAULT, OVER_DELAY, OVER_EVERY, Method, method
from benchmarks.training._local_steps_summary import BASELINE, draw, summarize, table

_NAME = "local_steps"
_CODE = (
    "jaxzero",
    "benchmarks/training/local_steps.py",
    "benchmarks/training/_local_steps_methods.py",
    "benchmarks/shared/_byte_decoder.py",
    "benchmarks/shared/_byte_training.py",
    "benchmarks/shared/_corpus.py",
)


_STEPS_PER_CALL = 100  # of synchronous training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained, and how.

    Attributes:
        steps: of the inner optimizer, a multiple of 100.
        synchronous_steps: how many of them, the first ones, are synchronous; a multiple of 100.
        rows: windows in a step, over all nodes.
        learning_rate: the highest, after the warm-up.
        inner: the optimizer of synchronous training and of the nodes.
        size: of the model.
        corpus: the standard library, whose windows may come twice, or installed packages.
        seeds: one run for each, of every method.
        methods: their names (see `_local_steps_methods`); none: `DEFAULT` there.
        nodes: numbers of nodes, of one device each; synchronous training runs on the first number
            alone, for on others it differs by rounding only.
        summary: run nothing; print the table and draw the figure.
    """

    steps: int = 900
    synchronous_steps: int = 300
    rows: int = 8
    learning_rate: float = 2e-3
    inner: Inner = "adamw"
    size: Size = Size()
    corpus: Literal["library", "packages"] = "library"
    seeds: tuple[int, ...] = (1, 2, 3)
    methods: tuple[str, ...] = ()
    nodes: tuple[int, ...] = (2, 8)
    summary: bool = False

    def __post_init__(self):
        for name in ("steps", "synchronous_steps"):
            if getattr(self, name) % _STEPS_PER_CALL:
                raise ValueError(
                    f"`{name}` must be a multiple of {_STEPS_PER_CALL}; got {getattr(self, name)}."
                )
        if self.steps <= max(WARMUP_STEPS, self.synchronous_steps):
            raise ValueError(
                f"`steps` must be more than the {WARMUP_STEPS} of the warm-up and the "
                f"{self.synchronous_steps} that are synchronous; got {self.steps}."
            )
        for name in self.methods:
            method(name)  # or it raises

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs must share to be compared."""
        fields = dataclasses.asdict(self)
        settings = {name: fields[name] for name in fields if name not in _NOT_SETTINGS}
        for name, first in _OF_FIRST_ROWS.items():
            if settings[name] == first:
                del settings[name]  # rows that were made before there was another do not name it
        return settings

    def has_tokens_of(self, settings: dict[str, Any]) -> bool:
        """Whether a run with these settings trained the same model on the same tokens."""
        own, other = dataclasses.asdict(self), _OF_FIRST_ROWS | settings
        return all(own[name] == other[name] for name in ("steps", "rows", "size", "corpus"))

    def tx(self, rate: float = 1.0) -> optax.GradientTransformation:
        """The optimizer, with `rate` times the learning rate of the study."""
        return optimizer(rate * self.learning_rate, self.steps, inner=self.inner)


_NOT_SETTINGS = ("seeds", "methods", "nodes", "summary")
_OF_FIRST_ROWS = {"inner": "adamw", "corpus": "library"}


# One run.


@functools.cache
def _zero(nodes: int) -> jz.Zero:
    return jz.Zero(jz.make_mesh(nodes, simulate=nodes), jz.zero3())


def training_step(study: Study, zero: jz.Zero, rate: float = 1.0) -> Callable:
    """A step of the inner optimizer: `(params, opt_state, tokens) -> (params, opt_state, loss)`."""
    # Whole states are sharded by shape below, which pads Muon's coefficients.
    tx = zero.optimizer(study.tx(rate))
    value_and_grad = zero.value_and_grad(
        lambda params, tokens: losses(study.size, params, tokens).mean()
    )

    def step(params, opt_state, tokens):
        loss, grads = value_and_grad(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


@functools.cache
def _synchronous(study: Study, nodes: int) -> Callable:
    """Many steps in one call: `(state, tokens) -> (state, losses)`."""
    step = training_step(study, _zero(nodes))

    def one(state, tokens):
        *state, loss = step(*state, tokens)
        return tuple(state), loss

    return jax.jit(lambda state, tokens: jax.lax.scan(one, state, tokens))


@functools.cache
def _rounds(study: Study, name: str, nodes: int) -> tuple[Any, Callable]:
    """The rounds, and one round compiled."""
    settings = method(name)
    assert settings is not None
    step = training_step(study, _zero(nodes), settings.rate)
    rounds = _zero(nodes).local_steps(step, settings.local)
    return rounds, jax.jit(rounds, donate_argnums=0)


@functools.cache
def _corpus(study: Study) -> Corpus:
    return read_corpus() if study.corpus == "library" else read_packages()


def _data(study: Study) -> dict[str, Any] | None:
    """What a row says of its data; None: it is the standard library."""
    return None if study.corpus == "library" else _corpus(study).described()


def _tokens(study: Study, seed: int) -> np.ndarray:
    """The windows of all steps: int32 `[steps, rows, length + 1]`."""
    shape, generator = (study.steps, study.rows), np.random.default_rng(seed)
    train, length = _corpus(study).train, study.size.length
    if study.corpus == "library":
        return random_windows(train, shape, length, generator)
    windows = distinct_windows(train, study.steps * study.rows, length, generator)
    return windows.reshape(*shape, -1).astype(np.int32)


@functools.lru_cache(maxsize=1)
def _first(study: Study, seed: int) -> tuple[Any, np.ndarray]:
    """The full parameters and optimizer state after the synchronous steps, and their losses."""
    zero = _zero(2)
    params = zero.init(functools.partial(init, study.size), jax.random.key(seed))
    state = params, zero.init_optimizer(zero.optimizer(study.tx()), params)
    tokens = _tokens(study, seed)[: study.synchronous_steps]
    state, curve = _train(_synchronous(study, 2), state, tokens, _STEPS_PER_CALL)
    return tuple(jax.tree.map(np.asarray, zero.unshard(tree)) for tree in state), curve


def _train(run: Callable, state: Any, tokens: np.ndarray, every: int) -> tuple[Any, np.ndarray]:
    """The state after all steps, `every` in a call, and the loss of each, a mean over nodes."""
    curve = [np.zeros(0)]
    for i in range(0, len(tokens), every):
        state, step_losses = run(state, tokens[i : i + every])
        curve.append(np.asarray(step_losses).reshape(every, -1).mean(1))
    return state, np.concatenate(curve)


@functools.cache
def _agreement(study: Study, rate: float) -> Callable:
    """The mean cosine between the changes of two nodes' parameters in a round.

    The result takes the parameters and optimizer states of all nodes and the tokens of a round.
    """
    tx = study.tx(rate)
    grad = jax.grad(lambda params, tokens: losses(study.size, params, tokens).mean())

    def one(state, tokens):
        params, opt_state = state
        updates, opt_state = tx.update(grad(params, tokens), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    def change(node):
        *state, tokens = node
        (params, _), _ = jax.lax.scan(one, tuple(state), tokens)
        moved = jax.tree.leaves(jax.tree.map(lambda x, y: (x - y).ravel(), params, state[0]))
        moved = jnp.concatenate(moved)
        return moved / jnp.linalg.norm(moved)

    @jax.jit
    def cosine(params, opt_state, tokens):
        nodes = len(params["norm"])
        tokens = tokens.reshape(len(tokens), nodes, -1, tokens.shape[-1]).swapaxes(0, 1)
        changes = jax.lax.map(change, (params, opt_state, tokens))
        return (jnp.sum(changes.sum(0) ** 2) - nodes) / (nodes * (nodes - 1))

    return cosine


def _run(study: Study, name: str, nodes: int, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    zero, settings, corpus = _zero(nodes), method(name), _corpus(study)
    (params, opt_state), curve = _first(study, seed)
    params, opt_state = zero.shard(params), zero.shard(opt_state)
    tokens = _tokens(study, seed)[study.synchronous_steps :]
    if settings is None:
        run, state, every = _synchronous(study, nodes), (params, opt_state), _STEPS_PER_CALL
    else:
        rounds, run = _rounds(study, name, nodes)
        state, every = rounds.init(params, opt_state), settings.local.every
    half = len(tokens) // every // 2 * every
    state, rest = _train(run, state, tokens[:half], every)
    cosine = None
    if settings is not None:
        agreement = _agreement(study, settings.rate)
        cosine = rounded(agreement(state.params, state.opt_state, tokens[half : half + every]))
    state, last = _train(run, state, tokens[half:], every)
    rest = np.concatenate([rest, last])
    mean = state[0] if settings is None else rounds.mean(state)
    parts = held_out_losses(study.size, corpus, zero.unshard(mean))
    curve = np.concatenate([curve, rest]).reshape(-1, _STEPS_PER_CALL).mean(1)
    return {
        "method": name,
        "nodes": nodes,
        "seed": seed,
        "settings": study.settings,
        "corpus": _data(study),
        "method_settings": None if settings is None else _described(settings),
        "held_out_loss": rounded(parts.mean()),
        "held_out_loss_of_parts": [rounded(loss) for loss in parts],
        "cosine_between_nodes": cosine,
        "train_loss_of_first_and_last_step_of_a_round": (
            None
            if settings is None
            else [rounded(loss) for loss in last.reshape(-1, every).mean(0)[[0, -1]]]
        ),
        f"train_loss_mean_of_{_STEPS_PER_CALL}_steps": [rounded(loss) for loss in curve],
        "seconds": round(time.perf_counter() - start, 1),
    }


def _described(settings: Method) -> dict[str, Any]:
    local = settings.local
    return {
        "rate": settings.rate,
        "every": local.every,
        "delay": local.delay,
        "fragments": local.fragments,
        "outer": settings.outer,
        "codec": repr(local.codec),
        "mixing": local.mixing,
    }


def _check_rounds(study: Study) -> None:
    """Raise unless the steps that are not synchronous are whole rounds of every method."""
    local_steps = study.steps - study.synchronous_steps
    for name in study.methods or DEFAULT:
        settings = method(name)
        if settings is not None and local_steps % settings.local.every:
            raise ValueError(
                "`steps` less `synchronous_steps` must be a multiple of the "
                f"{settings.local.every} steps in a round of {name}; got {local_steps}."
            )


def _run_all(study: Study) -> None:
    _check_rounds(study)
    done = {
        tuple(row["results"][name] for name in ("method", "nodes", "seed"))
        for row in read_rows(_NAME, study.settings)
        if is_current(row, *_CODE) and row["results"].get("corpus") == _data(study)
    }
    for seed in study.seeds:  # outermost: when stopped, what is there can be compared
        for name in study.methods or DEFAULT:
            for nodes in study.nodes[:1] if name == BASELINE else study.nodes:
                if (name, nodes, seed) not in done:
                    append_row(_NAME, _run(study, name, nodes, seed))


def main(study: Study) -> None:
    """Run what is missing, then print the table and draw the figure."""
    if not study.summary:
        _run_all(study)
    rows = read_rows(_NAME, study.settings)
    data = rows[-1]["results"].get("corpus") if rows else None  # of the packages that were there
    rows = [row for row in rows if row["results"].get("corpus") == data]
    alike = [row for row in read_rows(_NAME) if study.has_tokens_of(row["results"]["settings"])]
    summaries = summarize(rows, study.seeds, alike)
    if summaries:
        Console(width=140).print(table(summaries))
    if summaries and study.inner == "adamw":  # of Muon there are too few methods for curves
        titles = "steps in a round (H)", "steps that a message travels (tau)"
        draw(summaries, [OVER_EVERY, OVER_DELAY], titles, RESULTS / f"{_NAME}.png")


if __name__ == "__main__":
    main(tyro.cli(Study))
