"""Classify points on three spirals by a Haiku network with state, on one device."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_spirals(seed, num):
    """Points on three spiral arms, with noise; which arm is the label."""
    random = np.random.default_rng(seed)
    labels, radius = random.integers(0, 3, num), random.uniform(0.2, 1.0, num)
    angle = 4 * radius + 2 * np.pi / 3 * labels + random.normal(0, 0.1, num)
    points = radius * np.stack([np.cos(angle), np.sin(angle)])
    return points.T.astype("float32"), labels


def forward(x, is_training):
    x = hk.Linear(64)(x)
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
    x = jax.nn.relu(norm(x, is_training))
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.1, x)
    x = jax.nn.relu(hk.Linear(31)(x))
    return hk.Linear(3)(x)


network = hk.transform_with_state(forward)
tx = optax.adamw(1e-2)


def loss_fn(params, state, key, batch):
    x, y = batch
    logits, state = network.apply(params, state, key, x, is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state


@jax.jit
def train_step(params, state, opt_state, key, batch):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = grad_fn(params, state, key, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), state, opt_state, loss


@jax.jit
def count_correct(params, state, batch):
    x, y = batch
    logits, _ = network.apply(params, state, None, x, is_training=False)
    return jnp.sum(jnp.argmax(logits, axis=-1) == y)


x_train, y_train = make_spirals(0, 2048)
x_test, y_test = make_spirals(1, 450)  # the last batch of 128 is short
keys = hk.PRNGSequence(0)
params, state = network.init(next(keys), x_train[:1], is_training=True)
opt_state = tx.init(params)
losses = []
for epoch in range(6):
    for i in range(0, len(x_train), 128):
        batch = x_train[i : i + 128], y_train[i : i + 128]
        params, state, opt_state, loss = train_step(params, state, opt_state, next(keys), batch)
        losses.append(float(loss))
    print(f"epoch {epoch}: loss {np.mean(losses[-16:]):.4f}")

correct = 0
for i in range(0, len(x_test), 128):
    batch = x_test[i : i + 128], y_test[i : i + 128]
    correct += int(count_correct(params, state, batch))
accuracy = correct / len(x_test)
print(f"accuracy {accuracy:.4f}")
