"""Programs and arguments that pipeline stages refuse, and what the errors say."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxzero as jz

from . import models


def _zero() -> jz.Zero:
    return jz.Zero(jz.make_mesh(2, devices=jax.devices()[:4]), jz.pipeline(2))


def _two_loops(params, batch):
    x = params["embed"][batch["ids"]]
    for _ in range(2):
        x, _ = lax.scan(lambda x, w: (models.layer(x, w), None), x, params["layers"])
    return models.cross_entropy(x, params["head"], batch)


def _loop_in_remat(params, batch):
    run = lambda x: lax.scan(lambda x, w: (models.layer(x, w), None), x, params["layers"])[0]  # noqa: E731
    x = jax.checkpoint(run)(params["embed"][batch["ids"]])
    return models.cross_entropy(x, params["head"], batch)


def _norm_of_layers(params, batch):
    norm = jnp.linalg.svd(params["layers"]["up"], compute_uv=False)[0, 0]
    return models.LOSSES["untied"](params, batch) + lax.stop_gradient(norm)


def _loop_over_a_list(params, batch):
    x = params["embed"][batch["ids"]]
    for w in params["layers"]:
        x = jnp.tanh(x @ w @ w.T)
    return models.cross_entropy(x, params["head"], batch)


def _permutes(params, batch):
    everyone = lax.ppermute(params["head"], "local", [(0, 1), (1, 0)])
    return models.LOSSES["untied"](params | {"head": everyone}, batch)


def _reversed(params, batch):
    start = params["embed"][batch["ids"]]
    body = lambda x, w: (models.layer(x, w), None)  # noqa: E731
    x, _ = lax.scan(body, start, params["layers"], reverse=True)
    return models.cross_entropy(x, params["head"], batch)


def _while_in_layers(params, batch):
    def body(x, w):
        size = jnp.max(jnp.abs(lax.stop_gradient(x)))
        size = lax.while_loop(lambda m: m < 1.0, lambda m: 2 * m, size)
        return models.layer(x, w) / size, None

    x, _ = lax.scan(body, params["embed"][batch["ids"]], params["layers"])
    return models.cross_entropy(x, params["head"], batch)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_reversed, "from the last layer to the first"),
        (_while_in_layers, "has a `while` loop"),
        (_permutes, "`ppermute` .* outside of the layers"),
        (_two_loops, "loops"),
        (_loop_in_remat, "one forward loop over the layers"),
        (_norm_of_layers, "reads the stack `layers.up`"),
    ],
)
def test_refused_programs(loss, message):
    zero = _zero()
    with pytest.raises(NotImplementedError, match=message):
        zero.plan(loss, zero.shard(models.params()), models.batch())


def test_refused_arguments():
    params, batch = models.params(), models.batch()
    with pytest.raises(ValueError, match=r"`layers.down` .* at least 2 layers"):
        _zero().shard(jax.tree.map(lambda x: x[:1], params))
    with pytest.raises(ValueError, match="`stages` must divide the number of nodes"):
        jz.make_mesh(4, stages=3)
    with pytest.raises(ValueError, match="`mesh` has stages"):
        jz.Zero(jz.make_mesh(4, stages=2))
    with pytest.raises(ValueError, match="`microbatches` of `Stages`"):
        jz.pipeline(0)
    with pytest.raises(ValueError, match="`layers` of `Stages`"):
        jz.pipeline(4, layers="")
    with pytest.raises(ValueError, match="wire|state from step to step|keep arrays"):
        dataclasses.replace(jz.zeropp4(), stages=jz.Stages(microbatches=4))
    zero = _zero()
    with pytest.raises(NotImplementedError, match="`local_steps` does not work with `stages`"):
        zero.local_steps(lambda *args: args)
    with pytest.raises(NotImplementedError, match="`layers` of `jz.Stages` does not name"):
        other = jz.Zero(zero.mesh, jz.pipeline(2, layers=("layers.up", "layers.down")))
        other.value_and_grad(models.LOSSES["tied"])(other.shard(params), batch)
    with pytest.raises(ValueError, match="`layers` of `jz.Stages` is 'blocks', and the leaves are"):
        other = jz.Zero(zero.mesh, jz.pipeline(2, layers="blocks"))
        other.value_and_grad(models.LOSSES["tied"])(other.shard(params), batch)
    listed = params | {"layers": [params["layers"]["up"][0]] * 2}
    with pytest.raises(NotImplementedError, match=r'name a list of layers by "layers\.\*"'):
        zero.plan(_loop_over_a_list, zero.shard(listed), batch)
