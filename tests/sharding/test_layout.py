"""Layouts of a leaf: all are even, and padding is as small as can be."""

import math

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxzero as jz
from jaxzero._sharding.layout import layouts_by_preference
from jaxzero._sharding.tree import lay_out

shapes = st.lists(st.integers(0, 12), min_size=0, max_size=4).map(tuple)


@given(shapes, st.integers(1, 9))
def test_pieces_are_even_and_padding_is_less_than_one_unit(shape, pieces):
    for layout in layouts_by_preference(shape, pieces):
        assert layout.padded % pieces == 0
        assert 0 <= layout.padded - layout.size < pieces
        assert layout.size == shape[layout.dim]


@given(shapes, st.integers(2, 9))
def test_only_single_numbers_and_empty_leaves_stay_whole(shape, pieces):
    assert bool(layouts_by_preference(shape, pieces)) == (math.prod(shape) > 1)


@given(shapes, st.integers(2, 9))
def test_of_short_dims_the_largest_that_divides_comes_first(shape, pieces):
    choices = layouts_by_preference(shape, pieces)
    even = [size for size in shape if size % pieces == 0]
    if choices and even:
        assert choices[0].size == max(even)
        assert not choices[0].is_padded
    elif choices:
        assert choices[0].size == max(shape)


def test_dims_of_other_axes_are_left_to_them():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("node", "local", "tensor"))
    tree = {"w": jax.ShapeDtypeStruct((8, 64), np.float32)}
    layout = lay_out(tree, mesh, jz.zero3(), {"w": P(None, "tensor")})
    assert layout.leaves[0].spec(("local", "node")) == P(("local", "node"), "tensor")
    assert layout.leaves[0].spec(("local", "node"), manual_only=True) == P(("local", "node"))
    alone = lay_out({"b": jax.ShapeDtypeStruct((8,), np.float32)}, mesh, jz.zero3(), P("tensor"))
    assert alone.leaves[0].spec(("local", "node")) == P(("local", "node", "tensor"))
