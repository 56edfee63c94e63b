"""Decoding with a cache in every family: its logits, and greedy text against transformers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxzero import interop, models

from . import tiny_models
from .tiny_models import allowed, read

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

LENGTH, PROMPT = 14, 5
IDS = np.random.default_rng(1).integers(0, 37, (3, LENGTH)).astype(np.int32)
MASK = np.arange(LENGTH)[None] >= PROMPT - np.array([5, 3, 1])[:, None]  # padding on the left
# Beyond these lengths the frequencies of rotary embeddings change, and a cache is refused.
LENGTHS = {"smollm3": 8, "phi3-long": 10}
FIRST = {"gpt2", "llama", "gemma3", "deepseek", "gpt-oss", "cohere2", "smollm3", "mixtral"}
NAMES = [
    *(
        pytest.param(name, marks=() if name in FIRST else pytest.mark.ci)
        for name in tiny_models.DECODERS
    ),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in tiny_models.MORE_DECODERS),
]


@pytest.mark.parametrize("name", NAMES)
def test_cached_logits_and_greedy_text(made, name: str):
    """Logits are transformers' of the whole text at once, the text is that of its `generate`."""
    model, directory = made(name)
    loaded = interop.load_decoder(directory, scan_layers=tiny_models.SCANNED.get(name, False))
    length = LENGTHS.get(name, LENGTH)
    num_new = length - PROMPT + 1

    @jax.jit
    def run(params, ids, mask):
        decoder = nnx.merge(loaded.graph, params)
        cache = decoder.make_cache(3, length)
        prompt = (ids[:, :PROMPT], mask[:, :PROMPT])
        text = models.generate(decoder.decode, cache, *prompt, max_new_tokens=num_new)

        x, held = decoder.extend(cache, *prompt)

        def step(held, token):
            x, held = decoder.extend(held, token[:, None])
            return held, x[:, 0]

        _, later = jax.lax.scan(step, held, ids[:, PROMPT:].T)
        x = jnp.concatenate([x, jnp.swapaxes(later, 0, 1)], axis=1)
        return decoder.logits(x), text

    ids, mask = IDS[:, :length], MASK[:, :length]
    got, text = jax.device_get(run(read(loaded.params), ids, mask))
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    # transformers keeps rotations for the longest text so far, until a short one comes (smollm3).
    tiny_models.outputs(model, ids[:, :1], mask[:, :1], positions[:, :1])
    want = tiny_models.outputs(model, ids, mask, positions).logits.detach().numpy()
    # Two orders of summation; far below a wrong position or a key too many.
    atol = min(allowed(loaded.config.num_layers), 1e-5) * np.abs(want[mask]).max()
    np.testing.assert_allclose(got[mask], want[mask], rtol=0, atol=atol)

    theirs = tiny_models.greedy(model, ids[:, :PROMPT], mask[:, :PROMPT], num_new)
    np.testing.assert_array_equal(text.tokens, theirs)
    np.testing.assert_array_equal(text.lengths, num_new)


def test_rows_end_with_their_stop_tokens(made):
    model, directory = made("llama")
    loaded = interop.load_decoder(directory)
    ids, mask = IDS[:, :PROMPT], MASK[:, :PROMPT]
    stops = tuple(
        {int(row[2 + i]) for i, row in enumerate(tiny_models.greedy(model, ids, mask, 9))}
    )
    want = tiny_models.greedy(model, ids, mask, 9, eos_token_id=list(stops), pad_token_id=36)

    @jax.jit
    def run(params):
        decoder = nnx.merge(loaded.graph, params)
        return models.generate(
            decoder.decode,
            decoder.make_cache(3, 20),
            ids,
            mask,
            max_new_tokens=9,
            sampling=models.Sampling(stop_tokens=stops, pad_token=36),
        )

    got = run(read(loaded.params))
    num = want.shape[1]  # theirs is as long as the longest row
    assert num < 9, "no row ended early"
    np.testing.assert_array_equal(got.tokens[:, :num], want)
    assert (np.asarray(got.tokens[:, num:]) == 36).all()
    ends = [next(i for i, token in enumerate(row, start=1) if token in stops) for row in want]
    np.testing.assert_array_equal(got.lengths, ends)


@pytest.mark.parametrize("name", ["smollm3", "phi3-long"])
def test_rows_so_long_that_rotations_change_are_refused(made, name: str):
    config = models.DecoderConfig.from_json(made(name).directory)
    longest = LENGTHS[name]
    models.make_cache(config, 1, longest)
    message = f"`num_columns` is {longest + 1}, but with .* change when .* more than {longest} tok"
    with pytest.raises(ValueError, match=message):
        models.make_cache(config, 1, longest + 1)
