"""Offload: arrays in host memory, with the losses and gradients of the same config without it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxzero as jz
from tests.zero.offload_policy import offload_only

LAYERS, WIDTH = 4, 16
ALL = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=0)
PRESETS = ("zero3", "zeropp", "zeropp4", "hsdp")


def init(key):
    keys = jax.random.split(key, 5)
    return {
        "embed": jax.random.normal(keys[0], (32, WIDTH)),
        "layers": {
            "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) * 0.2,
            "b": jnp.zeros((LAYERS, WIDTH)),
            "up": jax.random.normal(keys[2], (LAYERS, WIDTH, 13)) * 0.2,  # 13: padded
            "down": jax.random.normal(keys[3], (LAYERS, 13, WIDTH)) * 0.2,
        },
        "odd": jax.random.normal(keys[4], (7, 3)),  # padded
    }


def layer(h, weights):
    h = h + jnp.tanh(h @ weights["w"] + weights["b"][None, None])
    return h + jnp.tanh(h @ weights["up"]) @ weights["down"]


def scanned(params, tokens):
    step = jax.checkpoint(lambda h, weights: (layer(h, weights), None))
    h, _ = jax.lax.scan(step, params["embed"][tokens], params["layers"])
    return jnp.mean(h**2) + jnp.sum(params["odd"]) ** 2 * 1e-3


def unrolled(params, tokens):
    h = params["embed"][tokens]
    for i in range(LAYERS):
        h = layer(h, jax.tree.map(lambda x, i=i: x[i], params["layers"]))
    return jnp.mean(h**2) + jnp.sum(params["odd"]) ** 2 * 1e-3


def cast_before(params, tokens):
    """Weights cast outside of the loop, a batch that the loop scans in reverse."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def step(h, weights):
        return layer(h, weights), h.sum()

    h, sums = jax.lax.scan(step, params["embed"][tokens], params["layers"], reverse=True)
    total = jnp.mean(h.astype(jnp.float32) ** 2) + jnp.mean(sums.astype(jnp.float32)) * 1e-2
    return total + jnp.sum(params["odd"].astype(jnp.float32)) ** 2 * 1e-3


