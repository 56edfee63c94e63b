"""BERT, RoBERTa and DistilBERT against transformers, and what encoders share with the decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxzero import interop
from jaxzero.models import Encoder, EncoderConfig

from . import tiny_models
from .tiny_models import read

IDS = np.random.default_rng(1).integers(2, 37, (3, 12)).astype(np.int32)
MASK = np.arange(12)[None] < np.array([12, 7, 4])[:, None]
SMALL = EncoderConfig(
    vocabulary_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    max_length=12,
)


def hidden(graph: Any, params: Any, ids: np.ndarray) -> np.ndarray:
    run = jax.jit(lambda params, ids, mask: nnx.merge(graph, params)(ids, mask))
    return np.asarray(run(params, ids, MASK))


@pytest.mark.parametrize(
    ("name", "scanned"),
    [
        ("roberta", False),
        ("distilbert-relu", True),
        ("bert-gelu-new", False),
        pytest.param("roberta", True, marks=pytest.mark.exhaustive),
        pytest.param("distilbert", False, marks=pytest.mark.exhaustive),
        pytest.param("xlm-roberta", False, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_transformers_and_a_round_trip_is_exact(name: str, scanned: bool, tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model = tiny_models.make(*tiny_models.ENCODERS[name], causal=False)
    source = tiny_models.save(model, tmp_path / "source")
    padding = tiny_models.ENCODERS[name][1].get("pad_token_id", 0)
    ids = np.where(MASK, IDS, padding)  # RoBERTa counts positions of ids that are no padding
    want = tiny_models.outputs(model, ids, MASK).last_hidden_state.detach().numpy()
    loaded = interop.load_encoder(source, scan_layers=scanned)
    params = read(loaded.params)
    got = hidden(loaded.graph, params, ids)
    # As for BERT in `test_encoder.py`; LayerNorm keeps vectors at their size.
    atol = 6 * 2 * np.sqrt(48) * np.finfo(np.float32).eps * np.abs(want[MASK]).max()
    np.testing.assert_allclose(got[MASK], want[MASK], rtol=0, atol=atol)

    export = interop.export_encoder(params, tmp_path / "export", source=source)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, export))
    assert before.keys() == after.keys()
    assert all(before[key].tobytes() == after[key].tobytes() for key in before)
    again = transformers.AutoModel.from_pretrained(export).state_dict()
    assert all(torch.equal(again[key], held) for key, held in model.state_dict().items())


def test_dropout_is_that_of_the_key():
    graph, _ = nnx.split(nnx.eval_shape(lambda: Encoder(SMALL, rngs=nnx.Rngs(0))))
    params = jax.jit(lambda: nnx.split(Encoder(SMALL, rngs=nnx.Rngs(0)))[1])()
    run = jax.jit(
        lambda key: nnx.merge(graph, params)(jnp.asarray(IDS), jnp.asarray(MASK), dropout_key=key)
    )
    key, other = jax.random.split(jax.random.key(0))
    np.testing.assert_array_equal(run(key), run(key))
    assert not np.allclose(run(key), run(other), atol=0.1)


def test_positions_of_roberta_begin_after_its_padding():
    config = dataclasses.replace(SMALL, padding_id=1)
    model = nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))
    assert model.embeddings.position.embedding.shape == (14, 16)
    positions = model.embeddings._positions(jnp.array([[1, 5, 6, 1, 7]]))
    np.testing.assert_array_equal(positions, [[1, 2, 3, 1, 4]])
    with pytest.raises(ValueError, match="13 tokens per row, the model has positions for 12"):
        model(jnp.ones((1, 13), jnp.int32), jnp.ones((1, 13), bool))
