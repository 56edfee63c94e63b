"""`Zero.verify` finds losses that are no mean of rows, and names the line where rows meet.

Each loss is right on one device, and wrong as it is on several. The line that is at fault is
marked; where rows meet in several operations of a line, any of them counts.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxzero as jz

AXES = ("node", "local")
FAULTS = {}
RIGHT = {}


def _fault(loss):
    FAULTS[loss.__name__] = loss
    return loss


def _right(loss):
    RIGHT[loss.__name__] = loss
    return loss


def _hidden(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def _each(params, batch):
    return (_hidden(params, batch) @ params["v"] - batch["y"]) ** 2


@_fault
def normalised_advantages(params, batch):
    advantages = batch["y"]
    centred = advantages - advantages.mean()  # fault
    return -jnp.mean(centred / (jnp.std(centred) + 1e-8) * (_hidden(params, batch) @ params["v"]))


@_fault
def mean_over_tokens(params, batch):
    mask = (batch["y"] > 0.1).astype(jnp.float32)
    total = jnp.sum(_each(params, batch) * mask)
    return total / (jnp.sum(mask) + 1)  # fault


@_fault
def contrastive_without_gather(params, batch):
    hidden = _hidden(params, batch)
    logits = hidden @ hidden.T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))  # fault


@_fault
def batch_norm(params, batch):
    hidden = batch["x"] @ params["w"]
    centred = hidden - hidden.mean(0, keepdims=True)  # fault
    hidden = centred / jnp.sqrt(jnp.mean(centred**2, 0, keepdims=True) + 1e-5)
    return jnp.mean((jnp.tanh(hidden) @ params["v"] - batch["y"]) ** 2)


@_fault
def batch_norm_in_a_scan(params, batch):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        return x - x.mean(0, keepdims=True), None  # fault

    x, _ = lax.scan(layer, _hidden(params, batch), params["layers"])
    return jnp.mean((x @ params["v"] - batch["y"]) ** 2)


@_fault
def largest_row(params, batch):
    return jnp.max(_each(params, batch))  # fault


@_fault
def hardest_rows(params, batch):
    return jnp.mean(lax.top_k(_each(params, batch), 2)[0])  # fault


@_fault
def variance_of_rows(params, batch):
    return jnp.var(_each(params, batch))  # fault


@_fault
def root_of_the_mean(params, batch):
    return jnp.sqrt(jnp.mean(_each(params, batch)))  # fault


@_fault
def softmax_over_rows(params, batch):
    weights = jax.nn.softmax(batch["y"])  # fault
    return jnp.sum(weights * _each(params, batch))


@_fault
def sum_over_rows(params, batch):
    return jnp.sum(_each(params, batch))  # its mean is taken over devices


@_fault
def running_sums_over_rows(params, batch):
    sums = jnp.cumsum(_each(params, batch))  # fault
    return jnp.mean(sums)


@_fault
def neighbours(params, batch):
    hidden = _hidden(params, batch)
    return jnp.mean((hidden - jnp.roll(hidden, 1, axis=0)) ** 2)  # fault


@_fault
def mixup_with_reversed_rows(params, batch):
    x = batch["x"] + batch["x"][::-1]  # fault
    return jnp.mean(jnp.tanh(x @ params["w"]) @ params["v"])


@_fault
def decorrelated_features(params, batch):
    hidden = _hidden(params, batch)
    covariance = hidden.T @ hidden / hidden.shape[0]
    return jnp.sum(covariance**2)  # fault


@_fault
def scaled_by_the_largest_input(params, batch):
    y = batch["y"] / jnp.max(jnp.abs(batch["y"]))  # fault
    return jnp.mean((_hidden(params, batch) @ params["v"] - y) ** 2)


@_fault
def sorted_pairs(params, batch):
    order = jnp.argsort(batch["y"])  # fault
    predicted = (_hidden(params, batch) @ params["v"])[order]
    return jnp.mean(jax.nn.relu(predicted[:-1] - predicted[1:]))


@_fault
def clipped_by_the_batch_gradient(params, batch):
    @jax.custom_vjp
    def clip(x):
        return x

    def backward(_, cotangent):
        return (cotangent / (1e-3 + jnp.sqrt(jnp.sum(cotangent**2))),)

    clip.defvjp(lambda x: (x, None), backward)
    hidden = clip(_hidden(params, batch))  # fault: the line of the call is that of its backward
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


@_fault
def product_of_two_means(params, batch):
    error = _each(params, batch)
    return jnp.mean(error) * jnp.mean(batch["y"] ** 2)  # fault


@_fault
def same_dropout_on_every_device(params, batch, key):
    hidden = _hidden(params, batch)
    kept = jax.random.bernoulli(key, 0.5, hidden.shape)  # fault
    return jnp.mean((jnp.where(kept, hidden, 0) @ params["v"] - batch["y"]) ** 2)


@_right
def mean_of_rows(params, batch):
    return jnp.mean(_each(params, batch))


@_right
def advantages_normalised_over_devices(params, batch):
    y = batch["y"]
    mean = lax.pmean(y.mean(), AXES)
    std = jnp.sqrt(lax.pmean(((y - mean) ** 2).mean(), AXES))
    return -jnp.mean((y - mean) / std * (_hidden(params, batch) @ params["v"]))


@_right
def dropout_by_device(params, batch, key):
    hidden = _hidden(params, batch)
    kept = jax.random.bernoulli(jz.fold_in_device(key), 0.5, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden, 0) @ params["v"] - batch["y"]) ** 2)


def _verify(loss, **options):
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.standard_normal(shape, np.float32)

    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = {"w": normal(6, 8) / 2, "layers": normal(2, 8, 8) / 3, "v": normal(8)}
    batch = {"x": normal(24, 6), "y": normal(24)}
    keys = [jax.random.key(0)] if "key" in inspect.signature(loss).parameters else []
    return zero.verify(loss, zero.shard(params), batch, *keys, variations=False, **options)


_QUICK = ("batch_norm_in_a_scan", "same_dropout_on_every_device")


@pytest.mark.parametrize(
    "name",
    [x if x in _QUICK else pytest.param(x, marks=pytest.mark.exhaustive) for x in FAULTS],
)
def test_a_loss_that_mixes_rows(name):
    loss = FAULTS[name]
    report = _verify(loss)
    assert not report.ok and report.cause == ("keys" if "key" in _names(loss) else "rows")
    lines, first = inspect.getsourcelines(loss)
    marked = [first + i for i, line in enumerate(lines) if "# fault" in line]
    if marked:
        assert f"{__file__.rpartition('/')[2]}:{marked[0]}:" in report.first, str(report)
    with pytest.raises(AssertionError, match="beyond their bounds|same random numbers"):
        report.raise_if_wrong()


def _names(loss):
    return inspect.signature(loss).parameters


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_does_not(name):
    report = _verify(RIGHT[name])
    report.raise_if_wrong()
    assert report.first == ""


@pytest.mark.ci
def test_rows_that_meet_in_a_micro_batch():
    """Over devices the statistics are those of all rows; a micro-batch has others."""
    loss = RIGHT["advantages_normalised_over_devices"]
    report = _verify(loss, microbatches=3)
    assert not report.ok and report.cause == "rows"
