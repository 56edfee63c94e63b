"""Hops that are defined outside of the package, and where they are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero import extend
from tests import zoo

WHOLE = {
    "w": zoo.normal(jax.random.key(0), 0, 16, 24),
    "stack": zoo.normal(jax.random.key(0), 1, 3, 24, 24),
}
X = zoo.normal(jax.random.key(0), 2, 48, 16, scale=1.0)


@dataclasses.dataclass(frozen=True)
class _Decayed(extend.GradientHop):
    decay: float = 0.5

    def corrected(self, gradient, residual):
        return gradient + residual

    def residual(self, corrected, sent):
        return self.decay * (corrected - sent)


class _TwiceTheDelta(extend.WeightHop):
    """The difference times two, which is exact: the same bits as `WeightDelta`."""

    def difference(self, weights, kept):
        return 2 * (weights - kept)

    def updated(self, kept, received):
        return kept + received / 2


def _loss(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["w"], params["stack"])
    return jnp.mean(h**2)


def _run(config, microbatches=1):
    """Gradients and wire state after three steps, the weights moved before each."""
    config = dataclasses.replace(config, min_quantized_size=100)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), config)
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    step = jax.jit(zero.value_and_grad(_loss, microbatches=microbatches))
    for _ in range(3):
        _, grads, state = step(params, X, wire_state=state)
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
    return jax.device_get((grads, state))


def _gradients(hop):
    return jz.zero3(gradients=jz.PerAxis(node=hop))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.one_in(2)
def test_without_decay_it_is_error_feedback(microbatches):
    codec = jz.Int4(block=128)
    want = _run(_gradients(jz.ErrorFeedback(codec)), microbatches)
    got = _run(_gradients(_Decayed(codec, decay=1.0)), microbatches)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_with_decay_it_keeps_less():
    codec = jz.Int4(block=128)
    sizes = [
        np.linalg.norm(_run(_gradients(_Decayed(codec, decay=decay)))[1].errors["w"].astype("f4"))
        for decay in (1.0, 0.5, 0.0)
    ]
    assert sizes[0] > sizes[1] > sizes[2] == 0


def test_a_weight_hop_has_the_bits_of_the_difference_it_sends():
    want, got = (
        _run(jz.ZeroConfig(weights=jz.PerAxis(node=hop), hpz=jz.HpZ(codec=None)))
        for hop in (jz.WeightDelta(), _TwiceTheDelta())
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_residual_has_its_type_and_the_report_knows_the_wire():
    config = dataclasses.replace(_gradients(_Decayed(dtype=jnp.float16)), min_quantized_size=100)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"), config)
    params = zero.shard(WHOLE)
    state = zero.init_wire_state(params)
    assert state.errors["w"].dtype == jnp.float16
    plan = zero.plan(_loss, params, X, wire_state=state)
    traffic = zero.report(params, plan=plan).traffic
    sent = {(t.collective, t.dtype) for t in traffic.transfers if t.purpose == "gradients"}
    assert ("all-to-all", "uint8") in sent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jz.zero3(weights=jz.PerAxis(node=_Decayed())), "`weights.node` cannot be `_Dec"),
        (lambda: _gradients(_TwiceTheDelta()), "`gradients.node` cannot be `_Twice.*for weights"),
        (lambda: jz.zero3(weights=jz.PerAxis(node=_TwiceTheDelta())), "`weights.node=_TwiceTheDe"),
        (
            lambda: jz.hsdp(gradients=jz.PerAxis(node=_Decayed())),
            r"`gradients.node=_Decayed\(...\)` needs gradients that are split over nodes",
        ),
        (lambda: _Decayed(dtype=jnp.int8), "`dtype` of `_Decayed` must be a float type"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["min_quantized_size", "param_persistence_threshold"])
def test_sizes_of_a_config_are_integers(name):
    config = jz.ZeroConfig()
    object.__setattr__(config, name, None)  # and not `ZeroConfig(...)`: annotations are checked
    with pytest.raises(ValueError, match=f"`{name}` of `ZeroConfig` must be an integer.*got None"):
        config.__post_init__()
    object.__setattr__(config, name, np.int64(5))
    config.__post_init__()
