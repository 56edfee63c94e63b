"""Rounds of local steps, against each node trained by itself on one device, averaged in numpy."""

from __future__ import annotations

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxzero as jz
from jaxzero.distributed import check_replicas
from tests import zoo

NODES, EVERY, WIDTH, LAYERS = 2, 4, 8, 4
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) * 0.3,
        "bias": jax.random.normal(keys[1], (WIDTH,)),
        "head": jax.random.normal(keys[2], (WIDTH, 3)),
        "scale": jnp.ones(()),
    }


def loss(params, batch):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
    out = (h + params["bias"][None]) @ params["head"] * params["scale"]
    return jnp.mean((out - batch["y"]) ** 2)


def step_of(zero, tx=TX):
    def step(params, opt_state, batch):
        value, grads = zero.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # Adam's `decay ** count`
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": value}

    return step


def batches(seed, every=EVERY):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(every, 16, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[..., :3])}


def make_mesh(kind):
    if kind == "simulated":
        return jz.make_mesh(NODES, simulate=4)
    axis_type = getattr(AxisType, kind)
    return jz.make_mesh(NODES, devices=jax.devices()[:4], axis_type=axis_type)


class Reference:
    """Local steps on one device: each node in turn, and the outer step in numpy."""

    def __init__(self, params, *, rate=1.0, momentum=0.0, tx=TX):
        self.outer = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.momentum = jax.tree.map(np.zeros_like, self.outer)
        self.params = [params] * NODES
        self.states = [tx.init(params)] * NODES
        self.rate, self.decay = rate, momentum
        self._step = jax.jit(step_of(_Plain(), tx))

    def round(self, batches):
        """One round without delay: each node's steps, then the outer step."""
        losses = np.zeros((EVERY, NODES))
        for node in range(NODES):
            for i in range(EVERY):
                rows = slice(8 * node, 8 * node + 8)
                batch = {name: x[i, rows] for name, x in batches.items()}
                self.params[node], self.states[node], metrics = self._step(
                    self.params[node], self.states[node], batch
                )
                losses[i, node] = metrics["loss"]
        mean = jax.tree.map(
            lambda *x: np.mean([np.asarray(v, np.float64) for v in x], 0), *self.params
        )
        delta = jax.tree.map(np.subtract, self.outer, mean)
        self.momentum = jax.tree.map(lambda m, d: self.decay * m + d, self.momentum, delta)
        self.outer = jax.tree.map(
            lambda w, m, d: w - self.rate * (d + self.decay * m), self.outer, self.momentum, delta
        )
        self.params = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), self.outer)] * NODES
        return losses


class _Plain:
    """In the place of a `Zero`, where there is one device."""

    value_and_grad = staticmethod(jax.value_and_grad)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("Auto", jz.zero3),
        ("Explicit", jz.zero3),
        ("simulated", jz.zero3),
        ("Auto", jz.ddp),
        ("Explicit", functools.partial(jz.ZeroConfig, stage=1)),
    ],
)
def test_diloco_is_that_of_one_device(kind, preset):
    zero = jz.Zero(make_mesh(kind), preset())
    full = jax.device_get(init(jax.random.key(0)))
    params = zero.shard(full)
    rounds = zero.local_steps(step_of(zero), jz.diloco(every=EVERY))
    state = rounds.init(params, zero.init_optimizer(TX, params))
    run = jax.jit(rounds, donate_argnums=0)
    reference = Reference(full, rate=0.7, momentum=0.9)
    for seed in range(2):
        state, metrics = run(state, batches(seed))
        # Eight steps of float32, each of some fifty roundings, whose errors Adam's division by the
        # root of the second moment carries over undamped: 8 * 50 * 2**-24.
        losses = reference.round(batches(seed))
        np.testing.assert_allclose(metrics["loss"], losses, rtol=3e-5)
    mean = zero.unshard(rounds.mean(state))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), mean, reference.outer
    )


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(jz.zeropp(), min_quantized_size=0),
        jz.hsdp(),
        jz.ZeroConfig(stage=2, gradients=jz.PerAxis(local=jz.Int8(block=32))),
    ],
    ids=["zeropp", "hsdp", "stage 2"],
)
def test_a_node_trains_as_a_mesh_of_its_own(config):
    zero = jz.Zero(make_mesh("Auto"), config)
    full = jax.device_get(init(jax.random.key(0)))
    params = zero.shard(full)
    rounds = zero.local_steps(step_of(zero), every=3)
    _, metrics = jax.jit(rounds)(
        rounds.init(params, zero.init_optimizer(TX, params)), batches(0, every=3)
    )
    for node in range(NODES):
        alone = jz.Zero(jz.make_mesh(1, devices=jax.devices()[2 * node : 2 * node + 2]), config)
        params = alone.shard(full)
        opt_state, step = alone.init_optimizer(TX, params), jax.jit(step_of(alone))
        for i in range(3):
            rows = slice(8 * node, 8 * node + 8)
            batch = {name: x[i, rows] for name, x in batches(0, every=3).items()}
            params, opt_state, one = step(params, opt_state, batch)
            # Each step rounds differently only in the optimizer, where XLA fuses otherwise.
            np.testing.assert_allclose(metrics["loss"][i, node], one["loss"], rtol=1e-6)


