"""The encoder against PyTorch's, and what padding, dtypes and wrong configs must do."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxzero import interop
from jaxzero.models import Encoder, EncoderConfig, mean_pool, normalize
from tests.interop import tiny_checkpoint

IDS = np.random.default_rng(1).integers(0, tiny_checkpoint.VOCABULARY, (5, 17)).astype(np.int32)
MASK = np.arange(17)[None] < np.array([17, 9, 4, 1, 12])[:, None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny"))


def embed(checkpoint: Path, ids: np.ndarray, mask: np.ndarray, **options) -> np.ndarray:
    loaded = interop.load_encoder(checkpoint, **options)
    params = jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded.params)

    @jax.jit
    def run(params, ids, mask):
        return normalize(mean_pool(nnx.merge(loaded.graph, params)(ids, mask), mask))

    with jax.default_matmul_precision("highest"):
        return np.asarray(run(params, ids, mask))


def test_equals_transformers(checkpoint: Path):
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    ours = embed(checkpoint, IDS, MASK)
    theirs = interop.embed_with_transformers(checkpoint, IDS, MASK, batch_size=2)
    # Each layer sums at most INTERMEDIATE products six times over, in an order of its own; rounding
    # errors of a sum grow as the root of its length, and LayerNorm keeps vectors at their size.
    roundings = 6 * tiny_checkpoint.LAYERS * np.sqrt(tiny_checkpoint.INTERMEDIATE)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=roundings * np.finfo(np.float32).eps)


def test_padding_changes_nothing(checkpoint: Path):
    shorter = embed(checkpoint, IDS[:, :12], MASK[:, :12])
    other_padding = np.where(MASK, IDS, 7)
    longer = embed(checkpoint, other_padding, MASK)
    short_rows = MASK.sum(axis=1) <= 12
    np.testing.assert_allclose(shorter[short_rows], longer[short_rows], rtol=0, atol=1e-6)


def test_token_types_are_added(checkpoint: Path):
    loaded = interop.load_encoder(checkpoint)
    params = jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded.params)
    run = jax.jit(lambda params, *args: nnx.merge(loaded.graph, params)(*args))
    left_out = run(params, IDS, MASK)
    np.testing.assert_array_equal(left_out, run(params, IDS, MASK, np.zeros_like(IDS)))
    assert not np.allclose(left_out, run(params, IDS, MASK, np.ones_like(IDS)))


@pytest.mark.standard_promotion  # of statistics in Flax's LayerNorm
def test_bfloat16_computes_in_bfloat16_and_keeps_parameters(checkpoint: Path):
    loaded = interop.load_encoder(checkpoint, compute_dtype="bfloat16")
    params = jax.tree.map(lambda tensor: jnp.asarray(tensor.read()), loaded.params)
    run = jax.jit(lambda params, ids, mask: nnx.merge(loaded.graph, params)(ids, mask))
    hidden = run(params, IDS, MASK)
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    # Unit vectors from numbers with 8 bits: a few rounding steps of 2**-8 apart.
    narrow = embed(checkpoint, IDS, MASK, compute_dtype="bfloat16")
    np.testing.assert_allclose(narrow, embed(checkpoint, IDS, MASK), rtol=0, atol=8 * 2**-8)


def test_pooling_of_nothing_is_zero_with_a_finite_gradient():
    hidden, mask = jnp.ones((2, 3, 4)), jnp.zeros((2, 3), bool)
    np.testing.assert_array_equal(normalize(mean_pool(hidden, mask)), jnp.zeros((2, 4)))
    gradient = jax.grad(lambda x: normalize(mean_pool(x, mask)).sum())(hidden)
    assert np.isfinite(gradient).all()


def test_too_many_tokens(checkpoint: Path):
    ids = np.zeros((1, tiny_checkpoint.LENGTH + 1), np.int32)
    with pytest.raises(ValueError, match="25 tokens per row, the model has positions for 24"):
        embed(checkpoint, ids, ids == 0)


def test_fresh_model_has_the_shapes_of_the_config():
    config = EncoderConfig(num_layers=1, vocabulary_size=11, hidden_size=8, num_heads=2)
    model = Encoder(config, rngs=nnx.Rngs(0))
    assert model.embeddings.word.embedding.shape == (11, 8)
    assert len(model.layers) == 1


def test_config_reads_the_json(checkpoint: Path):
    config = EncoderConfig.from_json(checkpoint, compute_dtype="float16")
    assert config == EncoderConfig(
        vocabulary_size=tiny_checkpoint.VOCABULARY,
        hidden_size=tiny_checkpoint.HIDDEN,
        intermediate_size=tiny_checkpoint.INTERMEDIATE,
        num_layers=tiny_checkpoint.LAYERS,
        num_heads=tiny_checkpoint.HEADS,
        max_length=tiny_checkpoint.LENGTH,
        compute_dtype="float16",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "electra"},
            r"`model_type` in .* is 'electra'; .* bert, distilbert, roberta",
        ),
        (
            {"hidden_dropout_prob": 1.0},
            "`hidden_dropout_prob` in .* at least 0 and below 1; got 1.0",
        ),
        ({"type_vocab_size": -1}, "`type_vocab_size` in .*must be 0 or a positive integer.*-1"),
        ({"hidden_act": "tanh"}, r"`hidden_act` in .* is 'tanh'; .* gelu_new, .*relu"),
        (
            {"position_embedding_type": "relative_key"},
            r"`position_embedding_type` in .* 'absolute'",
        ),
        (
            {"num_attention_heads": 3},
            "`hidden_size` in .* a multiple of `num_attention_heads`; got 16 and 3",
        ),
        (
            {"num_hidden_layers": 0},
            "`num_hidden_layers` in .* must be an integer from 1 to 10000; got 0",
        ),
    ],
)
def test_config_refuses(tmp_path: Path, change: dict, message: str):
    (tmp_path / "config.json").write_text(json.dumps(tiny_checkpoint.CONFIG | change))
    with pytest.raises(ValueError, match=message):
        EncoderConfig.from_json(tmp_path)


def test_config_missing(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no `config.json` .*`save_pretrained`"):
        EncoderConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"lacks hidden_size, .*Save the checkpoint again"):
        EncoderConfig.from_json(tmp_path)
