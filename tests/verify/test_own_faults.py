"""`Zero.verify` finds errors that are planted in jaxzero itself, and names what they spoil.

What is wrong then is an error of the step: plain JAX on the rows of each device, which none of this
code computes, gives other values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxzero as jz

from .own_faults import ENCODED, FAULTS


def _verify(config=None, aux=False, weighted=False, random=False, microbatches=1):
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.standard_normal(shape, np.float32)

    params = {
        "bias": normal(16),
        "first": normal(16, 16) / 4,
        "layers": normal(3, 16, 16) / 4,
        "padded": normal(13),
    }
    batch = {"x": normal(48, 16), "y": normal(48)}

    def loss(params, batch, key=None):
        x = jnp.tanh(batch["x"] @ params["first"] + params["bias"][None])
        if key is not None:
            kept = jax.random.bernoulli(jz.fold_in_device(key), 0.8, x.shape)
            x = jnp.where(kept, x, 0)
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        error = (x[:, :13] @ params["padded"] - batch["y"]) ** 2
        if weighted:
            return jnp.sum(error), jnp.sum(batch["y"] > 0).astype(jnp.float32)
        if aux:
            return jnp.mean(error), {"count": jnp.sum(error), "largest": jnp.max(error)}
        return jnp.mean(error)

    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    keys = [jax.random.key(0)] if random else []
    return zero.verify(
        loss,
        zero.shard(params),
        batch,
        *keys,
        tx=optax.sgd(0.1),
        has_aux=aux,
        aux_reduce={"count": "sum", "largest": "max"} if aux else None,
        weighted=weighted,
        microbatches=microbatches,
        variations=False,
    )


_QUICK = ("one_element_not_sent", "a_wrong_scale_of_gradients")
_CASES = [x if x in _QUICK else pytest.param(x, marks=pytest.mark.exhaustive) for x in FAULTS]


@pytest.mark.parametrize("name", _CASES)
def test_a_planted_error(name, monkeypatch):
    plant, spoilt, cause, options = FAULTS[name]
    plant(monkeypatch)
    report = _verify(**options)
    assert not report.ok and report.cause == cause, str(report)
    found = {x.name if x.kind != "aux" else x.name for x in report.wrong}
    assert spoilt <= found, f"{found}\n{report}"
    if len(spoilt) == 1 and spoilt != {"loss"}:  # named, and nothing else is
        assert found == spoilt, str(report)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": ENCODED},
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in ({"aux": True}, {"weighted": True}, {"random": True}, {"microbatches": 3})
        ),
    ],
    ids=str,
)
@pytest.mark.one_in(2)
def test_nothing_is_wrong_without_one(options):
    _verify(**options).raise_if_wrong()
