"""`value_and_update`: the bits of `value_and_grad` and `apply_gradients`, updated in the loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxzero as jz
from tests.zero.offload_policy import offload_only

# optax mixes dtypes and ranks, as JAX does by default.
pytestmark = pytest.mark.standard_promotion

STEPS, LAYERS, WIDTH = 5, 4, 8
ALL = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=32)
SCHEDULE = optax.linear_schedule(1e-2, 1e-3, STEPS)
TOKENS = (jnp.arange(48) % 16).reshape(24, 2)


def init(key):
    keys = jax.random.split(key, 4)
    return {
        "embed": jax.random.normal(keys[0], (16, WIDTH)),
        "layers": {
            "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) * 0.2,
            "up": jax.random.normal(keys[2], (LAYERS, WIDTH, 13)) * 0.2,
            "down": jax.random.normal(keys[3], (LAYERS, 13, WIDTH)).astype(jnp.bfloat16),
            "b": jnp.zeros((LAYERS, 2)),  # too small for host memory
        },
    }


def layer(h, weights):
    h = h + jnp.tanh(h @ weights["w"]) + weights["b"].sum()
    return h + jnp.tanh(h @ weights["up"]) @ weights["down"].astype(h.dtype)


def scanned(params, tokens):
    step = jax.checkpoint(lambda h, weights: (layer(h, weights), None))
    return jnp.mean(jax.lax.scan(step, params["embed"][tokens], params["layers"])[0] ** 2)


def unrolled(params, tokens):
    h = params["embed"][tokens]
    for i in range(LAYERS):
        h = layer(h, jax.tree.map(lambda x, i=i: x[i], params["layers"]))
    return jnp.mean(h**2)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 2, params)


OPTIMIZERS = {
    "adamw": optax.adamw(SCHEDULE, mask=is_matrix),
    "momentum": optax.sgd(SCHEDULE, momentum=0.9),
    "lion": optax.lion(SCHEDULE, weight_decay=0.1),
    "nested": optax.chain(optax.masked(optax.trace(0.9), is_matrix), optax.adam(SCHEDULE)),
}


def mesh_of(name):
    nodes, devices = {"2x2": (2, 4), "1x3": (1, 3), "1x1": (1, 1)}[name]
    return jz.make_mesh(nodes, devices=jax.devices()[:devices])


def zero_of(mesh, preset="zero3", offload=ALL, **changes):
    config = dataclasses.replace(getattr(jz, preset)(), min_quantized_size=64, offload=offload)
    return jz.Zero(mesh_of(mesh), dataclasses.replace(config, **changes))


def apart(zero, loss, tx):
    def step(params, opt_state, tokens):
        value, grads = zero.value_and_grad(loss)(params, tokens)
        params, opt_state = zero.apply_gradients(tx, grads, opt_state, params)
        return value, params, opt_state

    return step


def train(zero, step, tx) -> Any:
    """Losses, parameters and state of five steps, and the memory of the last two."""
    params = zero.init(init, jax.random.key(0))
    opt_state = zero.init_optimizer(tx, params)
    step, losses = jax.jit(step, donate_argnums=(0, 1)), []
    for _ in range(STEPS):
        loss, params, opt_state = step(params, opt_state, TOKENS)
        losses.append(loss)
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves((params, opt_state))]
    found = jax.tree.map(np.asarray, (losses, zero.unshard(params), zero.unshard(opt_state)))
    return found, kinds


def updated_in_loop(zero, loss, tx):
    """The names of the parameters that a step updates in a loop."""
    params = zero.abstract(init, jax.random.key(0))
    plan = zero.plan(loss, params, TOKENS, tx=tx, opt_state=zero.init_optimizer(tx, params))
    copied = {x.name for x in plan.host_transfers if x.purpose == "update" and x.to == "host"}
    return {name.removesuffix("[i]") for name in copied if name.startswith("layers")}


STACKS = {f"layers.{name}" for name in ("w", "up", "down")}


@pytest.mark.parametrize(
    ("mesh", "preset", "loss", "name", "changes"),
    [
        ("2x2", "zero3", scanned, "adamw", {}),
        pytest.param("2x2", "zeropp", scanned, "adamw", {}, marks=pytest.mark.ci),
        pytest.param(
            *("2x2", "zero3", scanned, "nested"),
            {"schedule": jz.CommSchedule(bucket_bytes=0)},
            marks=pytest.mark.ci,
        ),
        ("1x1", "zero3", scanned, "momentum", {}),
        pytest.param("1x3", "zero3", scanned, "lion", {}, marks=pytest.mark.ci),
        ("2x2", "zero3", unrolled, "momentum", {}),
    ],
)
@pytest.mark.one_in(2)
def test_bits_are_those_of_two_programs(mesh, preset, loss, name, changes):
    zero, tx = zero_of(mesh, preset, **changes), OPTIMIZERS[name]
    assert updated_in_loop(zero, loss, tx) == (STACKS if loss is scanned else set())
    (found, kinds), (expected, same) = (
        train(zero, step, tx) for step in (zero.value_and_update(loss, tx), apart(zero, loss, tx))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert kinds == same
    assert "pinned_host" in kinds


def kept_in_host_memory(params, tokens):
    """Backward reads offloaded activations, and starts its first gathers by itself."""

    def step(h, weights):
        return layer(checkpoint_name(h, "h"), weights), None

    step = jax.checkpoint(step, policy=offload_only("h"))
    return jnp.mean(jax.lax.scan(step, params["embed"][tokens], params["layers"])[0] ** 2)


def with_a_head(params, tokens):
    """Backward's first gathers are under way before its loop begins."""
    step = jax.checkpoint(lambda h, weights: (layer(h, weights), None))
    h = jax.lax.scan(step, params["embed"][tokens], params["layers"])[0]
    for _ in range(4):
        h = jnp.tanh(h @ params["embed"].T) @ params["embed"]
    return jnp.mean(h**2)


