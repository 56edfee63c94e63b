"""A small model with leaves that no device count divides, and the oracle on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from tests import zoo

ROWS = 16


def whole_params():
    key = jax.random.key(0)
    return {
        "body": {"w": zoo.normal(key, 0, 8, 15), "b": zoo.normal(key, 1, 15)},
        "head": zoo.normal(key, 2, 15, 31),  # no dim of it divides
        "table": zoo.normal(key, 3, 24, 31),
    }


def make_rows(zero, features=8):
    rows = 2 * zero.num_devices
    return zoo.normal(jax.random.key(1), 0, rows, features, scale=1.0)


def predict(body, head, table, x):
    hidden = jnp.tanh(x @ body["w"] + body["b"][None])
    return jax.nn.logsumexp(hidden @ head @ table.T, axis=-1).mean()


def mean_loss(params, x):
    return predict(params["body"], params["head"], params["table"], x)


def assert_equal(zero, got, want):
    loss, grads = got
    want_loss, want_grads = jax.device_get(want)
    zoo.assert_close(jax.device_get(loss), want_loss, 1e-5, "loss")
    zoo.assert_close(jax.device_get(zero.unshard(grads)), want_grads, 1e-5, "grads")


def transformed(zero, f, argnums=0, **options):
    """The transformed function: under `jit`, or, on explicit meshes, as it is."""
    step = zero.value_and_grad(f, argnums, **options)
    return step if AxisType.Explicit in zero.mesh.axis_types else jax.jit(step)


def on_one_device(f, argnums=0):
    """On one device and whole arrays, in one program."""
    return jax.jit(jax.value_and_grad(f, argnums))
