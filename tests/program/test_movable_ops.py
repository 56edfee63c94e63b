"""Operations that wait: on a shard they do what they do to the whole, and back."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxzero._program import movable_ops
from jaxzero._sharding.layout import DimSharding

PIECES = 2


@st.composite
def ops_and_shapes(draw):
    """A function that makes an operation (annotations are checked with `random`, which strategies
    may not use), and a shape for it.
    """
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3)))
    kind = draw(st.sampled_from(["transpose", "reshape", "broadcast", "slice", "pad", "cast"]))
    if kind == "transpose":
        order = tuple(draw(st.permutations(range(len(shape)))))
        op = lambda: movable_ops.Transpose(order)  # noqa: E731
    elif kind == "reshape":
        at = draw(st.integers(0, len(shape)))
        joined = (*shape[:1], int(np.prod(shape[1:], dtype=int)))
        new_shape = draw(st.sampled_from([(*shape[:at], 1, *shape[at:]), joined]))
        op = lambda: movable_ops.Reshape(new_shape)  # noqa: E731
    elif kind == "broadcast":
        at = draw(st.integers(0, len(shape)))
        dims = tuple(i + (i >= at) for i in range(len(shape)))
        new = draw(st.sampled_from([1, 3]))
        op = lambda: movable_ops.Broadcast((*shape[:at], new, *shape[at:]), dims)  # noqa: E731
    elif kind == "slice":
        bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        keep = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
        bounds = [(0, n) if k else b for b, n, k in zip(bounds, shape, keep, strict=True)]
        starts, limits = zip(*bounds, strict=True)
        op = lambda: movable_ops.Slice(starts, limits, (1,) * len(shape))  # noqa: E731
    elif kind == "pad":
        low = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
        config = tuple((n, 1 if n else 0, 0) for n in low)
        op = lambda: movable_ops.Pad(config)  # noqa: E731
    else:
        op = lambda: movable_ops.ConvertDtype(jnp.dtype(jnp.bfloat16), True)  # noqa: E731
    return op, shape


def _pieces(x, layout):
    return np.split(x, PIECES, axis=layout.dim)


def _layouts(shape):
    return [DimSharding(dim, n, PIECES) for dim, n in enumerate(shape) if n and n % PIECES == 0]


def _values(shape):
    return np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.float32).reshape(shape)


@settings(max_examples=25)  # each compiles
@given(ops_and_shapes())
def test_on_shards_equals_on_the_whole(drawn):
    make, shape = drawn
    op = make()
    x = _values(shape)
    whole = np.asarray(op.apply(jnp.asarray(x)))
    assert whole.shape == op.out_shape(shape)
    for layout in _layouts(shape):
        moved = op.through(layout, shape)
        if moved is None:
            continue
        parts = [
            movable_ops.apply_on_shard((op,), jnp.asarray(piece), layout, shape)
            for piece in _pieces(x, layout)
        ]
        np.testing.assert_array_equal(np.concatenate(parts, axis=moved.dim), whole)


@given(ops_and_shapes())
def test_back_undoes_through(drawn):
    make, shape = drawn
    op = make()
    for layout in _layouts(op.out_shape(shape)):
        source = op.back(layout, shape)
        if source is not None:
            assert op.through(source, shape) == layout


@given(ops_and_shapes())
def test_reduction_commutes_where_back_says_so(drawn):
    """Sum over devices, then op, equals op, then sum, piece by piece: what sinking relies on."""
    make, shape = drawn
    op = make()
    if isinstance(op, (movable_ops.Slice, movable_ops.ConvertDtype)):
        return
    a, b = _values(shape), -2 * _values(shape) ** 2
    total = np.asarray(op.apply(jnp.asarray(a))) + np.asarray(op.apply(jnp.asarray(b)))
    for layout in _layouts(op.out_shape(shape)):
        source = op.back(layout, shape)
        if source is None:
            continue
        for piece, want in zip(_pieces(a + b, source), _pieces(total, layout), strict=True):
            got = movable_ops.apply_on_shard((op,), jnp.asarray(piece), source, shape)
            np.testing.assert_array_equal(got, want)


@settings(max_examples=50)  # each compiles
@given(ops_and_shapes())
def test_of_slice_and_of_stack(drawn):
    make, shape = drawn
    op = make()
    x = _values(shape)
    one = op.of_slice(shape)
    if one is not None:
        parts = [np.asarray(one.apply(jnp.asarray(layer))) for layer in x]
        np.testing.assert_array_equal(np.stack(parts), op.apply(jnp.asarray(x)))
    stack = np.stack([x, x + 1, -x])
    want = np.stack([np.asarray(op.apply(jnp.asarray(layer))) for layer in stack])
    np.testing.assert_array_equal(op.of_stack(3).apply(jnp.asarray(stack)), want)


def test_casts_move_to_the_front_and_slices_before_the_gather():
    bfloat16, turn = (
        movable_ops.ConvertDtype(jnp.dtype(jnp.bfloat16), True),
        movable_ops.Transpose((1, 0)),
    )
    widen = movable_ops.ConvertDtype(jnp.dtype(jnp.float32), False)
    layout = DimSharding(0, 4, PIECES)
    assert movable_ops.before_gather((turn, bfloat16, widen), layout, (4, 6)) == (
        (bfloat16,),
        (turn, widen),
    )
    other, same = (
        movable_ops.Slice((0, 0), (4, 2), (1, 1)),
        movable_ops.Slice((0, 0), (2, 6), (1, 1)),
    )
    assert movable_ops.before_gather((other,), layout, (4, 6)) == ((other,), ())
    assert movable_ops.before_gather((same,), layout, (4, 6)) == ((), (same,))
