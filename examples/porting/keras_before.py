"""Classify small images by a Keras 3 model with a training loop in JAX, on one device."""

import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax


def make_images(seed, num):
    """Noise, with one bright row or column in it: five of each are ten classes."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, num)
    images = random.normal(0, 0.5, (num, 5, 5, 1)).astype("float32")
    rows = np.eye(5, dtype="float32")[:, :, None] * np.ones(5, "float32")
    lines = np.concatenate([rows, rows.swapaxes(1, 2)])
    return images + lines[labels][..., None], labels


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((5, 5, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Activation("relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(31, activation="relu"),
        keras.layers.Dense(10),
    ]
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
tx = optax.adam(3e-3)


def loss_fn(trainable, non_trainable, x, y):
    logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
    return cross_entropy(y, logits), non_trainable


@jax.jit
def train_step(trainable, non_trainable, opt_state, x, y):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, non_trainable), grads = grad_fn(trainable, non_trainable, x, y)
    updates, opt_state = tx.update(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), non_trainable, opt_state, loss


@jax.jit
def count_correct(trainable, non_trainable, x, y):
    logits, _ = model.stateless_call(trainable, non_trainable, x, training=False)
    return jnp.sum(jnp.argmax(logits, axis=-1) == y)


x_train, y_train = make_images(0, 2048)
x_test, y_test = make_images(1, 450)  # the last batch of 64 is short
trainable = [v.value for v in model.trainable_variables]
non_trainable = [v.value for v in model.non_trainable_variables]
opt_state = tx.init(trainable)
losses = []
for epoch in range(4):
    for i in range(0, len(x_train), 64):
        trainable, non_trainable, opt_state, loss = train_step(
            trainable, non_trainable, opt_state, x_train[i : i + 64], y_train[i : i + 64]
        )
        losses.append(float(loss))
    print(f"epoch {epoch}: loss {np.mean(losses[-32:]):.4f}")

correct = 0
for i in range(0, len(x_test), 64):
    x, y = x_test[i : i + 64], y_test[i : i + 64]
    correct += int(count_correct(trainable, non_trainable, x, y))
accuracy = correct / len(x_test)
print(f"accuracy {accuracy:.4f}")

for variable, value in zip(model.trainable_variables, trainable, strict=True):
    variable.assign(value)
for variable, value in zip(model.non_trainable_variables, non_trainable, strict=True):
    variable.assign(value)
model.save(Path(tempfile.gettempdir()) / "bars.keras")
