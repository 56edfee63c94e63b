"""Grouping values into buckets, and laying them side by side in a message."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxzero as jz
from jaxzero._codecs import column_bytes, join_columns, split_columns
from jaxzero._plan.bucketing import find_repetition, layers_of_body, split_into_groups


def _groups(sizes, bucket_bytes=10**9, num_layers=0):
    return split_into_groups(sizes, lambda x: x, lambda x: x, bucket_bytes, num_layers)


def test_a_period_is_a_layer():
    layer = [5, 5, 5, 8, 9, 8]
    assert find_repetition([50, *layer, *layer, *layer, 2, 40]) == (1, 6, 3)
    assert _groups([50, *layer, *layer, *layer, 2, 40]) == [[50], layer, layer, layer, [2, 40]]
    assert find_repetition([1, 2, 3]) is None
    assert find_repetition([]) is None


def test_without_layers_no_unit_is_larger_than_the_largest_value():
    assert _groups([8, 3, 4, 2, 9]) == [[8], [3, 4, 2], [9]]


MIB = 2**20


@given(
    st.lists(st.sampled_from([2**11, 2**18, 5 * MIB, 12 * MIB, 30 * MIB, 59 * MIB]), max_size=60)
)
def test_no_group_is_too_small_while_a_neighbour_has_room(sizes):
    """Below 8 MiB, or in a small program a sixteenth of its largest value."""
    groups = [sum(group) for group in _groups(sizes)]
    largest = max(sizes, default=0)
    for pair in itertools.pairwise(groups):
        assert min(pair) >= min(8 * MIB, largest // 16) or sum(pair) > largest + largest // 8, (
            groups
        )


def test_the_gains_of_norms_are_sent_with_convolutions():
    """The middle of a U-Net, of which every part is there twice in a row."""
    block = [2560, 2560, 30 * MIB, 2560, 3 * MIB, 3 * MIB, 2560, 2560, 15 * MIB, 2560]
    sizes = [size * 2 ** (i % 2) for i in range(4) for size in block]
    groups = _groups(sizes)
    assert min(map(sum, groups)) >= 8 * MIB
    assert len(groups) <= 2 * sum(size >= 8 * MIB for size in sizes)


def test_a_small_group_is_joined_within_its_region():
    layer = [9 * MIB, 5 * MIB]
    sizes = [*layer, *layer, 2]
    assert _groups(sizes) == [layer, [*layer, 2]]
    region = [2].__contains__
    apart = split_into_groups(sizes, str, int, 10**9, region=region)
    assert apart == [layer, layer, [2]]


def test_a_repetition_that_is_too_small_is_none():
    sizes = [3, 1, 1, 1, 1, 9, 8, 9, 8, 2]
    assert find_repetition(sizes, sizes) == (1, 1, 4)
    assert find_repetition(sizes, sizes, least=10) == (5, 2, 2)


def test_a_body_is_one_unit_up_to_the_limit():
    assert _groups([5, 5, 5, 8], num_layers=1) == [[5, 5, 5, 8]]
    assert _groups([5, 5, 5, 8], bucket_bytes=15, num_layers=1) == [[5, 5, 5], [8]]
    assert _groups([5, 5, 5, 8], bucket_bytes=0, num_layers=1) == [[5], [5], [5], [8]]
    assert _groups([]) == []


@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 20), st.integers(0, 2))
def test_units_keep_order_and_bound(sizes, bucket_bytes, num_layers):
    gather_groups = _groups(sizes, bucket_bytes, num_layers)
    assert [x for group in gather_groups for x in group] == sizes
    assert all(len(group) == 1 or sum(group) <= bucket_bytes for group in gather_groups)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_a_repetition_repeats(signatures):
    found = find_repetition(signatures)
    if found is not None:
        start, period, times = found
        run = signatures[start : start + period * times]
        assert times >= 2 and run == run[:period] * times


_TYPES = ("float32", "uint8", "uint16", "int8", "int32")  # 16-bit floats travel as integers


@settings(max_examples=20)  # each compiles
@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(_TYPES)), min_size=1, max_size=5))
def test_join_and_split(columns):
    rng = np.random.default_rng(0)
    columns = [(length, jnp.dtype(dtype)) for length, dtype in columns]
    arrays = [
        jnp.asarray(rng.integers(0, 256, (3, length * dtype.itemsize), np.uint8).view(dtype))
        for length, dtype in columns
    ]
    joined = join_columns(arrays)
    assert joined.size * joined.dtype.itemsize == 3 * sum(column_bytes(columns))
    for got, want in zip(split_columns(joined, columns), arrays, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8)
        )


def test_layers_of_a_body():
    """Repetitions are layers where they are most of a body, large, and of several roles."""
    layer = [10**6, 10**6, 10**5]  # two equal matrices and a vector
    assert _num_layers([*layer, *layer]) == 2
    assert _num_layers([*layer, *layer, *layer, 7]) == 3
    assert _num_layers(layer) == 1
    assert _num_layers([10**6] * 4) == 1  # equal matrices of one layer
    assert _num_layers([4, 8] * 2) == 1  # too small to be sent alone
    assert _num_layers([10**6, 10**5, 10**6, 10**5, 9 * 10**6]) == 1  # not the whole body
    assert _num_layers([]) == 1
    assert _groups([*layer, *layer], num_layers=2) == [layer, layer]


def _num_layers(sizes):
    return layers_of_body(sizes, lambda x: x, lambda x: x)


WIDTH = 256  # a matrix has 256 KiB


def _layer(x, w):
    return jnp.tanh(x @ w["up"] + w["bias"][None]) @ w["down"]


def _loss(num_layers):
    """Of a model of 16 layers, of which an iteration computes so many."""

    def body(x, w):
        for i in range(num_layers):
            x = _layer(x, jax.tree.map(lambda stack, i=i: stack[i], w))
        return x, None

    def loss(params, x):
        stacks = jax.tree.map(
            lambda x: x.reshape(len(x) // num_layers, num_layers, *x.shape[1:]), params
        )
        return jnp.mean(jax.lax.scan(jax.checkpoint(body), x, stacks)[0] ** 2)

    return loss


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_a_body_of_several_layers_has_a_bucket_for_each(num_layers):
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params = zero.abstract(_init)
    plan = zero.plan(_loss(num_layers), params, jnp.ones((16, WIDTH)))
    assert len(plan.top.loops) == 2
    for loop in plan.top.loops.values():
        sizes = [sum(x.num_bytes for x in g.gathers) for g in loop.body.gather_groups]
        assert len(set(sizes)) == 1 and len(sizes) == num_layers
        if loop.body.reduce_groups:
            assert len(loop.body.reduce_groups) == num_layers


def test_two_layers_of_a_body_are_not_held_together():
    """Buckets of both layers at once, and of the next two, are half of the weights."""
    zero = jz.Zero(jz.make_mesh(nodes=2))
    params, x = zero.abstract(_init), jnp.ones((16, WIDTH))
    compiled = jax.jit(zero.value_and_grad(_loss(2))).lower(params, x).compile()
    of_all = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * of_all


def _init():
    matrix, bias = jnp.ones((16, WIDTH, WIDTH)), jnp.ones((16, WIDTH))
    return {"up": matrix, "down": matrix, "bias": bias}
