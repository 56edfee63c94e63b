"""Train a small network with Flax NNX and ZeRO-3 on 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxzero as jz

jax.config.update("jax_num_cpu_devices", 8)  # pretend; leave it out where there are GPUs
zero = jz.Zero(jz.make_mesh(nodes=2))
tx = optax.adamw(1e-2)


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden1 = nnx.Linear(2, 64, rngs=rngs)
        self.norm1 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.hidden2 = nnx.Linear(64, 31, rngs=rngs)
        self.norm2 = nnx.BatchNorm(31, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.output = nnx.Linear(31, 3, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm1(self.hidden1(x)))
        x = nnx.relu(self.norm2(self.hidden2(x)))
        return self.output(self.dropout(x, rngs=rngs))


def spirals(seed, num):
    """Points near one of three arms of a spiral; the class is the arm."""
    random = np.random.default_rng(seed)
    label = random.integers(3, size=num)
    radius = random.uniform(0.1, 1, num)
    angle = 2 * np.pi / 3 * label + 4 * radius + random.normal(0, 0.1, num)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"x": x.astype(np.float32), "label": label}


@nnx.jit
def train_step(model, opt_state, rngs, batch):
    key = rngs.dropout()

    def loss_fn(model, batch):
        logits = model(batch["x"], rngs=nnx.Rngs(jz.fold_in_device(key)))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), nnx.state(model, nnx.BatchStat)

    grad_fn = zero.value_and_grad(loss_fn, has_aux=True, row_statistics="device")  # of BatchNorm
    (loss, batch_stats), grads = grad_fn(model, batch)
    params, grads = nnx.state(model, nnx.Param), nnx.state(grads, nnx.Param)
    updates, opt_state = tx.update(grads, opt_state, params)
    nnx.update(model, optax.apply_updates(params, updates), batch_stats)
    return opt_state, loss


@nnx.jit
def num_correct(model, batch):
    def count(model, batch):
        batch, weights = batch
        logits = model(batch["x"])
        return jnp.sum(weights * (jnp.argmax(logits, axis=-1) == batch["label"]))

    return zero.apply(count, out_reduce="sum")(model, batch)


train, test = spirals(0, 2048), spirals(1, 500)
model = zero.init(lambda: MLP(nnx.Rngs(0)))
opt_state = zero.init_optimizer(tx, nnx.state(model, nnx.Param))
rngs = nnx.Rngs(dropout=1)
model.train()
for step in range(100):
    rows = np.random.default_rng(step).choice(2048, 256, replace=False)
    batch = {name: x[rows] for name, x in train.items()}
    opt_state, loss = train_step(model, opt_state, rngs, batch)
    if step < 3 or step % 25 == 24:
        print(f"step {step + 1}: loss {loss:.5f}")

model.eval()
correct = 0
for start in range(0, 500, 64):  # the last batch has 52 rows
    batch = {name: x[start : start + 64] for name, x in test.items()}
    correct += num_correct(model, jz.pad_batch(batch, zero))
print(f"test accuracy {correct / 500:.3f}")