@pytest.mark.ci
def test_each_node_adapts_its_own_batch():
    """ZeRO++ inside a node and SimiGrad in the step: a node does what a mesh of its own does."""
    config, every = dataclasses.replace(jz.zeropp(), min_quantized_size=0), 6
    tx = jz.simigrad(optax.sgd(0.1), target_similarity=0.8, initial=1, max_steps=4)

    def adaptive(zero):
        def step(params, opt_state, batch):
            _, grads, halves = zero.value_and_grad(loss, halves=True)(params, batch)
            new = zero.apply_gradients(tx, grads, opt_state, params, halves=halves)
            stats = jz.simigrad_stats(new[1])
            return *new, {name: stats[name] for name in ("steps", "similarity")}

        return step

    zero, full = jz.Zero(make_mesh("Auto"), config), jax.device_get(init(jax.random.key(0)))
    params = zero.shard(full)
    rounds = zero.local_steps(adaptive(zero), every=every)
    state = rounds.init(params, zero.init_optimizer(tx, params))
    found = jax.device_get(jax.jit(rounds)(state, batches(0, every=every))[1])
    for node in range(NODES):
        alone = jz.Zero(jz.make_mesh(1, devices=jax.devices()[2 * node : 2 * node + 2]), config)
        params = alone.shard(full)
        opt_state, step = alone.init_optimizer(tx, params), jax.jit(adaptive(alone))
        for i in range(every):
            batch = {name: x[i, 8 * node : 8 * node + 8] for name, x in batches(0, every).items()}
            params, opt_state, one = step(params, opt_state, batch)
            assert int(found["steps"][i, node]) == int(one["steps"])
            # A ratio of sums of float32 products, which XLA fuses otherwise.
            np.testing.assert_allclose(found["similarity"][i, node], one["similarity"], rtol=1e-5)
    assert len(np.unique(found["steps"])) > 1
    assert (found["similarity"][:, 0] != found["similarity"][:, 1]).all()


