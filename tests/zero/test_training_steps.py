"""Two training steps with plain optax optimizers equal those of one device; stages store what
they promise."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

pytestmark = pytest.mark.standard_promotion

# Adam divides by the root of the second moment: where a gradient is nearly zero, its rounding
# error decides the update's sign. With this epsilon the update is smooth, so that an update's
# error is at most 1 / epsilon times the gradient's, and 1e-4 covers two steps.
_EPS = 1e-2
_TOLERANCE = 1e-4


def _adafactor():
    return optax.adafactor(3e-2, min_dim_size_to_factor=4, eps=1e-4, clipping_threshold=0.5)


_OPTIMIZERS = {
    "sgd_with_momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(3e-2, eps=_EPS),
    "clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(3e-2, eps=_EPS)
    ),
    "adamw": lambda: optax.adamw(3e-2, eps=_EPS, weight_decay=0.1),
    "lamb": lambda: optax.lamb(3e-2, eps=_EPS, weight_decay=0.1),
    "adafactor": _adafactor,
}
_SHAPE_DEPENDENT = ("adafactor",)


def _model(key):
    """Leaves that six devices divide and leaves that they do not; a scalar; a stack."""
    shapes = {
        "first": (8, 12),
        "bias": (12,),
        "stack": (2, 12, 12),
        "odd": (12, 7),
        "last": (7, 4),
    }
    drawn = jax.random.normal(key, (1024,))
    weights, start = {"scale": jnp.float32(1.5)}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        weights[name] = 0.3 * drawn[start:stop].reshape(shape)
        start = stop
    return weights


@functools.cache
def _whole():
    return jax.device_get(jax.jit(_model)(jax.random.key(0)))


def _loss(params, batch):
    x = jnp.tanh(batch["x"] @ params["first"] + params["bias"][None])
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    x = params["scale"] * jnp.tanh(x @ params["odd"])
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def _batch(step):
    key = jax.random.key(10 + step)
    return {
        "x": zoo.normal(key, 0, 24, 8, scale=1.0),
        "y": zoo.normal(key, 1, 24, 4, scale=1.0),
    }


def _train(value_and_grad, tx, params, opt_state, place=lambda params: params):
    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), opt_state

    losses = []
    for i in range(2):
        loss, params, opt_state = step(params, opt_state, _batch(i))
        params = place(params)
        losses.append(float(loss))
    return losses, params, opt_state


@functools.cache
def _single_device(name):
    params, tx = _whole(), _OPTIMIZERS[name]()
    losses, params, _ = _train(jax.value_and_grad(_loss), tx, params, tx.init(params))
    return losses, jax.device_get(params)


def _sharded(name, mesh, config=None):
    zero = jz.Zero(zoo.make_mesh(mesh), config or jz.zero3())
    tx = _OPTIMIZERS[name]()
    if name in _SHAPE_DEPENDENT:
        tx = zero.optimizer(tx)
    params = zero.shard(_whole())
    opt_state = zero.init_optimizer(tx, params)
    shardings = zero.shardings(params)
    losses, params, opt_state = _train(
        zero.value_and_grad(_loss),
        tx,
        params,
        opt_state,
        place=lambda params: jax.device_put(params, shardings),
    )
    return zero, losses, params, opt_state


# Each optimizer on one mesh; on the others in `make test-exhaustive`.
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if (i - j) % 3 == 0 else pytest.mark.exhaustive)
        for i, name in enumerate(_OPTIMIZERS)
        for j, mesh in enumerate(["2x3-auto", "2x4-auto", "3x2-explicit"])
    ],
)
@pytest.mark.one_in(4)
def test_two_steps_equal_those_of_one_device(name, mesh):
    with jax.default_matmul_precision("highest"):
        want_losses, want = _single_device(name)
        zero, losses, params, _ = _sharded(name, mesh)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    zoo.assert_close(jax.device_get(zero.unshard(params)), want, _TOLERANCE, "params")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), _whole(), want)
    assert min(jax.tree.leaves(moved)) > 1e-4, "the optimizer does nothing here"


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_padding_stays_zero(name):
    zero, _, params, opt_state = _sharded(name, "2x3-auto")
    leaves = jax.tree.leaves((params, opt_state), is_leaf=lambda x: hasattr(x, "shape"))
    stored = [x for x in leaves if not isinstance(x, jax.Array)]
    assert sum(x.shape == params["last"].shape for x in stored) == 3, "a parameter and two moments"
    for leaf in stored:
        assert leaf.data.shape != leaf.shape
        _assert_zero_outside(np.asarray(leaf.data), leaf.shape, repr(leaf.shape))


def _assert_zero_outside(array, shape, what):
    outside = np.ones(array.shape, bool)
    outside[tuple(slice(0, size) for size in shape)] = False
    assert not np.any(array[outside]), f"{what}: padding is not zero"


def _on_one_mesh(stages, *meshes):
    """Stages and meshes: each stage on one of two, on the other in `make test-exhaustive`."""
    return [
        pytest.param(stage, mesh, marks=[] if (i + j) % 2 else pytest.mark.exhaustive)
        for i, stage in enumerate(stages)
        for j, mesh in enumerate(meshes)
    ]


@pytest.mark.parametrize(
    ("stage", "mesh"), _on_one_mesh([0, 1, 2, 3, "hsdp"], "2x4-auto", "2x3-auto")
)
@pytest.mark.one_in(2)
def test_stages_train_the_same(stage, mesh):
    with jax.default_matmul_precision("highest"):
        want_losses, want = _single_device("clip_by_global_norm")
        zero, losses, params, _ = _sharded("clip_by_global_norm", mesh, _config(stage))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    zoo.assert_close(jax.device_get(zero.unshard(params)), want, _TOLERANCE, "params")


def _config(stage):
    return jz.hsdp() if stage == "hsdp" else jz.ZeroConfig(stage=stage)


_MESHES = ("1x1", "1x8", "2x4", "4x2", "8x1", "2x3", "3x2")


@pytest.mark.parametrize("mesh", _MESHES)
@pytest.mark.one_in(4)
def test_zero3_stores_one_nth_of_everything(mesh):
    zero = jz.Zero(zoo.make_mesh(f"{mesh}-auto"))
    trees = _stored(zero)
    for name in ("params", "grads", "opt_state"):
        _assert_split(trees[name], _pieces(zero, zero.config), name)


@pytest.mark.parametrize(("stage", "mesh"), _on_one_mesh([0, 1, 2, "hsdp"], "2x4", "2x3"))
def test_stage_stores_what_it_says(stage, mesh):
    config = _config(stage)
    zero = jz.Zero(zoo.make_mesh(f"{mesh}-auto"), config)
    trees = _stored(zero)
    split = {0: (), 1: ("opt_state",), 2: ("grads", "opt_state")}.get(stage, tuple(trees))
    for name, tree in trees.items():
        _assert_split(tree, _pieces(zero, config) if name in split else 1, f"stage {stage}, {name}")


def _pieces(zero, config):
    sizes = zero.mesh.shape
    return sizes["local"] * (sizes["node"] if config.split == "all" else 1)


def _stored(zero):
    params = zero.init(_model, jax.random.key(0))
    _, grads = zero.value_and_grad(_loss)(params, _batch(0))
    opt_state = zero.init_optimizer(optax.adam(1e-3), params)
    return {"params": params, "grads": grads, "opt_state": opt_state}


def _assert_split(tree, pieces, what):
    """Every leaf takes 1/pieces of its bytes on each device, and is padded by less than one
    row for each piece; scalars are whole."""
    true_shapes = jax.eval_shape(_model, jax.random.key(0))
    allowed = {shape for leaf in true_shapes.values() for shape in _paddings(leaf.shape, pieces)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        at = what + jax.tree_util.keystr(path)
        share = 1 if leaf.ndim == 0 else pieces
        for shard in leaf.addressable_shards:
            assert shard.data.nbytes * share == leaf.nbytes, f"{at}: {shard.data.shape}"
        assert share == 1 or leaf.shape in allowed, f"{at}: {leaf.shape} is padded too far"


def _paddings(shape, pieces):
    if any(dim % pieces == 0 for dim in shape):
        return {shape}
    padded = (math.ceil(dim / pieces) * pieces for dim in shape)
    return {(*shape[:i], dim, *shape[i + 1 :]) for i, dim in enumerate(padded)}
