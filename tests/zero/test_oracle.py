"""Sharded gradients equal those of `jax.value_and_grad` on one device, for a zoo of models.

Here in float32; in float64, where nothing can hide behind rounding, in `test_oracle_x64.py`.
Each model runs on two meshes, one in each file; which ones goes round. Of the two one is always
run, and the other by `make test-exhaustive`.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from tests import zoo

pytestmark = pytest.mark.slow

_ROTATION = zoo.rotation("float32")
_EACH = [
    pytest.param(name, mesh, id=f"{name}-{mesh}", marks=[] if always else pytest.mark.exhaustive)
    for name, mesh, always in _ROTATION
]


@pytest.mark.parametrize(("name", "mesh"), _EACH)
@pytest.mark.one_in(5)
def test_gradients_equal_the_oracle(name, mesh):
    zoo.check(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh)))


@pytest.mark.parametrize(
    ("name", "mesh"), [("mlp", "1x2-auto"), ("scanned_layers", "2x1-explicit")]
)
def test_two_devices(name, mesh):
    """The fewest that reduce anything; no mesh of the rotation divides sums by two."""
    zoo.check(zoo.CASES[name], jz.Zero(zoo.make_mesh(mesh)))


def test_rotation_takes_every_model_to_two_meshes_and_every_mesh_to_four_models():
    runs = _ROTATION + zoo.rotation("float64")
    models = collections.Counter(mesh for _, mesh, _ in runs)
    always = collections.Counter(mesh for _, mesh, always in runs if always)
    sizes = ("1x1", "1x8", "2x4", "4x2", "8x1", "2x3", "3x2", "2x2x2")
    for mesh in (f"{size}-{kind}" for size in sizes for kind in ("auto", "explicit")):
        assert models[mesh] >= 4, f"{mesh} meets {models[mesh]} models"
        assert always[mesh] >= 2, f"{mesh} always meets {always[mesh]} models"
    assert set(collections.Counter(name for name, _ in {run[:2] for run in runs}).values()) == {2}
    assert {name for name, _, always in runs if always} == set(zoo.CASES)


def test_tensor_parallel_third_axis():
    """Weights also split over an axis that is not ours stay so, and results are the same."""
    mesh = zoo.make_mesh("2x2x2-auto")
    zero = jz.Zero(mesh)
    whole = {
        "up": zoo.normal(jax.random.key(0), 0, 8, 12),
        "down": zoo.normal(jax.random.key(0), 1, 12, 8),
    }

    def loss(params, x, constrain=lambda x: x):
        hidden = constrain(jnp.tanh(x @ params["up"]))
        return jnp.mean((hidden @ params["down"]) ** 2)

    def over_tensor(x):
        return lax.with_sharding_constraint(x, P(None, "tensor"))

    def assert_right(zero, step, params):
        got, grads = step(params, x)
        zoo.assert_close(jax.device_get(got), jax.device_get(want), 1e-5, "loss")
        zoo.assert_close(jax.device_get(zero.unshard(grads)), want_grads, 1e-5, "grads")
        return grads

    x = zoo.normal(jax.random.key(1), 0, 16, 8, scale=1.0)
    want, want_grads = jax.device_get(jax.value_and_grad(loss)(whole, x))
    params = zero.shard(whole)
    with jax.set_mesh(mesh):
        step = zero.value_and_grad(functools.partial(loss, constrain=over_tensor))
        assert_right(zero, step, params)
    params = zero.shard(whole, specs={"up": P(None, "tensor"), "down": P("tensor")})
    grads = assert_right(zero, zero.value_and_grad(loss), params)
    assert "tensor" in str(grads["up"].sharding.spec)