def nested(params, tokens):
    """A loop over pairs of layers, with a loop over the layers of a pair inside."""
    pairs = jax.tree.map(lambda x: x.reshape(2, LAYERS // 2, *x.shape[1:]), params["layers"])

    def outer(h, pair):
        return jax.lax.scan(lambda h, weights: (layer(h, weights), None), h, pair)[0], None

    h, _ = jax.lax.scan(outer, params["embed"][tokens], pairs)
    return jnp.mean(h**2) + jnp.sum(params["odd"]) ** 2 * 1e-3


@functools.cache
def whole():
    return jax.device_get(jax.jit(init)(jax.random.key(0)))


TOKENS = (jnp.arange(48) % 32).reshape(24, 2)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def config_of(preset, offload):
    return dataclasses.replace(getattr(jz, preset)(), min_quantized_size=64, offload=offload)


def run(mesh, config, loss, **options):
    """Loss and whole gradients of one step, and the gradients as they are returned."""
    zero = jz.Zero(mesh, config)
    params = zero.shard(whole())
    state = {}
    if config.needs_wire_state:
        state["wire_state"] = zero.init_wire_state(params)
    step = jax.jit(zero.value_and_grad(loss, **options))
    value, grads = step(params, TOKENS, **state)[:2]
    return np.asarray(value), jax.tree.map(np.asarray, zero.unshard(grads)), grads


def assert_same(with_offload, without):
    np.testing.assert_array_equal(with_offload[0], without[0])
    jax.tree.map(np.testing.assert_array_equal, with_offload[1], without[1])


MESHES = {"2x2": (2, 4), "1x3": (1, 3), "1x1": (1, 1)}
of_one_mesh = pytest.mark.parametrize(
    "mesh",
    ["2x2", *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("1x3", "1x1"))],
    indirect=True,
)


@pytest.fixture(scope="module", params=list(MESHES))
def mesh(request):
    nodes, devices = MESHES[request.param]
    return jz.make_mesh(nodes, devices=jax.devices()[:devices])


# Each of the usual presets, and each mesh; the rest in `make test-exhaustive`.
_RUN = {("2x2", "zero3"), ("2x2", "zeropp"), ("2x2", "hsdp"), ("1x3", "zero3"), ("1x1", "zero3")}


@pytest.mark.parametrize(
    ("mesh", "preset"),
    [
        pytest.param(*case, marks=[] if case in _RUN else pytest.mark.exhaustive)
        for case in itertools.product(MESHES, PRESETS)
    ],
    indirect=["mesh"],
)
@pytest.mark.one_in(3)
def test_gradients_are_bit_equal(mesh, preset):
    if preset == "zeropp4" and mesh.shape["node"] == 1:
        pytest.skip("differences are sent between nodes")
    results = [run(mesh, config_of(preset, offload), scanned) for offload in (ALL, None)]
    assert_same(*results)
    assert kinds(results[0][2]) == {"pinned_host"}
    assert "pinned_host" not in kinds(results[1][2])


@of_one_mesh
@pytest.mark.parametrize("loss", [unrolled, cast_before, nested])
@pytest.mark.parametrize("preset", ["zero3", pytest.param("zeropp", marks=pytest.mark.exhaustive)])
@pytest.mark.one_in(2)
def test_other_programs_are_bit_equal(mesh, preset, loss):
    assert_same(*(run(mesh, config_of(preset, offload), loss) for offload in (ALL, None)))


@of_one_mesh
@pytest.mark.parametrize(
    ("schedule", "window"),
    [
        ({"prefetch": 0}, 1),
        ({"prefetch": 3}, 2),
        ({"bucket_bytes": 0}, LAYERS + 3),
        ({"max_live_parameters": 0}, 1),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_windows_and_schedules_are_bit_equal(mesh, schedule, window):
    offload = dataclasses.replace(ALL, window=window)
    configs = [
        dataclasses.replace(config_of("zero3", x), schedule=jz.CommSchedule(**schedule))
        for x in (offload, None)
    ]
    assert_same(*(run(mesh, config, scanned) for config in configs))


@of_one_mesh
@pytest.mark.parametrize("options", [{"microbatches": 2}, {"weighted": True}], ids=str)
@pytest.mark.parametrize("preset", ["zero3", pytest.param("zeropp", marks=pytest.mark.ci)])
@pytest.mark.one_in(2)
def test_sums_are_bit_equal(mesh, preset, options):
    def weighted(params, tokens):
        return scanned(params, tokens) * 2.0, jnp.asarray(2.0)

    loss = weighted if "weighted" in options else scanned
    results = [run(mesh, config_of(preset, x), loss, **options) for x in (ALL, None)]
    assert_same(*results)
    assert kinds(results[0][2]) == {"pinned_host"}


@of_one_mesh
def test_patterns_choose_leaves(mesh):
    offload = jz.Offload(weights="layers.*", gradients=("embed", "odd"), min_size=64)
    zero = jz.Zero(mesh, jz.ZeroConfig(offload=offload))
    params = zero.init(init, jax.random.key(0))
    assert kinds([params["layers"][name] for name in ("w", "up", "down")]) == {"pinned_host"}
    assert "pinned_host" not in kinds([params["embed"], params["odd"]])
    _, grads = jax.jit(zero.value_and_grad(scanned))(params, TOKENS)
    assert kinds(grads["embed"]) == {"pinned_host"}
    assert "pinned_host" not in kinds([grads["layers"], grads["odd"]])  # `odd` is small


def test_shard_and_unshard(mesh):
    zero = jz.Zero(mesh, jz.ZeroConfig(offload=ALL))
    params = zero.shard(whole())
    assert kinds(params) == {"pinned_host"}
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.map(np.asarray, zero.unshard(params)), whole()
    )
    moved = zero.shard(params)  # from its own layout
    assert kinds(moved) == {"pinned_host"}


@of_one_mesh
def test_frozen_encoded_weights_in_host_memory(mesh):
    """LoRA: the weights beneath are frozen, stored as messages, and fetched as messages."""
    losses = []
    for offload in (jz.Offload(weights="layers.*", min_size=0), None):
        zero = jz.Zero(mesh, jz.ZeroConfig(min_quantized_size=64))
        frozen = jz.Zero(mesh, jz.ZeroConfig(min_quantized_size=64, offload=offload))
        base = frozen.shard(whole(), codec=jz.Int8(block=32))
        if offload:
            assert kinds(base["layers"]["w"]) == {"pinned_host"}
        scale = zero.shard({"scale": jnp.ones((LAYERS, WIDTH))})

        def loss(scale, base, tokens):
            layers = {**base["layers"], "b": base["layers"]["b"] + scale["scale"]}
            return scanned({**base, "layers": layers}, tokens)

        value, grads = jax.jit(frozen.value_and_grad(loss))(scale, base, TOKENS)
        losses.append((np.asarray(value), np.asarray(zero.unshard(grads)["scale"])))
    np.testing.assert_array_equal(losses[0][0], losses[1][0])
    np.testing.assert_array_equal(losses[0][1], losses[1][1])


@of_one_mesh
def test_evaluation_fetches(mesh):
    results = []
    for offload in (ALL, None):
        zero = jz.Zero(mesh, jz.ZeroConfig(offload=offload))
        params = zero.init(init, jax.random.key(0))
        results.append(np.asarray(zero.apply(scanned)(params, TOKENS)))
    np.testing.assert_array_equal(*results)


def test_mistakes():
    mesh = jz.make_mesh(2, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="offloads nothing"):
        jz.Offload()
    with pytest.raises(ValueError, match="`weights` of `Offload` must be True, False, or patterns"):
        jz.Offload(weights=("layers.*", ""))
    with pytest.raises(ValueError, match="`window` of `Offload` must be an integer of at least 1"):
        jz.Offload(weights=True, window=0)
    with pytest.raises(ValueError, match=r"`stage` of at least 3; got 1"):
        jz.ZeroConfig(stage=1, offload=jz.Offload(weights=True))
    zero = jz.Zero(mesh, jz.ZeroConfig(offload=jz.Offload(weights="blocks.*")))
    with pytest.raises(ValueError, match=r"'blocks.\*', which matches no leaf.*embed, layers.b"):
        zero.init(init, jax.random.key(0))
    with pytest.raises(NotImplementedError, match="simulates"):
        jz.Zero(jz.make_mesh(2, simulate=4), jz.ZeroConfig(offload=ALL))


def test_too_little_host_memory(monkeypatch):
    monkeypatch.setattr("jaxzero._zero.host_memory.available_bytes", lambda: 1000)
    zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), jz.ZeroConfig(offload=ALL))
    with warnings.catch_warnings(), pytest.raises(MemoryError, match="parameters would take"):
        zero.init(init, jax.random.key(0))


