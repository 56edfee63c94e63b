"""Packed rows: what they hold, how full they are, and a decoder's loss of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import grain
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxzero as jz
from jaxzero.data import Batches, PackedRows
from jaxzero.models import Decoder, DecoderConfig, Rope
from tests import zoo

VOCABULARY = 23
CONFIG = DecoderConfig(
    vocabulary_size=VOCABULARY,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_key_value_heads=1,
    head_size=4,
    norm="rms",
    norm_placement="before",
    tied_head=True,
    rope=None,
    max_length=16,
    scan_layers=True,
    initializer_range=0.5,
    compute_dtype="float64",
)


def documents(lengths: list[int]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]


def pairs(row: dict[str, np.ndarray]) -> list[list[tuple[int, int]]]:
    """The pairs of a token and its label of each segment, and padding checked to be nothing."""
    is_token = row["segments"] > 0
    np.testing.assert_array_equal(row["weights"], is_token.astype(np.float32))
    assert not np.diff(is_token.astype(int)).max(initial=-1) > 0, "padding is at the end"
    for name in ("ids", "labels", "positions"):
        assert not row[name][~is_token].any()
    found = []
    for segment in range(1, row["segments"].max() + 1):
        held = np.flatnonzero(row["segments"] == segment)
        np.testing.assert_array_equal(held, np.arange(held[0], held[-1] + 1))
        np.testing.assert_array_equal(row["positions"][held], np.arange(len(held)))
        ids, labels = row["ids"][held], row["labels"][held]
        np.testing.assert_array_equal(ids[1:], labels[:-1])
        found.append(list(zip(ids.tolist(), labels.tolist(), strict=True)))
    return found


@hypothesis.given(st.lists(st.integers(0, 25), min_size=1, max_size=30), st.integers(1, 9))
def test_each_pair_of_each_document_is_in_one_row(lengths: list[int], length: int):
    hypothesis.assume(max(lengths) > 1)
    numbered = [1000 * i + np.arange(n) for i, n in enumerate(lengths)]  # no token twice
    rows = PackedRows(numbered, length)
    found = []
    for i in range(len(rows)):
        row = rows[i]
        assert all(x.shape == (length,) for x in row.values())
        segments = pairs(row)
        assert all(len({token // 1000 for token, _ in segment}) == 1 for segment in segments)
        found += [pair for segment in segments for pair in segment]
    wanted = [(int(x[k]), int(x[k + 1])) for x in numbered for k in range(len(x) - 1)]
    assert sorted(found) == sorted(wanted)
    # Two rows that are at most half full would have been one.
    filled = [int(rows[i]["weights"].sum()) for i in range(len(rows))]
    assert sum(2 * n <= length for n in filled) <= 1


def test_rows_are_in_the_order_of_documents_and_say_how_full_they_are():
    rows = PackedRows(documents([4, 9, 6, 3, 12, 1]), 8)
    firsts = [rows[i]["segments"].max() for i in range(len(rows))]
    # 3 + 5, 8, 2 + 3 of the document of 12 tokens, whose first 8 pairs are a row.
    assert (
        firsts == [2, 1, 2, 1]
        and repr(rows) == "PackedRows(6 documents in 4 rows of 8 tokens, 90.6% filled)"
    )
    with pytest.raises(IndexError):
        rows[4]


def test_batches_of_packed_rows_go_on_where_they_were():
    source = PackedRows(documents([5, 9, 3, 7, 2, 8] * 20), 8)

    def batches():
        examples = grain.MapDataset.source(source).seed(0).shuffle().repeat(2)
        return Batches(examples, jz.Zero(jz.make_mesh(nodes=2)), batch_size=8)

    with batches() as whole, batches() as rest:
        first, second = next(whole), next(whole)
        rest.set_state(whole.get_state() | {"batches": 1})
        zoo.assert_close(jax.device_get(next(rest)), jax.device_get(second), 0.0, "second batch")
    assert first["ids"].shape == (8, 8) and not np.array_equal(first["ids"], second["ids"])


def _losses(graph: Any, params: Any, ids: Any, labels: Any, **options: Any) -> jax.Array:
    logits = nnx.merge(graph, params)(ids, **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("changes", "gives_positions", "tolerance"),
    [
        pytest.param({}, True, 1e-12, marks=pytest.mark.exhaustive),
        ({}, False, 1e-12),
        # Rotations are computed in float32.
        pytest.param({"rope": Rope(rotary_size=4)}, False, 1e-5, marks=pytest.mark.ci),
        pytest.param(
            {"attention_softcap": 2.0, "sliding_window": 3, "sliding_layers": (1,)},
            True,
            1e-12,
            marks=pytest.mark.ci,
        ),
    ],
    ids=["learned positions", "of segments", "rotary positions", "windows and caps"],
)
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(
    changes, gives_positions, tolerance
):
    config = dataclasses.replace(CONFIG, **changes)
    texts = documents([6, 3, 13, 2, 6, 1])
    rows = PackedRows(texts, 12)
    assert len(rows) == 3, "several documents share a row"
    batch = jax.tree.map(lambda *x: np.stack(x), *(rows[i] for i in range(len(rows))))
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def packed(params):
        options = {"positions": jnp.asarray(batch["positions"])} if gives_positions else {}
        segments = jnp.asarray(batch["segments"])
        model = nnx.merge(graph, params)
        hidden = model.hidden(jnp.asarray(batch["ids"]), segments=segments, **options)
        labels, weights = jnp.asarray(batch["labels"]), jnp.asarray(batch["weights"])
        return model.cross_entropy(hidden, labels, weights, chunk=5)[0]

    def one_by_one(params):
        return sum(
            jnp.sum(_losses(graph, params, jnp.asarray(x[None, :-1]), jnp.asarray(x[None, 1:])))
            for x in texts
            if len(x) > 1
        )

    with jax.enable_x64(True):
        params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1]
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        got, want = (jax.jit(jax.value_and_grad(each))(params) for each in (packed, one_by_one))
        zoo.assert_close(jax.device_get(got), jax.device_get(want), tolerance, "loss and gradients")


def test_a_mask_and_segments_are_refused():
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    ids = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="Give `mask` or `segments`, not both"):
        jax.eval_shape(lambda params: nnx.merge(graph, params)(ids, ids == 0, segments=ids), params)


@pytest.mark.parametrize(
    ("given", "length", "options", "error", "message"),
    [
        ([[1, 2]], 0, {}, ValueError, "`length` must be a number of tokens, at least 1; got 0"),
        (
            [[1, 2]],
            4,
            {"lengths": [2, 3]},
            ValueError,
            r"each of the 1 documents; got shape \(2,\)",
        ),
        ([[1], []], 4, {}, ValueError, "None of the `documents` has two tokens"),
        (
            [[1, 2]],
            4,
            {"lengths": [3]},
            ValueError,
            "Document 0 has 2 tokens, but `lengths` says 3",
        ),
        (["ab"], 4, {}, TypeError, "Document 0 must be a sequence of token ids.*Tokenize it first"),
        ([[1.0, 2.0]], 4, {}, TypeError, "Document 0 must be .* got an array of float64"),
    ],
)
def test_refused(given: Any, length: int, options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        PackedRows(given, length, **options)[0]