@pytest.mark.parametrize(
    ("loss", "num_layers"),
    [
        (scanned, 2),
        (kept_in_host_memory, 2),
        (with_a_head, 3),
        *(
            pytest.param(loss, num_layers, marks=pytest.mark.exhaustive)
            for loss, num_layers in (
                *((scanned, 3), (kept_in_host_memory, 3), (with_a_head, 2)),
                *((loss, 4) for loss in (scanned, kept_in_host_memory, with_a_head)),
            )
        ),
    ],
)
@pytest.mark.one_in(3)
def test_bits_with_about_as_many_layers_as_gradients_in_flight(monkeypatch, loss, num_layers):
    """With two, the last iteration updates none, and the layers after it are the first ones."""
    monkeypatch.setitem(globals(), "LAYERS", num_layers)
    zero, tx = zero_of("2x2"), OPTIMIZERS["adamw"]
    assert updated_in_loop(zero, loss, tx) == STACKS
    (found, _), (expected, _) = (
        train(zero, step, tx) for step in (zero.value_and_update(loss, tx), apart(zero, loss, tx))
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_nothing_offloaded_and_aux():
    def with_aux(params, tokens):
        return scanned(params, tokens), {"rows": jnp.ones((tokens.shape[0],))}

    zero, tx = zero_of("1x1", offload=None), OPTIMIZERS["momentum"]
    params = zero.init(init, jax.random.key(0))
    opt_state = zero.init_optimizer(tx, params)
    step = zero.value_and_update(with_aux, tx, has_aux=True, aux_reduce="concat")
    (loss, aux), new, state = step(params, opt_state, TOKENS)  # outside of `jax.jit`
    expected, grads = jax.jit(jax.value_and_grad(scanned))(init(jax.random.key(0)), TOKENS)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert aux["rows"].shape == (24,)
    # One step of size 1e-2 along a gradient that is summed up in another order.
    updated = jax.tree.map(lambda x, g: x - jnp.asarray(1e-2, x.dtype) * g, params, grads)
    bits = {jnp.dtype(jnp.float32): 1e-5, jnp.dtype(jnp.bfloat16): 2**-7}
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(updated), strict=True):
        x, y, tolerance = (np.asarray(x, np.float32), np.asarray(y, np.float32), bits[x.dtype])
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
    assert jax.tree.structure(state) == jax.tree.structure(opt_state)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            "leaf `layers.down` in .*: `reduce_sum`",
        ),
        (optax.lamb(0.1), "leaf `layers.down` in .*: `reduce_sum`"),
        (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "in the backward pass"),
    ],
    ids=["clip", "lamb", "block_rms"],
)
def test_optimizers_that_reduce_are_refused(tx, message):
    zero = zero_of("2x2")
    params = zero.abstract(init, jax.random.key(0))
    opt_state = zero.init_optimizer(tx, params)
    with pytest.raises(NotImplementedError, match=message) as error:
        zero.plan(scanned, params, TOKENS, tx=tx, opt_state=opt_state)
    assert "zero.apply_gradients(tx, grads, opt_state, params)" in str(error.value)