@of_one_mesh
@pytest.mark.parametrize("offload", [None, ALL], ids=["weights on the device", "all offloaded"])
@pytest.mark.parametrize("reverse", [False, True])
def test_activations_that_a_policy_offloads(mesh, offload, reverse):
    """Values only: on CPUs host memory is the same; where they lie is tested ahead of time."""
    policies = jax.checkpoint_policies
    offloads = offload_only("h")

    def loss(policy, params, tokens):
        def step(h, weights):
            return layer(checkpoint_name(h, "h"), weights), None

        step = jax.checkpoint(step, policy=policy)
        h, _ = jax.lax.scan(step, params["embed"][tokens], params["layers"], reverse=reverse)
        return jnp.mean(h**2)

    def gradients(policy):
        return run(mesh, config_of("zero3", offload), functools.partial(loss, policy))

    if reverse and jax.__version_info__ < (0, 12):
        with pytest.raises(NotImplementedError, match=r"JAX 0\.12 writes in the wrong order"):
            gradients(offloads)
        return
    assert_same(gradients(offloads), gradients(policies.save_only_these_names("h")))


def _kept(params, tokens, policy, num_layers=LAYERS):
    """Layers whose activations `policy` keeps."""

    def step(h, weights):
        return layer(checkpoint_name(h, "h"), weights), None

    layers = jax.tree.map(lambda x: x[:num_layers], params["layers"])
    step = jax.checkpoint(step, policy=policy)
    return jnp.mean(jax.lax.scan(step, params["embed"][tokens], layers)[0] ** 2)


