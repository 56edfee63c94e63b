"""Tokens, order, loss and metrics of the training job, each against a slow and obvious twin."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxzero as jz
from jaxzero import jobs
from jaxzero.jobs._data import Pair, PairTokenizer, PairTokens, training_batches
from jaxzero.jobs._retrieval import (
    contrastive_loss,
    in_batches,
    ranks_of_partners,
    retrieval_scores,
)
from tests.interop import tiny_checkpoint


def unit_vectors(num_pairs: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(num_pairs, 2, 6)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_tokens_are_padded_and_cut_to_the_length_asked_for(tmp_path: Path):
    checkpoint = tiny_checkpoint.write(tmp_path)
    pairs = [Pair(description="abc", code="return ( xyz )", module="m", line=1)]
    tokens = PairTokenizer(checkpoint, 6)(pairs)
    # [CLS] a ##b ##c [SEP] [PAD], and [CLS] return ( x ##y [SEP]
    assert tokens.ids.shape == tokens.mask.shape == (1, 2, 6)
    assert tokens.ids[0, 0].tolist() == [2, 4, 31, 32, 3, 0]
    assert tokens.ids[0, 1].tolist() == [2, 56, 58, 27, 54, 3]
    assert tokens.mask[0].sum(axis=1).tolist() == [5, 6]


def test_tokenizer_missing(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no `tokenizer.json` .*save_pretrained"):
        PairTokenizer(tmp_path, 6)


def made_up_pairs(num: int) -> PairTokens:
    """Of one token each, which is the number of the pair."""
    ids = np.arange(num, dtype=np.int32).repeat(2).reshape(num, 2, 1)
    return PairTokens(ids, ids >= 0)


def rows_of_steps(num: int, *, num_rows: int, rows_per_step: int, seed: int) -> list[list[int]]:
    """Which rows the first steps train on."""
    zero = jz.Zero(jz.make_mesh(devices=jax.devices()[:1]))
    optimization = jobs.Optimization(batch_size=rows_per_step, seed=seed)
    batches = training_batches(made_up_pairs(num_rows), zero, optimization)
    steps = [next(batches) for _ in range(num)]
    assert all(isinstance(step, PairTokens) and bool(step.mask.all()) for step in steps)
    return [np.asarray(step.ids)[:, 0, 0].tolist() for step in steps]


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    num_rows=st.integers(1, 40), rows_per_step=st.integers(1, 40), seed=st.integers(0, 2**64)
)
def test_each_epoch_visits_each_row_at_most_once(num_rows: int, rows_per_step: int, seed: int):
    hypothesis.assume(rows_per_step <= num_rows)
    per_epoch = num_rows // rows_per_step
    steps = rows_of_steps(2 * per_epoch, num_rows=num_rows, rows_per_step=rows_per_step, seed=seed)
    for epoch in (steps[:per_epoch], steps[per_epoch:]):
        rows = [row for step in epoch for row in step]
        assert len(set(rows)) == len(rows) == per_epoch * rows_per_step
        assert set(rows) <= set(range(num_rows))


def test_order_depends_on_seed_and_epoch():
    options = {"num_rows": 64, "rows_per_step": 64}
    first, second = rows_of_steps(2, **options, seed=0)
    other, _ = rows_of_steps(2, **options, seed=1)
    assert first != second and first != other and second != other
    assert rows_of_steps(1, **options, seed=0) == [first]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "message"),
    [
        (8, 16, "`batch_size` asks for 16 rows per step, the data has 8. Ask for fewer"),
        (20, 12, "`batch_size` must be a multiple of the number of devices, 8; got 12"),
    ],
)
def test_rows_that_make_no_step(num_rows: int, batch_size: int, message: str):
    optimization = jobs.Optimization(batch_size=batch_size)
    with pytest.raises(ValueError, match=message):
        training_batches(made_up_pairs(num_rows), jz.Zero(jz.make_mesh()), optimization)


def loss_by_hand(embeddings: np.ndarray, temperature: float) -> float:
    total = 0.0
    for queries, documents in ((0, 1), (1, 0)):
        for i in range(len(embeddings)):
            logits = embeddings[:, documents].astype(np.float64) @ embeddings[i, queries]
            logits = logits / temperature
            total += np.log(np.exp(logits).sum()) - logits[i]
    return total / (2 * len(embeddings))


@pytest.mark.parametrize("nodes", [1, 2])
def test_loss_is_that_over_all_pairs_of_all_devices(nodes: int):
    mesh = jz.make_mesh(nodes=nodes)
    embeddings = unit_vectors(24, seed=0)

    def mean_over_devices(own):
        loss, metrics = contrastive_loss(own, temperature=0.1)
        return jax.lax.pmean((loss, metrics), ("node", "local"))

    split = PartitionSpec(("node", "local"))
    sharded = jax.jit(
        jax.shard_map(mean_over_devices, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    )
    loss, metrics = sharded(jnp.asarray(embeddings))
    np.testing.assert_allclose(loss, loss_by_hand(embeddings, 0.1), rtol=1e-5)
    cosines = embeddings[:, 0] @ embeddings[:, 1].T
    diagonal = np.diag(cosines)
    others = (cosines.sum() - diagonal.sum()) / (24 * 23)
    np.testing.assert_allclose(metrics["similarity"], diagonal.mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["similarity_others"], others, atol=1e-6)
    np.testing.assert_allclose(
        metrics["accuracy"], np.mean(cosines.argmax(axis=1) == np.arange(24)), rtol=1e-6
    )


def test_ranks_by_sorting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxzero.jobs._retrieval._ROWS", 7)  # several blocks, one shorter
    embeddings = unit_vectors(40, seed=1)
    ranks = ranks_of_partners(embeddings[:, 0], embeddings[:, 1])
    for i in range(40):
        nearest_first = np.argsort(-(embeddings[:, 1] @ embeddings[i, 0]))
        assert ranks[i] == 1 + nearest_first.tolist().index(i)
    scores = retrieval_scores(embeddings)
    assert scores.recall_at_1 == np.mean([rank == 1 for rank in ranks])
    reciprocal = [1 / rank if rank <= 10 else 0 for rank in ranks]
    np.testing.assert_allclose(scores.mrr_at_10, np.mean(reciprocal))


def test_a_collapsed_model_scores_zero():
    scores = retrieval_scores(np.ones((20, 2, 4), np.float32))
    assert (scores.mrr_at_10, scores.recall_at_1) == (0, 0)


@pytest.mark.parametrize("num_pairs", [1, 8, 11])
def test_batches_are_filled_up(num_pairs: int):
    ids = np.arange(num_pairs * 6, dtype=np.int32).reshape(num_pairs, 2, 3)
    tokens = PairTokens(ids, np.ones_like(ids, bool))
    seen = []

    def embed(batch: PairTokens) -> np.ndarray:
        seen.append(len(batch))
        return (batch.ids * batch.mask).astype(np.float32)

    np.testing.assert_array_equal(in_batches(embed, tokens, 4), ids.astype(np.float32))
    assert set(seen) == {4}
