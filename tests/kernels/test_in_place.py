"""Messages in a larger array: kernels read and write there, where XLA cuts out and joins."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxzero as jz
from jaxzero import pallas_kernels as pk
from jaxzero._codecs import DeferredMessage
from jaxzero._codecs import rows as messages
from jaxzero._collectives import reductions
from jaxzero._collectives.comm_spec import CommSpec, ReduceSpec
from jaxzero._collectives.encoded_shards import EncodedShards
from jaxzero._collectives.gather import start_gather
from jaxzero._sharding.layout import DimSharding
from jaxzero.pallas_kernels import _blockwise as blocks
from jaxzero.pallas_kernels import _memory as memory

from .test_kernels import (
    FLOATS,
    assert_same_bits,
    by_sums,
    each,
    formats,
    needs_mosaic,
    shapes,
    surrounded,
)

READERS = ["dequantize", "dequantize_sum", "dequantize_sum_requantize"]
WRITERS = ["quantize", "dequantize_sum_requantize"]
places = st.one_of(st.integers(0, 100), st.integers(0, 100).map(lambda i: 16 * i))


@needs_mosaic
@pytest.mark.parametrize("op", READERS)
@hypothesis.given(
    format=formats,
    shape=shapes,
    dtype=st.sampled_from(FLOATS),
    peers=st.sampled_from([(1, 1), (2, 1), (3, 1), (5, 1), (1, 2), (2, 2)]),  # XLA reorders 6
    sides=st.tuples(places, places),
)
@hypothesis.settings(max_examples=10, phases=[hypothesis.Phase.generate])
def test_kernels_read_in_place_what_xla_cuts_out(op, format, shape, dtype, peers, sides):
    num, around = math.prod(peers), (*sides, peers[1])
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


@needs_mosaic
@pytest.mark.parametrize("op", WRITERS)
@hypothesis.given(
    format=formats, shape=shapes, dtype=st.sampled_from(FLOATS), sides=st.tuples(places, places)
)
@hypothesis.settings(max_examples=10, phases=[hypothesis.Phase.generate])
def test_kernels_write_in_place_what_xla_puts_there(op, format, shape, dtype, sides):
    """And leave all other columns as they are."""
    assert_same_bits(*each(op, format, shape, dtype, place=(*sides, 1)))


@needs_mosaic
@pytest.mark.parametrize("op", WRITERS)
@pytest.mark.parametrize("place", [(64, 32, 1), (3, 0, 1)])
def test_rotated_kernels_write_in_place(op, place, monkeypatch):
    monkeypatch.setattr(blocks, "_rotate", by_sums)
    format = pk.Format(kind="int4", block=128, hadamard=32)
    assert_same_bits(*each(op, format, (1, 2, 8192), jnp.bfloat16, peers=2, place=place))


@pytest.mark.parametrize(
    "place",
    [
        pk.Place((3, 100), 0),
        pk.Place((2, 100), 35),
        pk.Place((2, 100), -1),
        pk.Place((2, 100), 0, jnp.zeros((2, 99), jnp.uint8)),
    ],
)
def test_a_place_that_is_too_small(place):
    with pytest.raises(ValueError, match="`place` must have a row for each of 2 messages"):
        pk.quantize(jnp.zeros((1, 2, 64)), pk.Format(block=64), place=place)


def drafts(messages):
    """Every second message as a draft of itself."""
    for i, message in enumerate(messages):
        if i % 2 or message.dtype != jnp.uint8:
            yield message
        else:
            yield DeferredMessage(
                message.shape, lambda place=None, x=message: place.put(x) if place else x
            )


@pytest.mark.parametrize("types", [["u1"], ["u1"] * 5, ["u2", "f4", "u1", "u1", "u1"]])
def test_drafts_are_joined_as_what_they_will_be(types):
    rng = np.random.default_rng(0)
    rows = [jnp.asarray(rng.integers(0, 200, (3, 4 + i)).astype(t)) for i, t in enumerate(types)]
    got = messages.join_columns(list(drafts(rows)))
    assert_same_bits(np.asarray(messages.join_columns(rows)), np.asarray(got))


def sent(implementation, shards, fulls):
    """What the first hops of a gather and of a reduction send, on one device of 2 x 2."""
    codec = jz.Int8(block=64, implementation=implementation)
    hops = jz.PerAxis(node=codec, local=codec)
    config = jz.ZeroConfig(weights=hops, gradients=hops, min_quantized_size=1000)
    wire = dataclasses.replace(
        CommSpec.of(jz.make_mesh(nodes=2, devices=jax.devices()[:4]), config),
        min_quantized_size=1000,
    )

    def write(shards, fulls):
        pieces = [
            dataclasses.replace(EncodedShards.plain(x, 0), axes=("node", "local")) for x in shards
        ]
        parcels = start_gather(pieces, [4 * x.size for x in shards], wire)
        summands = [ReduceSpec("x", x.shape, x.dtype, DimSharding(0, len(x), 4)) for x in fulls]
        outbox = reductions.start_reduction(fulls, summands, wire)
        return [x.data for x in parcels], outbox.coded

    for axis in ("local", "node"):
        write = jax.vmap(write, axis_name=axis)
    return jax.jit(write)(*([x[None, None] for x in xs] for xs in (shards, fulls)))


@needs_mosaic
def test_one_message_is_filled_by_several_kernels():
    rng = np.random.default_rng(0)
    shards, fulls = (
        [jnp.asarray(rng.normal(size=(n, 256)), jnp.bfloat16) for n in sizes]
        for sizes in ((16, 2, 1, 32), (32, 4, 16))
    )
    want = sent("xla", shards, fulls)
    with memory.interpreted(detect_races=True):
        got = jax.block_until_ready(sent("mosaic_gpu", shards, fulls))
    for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))


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
    joined = messages.join_columns([jnp.asarray(x) for x in rows])
    parts = messages.columns_in_place(joined, [(x.shape[1], x.dtype) for x in rows])
    assert [x.array is joined for x in parts] == [True, False, True]
    for part, want in zip(parts, rows, strict=True):
        np.testing.assert_array_equal(part.cut_out(), want)
        assert part.cut_out().dtype == want.dtype
