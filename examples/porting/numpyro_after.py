"""Fit a hierarchical logistic regression by stochastic variational inference, on 8 CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import jaxzero as jz

jax.config.update("jax_num_cpu_devices", 8)  # pretend; leave it out where there are GPUs
zero = jz.Zero(jz.make_mesh(nodes=2))

NUM_GROUPS, NUM_FEATURES, NUM_TRAIN, NUM_TEST = 50, 12, 4096, 450


def make_data(num):
    """Two outcomes, by features that count alike everywhere and an offset of each group."""
    random = np.random.default_rng(0)
    weights = random.normal(0, 1, NUM_FEATURES)
    offsets = random.normal(0, 2, NUM_GROUPS)
    x = random.normal(0, 1, (num, NUM_FEATURES)).astype("float32")
    group = random.integers(0, NUM_GROUPS, num)
    logits = x @ weights + offsets[group]
    return {"x": x, "group": group, "y": (random.logistic(0, 1, num) < logits).astype("float32")}


def model(x, group, y=None):
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([NUM_FEATURES]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    with numpyro.plate("groups", NUM_GROUPS):
        offsets = numpyro.sample("offsets", dist.Normal(0, spread))
    with numpyro.plate("rows", NUM_TRAIN, subsample_size=len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights + offsets[group]), obs=y)


guide = AutoNormal(model)
tx, elbo = optax.adam(5e-2), Trace_ELBO()
svi = SVI(model, guide, tx, elbo)


def loss_fn(params, key, batch):
    return elbo.loss(key, svi.constrain_fn(params), model, guide, **batch)


@jax.jit
def train_step(params, opt_state, key, batch):
    key, step_key = jax.random.split(key)
    loss, grads = zero.value_and_grad(loss_fn)(params, step_key, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, key, loss


def count_correct(params, batch):
    batch, row_weights = batch
    latent = guide.median(svi.constrain_fn(params))
    logits = batch["x"] @ latent["weights"] + latent["offsets"][batch["group"]]
    return jnp.sum(row_weights * ((logits > 0) == batch["y"]))


evaluate = jax.jit(zero.apply(count_correct, out_reduce="sum"))


data = make_data(NUM_TRAIN + NUM_TEST)
train = {name: x[:NUM_TRAIN] for name, x in data.items()}
test = {name: x[NUM_TRAIN:] for name, x in data.items()}
state = svi.init(jax.random.key(0), **{name: x[:128] for name, x in train.items()})
params = zero.shard(svi.optim.get_params(state.optim_state))
opt_state = zero.init_optimizer(tx, params)
key = state.rng_key
losses = []
for epoch in range(5):
    for i in range(0, NUM_TRAIN, 128):
        batch = {name: x[i : i + 128] for name, x in train.items()}
        params, opt_state, key, loss = train_step(params, opt_state, key, batch)
        losses.append(float(loss))
    print(f"epoch {epoch}: loss {np.mean(losses[-32:]):.1f}")

correct = 0
for i in range(0, NUM_TEST, 128):
    batch = {name: x[i : i + 128] for name, x in test.items()}
    correct += int(evaluate(params, jz.pad_batch(batch, zero, rows=128)))
accuracy = correct / NUM_TEST
print(f"accuracy {accuracy:.4f}")