def test_a_scalar_that_needs_a_gradient_is_refused():
    """A scale for all leaves, from the gradient of one that stays in device memory."""

    def update(updates, state, params=None):
        scale = jnp.sum(updates["layers"]["b"] ** 2)
        return jax.tree.map(lambda x: (x * scale).astype(x.dtype), updates), state

    tx = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    zero = zero_of("2x2")
    params = zero.abstract(init, jax.random.key(0))
    opt_state = zero.init_optimizer(tx, params)
    with pytest.raises(NotImplementedError, match=r"needs `layers\.b`"):
        zero.plan(scanned, params, TOKENS, tx=tx, opt_state=opt_state)


def test_options_that_make_gradients_final_late_are_refused():
    zero, tx = zero_of("2x2"), OPTIMIZERS["momentum"]
    with pytest.raises(NotImplementedError, match="`microbatches` of 2"):
        zero.value_and_update(scanned, tx, microbatches=2)
    with pytest.raises(NotImplementedError, match="`weighted=True`"):
        zero.value_and_update(scanned, tx, weighted=True)
    with pytest.raises(NotImplementedError, match="wire state"):
        zero_of("2x2", "zeropp4").value_and_update(scanned, tx)


def test_a_plan_of_another_step_is_refused():
    """`plan` with `tx` takes what `value_and_update` takes, and needs the optimizer state."""
    zero, tx = zero_of("2x2"), OPTIMIZERS["momentum"]
    params = zero.abstract(init, jax.random.key(0))
    state = zero.init_optimizer(tx, params)

    def refused(error, match, **options):
        with pytest.raises(error, match=match):
            zero.plan(scanned, params, TOKENS, **options)

    refused(ValueError, "`opt_state` without `tx`", opt_state=state)
    refused(ValueError, "`tx` without `opt_state`", tx=tx)
    refused(NotImplementedError, "`microbatches` of 2", tx=tx, opt_state=state, microbatches=2)
    refused(ValueError, "takes no `halves`", tx=tx, opt_state=state, halves=True)


def test_plan_and_report_name_the_copies_of_the_update():
    zero, tx = zero_of("2x2"), OPTIMIZERS["momentum"]
    params = zero.abstract(init, jax.random.key(0))
    opt_state = zero.init_optimizer(tx, params)
    plan = zero.plan(scanned, params, TOKENS, tx=tx, opt_state=opt_state)
    lines = [line for line in str(plan).splitlines() if "trace.layers.w[i]" in line]
    assert [" ".join(line.split()[2:5]) for line in lines] == ["copy to device", "copy to host"]
    assert "once updated" in lines[1]
    host = zero.report(params, opt_state, plan).as_dict()["host_traffic"]["parts"]["update"]
    layer = (WIDTH * WIDTH * 4 + WIDTH * 13 * 4 + 13 * WIDTH * 2) // 4  # bytes of a device
    embed = 16 * WIDTH * 4 // 4
    # A layer's update comes three iterations after its gradient: the sums over two axes, and the
    # copy. With four layers the first is updated in the last iteration, which runs apart, so no
    # layer is written back unchanged; three are fetched in vain, one of them before the loop.
    turns = LAYERS + 3
    assert host["to_host"] == 2 * (layer * LAYERS + embed)
    assert host["to_device"] == 2 * (layer * turns + embed) + embed  # and the gradient
