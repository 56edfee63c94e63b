"""Classify small images by a Keras 3 model with a training loop in JAX, on 8 CPU devices."""

import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax

import jaxzero as jz

jax.config.update("jax_num_cpu_devices", 8)  # pretend; leave it out where there are GPUs


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
zero = jz.Zero(jz.make_mesh(nodes=2))
is_seed = [v.name == "seed_generator_state" for v in model.non_trainable_variables]
aux_reduce = ["first" if seed else "mean" for seed in is_seed]


def loss_fn(trainable, non_trainable, x, y):
    pairs = zip(non_trainable, is_seed, strict=True)
    non_trainable = [jz.fold_in_device(v) if seed else v for v, seed in pairs]
    logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
    return cross_entropy(y, logits), non_trainable


@jax.jit
def train_step(trainable, non_trainable, opt_state, x, y):
    grad_fn = zero.value_and_grad(
        loss_fn,
        has_aux=True,
        aux_reduce=aux_reduce,
        batch_argnums=("x", "y"),
        row_statistics="device",  # of BatchNormalization
    )
    (loss, non_trainable), grads = grad_fn(trainable, non_trainable, x, y)
    updates, opt_state = tx.update(grads, opt_state, trainable)
    return optax.apply_updates(trainable, updates), non_trainable, opt_state, loss


def count_correct(trainable, non_trainable, batch):
    (x, y), weights = batch
    logits, _ = model.stateless_call(trainable, non_trainable, x, training=False)
    return jnp.sum(weights * (jnp.argmax(logits, axis=-1) == y))


evaluate = jax.jit(zero.apply(count_correct, batch_argnums="batch", out_reduce="sum"))


x_train, y_train = make_images(0, 2048)
x_test, y_test = make_images(1, 450)  # the last batch of 64 is short
trainable = zero.shard([v.value for v in model.trainable_variables])
non_trainable = [v.value for v in model.non_trainable_variables]
opt_state = zero.init_optimizer(tx, trainable)
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
    batch = jz.pad_batch((x_test[i : i + 64], y_test[i : i + 64]), zero, rows=64)
    correct += int(evaluate(trainable, non_trainable, batch))
accuracy = correct / len(x_test)
print(f"accuracy {accuracy:.4f}")

for variable, value in zip(model.trainable_variables, zero.unshard(trainable), strict=True):
    variable.assign(value)
for variable, value in zip(model.non_trainable_variables, non_trainable, strict=True):
    variable.assign(value)
model.save(Path(tempfile.gettempdir()) / "bars.keras")
