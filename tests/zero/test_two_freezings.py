"""Freezing: trees of another freezing, leaves named like a stack, parts too small to be split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo


def _loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
    return jnp.mean(x)


def test_a_loss_of_trees_of_two_freezings_is_refused():
    """Together they would be a model of another number of layers."""
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    params = zero.shard({"layers": np.ones((4, 8, 8), np.float32)})
    freezing = zero.freeze(params, 2, layers="layers", before=())
    active, frozen = freezing.split(params)
    whole = zero.freeze(params, 4, layers="layers", before=()).split(params)[1]
    batch = np.ones((8, 8), np.float32)
    run = zero.value_and_grad(freezing.wrap(_loss))
    with pytest.raises(ValueError, match=r"`frozen` is not .* `layers` it has \(4, 8, 8\)"):
        run(active, whole, batch)
    with pytest.raises(ValueError, match="`active` is not a tree of this freezing"):
        run({"layers": None}, frozen, batch)


def test_a_leaf_may_be_named_like_a_stack():
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    tree = {"w": np.ones((4, 8, 8), np.float32), "a": {"w": np.ones((16, 8), np.float32)}}
    params = zero.shard(tree)
    tx = optax.adam(1e-3)
    opt_state = zero.init_optimizer(tx, params)
    freezing = zero.freeze(params, 1, layers="w", before=())
    active, frozen = freezing.split_optimizer(tx, opt_state)
    assert active[0].mu["a"]["w"].shape == (16, 8)
    assert (active[0].mu["w"].shape, frozen[0].mu["w"].shape) == ((3, 8, 8), (1, 8, 8))


def test_a_part_that_is_not_split_is_not_offloaded():
    """A stack of scalars has no dim to split beside its layers; a step copies only split leaves."""
    zero = jz.Zero(
        zoo.make_mesh("2x4-auto"), jz.ZeroConfig(offload=jz.Offload(weights=True, min_size=1))
    )
    params = zero.shard({"s": np.arange(1.0, 3.0, dtype=np.float32)})
    freezing = zero.freeze(params, 1, layers="s", before=())

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, s: (x * s, None), batch, params["s"])
        return jnp.mean(x)

    active, frozen = freezing.split(params)
    run = jax.jit(zero.value_and_grad(freezing.wrap(loss)))
    value, grads = run(active, frozen, np.ones(8, np.float32))
    np.testing.assert_array_equal((value, zero.unshard(grads)["s"][0]), (2.0, 1.0))
    whole = freezing.join(active, frozen)["s"]
    assert whole.data.sharding.memory_kind == "pinned_host"
