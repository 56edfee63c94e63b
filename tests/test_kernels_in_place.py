"""Messages that lie in a larger array: kernels read there what `jax.numpy` cuts out first."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import (
    FLOATS,
    assert_same_bits,
    by_sums,
    each,
    formats,
    needs_mosaic,
    shapes,
    surrounded,
)

from jaxzero import _blocks as blocks
from jaxzero import _messages as messages
from jaxzero import pallas_kernels as pk

READERS = ["dequantize", "dequantize_sum", "dequantize_sum_requantize"]
places = st.one_of(st.integers(0, 100), st.integers(0, 100).map(lambda i: 16 * i))


@needs_mosaic
@pytest.mark.parametrize("op", READERS)
@hypothesis.given(
    format=formats,
    shape=shapes,
    dtype=st.sampled_from(FLOATS),
    rows=st.sampled_from([1, 2, 4]),  # division by other numbers of peers is not exact
    around=st.tuples(places, places, st.integers(1, 2)),
)
@hypothesis.settings(max_examples=10, phases=[hypothesis.Phase.generate])
def test_kernels_read_in_place_what_xla_cuts_out(op, format, shape, dtype, rows, around):
    num = rows * around[2]  # messages
    if op == "dequantize":
        shape = (shape[0], num, shape[2])
    assert_same_bits(*each(op, format, shape, dtype, peers=num, around=around))


@needs_mosaic
@pytest.mark.parametrize("op", READERS)
@pytest.mark.parametrize("around", [(64, 32, 2), (3, 0, 1)])
def test_rotated_kernels_read_in_place(op, around, monkeypatch):
    monkeypatch.setattr(blocks, "_rotate", by_sums)
    format = pk.Format(kind="int4", block=128, hadamard=32)
    shape = (1, 2 if op == "dequantize" else 1, 8192)
    assert_same_bits(*each(op, format, shape, jnp.bfloat16, peers=2, around=around))


@pytest.mark.parametrize("around", [(0, 0, 1), (5, 0, 1), (0, 7, 3), (16, 48, 2)])
def test_messages_are_found_and_cut_out(around):
    message = np.random.default_rng(0).integers(0, 256, (6, 40), np.uint8)
    array, find = surrounded(message, around)
    found = find(array)
    assert len(found) == 6
    np.testing.assert_array_equal(pk.cut_out(found), message)
    flat = np.asarray(array).reshape(-1)
    powers = [2**i for i in range(5) if not any(x % 2**i for x in found.offsets)]
    for number, want in enumerate(message):
        for place in (found.begin(number), int(found.begin(jnp.int32(number)))):
            np.testing.assert_array_equal(flat[place : place + 40], want)
            assert not any(place % power for power in powers)


def test_bytes_among_other_types_are_read_in_place():
    """What is not bytes cannot be read as what it is where bytes lie."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 200, (2, n)).astype(t) for n, t in [(5, "u1"), (3, "u2"), (4, "u1")]]
    joined = messages.join([jnp.asarray(x) for x in rows])
    parts = messages.in_place(joined, [(x.shape[1], x.dtype) for x in rows])
    assert [x.array is joined for x in parts] == [True, False, True]
    for part, want in zip(parts, rows, strict=True):
        np.testing.assert_array_equal(part.cut_out(), want)
        assert part.cut_out().dtype == want.dtype
