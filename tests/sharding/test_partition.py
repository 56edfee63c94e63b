"""Layouts: everything is split, evenly, on one dim; padding is as small as can be."""

import math

import jax
import numpy as np
import pytest
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


def test_a_stack_of_layers_keeps_its_first_dim_whole():
    assert layouts_by_preference((24, 1024, 4096), 8)[0].dim == 1
    assert layouts_by_preference((24, 1024), 8)[0].dim == 1


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((512, 2048), 0),
        ((256, 2048), 0),
        ((248, 2048), 1),  # may be layers
        ((1001, 2048), 1),
        ((512, 1024, 2048), 1),  # experts, or a convolution
        ((4096, 32, 128), 0),  # a matrix whose features are cut into heads
        ((1001, 2049), 1),  # neither divides: the larger needs least padding
    ],
)
def test_of_the_long_dims_of_a_matrix_the_first_is_cut(shape, dim):
    assert layouts_by_preference(shape, 8)[0].dim == dim


def test_dims_of_other_axes_are_left_to_them():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("node", "local", "tensor"))
    tree = {"w": jax.ShapeDtypeStruct((8, 64), np.float32)}
    layout = lay_out(tree, mesh, jz.zero3(), {"w": P(None, "tensor")})
    assert layout.leaves[0].spec(("local", "node")) == P(("local", "node"), "tensor")
    assert layout.leaves[0].spec(("local", "node"), manual_only=True) == P(("local", "node"))
    alone = lay_out({"b": jax.ShapeDtypeStruct((8,), np.float32)}, mesh, jz.zero3(), P("tensor"))
    assert alone.leaves[0].spec(("local", "node")) == P(("local", "node", "tensor"))


def test_specs_may_not_name_our_axes():
    zero = jz.Zero(jz.make_mesh(2))
    with pytest.raises(ValueError, match="`specs` may name only mesh axes other than"):
        zero.shard({"w": np.ones((8, 8), np.float32)}, specs=P("node"))


def test_small_leaves_can_stay_whole():
    zero = jz.Zero(jz.make_mesh(2), jz.ZeroConfig(param_persistence_threshold=100))
    params = zero.shard(
        {"small": np.ones((9, 11), np.float32), "large": np.ones((8, 16), np.float32)}
    )
    assert params["small"].sharding.spec == P()
    assert params["large"].sharding.spec == P(None, ("local", "node"))
