"""`Zero.verify` with `local_steps`: what holds, and planted errors of steps and of the exchange."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxzero as jz
from jaxzero._collectives import comm_spec
from jaxzero._local_steps import exchange

INT8 = jz.Int8(block=32, scale_dtype="float32")


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _loss(params, batch):
    x = jnp.tanh(batch["x"] @ params["w"] + params["bias"][None])
    return jnp.mean((x @ params["padded"] - batch["y"]) ** 2)


def _batches(every):
    return {"x": _normal(every, 16, 8, seed=1), "y": _normal(every, 16, seed=2)}


def _verify(method, tx=None, loss=_loss, config=None, more=(), **options):
    config = config or jz.ZeroConfig(min_quantized_size=32)
    zero = jz.Zero(jz.make_mesh(nodes=2), config)
    params = {"w": _normal(8, 13) / 2, "bias": _normal(13), "padded": _normal(13, seed=3)}
    with jax.numpy_dtype_promotion("standard"):  # Adam's `decay ** count`
        return zero.verify(
            loss,
            zero.shard(params),
            _batches(method.every),
            *more,
            tx=tx or optax.sgd(0.1),
            local_steps=method,
            **options,
        )


METHODS = {
    "one step": (jz.diloco(every=1), optax.sgd(0.1, momentum=0.9)),
    "delay": (jz.LocalSteps(every=3, delay=1), optax.adam(1e-2)),
    "mixing": (jz.LocalSteps(every=3, delay=2, mixing=0.25), optax.sgd(0.1)),
    "codec": (jz.LocalSteps(every=2, codec=INT8), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.one_in(4)
def test_what_is_right_holds(name):
    method, tx = METHODS[name]
    report = _verify(method, tx)
    report.raise_if_wrong()
    kinds = {x.kind.removesuffix(", encoded") for x in report.checks}
    assert {"loss", "parameter", "outer parameter"} <= kinds and report.is_round
    assert ("optimizer state" in kinds) == bool(jax.tree.leaves(tx.init(jnp.zeros(1))))
    assert any("encoded" in x.kind for x in report.checks) == (method.codec is not None)
    assert "The round computes what one device would" in str(report)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", [jz.zeropp, jz.ddp, jz.hsdp], ids=lambda x: x.__name__)
def test_each_config_holds(preset):
    config = dataclasses.replace(preset(), min_quantized_size=0)
    report = _verify(jz.diloco(every=2), config=config, microbatches=2, float64=True)
    report.raise_if_wrong()
    assert len(report.notes) == (config.weights != jz.PerAxis())
    assert all(x.of_step < 1e-4 for x in report.roundings) and report.roundings


@pytest.mark.ci
def test_random_keys_and_aux():
    def loss(params, batch, key):
        kept = jax.random.bernoulli(jz.fold_in_device(key), 0.8, batch["x"].shape)
        return _loss(params, batch | {"x": jnp.where(kept, batch["x"], 0)}), jnp.ones(())

    keys = jax.random.split(jax.random.key(0), 2)
    report = _verify(jz.diloco(every=2), loss=loss, more=(keys,), has_aux=True)
    report.raise_if_wrong()
    assert "aux is not compared" in report.notes[0]


def _replace(patch, module, name, make):
    patch.setattr(module, name, make(getattr(module, name)))


def mean_of_the_first_node(patch):
    def make(mean):
        return lambda parts, x, nodes: mean(parts, x[:1], 1)

    _replace(patch, exchange, "mean_of_nodes", make)


def message_of_a_node_lost(patch):
    def make(mean):
        return lambda parts, x, nodes: mean(parts, x.at[1].set(0), nodes)

    _replace(patch, exchange, "mean_of_nodes", make)


def sums_for_means(patch):
    def make(mean):
        return lambda parts, x, nodes: mean(parts, x, 1)

    _replace(patch, exchange, "mean_of_nodes", make)


def one_node_keeps_its_parameters(patch):
    def make(merged):
        def changed(self, now, own, anchor):
            return jnp.where(lax.axis_index("node") == 1, now, merged(self, now, own, anchor))

        return changed

    _replace(patch, exchange.Exchange, "_merged", make)


def progress_of_the_delay_lost(patch):
    patch.setattr(exchange.Exchange, "_merged", lambda self, now, own, anchor: anchor)


def outer_state_not_kept(patch):
    patch.setattr(exchange.Exchange, "_with_state_part", lambda self, old, new, number: old)


def gradients_of_half_size(patch):
    patch.setattr(comm_spec.CommSpec, "divisor", property(lambda self: 2 * self.num_devices))


def wrong_scale_of_messages(patch):
    def make(decode):
        return lambda self, *args, **kwargs: 0.5 * decode(self, *args, **kwargs)

    _replace(patch, jz.Int8, "decode_rows", make)


ONE = METHODS["one step"][0]
EXCHANGED = {"outer parameter", "outer state", "parameter"}
FAULTS = {
    mean_of_the_first_node: (ONE, "exchange", EXCHANGED),
    message_of_a_node_lost: (ONE, "exchange", EXCHANGED),
    sums_for_means: (ONE, "exchange", EXCHANGED),
    one_node_keeps_its_parameters: (ONE, "exchange", {"parameter"}),
    progress_of_the_delay_lost: (jz.LocalSteps(every=2, delay=1), "exchange", {"parameter"}),
    outer_state_not_kept: (ONE, "exchange", {"outer state"}),
    gradients_of_half_size: (ONE, "node", EXCHANGED | {"optimizer state"}),
    wrong_scale_of_messages: (
        METHODS["codec"][0],
        "codecs",
        {f"{kind}, encoded" for kind in EXCHANGED},
    ),
}
_QUICK = (message_of_a_node_lost,)


@pytest.mark.parametrize(
    "plant",
    [x if x in _QUICK else pytest.param(x, marks=pytest.mark.exhaustive) for x in FAULTS],
    ids=lambda x: x.__name__,
)
def test_a_planted_error(plant, monkeypatch):
    method, cause, spoilt = FAULTS[plant]
    plant(monkeypatch)
    report = _verify(method, optax.sgd(0.1, momentum=0.9))
    assert not report.ok and report.cause == cause, str(report)
    assert {x.kind for x in report.wrong} == spoilt, str(report)
    if plant is one_node_keeps_its_parameters:
        assert "differs on node 1 of 2" in report.first


def test_a_loss_that_mixes_rows_fails_in_the_steps():
    def loss(params, batch):
        return _loss(params, batch | {"y": batch["y"] - batch["y"].mean()})

    report = _verify(ONE, loss=loss)
    assert report.cause == "node" and "differs on nodes 0, 1 of 2" in report.first


def test_errors():
    with pytest.raises(ValueError, match="compares rounds of one fragment, and .* has 2"):
        _verify(jz.LocalSteps(every=2, fragments=2))
    with pytest.raises(ValueError, match=r"sends nothing new with `delay=1`.*every=2"):
        _verify(jz.LocalSteps(every=1, delay=1))
    with pytest.raises(ValueError, match="leave out `argnums`"):
        _verify(ONE, in_one_program=True)
    with pytest.raises(ValueError, match="must be a `jz.LocalSteps`"):
        jz.Zero(jz.make_mesh(nodes=2)).verify(_loss, {}, {}, local_steps=3)
    with pytest.raises(ValueError, match="`batches` must be the batches of 1 steps, stacked"):
        _verify(ONE, more=(_normal(16, 3),))
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.shard({"w": _normal(8, 8)})
    with pytest.raises(NotImplementedError, match="takes one sharded tree"):
        zero.verify(_loss, params, params, tx=optax.sgd(0.1), local_steps=ONE)
