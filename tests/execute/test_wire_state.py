"""What the wire remembers: kept slices that differences are added to, and errors fed back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxzero as jz
from tests import zoo

WHOLE = {
    "w": zoo.normal(jax.random.key(0), 0, 16, 24),
    "stack": zoo.normal(jax.random.key(0), 1, 3, 24, 24),
    "bias": np.zeros(24, np.float32),
}
X = zoo.normal(jax.random.key(0), 2, 48, 16, scale=1.0)


def _loss(params, x):
    h = x @ params["w"] + params["bias"][None]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])
    return jnp.mean(h**2)


def _zero(config, mesh="2x4-auto", **changes):
    changes = {"min_quantized_size": 100, **changes}
    return jz.Zero(zoo.make_mesh(mesh), dataclasses.replace(config, **changes))


def _distances(state, params):
    """How far the slices, where they are kept whole, are from the weights."""
    kept = {key: np.asarray(x) for key, x in state.slices.items() if x is not None}
    return {key: np.abs(x - np.asarray(params[key])).max() for key, x in kept.items()}


@pytest.mark.parametrize("mesh", ["2x4-auto", "3x2-explicit", "4x2-auto"])
@pytest.mark.one_in(2)
def test_what_rounding_lost_is_in_the_next_difference(mesh):
    """The slices approach weights that stand still, by a factor of at least 14 each step."""
    zero = _zero(jz.zeropp4(), mesh, hpz=jz.HpZ(codec=None), gradients=jz.PerAxis())
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    assert state.slices["bias"] is None and state.errors["w"] is None
    moved = jax.tree.map(
        lambda x: x + 0.1 * jnp.sin(7 * jnp.arange(x.size)).reshape(x.shape), params
    )
    moved = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), moved, params)
    step = jax.jit(zero.value_and_grad(_loss))
    before = _distances(state, moved)
    assert set(before) == {"w", "stack"}
    for _ in range(4):
        _, _, state = step(moved, X, wire_state=state)
        now = _distances(state, moved)
        for key, off in now.items():
            # Half a step of amax / 7, the scale rounded up; and the rounding of float32.
            assert off <= before[key] / 14 * (1 + 1 / 128) + 1e-6
        before = now


@pytest.mark.parametrize(
    "mesh", ["2x4-auto", pytest.param("3x2-explicit", marks=pytest.mark.exhaustive)]
)
def test_apply_reads_what_the_next_step_reads(mesh):
    """Weights have moved since the state was made; the ratios of PPO are 1 before an update."""
    zero = _zero(jz.zeropp4(), mesh)
    state = zero.init_wire_state(zero.shard(WHOLE))
    params = zero.shard(jax.tree.map(lambda x: x + 0.1 * np.sin(x), WHOLE))

    def outputs(params, x):
        h = x @ params["w"] + params["bias"][None]
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["stack"])[0]

    def loss(params, x):
        return jnp.mean(outputs(params, x)), outputs(params, x)

    step = zero.value_and_grad(loss, has_aux=True, aux_reduce="concat")
    (_, expected), _, _ = step(params, X, wire_state=state)
    evaluate = zero.apply(outputs)
    jitted = jax.jit(lambda params, x, state: evaluate(params, x, wire_state=state))
    np.testing.assert_array_equal(jitted(params, X, state), expected)
    with pytest.warns(UserWarning, match="reads the weights in full as int8/256") as warned:
        in_full = evaluate(params, X), evaluate(params, X)
    assert len(warned) == 1
    assert np.abs(in_full[0] - expected).max() > 1e-4
    with pytest.raises(ValueError, match="The state is of other parameters"):
        other = zero.shard({**WHOLE, "w": WHOLE["w"][:, :8], "bias": WHOLE["bias"][:8]})
        evaluate(other, X, wire_state=state)
    with pytest.raises(ValueError, match="must be one state for each argument in `argnums`"):
        evaluate(params, X, wire_state=[state, state])


@pytest.mark.parametrize("kept", [jz.Int8(block=64), None])
def test_slices_follow_weights_that_train(kept):
    """After each step a slice is as near as one difference in 4 bits, and its own codec, bring it.

    The loss of a step is that of the weights in its slices, since all else travels whole.
    """
    weights = jz.PerAxis(node=jz.WeightDelta())
    zero = _zero(jz.zero3(), hpz=jz.HpZ(codec=kept), weights=weights)
    params = zero.shard({"w": WHOLE["w"]})
    state = zero.init_wire_state(params)

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    step = jax.jit(zero.value_and_grad(loss))
    old = _slice(state.slices["w"], kept)
    for _ in range(4):
        weights = np.asarray(params["w"])
        value, grads, state = step(params, X, wire_state=state)
        new = _slice(state.slices["w"], kept)
        allowed = np.abs(weights - old).max() / 14 * (1 + 1 / 128) + 1e-6
        if kept is not None:
            allowed += (np.abs(weights).max() + allowed) / 254 * (1 + 1 / 128)
        assert np.abs(weights - new).max() <= allowed
        np.testing.assert_allclose(value, loss({"w": new}, X), rtol=1e-5)
        params = jax.tree.map(lambda p, g: p - g, params, grads)
        old = new


def _slice(stored, codec):
    """`w` as all nodes keep it; messages are those of the devices of a node, along dim 1."""
    if codec is None:
        return np.asarray(stored)
    pieces = [codec.decode(message, 16 * 6, jnp.float32).reshape(16, 6) for message in stored]
    return np.concatenate(pieces, axis=1)


DEEP = {"stack": zoo.normal(jax.random.key(0), 3, 9, 16, 16, scale=0.3)}
SCHEDULES = {
    "plain": jz.CommSchedule(prefetch=0),
    "pipelined": jz.CommSchedule(separate_ends=False),
    "ends apart": jz.CommSchedule(separate_ends=True),
}


def _deep_loss(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["stack"])
    return jnp.mean(h**2)


def _deep_run(config, schedule, mesh="2x4-auto", microbatches=1):
    """Losses, slices and parameters of four steps that move the weights far, as numpy arrays."""
    zero = _zero(config, mesh, schedule=SCHEDULES[schedule])
    params = zero.shard(DEEP)
    state = zero.init_wire_state(params)
    step = jax.jit(zero.value_and_grad(_deep_loss, microbatches=microbatches))
    seen = []
    for _ in range(4):
        loss, grads, state = step(params, X, wire_state=state)
        seen.append(jax.device_get((loss, state.slices["stack"], params["stack"])))
        params = jax.tree.map(lambda p, g: p - 3 * g, params, grads)
    return seen


@pytest.mark.parametrize(
    "mesh", ["2x4-auto", pytest.param("8x1-explicit", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_scan_reads_the_slices_that_its_step_returns(schedule, mesh):
    """Of all layers, also the last, which a pipelined loop sends more than once."""
    config = dataclasses.replace(
        jz.zero3(), hpz=jz.HpZ(codec=None), weights=jz.PerAxis(node=jz.WeightDelta())
    )
    old = DEEP["stack"]
    for loss, slices, weights in _deep_run(config, schedule, mesh):
        np.testing.assert_allclose(loss, _deep_loss({"stack": slices}, X), rtol=1e-5)
        allowed = np.abs(weights - old).max(axis=(1, 2)) / 14 * (1 + 1 / 128) + 1e-6
        assert (np.abs(weights - slices).max(axis=(1, 2)) <= allowed).all()
        assert np.array_equal(weights, slices) == (old is DEEP["stack"])  # all later ones moved
        old = slices


def _scan(h, stack, reverse=False):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, stack, reverse=reverse)[0]


def _sum(h, stack):
    return jnp.einsum("bi,lij->bj", h, stack)


SEVERAL_USES = {
    "in full before": lambda x, stack: _scan(_sum(x, stack), stack),
    "in full after": lambda x, stack: _sum(_scan(x, stack), stack),
    "a layer before": lambda x, stack: _scan(x @ stack[0], stack),
    "the last layer after": lambda x, stack: _scan(x, stack) @ stack[8],
    "scanned twice": lambda x, stack: _scan(_scan(x, stack), stack, reverse=True),
    "scanned in halves": lambda x, stack: _scan(_scan(x, stack[:4]), stack[4:]),
}


@pytest.mark.parametrize("uses", SEVERAL_USES)
def test_all_uses_read_the_new_slice(uses):
    """A gather that is sent early waits for the slice: its shard is a difference until then."""

    def loss(params, x):
        return jnp.mean(SEVERAL_USES[uses](x, params["stack"]) ** 2)

    whole_slices = jz.ZeroConfig(hpz=jz.HpZ(codec=None), weights=jz.PerAxis(node=jz.WeightDelta()))
    zero = _zero(whole_slices)
    params = zero.shard(DEEP)
    state = zero.init_wire_state(params)
    moved = zero.shard({"stack": DEEP["stack"] + 0.1 * np.cos(DEEP["stack"] * 99)})
    value, grads, state = jax.jit(zero.value_and_grad(loss))(moved, X, wire_state=state)
    slices = {"stack": np.asarray(state.slices["stack"])}
    assert 0 < np.abs(slices["stack"] - np.asarray(moved["stack"])).max() < 0.1 / 13
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(slices, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    scale = np.abs(expected_grads["stack"]).max()
    np.testing.assert_allclose(grads["stack"], expected_grads["stack"], atol=1e-5 * scale)


def test_the_schedule_changes_no_bit():
    plain, *others = (_deep_run(jz.zeropp4(), schedule) for schedule in SCHEDULES)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, plain, other)


@pytest.mark.parametrize("schedule", ["plain", "pipelined"])
def test_micro_batches_read_the_slices_of_the_first(schedule):
    one, three = (_deep_run(jz.zeropp4(), schedule, microbatches=k)[0] for k in (1, 3))
    np.testing.assert_array_equal(one[1], three[1])
    np.testing.assert_allclose(one[0], three[0], rtol=1e-5)


def test_nodes_keep_the_same_slices_where_rounding_is_stochastic():
    codec = jz.Int8(rounding="stochastic")
    zero = _zero(jz.zeropp4(), "4x2-auto", hpz=jz.HpZ(codec=codec), gradients=jz.PerAxis())
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    for _ in range(2):
        _, _, state = zero.value_and_grad(_loss)(params, X, wire_state=state)
    for x in (state.slices["w"], state.slices["stack"]):
        by_piece = {}
        for shard in x.addressable_shards:
            by_piece.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert [len(copies) for copies in by_piece.values()] == [4, 4]
        for first, *others in by_piece.values():
            assert all(np.array_equal(first, other) for other in others)


def test_one_node_keeps_no_slices():
    zero = _zero(jz.zeropp4(), "1x8-auto")
    assert not jax.tree.leaves(zero.init_wire_state(zero.shard(WHOLE)))


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_a_step_that_is_not_finite_is_forgotten(wrong):
    """Errors fed back, and slices kept, are as good as before once batch and weights are."""
    whole_slices = jz.HpZ(codec=None)
    zero = _zero(jz.zeropp4(), hpz=whole_slices, gradients=jz.PerAxis(node=jz.ErrorFeedback()))
    params = zero.shard(WHOLE)
    broken = jax.tree.map(lambda x: x * wrong, params)
    state = zero.init_wire_state(params)
    step = jax.jit(zero.value_and_grad(_loss))
    _, grads, state = step(broken, X, wire_state=state)
    assert not np.isfinite(np.asarray(grads["stack"])).any()
    for _ in range(6):
        _, grads, state = step(params, X, wire_state=state)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(grads))
    for key, off in _distances(state, params).items():  # each step leaves 1/14 at most
        assert off <= np.abs(WHOLE[key]).max() / 13**6 + 1e-6


@pytest.mark.parametrize(
    ("feedback", "microbatches"),
    [(jz.ErrorFeedback(dtype=jnp.float32), 1), (jz.ErrorFeedback(), 3), (jz.Int4(), 1)],
)
def test_errors_do_not_add_up(feedback, microbatches):
    """The sum of what T steps return is off by one step's error, and not by T of them.

    With feedback the errors of steps telescope: only the last one is missing, which is half a
    step of 4 bits on each number. It is in proportion to the gradient, so `allowed` is found
    from the error of a first step without feedback, of which there are `steps` in the sum.
    """
    zero = _zero(jz.zero3(gradients=jz.PerAxis(node=feedback)))
    params = zero.shard(WHOLE)
    want = jax.device_get(jax.grad(_loss)(WHOLE, X))["stack"]
    step = jax.jit(zero.value_and_grad(_loss, microbatches=microbatches))
    state = zero.init_wire_state(params)
    total, first, steps = 0, 0, 12
    for i in range(steps):
        _, grads, state = step(params, X, wire_state=state)
        total = total + jax.device_get(zero.unshard(grads))["stack"]
        first = np.linalg.norm(total - want) if i == 0 else first
    off = np.linalg.norm(total - steps * want)
    if isinstance(feedback, jz.ErrorFeedback):
        assert off < 2 * first  # numbers of the last step are up to twice as large: error added
    else:
        assert off > 0.99 * steps * first


def test_errors_are_kept_for_what_is_quantised():
    """A stack whose layers are small is sent by its whole size where errors are kept for it."""
    zero = _zero(jz.zero3(gradients=jz.PerAxis(node=jz.ErrorFeedback())))
    params = zero.shard({"stack": WHOLE["w"]})

    def loss(params, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.sin(h + w[None]), None), x, params["stack"])
        return jnp.mean(h**2)

    x = zoo.normal(jax.random.key(0), 3, 48, 24, scale=1.0)
    _, _, state = zero.value_and_grad(loss)(params, x, wire_state=zero.init_wire_state(params))
    assert np.asarray(state.errors["stack"], np.float32).any()


def test_memory_is_sharded():
    zero = _zero(jz.zeropp4(), gradients=jz.PerAxis(node=jz.ErrorFeedback()))
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    local = zero.mesh.shape["local"]
    for key in ("w", "stack"):
        kept = state.slices[key].addressable_shards[0].data.nbytes
        assert kept <= 1.05 * WHOLE[key].size / local, "int8 over the devices of a node"
        error = state.errors[key].addressable_shards[0].data.nbytes
        assert error == 2 * WHOLE[key].size / local, "bfloat16 over the devices of a node"


def test_state_is_saved_and_restored(tmp_path, monkeypatch):
    """Bit for bit; and it is read in pieces, never whole on every device."""
    zero = _zero(jz.zeropp4(), gradients=jz.PerAxis(node=jz.ErrorFeedback()))
    params = zero.shard(WHOLE)
    _, _, state = zero.value_and_grad(_loss)(params, X, wire_state=zero.init_wire_state(params))
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"wire_state": state})
        targets, read = {}, ocp.args.StandardRestore
        monkeypatch.setattr(
            ocp.args, "StandardRestore", lambda item: targets.update(item) or read(item)
        )
        tree = checkpoints.restore(like={"wire_state": zero.init_wire_state(params)}).state
    restored = tree["wire_state"]
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(one, other)
        assert other.sharding.is_equivalent_to(one.sharding, one.ndim)
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in targets.values())
    zero.value_and_grad(_loss)(params, X, wire_state=restored)


def test_mistakes_are_named():
    zero = _zero(jz.zeropp4())
    params = zero.shard(WHOLE)
    step = zero.value_and_grad(_loss)
    with pytest.raises(ValueError, match=r"`wire_state` is missing.*init_wire_state"):
        step(params, X)
    with pytest.raises(ValueError, match=r"`wire_state` must be.*got dict"):
        step(params, X, wire_state={})
    other = _zero(jz.zeropp4(), "4x2-auto")
    state = other.init_wire_state(other.shard(WHOLE))
    with pytest.raises(ValueError, match=r"`wire_state.slices`, leaf `stack`: expected .* got"):
        step(params, X, wire_state=state)
    fewer = zero.init_wire_state(zero.shard({"w": WHOLE["w"]}))
    with pytest.raises(ValueError, match=r"`wire_state.slices` is not a tree like"):
        step(params, X, wire_state=fewer)


def test_a_config_that_remembers_nothing_takes_a_state_too():
    zero = _zero(jz.zeropp())
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    assert not jax.tree.leaves(state)
    _, grads, state = zero.value_and_grad(_loss)(params, X, wire_state=state)
    _, same = zero.value_and_grad(_loss)(params, X)
    jax.tree.map(np.testing.assert_array_equal, grads, same)
