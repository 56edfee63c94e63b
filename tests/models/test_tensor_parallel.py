"""Tensor parallelism by specs and `jz.reshard`: logits of one device, and no weights gathered."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero import models
from tests import zoo

from .drawn import drawn

PLAIN = models.DecoderConfig(
    vocabulary_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_key_value_heads=4,
    head_size=6,
    rope=models.Rope(rotary_size=6),
)
FAMILIES = {
    "grouped heads": PLAIN,
    "fewer key-value heads": dataclasses.replace(PLAIN, num_key_value_heads=2),
    "scanned, norms of heads": dataclasses.replace(PLAIN, scan_layers=True, query_key_norm="head"),
    "learned positions, biases, tied": dataclasses.replace(
        PLAIN,
        rope=None,
        norm="layer",
        gated_mlp=False,
        query_key_value_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tied_head=True,
    ),
    "vocabulary does not divide": dataclasses.replace(PLAIN, vocabulary_size=37, tied_head=True),
    "latent": dataclasses.replace(
        PLAIN,
        num_key_value_heads=8,
        rope=models.Rope(rotary_size=2),
        latent=models.LatentConfig(query_rank=10, key_value_rank=12, plain_size=4, value_size=5),
    ),
    "experts": dataclasses.replace(
        PLAIN,
        experts=models.ExpertsConfig(
            num_experts=8, num_experts_per_token=2, intermediate_size=16, shared_size=24, bias=True
        ),
    ),
}
ENCODER = models.EncoderConfig(
    vocabulary_size=11, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2
)
VIT = models.ViTConfig(
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    image_size=(8, 8),
    patch_size=(4, 4),
)
IDS = np.random.default_rng(0).integers(0, 37, (2, 7)).astype(np.int32)


@functools.cache
def split(config: models.DecoderConfig):
    return drawn(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))


def logits(graph, params, ids):
    return nnx.merge(graph, params)(jnp.asarray(ids))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(2)
def test_logits_are_those_of_one_device_and_no_weight_is_gathered(name):
    graph, full = split(FAMILIES[name])
    program = jax.jit(logits, static_argnums=0)
    want = jax.device_get(program(graph, full, IDS))
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.shard(full)
    specs = models.tensor_parallel_specs(graph, params, size=4)
    served = jz.reshard(params, zero, specs=specs)
    got = program(graph, served, IDS)
    # Sums of at most 48 products, ten to a layer, in another order.
    allowed = 10 * 2 * np.sqrt(48) * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=allowed)
    text = program.lower(graph, served, IDS).compile().as_text()
    weights = {x.size for x in jax.tree.leaves(full) if x.ndim > 1}
    gathered = [
        x.line
        for x in zoo.hlo.collectives(text)
        if x.op == "all-gather" and x.results[0].size in weights
    ]
    assert not gathered
    matrices = [x for x in jax.tree.leaves(served) if x.ndim > 1]
    is_split = [x.sharding.shard_shape(x.shape) != x.shape for x in matrices]
    assert sum(is_split) >= 0.6 * len(is_split)


def test_experts_by_expert_give_the_same():
    graph, full = split(dataclasses.replace(FAMILIES["experts"], expert_loop="ragged"))
    zero = jz.Zero(jz.make_mesh(2))
    params = zero.shard(full)
    specs = models.tensor_parallel_specs(graph, params, size=4, experts="expert")
    assert specs["layers"][0]["mlp"]["gate"] == P("local")
    served = jz.reshard(params, zero, specs=specs)
    program = jax.jit(logits, static_argnums=0)
    want = jax.device_get(program(graph, full, IDS))
    got = program(graph, served, IDS)
    allowed = 10 * 2 * np.sqrt(48) * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=allowed)


def test_each_kind_of_array_has_its_spec():
    graph, full = split(FAMILIES["scanned, norms of heads"])
    specs = models.tensor_parallel_specs(graph, full, size=4, axis="model")
    layers = specs["layers"]
    assert layers["attention"]["query"]["kernel"] == P(None, None, "model")
    assert layers["attention"]["output"]["kernel"] == P(None, "model")
    assert layers["attention"]["query_norm"]["scale"] == P()
    assert layers["mlp"]["down"]["kernel"] == P(None, "model")
    assert specs["embedding"]["embedding"] == P("model")
    assert specs["head"]["kernel"] == P(None, "model")


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (PLAIN, 3, "num_heads is 8, which does not divide by `size`=3 devices"),
        (dataclasses.replace(PLAIN, intermediate_size=42), 4, "width of a perceptron is 42"),
        (PLAIN, 0, "`size` must be a number of devices"),
    ],
)
def test_sizes_that_do_not_divide_are_named(config, size, message):
    graph, full = split(config)
    with pytest.raises(ValueError, match=message):
        models.tensor_parallel_specs(graph, full, size=size)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (functools.partial(nnx.Linear, 4, 4), "Linear"),
        (functools.partial(models.Encoder, ENCODER), "Encoder"),
        (functools.partial(models.ViT, VIT), "ViT"),
    ],
)
def test_other_models_are_refused(make, name):
    graph, full = nnx.split(make(rngs=nnx.Rngs(0)))
    with pytest.raises(NotImplementedError, match=f"decoders only; got a model of type `{name}`"):
        models.tensor_parallel_specs(graph, full, size=2)


def test_an_unknown_way_of_experts_is_refused(monkeypatch):
    graph, full = split(PLAIN)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    with pytest.raises(ValueError, match='`experts` must be "width" or "expert"'):
        models.tensor_parallel_specs(graph, full, size=4, experts="each")
    assert jnp.ndim(jax.tree.leaves(full)[0]) >= 1