def test_one_program_for_gradients_and_update_inside():
    """`value_and_update` means the devices of one node, as `value_and_grad` does."""
    zero = jz.Zero(make_mesh("Auto"))
    params = zero.init(init, jax.random.key(0))

    def step(params, opt_state, batch):
        with jax.numpy_dtype_promotion("standard"):  # Adam's `decay ** count`
            value, *new = zero.value_and_update(loss, TX)(params, opt_state, batch)
        return *new, {"loss": value}

    losses = []
    for each in (step_of(zero), step):
        rounds = zero.local_steps(each, every=3)
        state = rounds.init(params, zero.init_optimizer(TX, params))
        losses.append(jax.jit(rounds)(state, batches(0, every=3))[1]["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)  # a few roundings of float32


def test_a_run_may_begin_inside_of_jit():
    zero = jz.Zero(make_mesh("Auto"))
    params = zero.init(init, jax.random.key(0))
    opt_state = zero.init_optimizer(TX, params)
    rounds = zero.local_steps(step_of(zero), every=2)
    inside, outside = jax.jit(rounds.init)(params, opt_state), rounds.init(params, opt_state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(inside), jax.device_get(outside))
    explicit = jz.Zero(make_mesh("Explicit"))
    with pytest.raises(ValueError, match="inside `jax.jit` on a mesh with explicit axes"):
        jax.jit(lambda key: explicit.init(init, key))(jax.random.key(0))


def test_one_step_without_delay_is_synchronous():
    tx = optax.sgd(0.1)
    mesh = make_mesh("Auto")
    zero, hsdp = jz.Zero(mesh, jz.zero3()), jz.Zero(mesh, jz.hsdp())
    full = jax.device_get(init(jax.random.key(1)))
    params, synchronous = zero.shard(full), hsdp.shard(full)
    rounds = zero.local_steps(step_of(zero, tx), every=1, outer=optax.sgd(1.0))
    state = rounds.init(params, zero.init_optimizer(tx, params))
    opt_state = hsdp.init_optimizer(tx, synchronous)
    run, step = jax.jit(rounds), jax.jit(step_of(hsdp, tx))
    for seed in range(3):
        stacked = batches(seed, every=1)
        state, _ = run(state, stacked)
        batch = jax.tree.map(lambda x: x[0], stacked)
        synchronous, opt_state, _ = step(synchronous, opt_state, batch)
    # Three steps; each rounds parameters and gradients a few times.
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)  # noqa: E731
    jax.tree.map(close, zero.unshard(rounds.mean(state)), hsdp.unshard(synchronous))


@pytest.fixture(scope="module")
def streaming():
    """A run with fragments, a delay and 4 bits: zero, rounds, the compiled round and two states."""
    zero = jz.Zero(make_mesh("Auto"), jz.ZeroConfig(min_quantized_size=0))
    params = zero.init(init, jax.random.key(0))
    method = jz.streaming_diloco(every=EVERY, fragments=2, delay=1, codec=jz.Int4(block=32))
    rounds = zero.local_steps(step_of(zero), method)
    first = rounds.init(params, zero.init_optimizer(TX, params))
    run = jax.jit(rounds).lower(first, batches(0)).compile()
    return zero, rounds, run, first, run(first, batches(0))[0]


def test_a_module_with_functions_among_its_leaves():
    """One SGD step and the mean of the nodes are a step on all rows."""
    zero, tx = jz.Zero(make_mesh("Auto")), optax.sgd(0.1)
    make = functools.partial(eqx.nn.MLP, WIDTH, 3, 6, 2, key=jax.random.key(0))

    def of_module(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    def step(params, opt_state, batch):
        value, grads = zero.value_and_grad(of_module)(params, batch)
        return *zero.apply_gradients(tx, grads, opt_state, params), value

    params, batch = zero.init(make), batches(0, every=1)
    rounds = zero.local_steps(step, jz.LocalSteps(every=1, outer=optax.sgd(1.0)))
    state, _ = eqx.filter_jit(rounds)(rounds.init(params, zero.init_optimizer(tx, params)), batch)
    found = eqx.filter(zero.unshard(rounds.mean(state)), eqx.is_array)

    whole = make()
    grads = eqx.filter_grad(of_module)(whole, jax.tree.map(lambda x: x[0], batch))
    wanted = eqx.filter(
        eqx.apply_updates(whole, jax.tree.map(lambda g: -0.1 * g, grads)), eqx.is_array
    )
    # Sums of 48 numbers in another order: some roundings of 6e-8, of numbers below 1.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def test_explicit_axes_change_no_bit_of_whole_parameters():
    """At stage 2 a step takes full parameters, and an exchange takes fragments of their shards."""
    method = jz.streaming_diloco(every=EVERY, fragments=2, delay=1, codec=jz.Int4(block=32))
    results = []
    for kind in ("Auto", "Explicit"):
        zero = jz.Zero(make_mesh(kind), jz.ZeroConfig(stage=2, min_quantized_size=8))
        params = zero.shard(jax.device_get(init(jax.random.key(0))))
        rounds = zero.local_steps(step_of(zero), method)
        state = rounds.init(params, zero.init_optimizer(TX, params))
        for seed in range(2):
            state, _ = jax.jit(rounds)(state, batches(seed))
        results.append(jax.device_get(zero.unshard(rounds.mean(state))))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_only_fragments_cross_between_nodes(streaming):
    _, rounds, run, _, _ = streaming
    crossing = [
        found
        for found in zoo.hlo.collectives(run.as_text())
        if any(len({device // 2 for device in group}) > 1 for group in found.groups)
    ]
    assert [found.op for found in crossing] == ["all-gather"]
    sent = rounds.report().bytes_between_nodes
    received_by_a_node = crossing[0].entering_bytes * 2 * 2  # two devices, two fragments
    assert received_by_a_node == sent


def test_the_report_counts_what_arrays_take(streaming):
    _, rounds, _, first, _ = streaming
    report = rounds.report()
    for name, size in report.device_bytes.items():
        shards = [x.addressable_shards[0].data for x in jax.tree.leaves(getattr(first, name))]
        assert size == sum(x.nbytes for x in shards), name
    assert report.timeline == ((1, 2), (3, 4))
    text = str(report)
    assert "rounds of 4 steps" in text
    assert "0 in int4" in text
    elements = sum(x[0].size for x in jax.tree.leaves(first.params))
    assert report.models_per_step == report.bytes_between_nodes / EVERY / (2 * elements)


def test_nodes_agree_on_the_outer_parameters_to_the_bit(streaming):
    *_, state = streaming
    for x in jax.tree.leaves((state.outer_params, state.outer_state)):
        by_index = {}
        for shard in x.addressable_shards:
            by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all(len(same) > 1 for same in by_index.values())
        for same in by_index.values():
            for other in same[1:]:
                np.testing.assert_array_equal(same[0], other)
    own = np.asarray(state.params["layers"])
    assert not np.array_equal(own[0], own[1])
    check_replicas({"local": state}, step=1)


def test_a_restored_run_goes_on_to_the_bit(streaming, tmp_path):
    zero, rounds, run, first, state = streaming
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"local": state})
        restored = checkpoints.restore(like={"local": first}).state["local"]
    there, here = run(restored, batches(1))[0], run(state, batches(1))[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(there), jax.device_get(here))


def test_another_number_of_nodes_joins_with_the_mean(streaming, tmp_path):
    zero, rounds, _, _, state = streaming
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"local": state})
    wide = jz.Zero(jz.make_mesh(4, devices=jax.devices()[:8]), zero.config)
    params = wide.abstract(init, jax.random.key(0))
    more = wide.local_steps(step_of(wide), rounds.method)
    trees = params, wide.init_optimizer(TX, params)
    like = more.abstract(*trees, nodes=NODES)
    with jz.Checkpoints(tmp_path, wide) as checkpoints:
        with pytest.raises(ValueError, match=r"\(2, 8\).* \(4, 8\) in `like`.*`rounds.abstract\("):
            checkpoints.restore({"local": more.abstract(*trees)})
        joined = more.rejoin(checkpoints.restore(like={"local": like}).state["local"])
    mean = jax.device_get(zero.unshard(rounds.mean(state)))
    for node in range(4):
        own = np.asarray(joined.params["layers"])[node]
        np.testing.assert_array_equal(own, mean["layers"])
    again, metrics = jax.jit(more)(joined, batches(2))
    assert metrics["loss"].shape == (EVERY, 4)
    assert np.isfinite(metrics["loss"]).all()


def test_tangents_pass_through_encoded_fragments():
    """Those of a round whose fragments are not encoded, and whose nodes take the same steps."""
    config = dataclasses.replace(jz.zero3(), min_quantized_size=8)
    zero = jz.Zero(make_mesh("Auto"), config)
    params = zero.shard(init(jax.random.key(0)))
    opt_state, found = zero.init_optimizer(optax.sgd(0.1), params), {}
    for codec in (None, jz.Int4(block=32)):
        method = jz.diloco(every=1, codec=codec)
        rounds = zero.local_steps(step_of(zero, optax.sgd(0.1)), method)
        state = rounds.init(params, opt_state)

        def end(scale, rounds=rounds, state=state):
            rows = jax.tree.map(lambda x: x * scale, batches(3, every=1))
            return rounds.mean(rounds(state, rows)[0])

        found[codec] = jax.jit(lambda s, end=end: jax.jvp(end, (s,), (1.0,))[1])(1.0)
    exact, encoded = found.values()
    for x, y in zip(*map(jax.tree.leaves, (encoded, exact)), strict=True):
        assert np.linalg.norm(y) > 0
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
