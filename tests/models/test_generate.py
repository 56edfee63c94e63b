"""Generation by itself: random tokens, ways to hold the parameters, caches, and wrong arguments.

That every family writes the text of transformers is in `test_decoding_families.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from jaxzero import models
from jaxzero.models import Decoder, DecoderConfig, DynamicScaling, Rope, Sampling
from tests import zoo

from .drawn import drawn

CONFIG = DecoderConfig(  # every other layer has a window and a rotation of its own
    vocabulary_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=4,
    num_key_value_heads=2,
    head_size=6,
    query_key_norm="head",
    rope=Rope(rotary_size=6),
    sliding_rope=Rope(rotary_size=6, base=100.0),
    sliding_window=3,
    sliding_layers=(0, 2),
    initializer_range=0.3,
)
STACKED = dataclasses.replace(CONFIG, scan_layers=True)
IDS = np.random.default_rng(0).integers(0, 32, (8, 5)).astype(np.int32)
MASK = np.arange(5)[None] >= np.array([0, 1, 4, 2, 0, 3, 1, 2])[:, None]
NUM_NEW = 7
FULL_STACK = "f32[4,16,24]"  # gates of all layers
RANDOM = Sampling(temperature=0.8, top_k=20, top_p=0.9, stop_tokens=(3, 4), pad_token=31)
KEYS = jax.random.split(jax.random.key(5), len(IDS))


@functools.cache
def built(config: DecoderConfig) -> tuple[Any, Any]:
    return drawn(lambda: Decoder(config, rngs=nnx.Rngs(0)), seed=1)


def sample(graph: Any, sampling: Sampling, params: Any, batch: Any) -> models.Generated:
    ids, mask, keys = batch
    decoder = nnx.merge(graph, params)
    cache = decoder.make_cache(len(ids), ids.shape[1] + NUM_NEW)
    return models.generate(
        decoder.decode, cache, ids, mask, max_new_tokens=NUM_NEW, sampling=sampling, key=keys
    )


@functools.cache
def on_one_device(config: DecoderConfig) -> models.Generated:
    graph, params = built(config)
    run = jax.jit(functools.partial(sample, graph, RANDOM))
    found = jax.device_get(run(params, (IDS, MASK, KEYS)))
    assert len(np.unique(found.lengths)) > 2, "rows should end at different tokens"
    return found


def assert_same(got: models.Generated, want: models.Generated) -> None:
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)


@pytest.mark.parametrize(
    "config",
    [pytest.param(CONFIG, marks=pytest.mark.exhaustive), STACKED],
    ids=["list", "stack"],
)
def test_a_row_does_not_depend_on_other_rows_or_on_where_its_padding_is(config: DecoderConfig):
    graph, params = built(config)
    want = on_one_device(config)
    run = jax.jit(functools.partial(sample, graph, RANDOM))
    text = IDS[3][MASK[3]][None]
    got = run(params, (text, np.ones(text.shape, bool), KEYS[3:4]))
    assert_same(got, jax.tree.map(lambda x: x[3:4], want))
    order = np.argsort(~MASK, axis=1, stable=True)
    right = [np.take_along_axis(x, order, 1) for x in (IDS, MASK)]
    assert_same(run(params, (*right, KEYS)), want)


@pytest.mark.slow
def test_zero_gathers_once_for_a_split_batch():
    graph, params = built(STACKED)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    run = jax.jit(zero.apply(functools.partial(sample, graph, RANDOM), batch_argnums=1))
    arguments = (zero.shard(params), (IDS, MASK, KEYS))
    assert_same(run(*arguments), on_one_device(STACKED))
    assert FULL_STACK in str(run.lower(*arguments).compile().as_text())


@pytest.mark.slow
def test_zero_gathers_each_layer_at_every_token():
    graph, params = built(STACKED)
    zero = jz.Zero(zoo.make_mesh("2x4-auto"))
    whole = PartitionSpec()
    decode = zero.apply(
        lambda params, cache, ids, mask: nnx.merge(graph, params).decode(cache, ids, mask),
        in_specs=(None, whole, whole, whole),
        out_reduce="first",
    )

    @jax.jit
    def run(params):
        return models.generate(
            functools.partial(decode, params),
            models.make_cache(STACKED, len(IDS), 5 + NUM_NEW),
            jnp.asarray(IDS),
            jnp.asarray(MASK),
            max_new_tokens=NUM_NEW,
            sampling=RANDOM,
            key=KEYS,
        )

    shards = zero.shard(params)
    assert_same(run(shards), on_one_device(STACKED))
    hlo = str(run.lower(shards).compile().as_text())
    assert "all-gather" in hlo and FULL_STACK not in hlo


@pytest.mark.slow
def test_parameters_of_any_sharding():
    graph, params = built(CONFIG)
    mesh = zoo.make_mesh("2x4-auto")

    def split(x):
        dims = [i for i, size in enumerate(x.shape) if size % 4 == 0][-1:]
        spec = PartitionSpec(*(("local" if i in dims else None) for i in range(x.ndim)))
        return jax.device_put(x, NamedSharding(mesh, spec))

    run = jax.jit(functools.partial(sample, graph, RANDOM))
    assert_same(run(jax.tree.map(split, params), (IDS, MASK, KEYS)), on_one_device(CONFIG))


def test_chunks_write_the_same_text():
    graph, params = built(CONFIG)

    @jax.jit
    def begin(params):
        decoder = nnx.merge(graph, params)
        cache, ids, mask = decoder.make_cache(len(IDS), 11), jnp.asarray(IDS), jnp.asarray(MASK)
        return models.start_generation(
            decoder.decode, cache, ids, mask, max_new_tokens=NUM_NEW, sampling=RANDOM, key=KEYS
        )

    @functools.partial(jax.jit, donate_argnums=1)
    def proceed(params, generation):
        decode = nnx.merge(graph, params).decode
        return models.continue_generation(decode, generation, sampling=RANDOM, num_tokens=3)

    generation = begin(params)
    columns = [int(generation.num_columns)]
    while columns[-1] < NUM_NEW:
        generation = proceed(params, generation)
        columns.append(int(generation.num_columns))
    assert columns == [1, 4, 7]
    assert_same(models.Generated(generation.tokens, generation.lengths), on_one_device(CONFIG))


def first_tokens(logits: Any, sampling: Sampling, keys: Any) -> Any:
    """The first new token of each row, where a model has these logits."""
    one_layer = dataclasses.replace(CONFIG, num_layers=1, sliding_layers=(0,))
    generation = models.start_generation(
        lambda cache, *_: (logits, cache),
        models.make_cache(one_layer, len(logits), 1),
        jnp.zeros((len(logits), 1), jnp.int32),
        max_new_tokens=1,
        sampling=sampling,
        key=keys,
    )
    return generation.tokens[:, 0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_k=4),
        Sampling(temperature=1.5, top_p=0.7),
        Sampling(temperature=0.7, top_k=5, top_p=0.8),
        Sampling(temperature=1.0, top_k=100, top_p=1e-6),
    ],
    ids=str,
)
def test_tokens_have_the_probabilities_of_the_formula(sampling: Sampling):
    num, size = 20_000, 8
    logits = np.random.default_rng(2).normal(size=size) * 2
    shares = np.exp(logits / sampling.temperature)
    kept = np.argsort(-shares)[: sampling.top_k]
    before = np.cumsum(shares[kept] / shares[kept].sum()) - shares[kept] / shares[kept].sum()
    kept = [token for token, sum in zip(kept, before, strict=True) if sum < sampling.top_p]
    want = np.zeros(size)
    want[kept] = shares[kept] / shares[kept].sum()
    keys = jax.random.split(jax.random.key(1), num)
    rows = np.broadcast_to(logits.astype(np.float32), (num, size))
    tokens = jax.jit(lambda rows, keys: first_tokens(rows, sampling, keys))(rows, keys)
    got = np.bincount(tokens, minlength=size) / num
    # Within 5 standard deviations; what has no probability is never drawn.
    assert (np.abs(got - want) <= 5 * np.sqrt(want * (1 - want) / num)).all()


@pytest.mark.parametrize("temperature", [1e-37, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_a_tiny_temperature_takes_the_most_probable_token(temperature: float, options: dict):
    """The quotient of a logit and these temperatures is infinite in float32."""
    rows = 3 * np.random.default_rng(0).normal(size=(8, 37)).astype(np.float32)
    got = first_tokens(jnp.asarray(rows), Sampling(temperature=temperature, **options), KEYS)
    np.testing.assert_array_equal(got, rows.argmax(axis=-1))


def test_logits_that_are_no_numbers_end_a_row():
    def decode(cache, ids, mask):
        row = jnp.where(ids[:, -1:] == 2, jnp.nan, 0.0)
        return row + jax.nn.one_hot(2, 4)[None], cache

    cache = models.make_cache(CONFIG, 2, 9)
    got = models.generate(decode, cache, jnp.array([[1], [2]], jnp.int32), max_new_tokens=3)
    np.testing.assert_array_equal(got.tokens, [[2, -1, 0], [-1, 0, 0]])
    np.testing.assert_array_equal(got.lengths, [2, 1])


def test_a_row_without_tokens_gets_none():
    graph, params = built(CONFIG)
    mask = MASK.copy()
    mask[1] = False
    run = jax.jit(functools.partial(sample, graph, RANDOM))
    got = run(params, (IDS, mask, KEYS))
    assert got.lengths[1] == 0 and (np.asarray(got.tokens[1]) == 31).all()
    np.testing.assert_array_equal(got.tokens[2:], on_one_device(CONFIG).tokens[2:])


def test_more_tokens_than_the_cache_has_room_for():
    graph, params = built(CONFIG)
    decoder = nnx.merge(graph, params)
    cache = decoder.make_cache(8, 9)
    with pytest.raises(ValueError, match="`ids` holds 10 tokens per row, but of the 9 columns of"):
        decoder.extend(cache, jnp.zeros((8, 10), jnp.int32))
    with pytest.raises(ValueError, match="`ids` holds 1 rows, the `cache` 8. Make a cache with th"):
        decoder.extend(cache, jnp.zeros((1, 1), jnp.int32))
    ids = jnp.asarray(IDS)
    extend = jax.jit(lambda params, cache: nnx.merge(graph, params).extend(cache, ids))
    x, cache = extend(params, cache)
    assert np.isfinite(x).all()
    with pytest.raises(
        ValueError, match="`ids` holds 5 .* the 9 columns of the `cache` 5 are used"
    ):
        decoder.extend(cache, ids)
    x, _ = extend(params, cache)  # traced: the length is not known
    assert np.isnan(x).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros((2, 0), np.int32)}, "`ids` must hold at least one token per row"),
        ({"ids": np.zeros((2, 9), np.int32)}, "needs 11 columns; the `cache` has 10"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer of at least 1; got 0"),
        ({"sampling": RANDOM}, "`key` is needed for temperature 0.8. Give `jax.random.key"),
    ],
    ids=["empty", "long", "none", "key"],
)
def test_wrong_arguments(change: dict[str, Any], message: str):
    graph, params = built(CONFIG)
    decoder = nnx.merge(graph, params)
    given = {"ids": np.zeros((2, 4), np.int32), "max_new_tokens": 3} | change
    ids, cache = jnp.asarray(given.pop("ids")), decoder.make_cache(2, 10)
    with pytest.raises(ValueError, match=message):
        models.generate(decoder.decode, cache, ids, **given)


def test_a_mask_of_integers_is_that_of_booleans():
    graph, params = built(CONFIG)
    run = jax.jit(functools.partial(sample, graph, RANDOM))
    assert_same(run(params, (IDS, MASK.astype(np.int32), KEYS)), on_one_device(CONFIG))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [[1, 2]]}, "`ids` must be an array of integers, .*; got .*1, 2.*. Give the token"),
        (
            {"ids": np.zeros((2, 4), np.float32)},
            r"`ids` must .*; got float32\[2, 4\]. Give the tok",
        ),
        ({"ids": np.zeros(4, np.int32)}, r"`ids` must be .*\[rows, tokens\]; got int32\[4\]"),
        ({"mask": np.ones((2, 4), np.float32)}, r"`mask` must be an array of bool.*; got float32"),
        ({"mask": [[True] * 4] * 2}, "`mask` must be an array of booleans, or of the integers 0"),
        ({"max_new_tokens": 2.5}, "`max_new_tokens` must be an integer of at least 1; got 2.5"),
        ({"max_new_tokens": True}, "`max_new_tokens` must be an integer of at least 1; got True"),
        ({"key": 0}, r"`key` must be a key of `jax.random.key\(seed\)`; got 0. Give that, or"),
        ({"key": np.zeros(2, np.uint32)}, r"`key` must be a key .*; got uint32\[2\]. .*wrap_key_d"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_values_of_other_types(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    given = {"ids": IDS[:2, :4], "mask": None, "max_new_tokens": 3, "key": KEYS[0]} | change
    with pytest.raises((TypeError, ValueError), match=message):
        models.generate(never, models.make_cache(CONFIG, 2, 10), **given, sampling=RANDOM)


def test_arrays_of_other_shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    ids, cache = jnp.zeros((2, 4), jnp.int32), models.make_cache(CONFIG, 2, 10)
    with pytest.raises(ValueError, match=r"`mask` must have the shape of `ids`, \(2, 4\); got"):
        models.generate(never, cache, ids, jnp.ones((1, 4), bool), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"`key` must be one key, or one .* 2 rows; got shape \(8"):
        models.generate(never, cache, ids, max_new_tokens=3, sampling=RANDOM, key=KEYS)


def never(*_: Any) -> Any:
    pytest.fail("the model was called with wrong arguments")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("stop_tokens", (3, -1)),
        ("pad_token", -1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", "0.9"),
        ("stop_tokens", ("a",)),
        ("stop_tokens", (2.0,)),
        ("stop_tokens", 3),
        ("stop_tokens", (2**31,)),
        ("pad_token", None),
    ],
)
def test_sampling_checks_itself(field: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is for users
    with pytest.raises(ValueError, match=f"`{field}` must"):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, (0, 5), "`batch_size` must be a positive integer; got 0"),
        ({}, (1, 0), "`num_columns` must be a positive integer; got 0"),
        (
            {"rope": None, "sliding_rope": None, "max_length": 6},
            (1, 7),
            "`num_columns` is 7, but the model has positions for `max_length`, 6",
        ),
        (
            {
                "sliding_rope": Rope(
                    rotary_size=6, scaling=DynamicScaling(factor=2.0, trained_length=4)
                )
            },
            (1, 5),
            "`num_columns` is 5, but with DynamicScaling .* more than 4 tokens",
        ),
    ],
    ids=["no rows", "no columns", "learned positions", "scaling"],
)
def test_caches_that_are_refused(changes: dict[str, Any], sizes: tuple[int, int], message: str):
    with pytest.raises(ValueError, match=message):
        models.make_cache(dataclasses.replace(CONFIG, **changes), *sizes)
