"""Optimizers that multiply matrices, of stacks or leaves: optax on one device is the oracle."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

pytestmark = pytest.mark.standard_promotion

SHAPES = {
    "bias": (24,),
    "deep": (8, 16, 24),
    "few": (3, 16, 24),
    "odd": (5, 9, 7),
    "flat": (16, 8),
    "layers": [{"up": (16, 24), "odd": (9, 7)} for _ in range(3)],
}
FEW = {"bias": (24,), "deep": (8, 16, 24), "odd": (5, 9, 7), "layers": [{"up": (16, 24)}] * 2}
NUM_UPDATES = 3


def per_layer(params):
    numbers = optax.contrib.MuonDimensionNumbers
    by_ndim = {1: None, 2: numbers(0, 1), 3: numbers(1, 2)}
    return jax.tree.map(lambda x: by_ndim[len(x.shape)], params)


def muon(**options):
    return optax.contrib.muon(0.1, muon_weight_dimension_numbers=per_layer, **options)


class ShampooState(NamedTuple):
    left: Any
    right: Any


def _power(x):
    values, vectors = jnp.linalg.eigh(x)
    return vectors * jnp.abs(values + 1e-3)[..., None, :] ** -0.25 @ vectors.mT


def shampoo():
    """Shampoo of each matrix of a stack, whose state has other shapes than the stack."""

    def eyes(params, dim):
        def eye(x):
            n = x.shape[dim]
            return jnp.broadcast_to(jnp.eye(n, dtype=x.dtype), (*x.shape[:-2], n, n))

        return jax.tree.map(lambda x: eye(x) if x.ndim > 1 else None, params)

    def init(params):
        return ShampooState(eyes(params, -2), eyes(params, -1))

    def update(grads, state, params=None):
        left, right = (
            jax.tree.map(lambda g, s: None if s is None else s + of(g), grads, old)  # noqa: B023
            for of, old in ((lambda g: g @ g.mT, state.left), (lambda g: g.mT @ g, state.right))
        )
        new = jax.tree.map(
            lambda g, a, b: -0.1 * (g if a is None else _power(a) @ g @ _power(b)),
            grads,
            left,
            right,
        )
        return new, ShampooState(left, right)

    return optax.GradientTransformation(init, update)


def of_some(params):
    """Muon for all matrices but one of three that are alike otherwise."""
    numbers = per_layer(params)
    return {**numbers, "layers": [{**numbers["layers"][0], "up": None}, *numbers["layers"][1:]]}


def decayed(params):
    return jax.tree.map(lambda x: x.ndim == 3, params) | {"layers": [True, False, True]}


OPTIMIZERS = {
    "muon": muon(),
    "muon_decay": muon(weight_decay=0.1, nesterov=False),
    "muon_clipped": optax.chain(optax.clip_by_global_norm(0.1), muon()),
    "muon_aol": muon(preconditioning="aol", adaptive=True),
    "muon_of_some": optax.contrib.muon(
        0.1, muon_weight_dimension_numbers=of_some, weight_decay=0.1, weight_decay_mask=decayed
    ),
    "decay_before": optax.chain(optax.add_decayed_weights(0.1), muon()),
    "skipped": optax.apply_if_finite(muon(), 3),
    "every_second": optax.MultiSteps(muon(), 2).gradient_transformation(),
    "averaged": optax.contrib.schedule_free(muon(), 0.1),
    "shampoo": shampoo(),
    "galore": optax.contrib.galore(0.1, rank=4),
}
CONFIGS = {
    "zero3": jz.zero3(),
    "hsdp": jz.hsdp(),
    "explicit": jz.zero3(),
    "zero1": jz.ZeroConfig(stage=1),
    "stages": jz.pipeline(2, layers=("deep", "few")),
}


def trees(dtype, shapes=FEW):
    key = jax.random.key(0)
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))

    def tree(n):
        return treedef.unflatten(
            [zoo.normal(key, 20 * n + i, *x).astype(dtype) for i, x in enumerate(leaves)]
        )

    params, *grads = map(tree, range(NUM_UPDATES + 1))
    return params, grads


def updated(tx, params, state, grads):
    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for each in grads:
        params, state = step(params, state, each)
    return params, state


def both(tx, zero, dtype, shapes=FEW):
    """Parameters and state by `zero.optimizer(tx)` in full, and by `tx` on one device."""
    params, grads = trees(dtype, shapes)
    on_one = jax.tree.map(jnp.asarray, params)
    want = updated(tx, on_one, jax.jit(tx.init)(on_one), jax.tree.map(jnp.asarray, grads))
    wrapped, sharded = zero.optimizer(tx), zero.shard(params)
    state = zero.init_optimizer(wrapped, sharded)
    got = updated(wrapped, sharded, state, [zero.shard(x) for x in grads])
    return jax.device_get((zero.unshard(got[0]), zero.unshard(got[1]))), jax.device_get(want)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(2)
def test_updates_are_those_of_one_device(name):
    with jax.enable_x64(True):
        got, want = both(OPTIMIZERS[name], jz.Zero(zoo.make_mesh("2x4-auto")), np.float64, SHAPES)
        zoo.assert_close(got, want, 1e-9, name)


def _by_other_results(path, grad, state):
    """The products of one loop for the first layer, and its sums for the others."""

    def body(x, _):
        x = x @ x.T @ x / 100
        return x, (x @ x.T @ x, x + x)

    products, sums = jax.lax.scan(body, grad, None, 3)[1]
    return (products if path[1].idx == 0 else sums).sum(0), state


def _by_random_projections(path, grad, state):
    """Keys of "rbg", of which `vmap` draws other numbers than each by itself."""
    del path
    key = jax.random.wrap_key_data(state, impl="rbg")
    random = jax.random.normal(key, (grad.shape[1], 4), grad.dtype)
    return grad @ random @ random.T, state + jnp.uint32(1)


@pytest.mark.parametrize("of_leaf", [_by_other_results, _by_random_projections])
def test_leaves_alike_at_first_sight(of_leaf):
    """They have equal shapes and the same operations, and yet are not computed alike."""

    def init(params):
        return jax.tree.map(lambda x: jnp.arange(4, dtype=jnp.uint32), params)

    def update(grads, state, params=None):
        del params
        pairs = jax.tree_util.tree_map_with_path(of_leaf, grads, state)
        return jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0)), pairs)

    tx, shapes = optax.GradientTransformation(init, update), {"layers": [{"up": (16, 24)}] * 3}
    with jax.enable_x64(True):
        got, want = both(tx, jz.Zero(zoo.make_mesh("2x4-auto")), np.float64, shapes)
        zoo.assert_close(got, want, 1e-9, of_leaf.__name__)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.one_in(2)
def test_of_other_layouts(kind):
    with jax.enable_x64(True):
        mesh = zoo.make_mesh("2x4-explicit" if kind == "explicit" else "2x4-auto")
        shapes = {**FEW, "few": (3, 16, 24)} if kind == "stages" else FEW
        zero = jz.Zero(mesh, CONFIGS[kind])
        got, want = both(muon(weight_decay=0.1), zero, np.float64, shapes)
        zoo.assert_close(got, want, 1e-9, kind)


@pytest.mark.parametrize("options", [{}, {"mu_dtype": jnp.bfloat16}])
@pytest.mark.one_in(2)
def test_in_float32(options):
    with jax.default_matmul_precision("highest"):
        got, want = both(muon(**options), jz.Zero(zoo.make_mesh("2x4-auto")), np.float32)
        zoo.assert_close(got[0], want[0], 1e-6 if not options else 1e-2, "muon")


def test_outside_of_jit():
    with jax.enable_x64(True):
        zero, tx = jz.Zero(zoo.make_mesh("2x4-auto")), muon()
        params, grads = trees(np.float64)
        want = tx.update(grads[0], tx.init(params), params)[0]
        wrapped, sharded = zero.optimizer(tx), zero.shard(params)
        state = zero.init_optimizer(wrapped, sharded)
        got = wrapped.update(zero.shard(grads[0]), state, sharded)[0]
        zoo.assert_close(jax.device_get(zero.unshard(got)), jax.device_get(want), 1e-9, "muon")


def test_with_extra_arguments():
    plateau = optax.contrib.reduce_on_plateau(patience=0, rtol=1.0)
    zero, tx = jz.Zero(zoo.make_mesh("2x4-auto")), optax.chain(muon(), plateau)

    def run(tx, params, state, grads):
        for each in grads:
            updates, state = jax.jit(tx.update)(each, state, params, value=jnp.float32(1))
            params = optax.apply_updates(params, updates)
        return params

    with jax.enable_x64(True):
        params, grads = trees(np.float64)
        want = run(tx, params, tx.init(params), grads)
        wrapped, sharded = zero.optimizer(tx), zero.shard(params)
        state = zero.init_optimizer(wrapped, sharded)
        got = run(wrapped, sharded, state, [zero.shard(x) for x in grads])
        zoo.assert_close(jax.device_get(zero.unshard(got)), jax.device_get(want), 1e-9, "plateau")


def received(text):
    """Bytes of float32 results of collectives that move more than a scalar."""
    sizes = {}
    pattern = r"= (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
    for shapes, name in re.findall(pattern, text):
        for dims in re.findall(r"f32\[([\d,]*)\]", shapes):
            size = 4 * int(np.prod([int(d) for d in dims.split(",") if d]))
            sizes[name] = sizes.get(name, 0) + (size if size > 1024 else 0)
    return {name: size for name, size in sizes.items() if size}


def compiled(tx, zero, *shapes):
    params = zero.shard([np.ones(x, np.float32) for x in shapes])
    state = zero.init_optimizer(tx, params)

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update).lower(params, state, params).compile().as_text()


@pytest.mark.parametrize(
    ("tx", "kind"),
    [(muon(weight_decay=0.1), "zero3"), (shampoo(), "zero3"), (muon(), "stages")],
    ids=["muon", "shampoo", "stages"],
)
def test_a_stack_is_exchanged_once_each_way(tx, kind):
    config = jz.pipeline(2, layers="0") if kind == "stages" else CONFIGS[kind]
    zero, shape = jz.Zero(zoo.make_mesh("2x4-auto"), config), (8, 64, 128)
    share = 4 * np.prod(shape) // 8
    assert received(compiled(zero.optimizer(tx), zero, shape)) == {"all-to-all": 2 * share}
    assert sum(received(compiled(tx, zero, shape)).values()) > 8 * share


@pytest.mark.parametrize(
    ("name", "num"),
    [("muon_decay", 12), ("decay_before", 8), ("skipped", 8), ("every_second", 8)],
)
def test_matrices_that_are_leaves_are_exchanged_once_each_way(name, num):
    zero, shape = jz.Zero(zoo.make_mesh("2x4-auto")), (64, 128)
    text = compiled(zero.optimizer(OPTIMIZERS[name]), zero, *[shape] * num)
    assert received(text) == {"all-to-all": 2 * 4 * np.prod(shape) * -(-num // 8)}


@pytest.mark.parametrize(
    "tx", [optax.adamw(0.1), optax.adafactor(0.1), optax.lamb(0.1)], ids=["adamw", "factor", "lamb"]
)
def test_nothing_moves_for_optimizers_without_products(tx):
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    text = compiled(zero.optimizer(tx), zero, (8, 64, 128), (64, 128), (64, 128))
    assert "all-to-all" not in received(text)


@pytest.mark.parametrize("tx", [muon(), shampoo()], ids=["muon", "shampoo"])
def test_state_that_products_read_is_stored_by_layer(tx):
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard({"deep": np.ones((8, 16, 24), np.float32)})
    state = zero.init_optimizer(zero.optimizer(tx), params)
    shards = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state) if x.ndim == 3}
    as_stored = params["deep"].sharding.shard_shape((8, 16, 24))
    assert as_stored == (8, 16, 3)
    assert shards == (
        {(1, 16, 16), (1, 24, 24)} if isinstance(state, ShampooState) else {as_stored}
    )


def test_beside_leaves_in_host_memory():
    offload = jz.Offload(weights=("bias",), optimizer=("bias",), min_size=1)
    plain, zero = (
        jz.Zero(zoo.make_mesh("2x4-auto"), jz.ZeroConfig(offload=each)) for each in (None, offload)
    )
    with jax.enable_x64(True):
        params, grads = trees(np.float64)
        tx = zero.optimizer(muon(weight_decay=0.1))
        sharded = zero.shard(params)
        state = zero.init_optimizer(tx, sharded)
        step = jax.jit(lambda grads, state, params: zero.apply_gradients(tx, grads, state, params))
        got, new_state = step(plain.shard(grads[0]), state, sharded)
        updates, _ = muon(weight_decay=0.1).update(grads[0], muon().init(params), params)
        want = jax.device_get(optax.apply_updates(params, updates))
        zoo.assert_close(jax.device_get(zero.unshard(got)), want, 1e-9, "muon")
        same = jax.tree.map(
            lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), *(state, new_state)
        )
        assert all(jax.tree.leaves(same)), same


@pytest.mark.parametrize("mesh", ["2x4-auto", "2x3-auto"])
@pytest.mark.one_in(2)
def test_checkpoints_restore_the_state(mesh, tmp_path):
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    tx = zero.optimizer(muon())
    params, grads = trees(np.float32)
    sharded = zero.shard(params)
    state = updated(tx, sharded, zero.init_optimizer(tx, sharded), [zero.shard(grads[0])])[1]
    with jz.Checkpoints(tmp_path, zero) as checkpoints:
        checkpoints.save(1, {"state": state})
    other = jz.Zero(zoo.make_mesh(mesh))
    like = other.init_optimizer(other.optimizer(muon()), other.shard(params))
    with jz.Checkpoints(tmp_path, other) as checkpoints:
        restored = checkpoints.restore({"state": like}).state["state"]
    jax.tree.map(np.testing.assert_array_equal, other.unshard(restored), zero.unshard(state))


@pytest.mark.parametrize("num_frozen", [2, 4])
@pytest.mark.one_in(2)
def test_freezing_cuts_the_state(num_frozen):
    zero, tx = jz.Zero(zoo.make_mesh("2x4-auto")), muon()
    with jax.enable_x64(True):
        params, grads = trees(np.float64, {"flat": (16, 8), "layers": (6, 9, 16)})
        wrapped, sharded = zero.optimizer(tx), zero.shard(params)
        state = zero.init_optimizer(wrapped, sharded)
        freezing = zero.freeze(sharded, num_frozen, layers="layers", before="flat")
        active, frozen = freezing.split(sharded)
        active_state, frozen_state = freezing.split_optimizer(wrapped, state)
        of_active = freezing.split(zero.shard(grads[0]))[0]
        active, active_state = updated(wrapped, active, active_state, [of_active])
        got = zero.unshard(freezing.join(active, frozen))
        state = freezing.join_optimizer(wrapped, active_state, frozen_state)
        updates, want_state = tx.update(grads[0], tx.init(params), params)
        is_active = (np.arange(6) >= num_frozen)[:, None, None]
        want = params["layers"] + is_active * updates["layers"]
        zoo.assert_close(jax.device_get(got["layers"]), jax.device_get(want), 1e-9, "layers")
        got, want = (
            next(x for x in jax.tree.leaves(each) if x.ndim == 3)
            for each in (zero.unshard(state), want_state)
        )
        np.testing.assert_allclose(got[num_frozen:], want[num_frozen:], rtol=1e-9)
