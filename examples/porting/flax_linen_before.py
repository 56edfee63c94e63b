"""Train a small convolutional network with Flax Linen on one device."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training import train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.Conv(16, (3, 3), strides=2, dtype=jnp.bfloat16)(x)
        x = nn.relu(norm(dtype=jnp.bfloat16)(x))
        x = nn.Dense(31, dtype=jnp.bfloat16)(x.reshape(len(x), -1))
        x = nn.relu(norm(dtype=jnp.bfloat16)(x))
        x = nn.Dropout(rate=0.1, deterministic=not train)(x)
        return nn.Dense(10, dtype=jnp.bfloat16)(x).astype(jnp.float32)


class TrainState(train_state.TrainState):
    batch_stats: dict


def gratings(seed, num):
    """Images of stripes with noise; the class is one of ten orientations."""
    random = np.random.default_rng(seed)
    label = random.integers(10, size=num)
    angle, phase = np.pi / 10 * label, random.uniform(0, 2 * np.pi, num)
    position = np.arange(8)[None, :, None] * np.cos(angle)[:, None, None]
    position = position + np.arange(8)[None, None] * np.sin(angle)[:, None, None]
    image = np.sin(1.5 * position + phase[:, None, None]) + random.normal(0, 0.3, (num, 8, 8))
    return {"image": image[..., None].astype(np.float32), "label": label}


def create_train_state(key):
    model = CNN()
    variables = model.init(key, jnp.ones((1, 8, 8, 1)), train=False)
    return TrainState.create(apply_fn=model.apply, tx=optax.adamw(1e-2), **variables)


@jax.jit
def train_step(state, batch, key):
    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@jax.jit
def num_correct(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return jnp.sum(jnp.argmax(logits, axis=-1) == batch["label"])


train, test = gratings(0, 2048), gratings(1, 500)
state = create_train_state(jax.random.key(0))
for step in range(100):
    rows = np.random.default_rng(step).choice(2048, 64, replace=False)
    batch = {name: x[rows] for name, x in train.items()}
    state, loss = train_step(state, batch, jax.random.key(step))
    if step < 3 or step % 25 == 24:
        print(f"step {step + 1}: loss {loss:.5f}")

with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f"{folder}/100", state)
    checkpointer.wait_until_finished()
    state = checkpointer.restore(f"{folder}/100", state)

correct = 0
for start in range(0, 500, 64):  # the last batch has 52 rows
    correct += num_correct(state, {name: x[start : start + 64] for name, x in test.items()})
print(f"test accuracy {correct / 500:.3f}")
