# pyright: strict
"""A program of a user, type-checked in pyright's strict mode: every public name, as pages use it.

`make lint` checks it against the sources, `.ci/release-dry-run` against what is installed.
`tests/test_packaging.py` runs `train`.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]
from jax.sharding import PartitionSpec

import jaxzero as jz
from jaxzero import distributed, extend

# What pyright knows only in part is JAX's own: it counts no error of ours.
State = dict[str, Any]
jit: Any = jax.jit  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
zeros: Any = jnp.zeros  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
devices: Any = jax.devices  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class Model(NamedTuple):
    embedding: jax.Array
    head: jax.Array


class Patient(extend.BatchRule):
    def init(self) -> jax.Array:
        return zeros([], jnp.int32)

    def wanted(
        self, similarity: Any, steps: Any, weight: Any, target: Any, memory: Any
    ) -> tuple[Any, Any]:
        return jnp.where(similarity < target, 2 * steps, steps), memory


def init_model(key: jax.Array) -> Model:
    embedding, head = jax.random.normal(key, (2, 32, 16)) / 4
    return Model(embedding, head.T)


def loss_fn(model: Model, ids: jax.Array) -> jax.Array:
    hidden = model.embedding[ids[:, :-1]]
    return jnp.mean(jz.softmax_cross_entropy(hidden, model.head, ids[:, 1:]))


def configs() -> list[jz.ZeroConfig]:
    codecs: list[extend.Codec] = [
        jz.Int8(),
        jz.Int4(),
        jz.Float8(),
        jz.MXFloat8(),
        jz.NVFloat4(),
        jz.Cast(jnp.bfloat16),
    ]
    feedback = jz.PerAxis(node=jz.ErrorFeedback(codecs[1]), local=codecs[0])
    schedule = jz.CommSchedule(prefetch=2)
    return [
        jz.ddp(),
        jz.hsdp(),
        jz.zero3(gradients=feedback, hpz=jz.HpZ(codec=codecs[5])),
        *(jz.zero3(weights=jz.PerAxis(local=codec)) for codec in codecs),
        jz.zeropp(),
        dataclasses.replace(jz.zeropp4(), schedule=schedule),
        jz.pipeline(4, layers="layers"),
        jz.ZeroConfig(stages=jz.Stages(microbatches=4, layers="blocks", messages=jz.Int8())),
        jz.ZeroConfig(
            weights=jz.PerAxis(node=jz.WeightDelta(codecs[1])),
            hpz=jz.HpZ(codec=None),
            offload=jz.Offload(optimizer=True),
            activations=jz.Activations(budget_bytes=2**30),
        ),
        jz.ZeroConfig(ungathered=jz.Ungathered("*.experts.*", dim=0)),
    ]


def train(directory: Path, num_steps: int = 2) -> list[float]:
    warnings.filterwarnings("error", category=jz.RowsMixedWarning)
    zero = jz.Zero(jz.make_mesh(nodes=2), jz.zeropp())
    params = zero.init(init_model, jax.random.key(0))
    tx = jz.simigrad(
        optax.adamw(1e-2), target_similarity=0.5, initial=1, max_steps=4, rule=Patient()
    )
    opt_state = zero.init_optimizer(tx, params)
    value_and_grad = zero.value_and_grad(loss_fn, halves=True)
    options = jz.compiler_options(devices()[0].platform)

    @jit(compiler_options=options, donate_argnums=(0, 1))
    def step(params: Model, opt_state: Any, ids: jax.Array) -> tuple[Model, Any, jax.Array]:
        loss, grads, halves = value_and_grad(params, ids)
        noise = zero.codec_noise(grads)
        params, opt_state = zero.apply_gradients(
            tx, grads, opt_state, params, halves=halves, codec_noise=noise
        )
        return params, opt_state, loss

    ids = jax.random.randint(jax.random.key(1), (16, 9), 0, 32)
    plan = zero.plan(loss_fn, params, ids)
    report = zero.report(params, opt_state, plan)
    print(plan, report)
    losses: list[float] = []
    for _ in range(num_steps):
        params, opt_state, loss = step(params, opt_state, ids)
        losses.append(float(loss))
    print(jz.simigrad_stats(opt_state)["similarity"])
    with jz.Checkpoints(directory, zero) as checkpoints:
        checkpoints.save(num_steps, {"params": params})
        restored = checkpoints.restore({"params": params})
    losses.append(float(zero.apply(loss_fn)(restored.state["params"], ids)))
    return losses


def evaluate(zero: jz.Zero, params: Model, ids: jax.Array) -> float:
    padded, weights = jz.pad_batch(ids, zero)

    def total(model: Model, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss_fn(model, ids) * weights.sum(), weights.sum()

    loss, _ = zero.value_and_grad(total, weighted=True, batch_argnums=(1, 2))(
        params, padded, weights
    )
    return float(loss)


def local_step(params: Model, opt_state: Any, ids: jax.Array) -> tuple[Model, Any, State]:
    return params, opt_state, {"rows": len(ids)}


def other_parts(zero: jz.Zero, params: Model, opt_state: Any, key: jax.Array) -> None:
    tx = optax.adamw(1e-3)
    step = jit(zero.value_and_update(loss_fn, tx))
    loss, params, opt_state = step(params, opt_state, zeros((16, 9), jnp.int32))
    print(float(loss), jz.fold_in_device(key))

    frozen_layers = jz.freeze_schedule(12)
    freezing = zero.freeze(params, frozen_layers(3), layers="layers", before=())
    active, frozen = freezing.split(params)
    print(freezing, freezing.join(active, frozen))

    methods: list[jz.LocalSteps] = [
        jz.diloco(every=30),
        jz.streaming_diloco(every=30, fragments=3),
        jz.dasgd(every=4, delay=1),
    ]
    rounds = zero.local_steps(local_step, methods[0])
    state = rounds.init(params, opt_state)
    print(rounds.mean(state), rounds.report())

    served = jz.reshard(params, zero, specs=PartitionSpec(), dtype=jnp.bfloat16)
    print(served, jz.reshard_report(params, zero, specs=PartitionSpec()))

    ids = zeros((16, 9), jnp.int32)
    print(zero.verify(loss_fn, params, ids), zero.report(params).largest_model(device_bytes=2**36))


def mixture(model: Model, x: jax.Array) -> jax.Array:
    def compute(rows: jax.Array, group_sizes: jax.Array, row_weights: jax.Array) -> jax.Array:
        return rows * row_weights[:, None] * group_sizes.sum()

    first = zeros((len(x), 1), jnp.int32)
    mixed, dropped = jz.exchange_tokens(compute, x, first, x[:, :1], num_experts=2, num_local=2)
    heads = jz.split_tokens(mixed.reshape(1, len(x), 2, -1))
    return jz.attention(heads, heads, heads, is_causal=True).sum() + dropped


def plans() -> None:
    device = jz.Device(
        name="ours",
        flops=7e14,
        memory_bandwidth=3e12,
        memory=80e9,
        local_link=4e11,
        host_link=5e10,
    )
    cluster = jz.Cluster(nodes=2, local=8, device=device, link=5e10)
    ids = jax.ShapeDtypeStruct((16, 9), jnp.int32)
    ranked = jz.tune(loss_fn, lambda: init_model(jax.random.key(0)), ids, cluster)
    print(ranked)
    step = jit(loss_fn)
    print(jz.compile_for(step.lower(init_model(jax.random.key(0)), ids), cluster))
    rules: list[extend.BatchRule] = [jz.WalkRule(), jz.JumpRule(), Patient()]
    print(rules)
    run = jz.from_deepspeed("ds_config.json", jz.make_mesh(nodes=2))
    print(run.value_and_grad(loss_fn))


def main(directory: Path) -> None:
    distributed.initialize()
    distributed.check_same(settings={"directory": str(directory)})
    with distributed.StopRequest() as stop, distributed.Watchdog() as watchdog:
        watchdog.beat(0)
        if not stop.reached():
            train(directory)
