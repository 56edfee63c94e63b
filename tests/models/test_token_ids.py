"""Ids that are in no vocabulary: NaN for tokens, nothing for padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxzero import models
from jaxzero.models import Encoder, ModernBert, ModernBertConfig, Rope

from . import test_encoder_families, test_generate
from .drawn import drawn

ROPE = Rope(rotary_size=8)
LEARNED = {"rope": None, "sliding_rope": None, "sliding_window": None, "sliding_layers": ()}
MAKE: dict[str, Any] = {
    "decoder": lambda rngs: models.Decoder(test_generate.STACKED, rngs=rngs),
    "learned positions": lambda rngs: models.Decoder(
        dataclasses.replace(test_generate.CONFIG, **LEARNED), rngs=rngs
    ),
    "encoder": lambda rngs: Encoder(test_encoder_families.SMALL, rngs=rngs),
    "modern bert": lambda rngs: ModernBert(
        ModernBertConfig(
            vocabulary_size=37,
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=2,
            rope=ROPE,
            local_rope=ROPE,
        ),
        rngs=rngs,
    ),
}
IDS = np.array([[5, 3, 9, 7], [2, 4, 6, 8]], np.int32)
MASK = np.array([[True] * 4, [True, True, False, False]])


@pytest.mark.parametrize(  # operation by operation all of them in `make test-exhaustive`
    ("name", "is_traced"),
    [
        *(pytest.param(name, True, id=f"{name}-jit") for name in MAKE),
        *(
            pytest.param(
                name,
                False,
                id=f"{name}-eager",
                marks=[] if name in ("decoder", "encoder") else pytest.mark.exhaustive,
            )
            for name in MAKE
        ),
    ],
)
@pytest.mark.one_in(2)
def test_negative_ids(name: str, is_traced: bool):
    graph, params = drawn(lambda: MAKE[name](nnx.Rngs(0)))

    def run(params, ids, mask):
        return nnx.merge(graph, params)(ids, mask)

    run = jax.jit(run) if is_traced else run
    want = np.asarray(run(params, jnp.asarray(IDS), jnp.asarray(MASK)))
    assert np.isfinite(want).all()
    for wrong in (-1, -6, -100):
        ids = IDS.copy()
        ids[1, 2:] = wrong  # padding
        got = run(params, jnp.asarray(ids), jnp.asarray(MASK))
        np.testing.assert_array_equal(np.asarray(got)[MASK], want[MASK])
        ids[0, 3] = wrong
        got = np.asarray(run(params, jnp.asarray(ids), jnp.asarray(MASK)))
        assert np.isnan(got[0, 3]).all()
        np.testing.assert_array_equal(got[1, :2], want[1, :2])


def test_narrow_ids_of_a_large_vocabulary():
    config = dataclasses.replace(test_generate.CONFIG, vocabulary_size=300)
    graph, params = test_generate.built(config)
    run = jax.jit(lambda params, ids: nnx.merge(graph, params)(ids))
    want = run(params, IDS)
    np.testing.assert_array_equal(run(params, IDS.astype(np.int8)), want)
    assert np.isnan(run(params, np.full((1, 4), -1, np.int8))).all()


def test_a_prompt_with_a_negative_id_has_no_text():
    graph, params = test_generate.built(test_generate.CONFIG)

    @jax.jit
    def run(params, ids):
        decoder = nnx.merge(graph, params)
        return models.generate(decoder.decode, decoder.make_cache(2, 6), ids, max_new_tokens=3)

    got = run(params, np.array([[0, 0, 5, -6], [0, 0, 5, 6]], np.int32))
    np.testing.assert_array_equal(got.tokens[0], [-1, 0, 0])
    np.testing.assert_array_equal(got.lengths, [1, 3])