def _kept_without_weights(params, tokens, policy):
    step = jax.checkpoint(
        lambda h, _: (jnp.tanh(checkpoint_name(h, "h") * 1.1), None), policy=policy
    )
    return jnp.mean(jax.lax.scan(step, params["embed"][tokens], None, length=LAYERS)[0] ** 2)


@pytest.mark.parametrize(
    ("loss", "schedule"),
    [
        (_kept, jz.CommSchedule(prefetch=0)),
        (functools.partial(_kept, num_layers=1), jz.CommSchedule()),
        (_kept_without_weights, jz.CommSchedule()),
    ],
    ids=["no prefetch", "one layer", "no weights"],
)
def test_activations_that_are_copied_before_any_gather(loss, schedule):
    mesh = jz.make_mesh(2, devices=jax.devices()[:4])
    config = dataclasses.replace(jz.zero3(), schedule=schedule)
    policies = offload_only("h"), jax.checkpoint_policies.save_only_these_names("h")
    assert_same(*(run(mesh, config, functools.partial(loss, policy=x)) for x in policies))


def test_rows_in_host_memory_that_both_loops_read():
    """Forward scans `rows` at the index at which backward scans activations."""

    def loss(params, tokens, in_host):
        h = params["embed"][tokens]
        rows = jnp.stack([jnp.tanh(h * (i + 1)) for i in range(LAYERS)])
        rows = jax.lax.stop_gradient(rows)
        rows = jax.device_put(rows, jax.memory.Space.Host) if in_host else rows

        def step(h, given):
            row, weights = given
            row = jax.device_put(row, jax.memory.Space.Device) if in_host else row
            return layer(checkpoint_name(h + 0.1 * row, "h"), weights), None

        names = jax.checkpoint_policies.save_only_these_names("h")
        step = jax.checkpoint(step, policy=offload_only("h") if in_host else names)
        return jnp.mean(jax.lax.scan(step, h, (rows, params["layers"]))[0] ** 2)

    mesh = jz.make_mesh(2, devices=jax.devices()[:4])
    assert_same(*(run(mesh, jz.zero3(), functools.partial(loss, in_host=x)) for x in (True, False)))


@pytest.mark.parametrize("offload", [None, ALL], ids=["weights on the device", "all offloaded"])
def test_an_empty_loop(offload):
    """It is traced, so that its gradients, zeros, have shapes."""

    def loss(params, tokens):
        layers = jax.tree.map(lambda x: x[:0], params["layers"])
        step = jax.checkpoint(
            lambda h, weights: (layer(h, weights), None), policy=offload_only("h")
        )
        return jnp.mean(jax.lax.scan(step, params["embed"][tokens], layers)[0] ** 2)

    def without(params, tokens):
        return jnp.mean(params["embed"][tokens] ** 2)

    mesh = jz.make_mesh(2, devices=jax.devices()[:4])
    assert_same(*(run(mesh, config_of("zero3", offload), x) for x in (loss, without)))
