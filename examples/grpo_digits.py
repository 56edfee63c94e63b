"""Reinforcement learning in one loop: sample, judge, train, move weights; GRPO on sorting digits.

    python examples/grpo_digits.py
    python examples/grpo_digits.py --steps 300 --digits 4 --seed 1

A tiny decoder reads digits and writes them in order. It first sees some right answers, then learns
from rewards alone: of each prompt it samples a group of answers, and those above the mean of their
group become more likely (GRPO, https://arxiv.org/abs/2402.03300; one update for each batch of
samples, so that no ratio is clipped). Training is by `jz.Zero`, sampling by tensor parallelism on
the same devices, and `jz.reshard` moves the weights from one to the other after every step.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import jaxzero as jz
from jaxzero import models

EQUALS = 10  # the token between digits and answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Learn to sort digits from rewards."""

    steps: int = 60  # of GRPO
    warmup: int = 40  # steps on right answers before
    digits: int = 3  # of a prompt
    prompts: int = 16  # of a step
    group: int = 16  # answers to each prompt
    hidden: int = 32
    layers: int = 2
    learning_rate: float = 2e-3
    nodes: int = 2
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
    """Mean reward of each step, and the median time of each part of a step, in ms."""

    rewards: list[float]
    ms: dict[str, float]


def decoder(settings: Settings) -> tuple[Any, Any]:
    """Graph and fresh parameters."""
    heads = 4
    config = models.DecoderConfig(
        vocabulary_size=12,
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_layers=settings.layers,
        num_heads=heads,
        num_key_value_heads=heads,
        head_size=settings.hidden // heads,
        rope=models.Rope(rotary_size=settings.hidden // heads),
        scan_layers=True,
    )
    return nnx.split(models.Decoder(config, rngs=nnx.Rngs(settings.seed)))


def loss_fn(graph: Any, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Cross-entropy of the answers, each times its advantage."""
    ids, num = batch["ids"], batch["ids"].shape[1] // 2
    logits = nnx.merge(graph, params)(ids[:, :-1])[:, -num:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, -num:])
    return jnp.mean(losses * batch["advantage"][:, None])


def make_step(zero: jz.Zero, graph: Any, tx: optax.GradientTransformation) -> Any:
    """One update of sharded parameters."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        loss = functools.partial(loss_fn, graph)
        _, grads = zero.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def make_sampler(graph: Any, num: int) -> Any:
    """Answers of `num` digits to prompts, from parameters of any sharding."""

    @jax.jit
    def sample(params: Any, prompts: jax.Array, key: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        cache = model.make_cache(len(prompts), prompts.shape[1] + num)
        sampling = models.Sampling(temperature=1.0)
        return models.generate(
            model.decode, cache, prompts, max_new_tokens=num, sampling=sampling, key=key
        ).tokens

    return sample


def judged(prompts: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """The part of each answer's digits that are in their places."""
    return (answers == np.sort(prompts[:, :-1], axis=1)).mean(axis=1)


def advantages(rewards: np.ndarray, group: int) -> np.ndarray:
    """How far each reward is above the mean of its group, in standard deviations."""
    groups = rewards.reshape(-1, group)
    spread = groups.std(axis=1, keepdims=True) + 1e-4
    return ((groups - groups.mean(axis=1, keepdims=True)) / spread).ravel().astype(np.float32)


def learn(settings: Settings) -> Result:
    """Train; the rewards and times of the steps of GRPO."""
    random, num = np.random.default_rng(settings.seed), settings.digits
    zero = jz.Zero(jz.make_mesh(settings.nodes))
    graph, fresh = decoder(settings)
    params = zero.shard(fresh)
    specs = models.tensor_parallel_specs(graph, params, size=zero.mesh.shape["local"])
    print(jz.reshard_report(params, zero, specs=specs), flush=True)

    def draw(rows: int) -> np.ndarray:
        digits = random.integers(0, 10, (rows, num), dtype=np.int32)
        return np.concatenate([digits, np.full((rows, 1), EQUALS, np.int32)], axis=1)

    def batch(prompts: np.ndarray, answers: np.ndarray, advantage: np.ndarray) -> dict[str, Any]:
        return {"ids": np.concatenate([prompts, answers], axis=1), "advantage": advantage}

    rows = settings.prompts * settings.group
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))
    opt_state, step = zero.init_optimizer(tx, params), make_step(zero, graph, tx)
    for _ in range(settings.warmup):
        prompts = draw(rows)
        right = batch(prompts, np.sort(prompts[:, :-1], axis=1), np.ones(rows, np.float32))
        params, opt_state = step(params, opt_state, right)

    sample, key = make_sampler(graph, num), jax.random.key(settings.seed)
    rewards, seconds = [], {"reshard": [], "sample": [], "train": []}
    for i in range(settings.steps):
        began = time.perf_counter()
        served = jax.block_until_ready(jz.reshard(params, zero, specs=specs))
        moved = time.perf_counter()
        prompts = np.repeat(draw(settings.prompts), settings.group, axis=0)
        answers = np.asarray(sample(served, prompts, jax.random.fold_in(key, i)))
        sampled = time.perf_counter()
        reward = judged(prompts, answers)
        told = batch(prompts, answers, advantages(reward, settings.group))
        params, opt_state = jax.block_until_ready(step(params, opt_state, told))
        ended = time.perf_counter()
        rewards.append(float(reward.mean()))
        for name, time_s in zip(
            seconds, (moved - began, sampled - moved, ended - sampled), strict=True
        ):
            seconds[name].append(time_s)
        if i % 20 == 0 or i == settings.steps - 1:
            print(f"step {i} reward {rewards[-1]:.3f}", flush=True)
    return Result(rewards, {name: 1000 * float(np.median(x)) for name, x in seconds.items()})


def main(settings: Settings) -> None:
    """Learn, and print the time of each part of a step."""
    result = learn(settings)
    print("part      median ms of a step")
    for name, ms in result.ms.items():
        print(f"{name:<9} {ms:19.1f}")
    tenth = max(1, len(result.rewards) // 10)
    first, last = np.mean(result.rewards[:tenth]), np.mean(result.rewards[-tenth:])
    print(f"reward {first:.3f} in the first tenth of the steps, {last:.3f} in the last")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main(tyro.cli(Settings))
