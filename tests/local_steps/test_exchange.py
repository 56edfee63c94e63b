"""Check at which step each element is exchanged, and what arrives, by steps that add a constant.

On node m every step adds c_m to every parameter. So the value of an element at the end of a round
says at which step it was sent, received and merged. All numbers are small integers and halves, for
which float32 is exact.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

EVERY, FRAGMENTS = 12, 3
STEPS = EVERY // FRAGMENTS
FOUR = jz.make_mesh(4)
SHAPES = {
    "stack": (6, 8),
    "odd": (7, 3),  # padded on four devices, and cut unevenly
    "vector": (10,),
    "scalar": (),
    "wide": (2, 2, 9),
}


def init():
    return {name: jnp.full(shape, 5.0) for name, shape in SHAPES.items()}


def step(params, opt_state, batch):
    """Add the mean of the node's rows to every parameter."""
    change = jnp.mean(batch)
    return jax.tree.map(lambda x: x + change, params), opt_state, {"change": change}


def per_node(nodes):
    """c_m of each node, whose mean is the number of nodes."""
    return np.arange(1.0, 2 * nodes, 2)


def batches(nodes, every=EVERY):
    rows = np.repeat(per_node(nodes), 8 // nodes)  # rows are split over nodes first
    return np.broadcast_to(rows, (every, 8)).astype(np.float32)


def rounds_of(mesh, method):
    zero = jz.Zero(mesh)
    rounds = zero.local_steps(step, method)
    return zero, rounds, rounds.init(zero.init(init), jnp.zeros(()))


def expected(nodes, sent, delay, mixing):
    """Each node's value at the end of a round, of elements sent after `sent` steps."""
    mean, arrival = 5.0 + sent * nodes, sent + delay
    own = np.expand_dims(per_node(nodes), tuple(range(1, 1 + sent.ndim)))
    if mixing is None:
        merged = mean + delay * own
    else:
        merged = mixing * (5.0 + arrival * own) + (1 - mixing) * mean
    return merged + (EVERY - arrival) * own


@pytest.fixture(scope="module", params=["gathered, simulated", "reduced"])
def mesh(request):
    """Two nodes gather messages without a codec; four reduce them."""
    return FOUR if request.param == "reduced" else jz.make_mesh(2, simulate=4)


@pytest.mark.parametrize(("delay", "mixing"), [(0, None), (2, None), (4, 0.5)])
def test_every_element_is_sent_once_in_a_round_and_merged_as_asked(mesh, delay, mixing):
    outer = optax.sgd(1.0)
    method = jz.LocalSteps(
        every=EVERY, fragments=FRAGMENTS, delay=delay, mixing=mixing, outer=outer
    )
    zero, rounds, state = rounds_of(mesh, method)
    nodes = rounds.num_nodes
    state, metrics = rounds(state, batches(nodes))
    np.testing.assert_array_equal(
        metrics["change"], np.broadcast_to(per_node(nodes), (EVERY, nodes)).astype(np.float32)
    )
    received = zero.unshard(rounds.mean(state))
    for name, shape in SHAPES.items():
        outer_params = _whole(state.outer_params[name], shape)
        sent = (outer_params - 5.0) / nodes  # steps before it was sent
        turn = (sent + delay) / STEPS
        assert set(np.unique(turn)) <= {1.0, 2.0, 3.0}, name
        if len(shape) and max(shape) > FRAGMENTS:
            counts = [(turn == i).sum() for i in (1, 2, 3)]
            assert max(counts) - min(counts) <= np.prod(shape) / 2, (name, counts)
        values = expected(nodes, sent, delay, mixing)
        own = _whole(state.params[name], (nodes, *shape))
        np.testing.assert_array_equal(own, values, err_msg=name)
        np.testing.assert_array_equal(received[name], values.mean(0), err_msg=name)


def test_stacks_are_cut_by_layers(mesh):
    method = jz.LocalSteps(every=EVERY, fragments=FRAGMENTS, outer=optax.sgd(1.0))
    _, rounds, state = rounds_of(mesh, method)
    state, _ = rounds(state, batches(rounds.num_nodes))
    turn = (np.asarray(state.outer_params["stack"]) - 5.0) / rounds.num_nodes / STEPS
    np.testing.assert_array_equal(turn, np.repeat([[1.0], [2.0], [3.0]], 2, axis=0) * np.ones(8))


@jax.enable_x64(True)
def test_a_sum_of_floats_is_the_mean_of_nodes_and_the_same_on_all():
    """Nodes move float32 and float64 parameters by random numbers of their own."""
    shapes = {"wide": ((7, 12), jnp.float64), "vector": ((40,), jnp.float32)}

    def move(params, opt_state, batch):
        key = jax.random.fold_in(jax.random.key(0), jnp.mean(batch).astype(int))
        noise = {k: jax.random.normal(key, *shapes[k]) for k in params}
        return jax.tree.map(jnp.add, params, noise), opt_state, noise

    zero, rows = jz.Zero(FOUR), batches(4, every=1)
    rounds = zero.local_steps(move, every=1, outer=optax.sgd(1.0))
    params = zero.init(lambda: {k: jnp.ones(*shapes[k]) for k in shapes})
    first = rounds.init(params, jnp.zeros(()))
    run = jax.jit(rounds).lower(first, rows).compile()
    found = [x for x in zoo.hlo.collectives(run.as_text()) if x.crosses(2)]
    assert [x.op for x in found] == ["all-reduce"]
    sent, report = 8 * (7 * 12 + 40) // 2, rounds.report()  # all in float64, by each of two
    assert report.bytes_between_nodes == 2 * found[0].entering_bytes == 2 * 2 * sent * 3 // 4
    assert report.message_bytes == sent

    state, noise = run(first, rows)
    for name, (shape, dtype) in shapes.items():
        outer = state.outer_params[name]
        mean = np.asarray(noise[name], np.float64)[0].mean(0)
        # The steps, differences, three sums, the mean and the outer step, of numbers up to 8.
        error = 8 * 8 * float(jnp.finfo(dtype).eps) / 2
        np.testing.assert_allclose(_whole(outer, shape), 1 + mean, rtol=0, atol=error)
        copies = {}
        for shard in jax.tree.leaves(outer)[0].addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
        assert [(len(x), len(set(x))) for x in copies.values()] == [(4, 1), (4, 1)]


@pytest.mark.parametrize("codec", [jz.Int4(block=32), jz.Int8(block=32), jz.Cast(jnp.bfloat16)])
def test_what_a_message_leaves_out_is_sent_later(codec):
    zero = jz.Zero(FOUR, jz.ZeroConfig(min_quantized_size=0))

    def drift(params, opt_state, batch):
        direction = jax.random.normal(jax.random.key(0), (64, 8))
        return {"w": params["w"] + direction * jnp.mean(batch)}, opt_state, {}

    method = jz.LocalSteps(every=1, outer=optax.sgd(1.0), codec=codec)
    rounds = zero.local_steps(drift, method)
    state = rounds.init(zero.init(lambda: {"w": jnp.zeros((64, 8))}), jnp.zeros(()))
    direction = np.asarray(jax.random.normal(jax.random.key(0), (64, 8)), np.float64)
    num, largest = 6, 0.0
    for i in range(num):
        state, _ = rounds(state, batches(4, every=1))
        residual = np.asarray(state.residuals["w"].astype(jnp.float32), np.float64).mean(0)
        exact = direction * 4 * (i + 1)
        # Outer parameters lack what was left out, to the rounding of residuals (bfloat16, in each
        # round) and of sums (float32).
        largest = max(largest, np.abs(residual).max())
        bound = (i + 1) * largest * 2**-8 + (i + 1) * np.abs(exact).max() * 2**-22
        lacking = exact - np.asarray(state.outer_params["w"], np.float64)
        np.testing.assert_allclose(-lacking, residual, atol=bound, rtol=0)
    assert 0 < largest < np.abs(direction).max() * per_node(4).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cast_halves_messages_whatever_the_dtype_of_parameters(dtype):
    """Pseudo-gradients are float32 if the parameters are bfloat16, too."""
    sent = []
    for codec in (None, jz.Cast(jnp.bfloat16)):
        zero = jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]))
        rounds = zero.local_steps(step, every=1, codec=codec)
        rounds.init(zero.init(lambda: {"w": jnp.zeros((8, 3), dtype)}), jnp.zeros(()))
        sent.append(rounds.report().bytes_between_nodes)
    assert sent[1] == sent[0] / 2 == 2 * 24


