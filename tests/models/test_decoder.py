"""The decoder by itself: stacks and lists, dropout, 16 bits, experts, ZeRO, and wrong arguments.

That it computes what each family does is in `test_decoder_families.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero.models import (
    Decoder,
    DecoderConfig,
    DynamicScaling,
    ExpertsConfig,
    GroupRouting,
    LatentConfig,
    Rope,
    YarnScaling,
)
from tests import zoo

LENGTH = 9
MIXED = DecoderConfig(  # every other layer has a window and a rotation of its own
    vocabulary_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_key_value_heads=2,
    head_size=6,
    norm="rms_plus_one",
    norm_placement="both",
    query_key_norm="head",
    tied_head=True,
    embedding_scale=4.0,
    rope=Rope(rotary_size=6),
    sliding_rope=Rope(rotary_size=6, base=100.0),
    sliding_window=3,
    sliding_layers=(0, 2),
    embedding_dropout=0.1,
    attention_dropout=0.2,
    residual_dropout=0.3,
    initializer_range=0.3,
)
EXPERTS = dataclasses.replace(
    MIXED,
    num_layers=2,
    norm="rms",
    norm_placement="before",
    sliding_rope=None,
    sliding_window=None,
    sliding_layers=(),
    experts=ExpertsConfig(num_experts=3, num_experts_per_token=2, intermediate_size=8),
)
IDS = np.random.default_rng(0).integers(0, 29, (24, LENGTH)).astype(np.int32)
MASK = np.arange(LENGTH)[None] < np.random.default_rng(1).integers(4, LENGTH + 1, 24)[:, None]


@functools.cache
def built(config: DecoderConfig) -> tuple[Any, Any]:
    """Graph and parameters; those of a stack are those of the list, stacked."""
    if not config.scan_layers:
        model = jax.jit(lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1])()
        return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0], model
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    listed = nnx.to_pure_dict(
        built(dataclasses.replace(config, scan_layers=False, remat="none"))[1]
    )
    layers = [listed["layers"][i] for i in range(config.num_layers)]
    pure = listed | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
    nnx.replace_by_pure_dict(abstract, pure)
    return graph, abstract


def logits(config: DecoderConfig, ids=IDS[:3], mask=MASK[:3], **options):
    graph, params = built(config)
    run = jax.jit(lambda params, ids, mask, options: nnx.merge(graph, params)(ids, mask, **options))
    return np.asarray(run(params, ids, mask, options))


def loss(graph, params, batch):
    """Mean over rows of the loss of the next token."""
    ids, mask = batch
    scores = jax.nn.log_softmax(nnx.merge(graph, params)(ids, mask)[:, :-1].astype(jnp.float32))
    chosen = jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
    return -jnp.mean(jnp.where(mask[:, 1:], chosen, 0.0))


@pytest.mark.parametrize(
    "config", [MIXED, pytest.param(EXPERTS, marks=pytest.mark.exhaustive)], ids=["mixed", "experts"]
)
def test_a_stack_equals_a_list(config: DecoderConfig):
    key = jax.random.key(3)
    stacked = dataclasses.replace(config, scan_layers=True, remat="full")
    listed, scanned = (logits(each, dropout_key=key) for each in (config, stacked))
    # Only fusions differ. Dropout too is the same: keys belong to the numbers of layers.
    np.testing.assert_allclose(scanned, listed, rtol=0, atol=1e-5 * np.abs(listed).max())
    assert not np.allclose(listed, logits(config), atol=0.1), "there was no dropout"


def test_later_tokens_and_padding_are_not_seen():
    config = dataclasses.replace(MIXED, scan_layers=True)
    before = logits(config)
    changed = np.where(MASK[:3], IDS[:3], 5)
    changed[0, 6:] = (changed[0, 6:] + 1) % 29
    after = logits(config, changed)
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    assert not np.allclose(before[0, 6:], after[0, 6:])
    np.testing.assert_array_equal(before[1:][MASK[1:3]], after[1:][MASK[1:3]])


def test_positions_count_from_where_they_are_said_to():
    """Rotation knows distances only, so moved texts have the same logits; a gap is seen."""
    config = dataclasses.replace(MIXED, scan_layers=True)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (3, LENGTH))
    before = logits(config)
    np.testing.assert_array_equal(before, logits(config, positions=positions))
    moved = logits(config, positions=positions + 7)
    np.testing.assert_allclose(moved, before, rtol=0, atol=1e-4 * np.abs(before).max())
    gap = logits(config, positions=np.where(positions > 4, positions + 7, positions))
    assert not np.allclose(gap[:, -1], before[:, -1], atol=1e-2)


@pytest.mark.parametrize("name", ["embedding_dropout", "attention_dropout", "residual_dropout"])
def test_dropout_is_that_of_the_key(name: str):
    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), 0.0)
    one = dataclasses.replace(
        MIXED, num_layers=1, sliding_layers=(), sliding_window=None, **rates | {name: 0.5}
    )
    graph, params = built(one)
    run = jax.jit(lambda key: nnx.merge(graph, params)(jnp.asarray(IDS[:1]), dropout_key=key))
    key, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(run(key), run(key))
    assert not np.allclose(run(key), run(other), atol=0.1)


def test_bfloat16_computes_in_bfloat16_and_keeps_parameters():
    config = dataclasses.replace(MIXED, scan_layers=True)
    narrow = dataclasses.replace(config, compute_dtype="bfloat16")
    graph, params = built(narrow)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    got, want = logits(narrow), logits(config)
    assert got.dtype == jnp.bfloat16
    # About ten roundings of 2**-9 in each of the layers, which add up as a random walk does; the
    # largest of a few hundred errors is about three times the usual one.
    rms = np.sqrt(np.mean(want[MASK[:3]] ** 2))
    bound = 3 * np.sqrt(10 * config.num_layers) * 2**-9 * rms * 2
    np.testing.assert_allclose(np.float32(got)[MASK[:3]], want[MASK[:3]], rtol=0, atol=bound)
    # Through whole bfloat16 norms and rotations it would be this far off.
    assert np.abs(np.float32(got) - want)[MASK[:3]].max() > 2**-9 * rms


@pytest.mark.parametrize("tied", [True, False])
def test_losses_over_chunks_are_those_of_all_logits(tied: bool):
    config = dataclasses.replace(
        MIXED, scan_layers=True, tied_head=tied, logit_scale=0.5, logit_softcap=2.0
    )
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    params = jax.jit(lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1])()

    ids = jnp.asarray(IDS[:3])

    def chunked(params):
        model = nnx.merge(graph, params)
        return model.cross_entropy(model.hidden(ids)[:, :-1], ids[:, 1:], chunk=3).mean()

    def plain(params):
        scores = nnx.merge(graph, params)(ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]).mean()

    got, want = (jax.jit(jax.value_and_grad(each))(params) for each in (chunked, plain))
    zoo.assert_close(jax.device_get(got), jax.device_get(want), 1e-5, "loss and gradients")


def test_more_tokens_than_learned_positions():
    config = dataclasses.replace(MIXED, rope=None, sliding_rope=None, max_length=LENGTH)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    with pytest.raises(ValueError, match="`ids` holds 10 tokens per row, the model has positions "):
        jax.eval_shape(
            lambda params, ids: nnx.merge(graph, params)(ids), params, np.zeros((1, 10), np.int32)
        )


@pytest.mark.parametrize("normalize", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_experts_equal_a_loop_over_tokens(normalize: bool):
    """Both ways to compute them, and gradients of one by the other."""
    experts = dataclasses.replace(EXPERTS.experts, normalize=normalize, num_experts_per_token=2)
    config = dataclasses.replace(EXPERTS, experts=experts, num_layers=1)
    graph, params = built(config)
    block = nnx.merge(graph, params).layers[0].mlp
    x = zoo.normal(jax.random.key(0), 0, 2, 5, config.hidden_size, scale=1.0)
    want = np.zeros_like(x)
    router, gate, up, down = (
        np.asarray(each[...], np.float64)
        for each in (block.router.kernel, block.gate, block.up, block.down)
    )
    for at in np.ndindex(x.shape[:2]):
        shares = np.exp(x[at] @ router)
        shares /= shares.sum()
        chosen = np.argsort(-shares)[:2]
        total = shares[chosen].sum() if normalize else 1.0
        for e in chosen:
            wide = x[at] @ gate[e]
            wide = wide / (1 + np.exp(-wide)) * (x[at] @ up[e])
            want[at] += shares[e] / total * (wide @ down[e])
    ragged = dataclasses.replace(config, expert_loop="ragged")
    results = []
    for each in (config, ragged):
        graph, _ = built(each)

        @jax.jit
        def outputs(params, x, graph=graph):
            run = lambda params, x: nnx.merge(graph, params).layers[0].mlp(x)  # noqa: E731
            value, vjp = jax.vjp(run, params, x)
            return value, vjp(jnp.cos(value))

        value, gradients = outputs(params, x)
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-5 * np.abs(want).max())
        results.append(gradients)
    zoo.assert_close(*jax.device_get(results), 1e-5, "gradients")


def test_a_fresh_model_is_as_wide_as_it_is_said_to_be():
    _, params = built(
        dataclasses.replace(MIXED, num_layers=1, sliding_layers=(), sliding_window=None)
    )
    pure = nnx.to_pure_dict(params)
    deviation = np.std(pure["layers"][0]["mlp"]["up"]["kernel"])
    # Of 384 draws: within 5 standard errors of 1 / sqrt(2 n).
    np.testing.assert_allclose(deviation, 0.3, rtol=5 / np.sqrt(2 * 384))
    np.testing.assert_array_equal(pure["norm"]["scale"], 0)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_zero_of_scanned_layers_and_experts():
    """A step of ZeRO-3 is that of one device."""
    graph, params = built(dataclasses.replace(EXPERTS, scan_layers=True, remat="full"))
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    step = functools.partial(loss, graph)
    want = jax.jit(jax.value_and_grad(step))(params, (IDS, MASK))
    got, grads = zero.value_and_grad(step)(zero.shard(params), (IDS, MASK))
    np.testing.assert_allclose(got, want[0], rtol=1e-6)
    zoo.assert_close(jax.device_get(zero.unshard(grads)), jax.device_get(want[1]), 1e-5, "grads")


@pytest.mark.ci
@pytest.mark.slow
def test_a_step_of_zeropp_is_within_the_bound_of_its_codecs():
    # The head is tied and nothing is recomputed, so nothing is gathered between the two loops.
    config = dataclasses.replace(
        MIXED, sliding_layers=(), sliding_window=None, sliding_rope=None, scan_layers=True
    )
    graph, params = built(config)
    step = functools.partial(loss, graph)
    case = zoo.Case(
        name="decoder",
        loss=step,
        init=lambda key: (params,),
        batch=lambda key, num: (IDS[:num], MASK[:num]),
        oracle=step,
    )
    zoo.check_quantised(case, jz.Zero(zoo.make_mesh("2x4-auto"), zoo.PRESETS["zeropp"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a positive integer; got 0"),
        ({"num_key_value_heads": 3}, "`num_heads` must be a multiple of .*; got 4 and 3"),
        ({"residual_dropout": -0.1}, r"`residual_dropout` must be in \[0, 1\); got -0\.1"),
        ({"sliding_layers": ()}, "`sliding_window` is 3 and `sliding_layers` is .*or neither"),
        ({"sliding_layers": (4,)}, r"`sliding_layers` must be numbers from 0 to 3; got \(4,\)"),
        ({"unrotated_layers": (-1,)}, r"`unrotated_layers` must be numbers from 0 to 3; got"),
        (
            {"sliding_rope": Rope(rotary_size=6, pairs="neighbours")},
            "`sliding_rope` needs a `rope` of the same `rotary_size` and `pairs`",
        ),
        ({"residual": "parallel"}, "`residual` is 'parallel' and `norm_placement` is 'both'"),
        (
            {"latent": LatentConfig(key_value_rank=4, plain_size=2, value_size=3)},
            "`head_size` is 6, but `plain_size` of `latent` and `rotary_size` .* are 2 and 6",
        ),
        (
            {"latent": LatentConfig(key_value_rank=4, plain_size=2, value_size=3), "head_size": 8},
            "`query_key_norm` is 'head' and .*; latent attention has neither",
        ),
        ({"rope": Rope(rotary_size=8)}, "`rotary_size` of `rope` is 8, a head has 6 numbers"),
        ({"rope": None}, "`sliding_rope` needs a `rope` of the same `rotary_size` .* and None"),
        (
            {
                "experts": ExpertsConfig(
                    num_experts=2,
                    num_experts_per_token=1,
                    intermediate_size=4,
                    dense_layers=(1,),
                ),
                "scan_layers": True,
            },
            r"`scan_layers` needs layers that are alike, but layers \[1\] have no experts",
        ),
    ],
)
def test_config_refuses(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIXED, **change)


def test_choices_are_checked_without_a_type_checker_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    with pytest.raises(ValueError, match="`expert_loop` must be one of 'scan', 'ragged'; got 'no'"):
        dataclasses.replace(MIXED, expert_loop="no")


def test_more_experts_than_there_are():
    with pytest.raises(ValueError, match="`num_experts_per_token` is 3, but there are .* = 2"):
        ExpertsConfig(num_experts=2, num_experts_per_token=3, intermediate_size=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "`num_experts` is 8 and `num_groups` is 3. Groups must be of equal"),
        ({"num_groups": 8}, "at least two experts"),
        ({"num_chosen_groups": 5}, "`num_chosen_groups` is 5, but there are `num_groups` = 4"),
        ({"num_chosen_groups": 1}, "`num_experts_per_token` is 3, but the chosen groups hold 2"),
    ],
)
def test_groups_of_experts(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(
            num_experts=8,
            num_experts_per_token=3,
            intermediate_size=4,
            routing=GroupRouting(**{"num_groups": 4, "num_chosen_groups": 2} | change),
        )


def test_scalings_that_do_not_fit_a_rotation():
    with pytest.raises(ValueError, match="YarnScaling needs a `base` above 1; got 0.5"):
        Rope(rotary_size=4, base=0.5, scaling=YarnScaling(factor=2.0, trained_length=8))
    with pytest.raises(ValueError, match="DynamicScaling needs a `rotary_size` of at least 4"):
        Rope(rotary_size=2, scaling=DynamicScaling(factor=2.0, trained_length=8))


def test_rotation_in_pairs():
    with pytest.raises(ValueError, match="`rotary_size` must be even and at least 2; got 5"):
        Rope(rotary_size=5)
