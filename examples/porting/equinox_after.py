"""Train a small network with Equinox and ZeRO-3 on 8 devices."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxzero as jz

jax.config.update("jax_num_cpu_devices", 8)  # pretend; leave it out where there are GPUs
zero = jz.Zero(jz.make_mesh(nodes=2))
AXES = ("batch", "node", "local")


class MLP(eqx.Module):
    layers: list
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    activation: Callable

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Linear(2, 64, key=keys[0]),
            eqx.nn.Linear(64, 31, key=keys[1]),
            eqx.nn.Linear(31, 3, key=keys[2]),
        ]
        self.norm = eqx.nn.BatchNorm(31, axis_name=AXES, momentum=0.9, mode="batch")
        self.dropout = eqx.nn.Dropout(0.1)
        self.activation = jax.nn.gelu

    def __call__(self, x, state, key=None):
        x = self.activation(self.layers[0](x))
        x, state = self.norm(self.layers[1](x), state)
        x = self.dropout(self.activation(x), key=key)
        return self.layers[2](x), state


def spirals(seed, num):
    """Points near one of three arms of a spiral; the class is the arm."""
    random = np.random.default_rng(seed)
    label = random.integers(3, size=num)
    radius = random.uniform(0.1, 1, num)
    angle = 2 * np.pi / 3 * label + 4 * radius + random.normal(0, 0.1, num)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"x": x.astype(np.float32), "label": label}


def predict(model, state, x, keys=None):
    axes = (0, None, None if keys is None else 0)
    return jax.vmap(model, axes, (0, None), axis_name="batch")(x, state, keys)


def loss_fn(model, state, batch, key):
    keys = jax.random.split(jz.fold_in_device(key), len(batch["x"]))
    logits, state = predict(model, state, batch["x"], keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), state


@eqx.filter_jit
def train_step(model, state, opt_state, batch, key):
    grad_fn = zero.value_and_grad(loss_fn, has_aux=True, batch_argnums="batch", aux_reduce="first")
    (loss, state), grads = grad_fn(model, state, batch, key)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), state, opt_state, loss


@eqx.filter_jit
def num_correct(model, state, batch):
    def count(model, state, batch):
        batch, weights = batch
        logits, _ = predict(model, state, batch["x"])
        return jnp.sum(weights * (jnp.argmax(logits, axis=-1) == batch["label"]))

    return zero.apply(count, batch_argnums="batch", out_reduce="sum")(model, state, batch)


train, test = spirals(0, 2048), spirals(1, 500)
model, state = zero.init(eqx.nn.make_with_state(MLP), jax.random.key(0))
state = zero.unshard(state)
tx = optax.adamw(1e-2)
opt_state = zero.init_optimizer(tx, model)
for step in range(100):
    rows = np.random.default_rng(step).choice(2048, 256, replace=False)
    batch = {name: x[rows] for name, x in train.items()}
    model, state, opt_state, loss = train_step(model, state, opt_state, batch, jax.random.key(step))
    if step < 3 or step % 25 == 24:
        print(f"step {step + 1}: loss {loss:.5f}")

model = eqx.nn.inference_mode(model)
correct = 0
for start in range(0, 500, 64):  # the last batch has 52 rows
    batch = {name: x[start : start + 64] for name, x in test.items()}
    correct += num_correct(model, state, jz.pad_batch(batch, zero))
print(f"test accuracy {correct / 500:.3f}")