def test_infinities_stay_and_keys_and_counts_are_not_exchanged(mesh):
    zero = jz.Zero(mesh)
    tree = {
        "mask": jnp.where(jnp.arange(8) > 3, -jnp.inf, 0.0),
        "count": jnp.arange(4),
        "w": jnp.zeros((8, 4), jnp.bfloat16),
    }

    def count_up(params, opt_state, batch):
        change = jnp.mean(batch)
        new = {**params, "count": params["count"] + 1}
        new["w"] = params["w"] + change.astype(jnp.bfloat16)
        return new, jax.random.fold_in(opt_state, 1), {}

    method = jz.dasgd(every=4, delay=2)
    rounds = zero.local_steps(count_up, method)
    state = rounds.init(zero.shard(tree), zero.shard(jax.random.key(0)))
    nodes = rounds.num_nodes
    state, _ = rounds(state, batches(nodes, every=4))
    mean = zero.unshard(rounds.mean(state))
    np.testing.assert_array_equal(mean["mask"], tree["mask"])
    np.testing.assert_array_equal(mean["count"], np.arange(4) + 4)
    # Sent after 2 steps of the mean, and then 2 steps of its own.
    own = np.asarray(state.params["w"].astype(jnp.float32))
    np.testing.assert_array_equal(own[:, 0, 0], 2 * nodes + 2 * per_node(nodes))
    assert state.outer_params["count"] is None


