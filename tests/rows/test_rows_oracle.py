"""A step that sends rows of tables equals `jax.value_and_grad` on one device, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxzero as jz
from jaxzero._execute import table_rows

from .models import MODELS, ROWS, Model


@pytest.fixture(autouse=True)
def _any_saving(monkeypatch):
    monkeypatch.setattr(table_rows, "_pays", lambda rows, weight: True)
    with jax.enable_x64(True):
        yield


def _check(model: Model, zero: jz.Zero, **options) -> None:
    params, batch = model.init(jax.random.key(0)), model.batch()
    stored = zero.init(model.init, jax.random.key(0))
    plan = zero.plan(model.loss, stored, batch, **options)
    assert sorted(x.name for x in plan.rows) == sorted(model.moves), str(plan)
    loss, grads = jax.jit(zero.value_and_grad(model.loss, **options))(stored, batch)
    expected, wanted = jax.jit(jax.value_and_grad(model.loss))(params, batch)
    _equal((loss, zero.unshard(grads)), (expected, wanted))


def _equal(found, wanted) -> None:
    """Up to rounding: of a sum of at most 4 ids of each row and as many terms of the mean.

    Terms of a sum are no larger than 16 times the largest element that they are summed up to.
    """
    num = 4 * ROWS * 16
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        eps = float(jnp.finfo(y.dtype).eps)
        atol = num * eps * max(1e-30, float(np.max(np.abs(y))))
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    if name == "mixed":
        pytest.skip("in 16 bits: `test_16_bits`")
    _check(MODELS[name], jz.Zero(jz.make_mesh(nodes=2)))
