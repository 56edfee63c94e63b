"""ZeRO-3 around an Equinox model. Pretends that this machine has 8 devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxzero as jz

jax.config.update("jax_num_cpu_devices", 8)


def make(key):
    return eqx.nn.MLP(1, 1, 64, 1, activation=jnp.tanh, key=key)


def init(key):
    return eqx.filter(make(key), eqx.is_inexact_array)


static = eqx.filter(eqx.filter_eval_shape(make, jax.random.key(0)), callable)


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


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
