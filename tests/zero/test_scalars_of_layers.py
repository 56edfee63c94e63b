"""A scanned stack of one number for each layer, in host memory.

One layer of it cannot be split over devices. So its gradient is reduced after the loop, and not
layer by layer as those of other stacks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxzero as jz
from tests import zoo

TREE = {
    "b": np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8),
    "s": np.array([0.5, 1.5], np.float32),
}
BATCH = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def _loss(params, batch):
    def layer(x, w):
        return x * w["s"] + w["b"][None], None

    x, _ = jax.lax.scan(layer, batch, params)
    return jnp.mean(x**2)


@pytest.mark.parametrize("leaves", ["bs", "s"])
@pytest.mark.parametrize("in_one_program", [False, True])
@pytest.mark.one_in(2)
def test_its_update_is_that_of_one_device(in_one_program, leaves):
    offload = jz.Offload(weights=True, gradients=True, optimizer=True, min_size=1)
    zero = jz.Zero(zoo.make_mesh("2x2-auto"), jz.ZeroConfig(offload=offload))
    tree, rest = (
        {k: x for k, x in TREE.items() if (k in leaves) == kept} for kept in (True, False)
    )
    params, tx = zero.shard(tree), optax.sgd(0.25, momentum=0.5)

    def loss(params, batch):
        return _loss({**params, **rest}, batch)

    def step(params, opt_state, batch):
        if in_one_program:
            return zero.value_and_update(loss, tx)(params, opt_state, batch)
        value, grads = zero.value_and_grad(loss)(params, batch)
        return value, *zero.apply_gradients(tx, grads, opt_state, params)

    value, new, _ = jax.jit(step)(params, zero.init_optimizer(tx, params), BATCH)
    want, grads = jax.jit(jax.value_and_grad(loss))(tree, BATCH)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for name, x in zero.unshard(new).items():
        assert jax.tree.leaves(params[name])[0].sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(x, tree[name] - 0.25 * grads[name], rtol=1e-5)
