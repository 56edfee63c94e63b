"""ZeRO-3 around a Flax NNX model. Pretends that this machine has 8 devices."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxzero as jz

jax.config.update("jax_num_cpu_devices", 8)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(1, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def init(key):
    return nnx.state(Model(nnx.Rngs(key)), nnx.Param)


graph = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))


def loss_fn(params, batch):
    return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)


zero = jz.Zero(jz.make_mesh(nodes=2))
params = zero.init(init, jax.random.key(0))
tx = optax.adam(1e-2)
opt_state = zero.init_optimizer(tx, params)


@jax.jit
def step(params, opt_state, batch):
    loss, grads = zero.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


x = jnp.linspace(-3, 3, 256).reshape(-1, 1)
for i in range(300):
    params, opt_state, loss = step(params, opt_state, {"x": x, "y": jnp.sin(x)})
    if i % 100 == 0 or i == 299:
        print(f"step {i}: loss {loss:.5f}")