def test_an_outer_counter_is_kept_for_each_fragment_whatever_a_parameter_is_called(mesh):
    zero = jz.Zero(mesh)
    method = jz.LocalSteps(every=2, fragments=2, outer=optax.adam(0.1))
    rounds = zero.local_steps(step, method)
    params = zero.init(lambda: {"count": jnp.zeros(()), "w": jnp.zeros((8, 4))})
    with jax.numpy_dtype_promotion("standard"):  # Adam's `decay ** count`
        state, _ = rounds(rounds.init(params, jnp.zeros(())), batches(rounds.num_nodes, every=2))
    np.testing.assert_array_equal(state.outer_state[0].count, [1, 1])


def test_factored_state_of_an_inner_optimizer(mesh):
    """Adafactor keeps a row and a column for `[7, 4]`: arrays that devices cannot split evenly."""
    zero = jz.Zero(mesh)
    tx = zero.optimizer(optax.adafactor(0.1, min_dim_size_to_factor=2))
    params = zero.init(lambda: {"w": jnp.ones((7, 4))})

    def train(params, opt_state, batch):
        loss = lambda p, b: jnp.mean(b) * jnp.sum(p["w"] ** 2)  # noqa: E731
        _, grads = zero.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        opt_state = zero.init_optimizer(tx, params)
    rounds = zero.local_steps(train, every=2)
    state, _ = rounds(rounds.init(params, opt_state), batches(rounds.num_nodes, every=2))
    assert np.isfinite(zero.unshard(rounds.mean(state))["w"]).all()


def _whole(x, shape):
    """An array without the padding that its layout has."""
    data = x if isinstance(x, jax.Array | np.ndarray) else x.data
    return np.asarray(data, np.float64)[tuple(slice(size) for size in shape)]


def test_whole_parameters_stay_whole():
    mesh = jz.make_mesh(2, devices=jax.devices()[:4])
    zero = jz.Zero(mesh, jz.ZeroConfig(stage=1))
    rounds = zero.local_steps(step, jz.LocalSteps(every=2))
    state = rounds.init(zero.init(init), {})
    compiled = jax.jit(rounds).lower(state, batches(2, 2)).compile()
    state, _ = compiled(state, batches(2, 2))
    compiled(state, batches(2, 2))  # takes the state as it was returned
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert held == sum(rounds.report().device_bytes.values())
