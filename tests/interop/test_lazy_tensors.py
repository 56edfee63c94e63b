"""Views of tensors that stay where they are: numpy's values, and no more read than is asked for."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxzero as jz
from jaxzero.interop import ArrayTensor, LazyTensor
from jaxzero.interop._tensors import sharded
from jaxzero.interop._tensors.boxes import joined, replaced, whole_box
from jaxzero.interop._tensors.lazy import concatenate, stack
from jaxzero.interop._tensors.sharded import ShardedTensor


@dataclasses.dataclass(frozen=True)
class Counted(ArrayTensor):
    """An array that notes how many elements were read of it."""

    label: str = "counted"
    reads: list[int] = dataclasses.field(default_factory=list)

    def _read_box(self, box):
        part = self.array[tuple(slice(*bounds) for bounds in box)]
        self.reads.append(part.size)
        return part


SHAPES = [(4, 6), (2, 3, 4), (24,), (1, 24, 1), (3, 8), (6, 2, 2), (2, 2, 2, 3), (12, 2)]


def draw_view(data, tensor: LazyTensor, array: np.ndarray) -> tuple[LazyTensor, np.ndarray]:
    """One operation, on the tensor and, by numpy, on the array."""
    kind = data.draw(st.sampled_from(["transpose", "reshape", "narrow", "stack", "join", "cast"]))
    dim = data.draw(st.integers(0, array.ndim - 1)) if array.ndim else 0
    if kind == "transpose":
        dims = data.draw(st.permutations(range(array.ndim)))
        return tensor.transpose(*dims), array.transpose(dims)
    if kind == "reshape":
        fitting = [shape for shape in SHAPES if math.prod(shape) == array.size]
        shape = data.draw(st.sampled_from([*fitting, (array.size, 1), array.shape]))
        return tensor.reshape(shape), array.reshape(shape)
    if kind == "narrow" and array.ndim:
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, array.shape[dim])] * 2)))
        return tensor.narrow(dim, start, stop), array.take(range(start, stop), dim)
    if kind == "stack" and array.ndim < 5:
        return stack([tensor, tensor]), np.stack([array, array])
    if kind == "join" and array.ndim and array.size < 200:
        return concatenate([tensor] * 3, dim), np.concatenate([array] * 3, dim)
    return tensor.astype(np.float64), array.astype(np.float64)


def draw_box(data, shape: tuple[int, ...]) -> tuple[slice, ...]:
    bounds = (sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape)
    return tuple(slice(*each) for each in bounds)


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data())
def test_views_equal_those_of_numpy_and_read_what_is_asked_for(data):
    array = np.arange(24, dtype=np.float32).reshape(data.draw(st.sampled_from(SHAPES)))
    source = Counted(array)
    tensor: LazyTensor = source
    for _ in range(data.draw(st.integers(1, 4))):
        tensor, array = draw_view(data, tensor, array)
    assert not source.reads, "a view was read when it was made"
    assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
    assert (tensor.ndim, tensor.size, tensor.nbytes) == (array.ndim, array.size, array.nbytes)
    box = draw_box(data, array.shape)
    np.testing.assert_array_equal(tensor[box], array[box], strict=True)
    assert sum(source.reads) == array[box].size
    np.testing.assert_array_equal(tensor.read(), array, strict=True)


@dataclasses.dataclass(frozen=True)
class Held(ArrayTensor):
    """An array of which this process holds some boxes."""

    boxes: tuple = ()

    def own_boxes(self):
        return list(self.boxes)


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data())
def test_boxes_that_processes_hold_cover_a_view_once(data):
    array = np.arange(24, dtype=np.float32).reshape(data.draw(st.sampled_from(SHAPES)))
    dim = data.draw(st.integers(0, array.ndim - 1))
    cuts = sorted({0, array.shape[dim], *data.draw(st.lists(st.integers(0, array.shape[dim])))})
    whole = whole_box(array.shape)
    boxes = [replaced(whole, dim, bounds) for bounds in itertools.pairwise(cuts)]
    number = data.draw(st.integers(0, len(boxes)))
    kind = data.draw(st.sampled_from(["transpose", "reshape", "narrow", "stack", "join"]))
    count = np.zeros(_view_of(kind, ArrayTensor(array, "all"), array)[1].shape, int)
    for held in (boxes[:number], boxes[number:]):  # by two processes
        tensor, wanted = _view_of(kind, Held(array, "held", tuple(held)), array)
        own = tensor.own()
        for box in own.own_boxes():
            inside = tuple(slice(*bounds) for bounds in box)
            np.testing.assert_array_equal(own[inside], wanted[inside], strict=True)
            count[inside] += 1
    assert (count == 1).all()


def _view_of(kind: str, x: LazyTensor, array: np.ndarray) -> tuple[LazyTensor, np.ndarray]:
    if kind == "transpose":
        return x.transpose(), array.T
    if kind == "reshape":
        return x.reshape((4, 6)).transpose().astype(np.float64), array.reshape(4, 6).T.astype(float)
    if kind == "narrow":
        return x.reshape((24,)).narrow(0, 5, 17), array.reshape(24)[5:17]
    if kind == "stack":
        return stack([x, x]), np.stack([array, array])
    return concatenate([x.narrow(0, 0, 1), x], 0), np.concatenate([array[:1], array])


def test_joined_boxes_cover_the_same_elements():
    squares = [((i, i + 2), (j, j + 3)) for i in (0, 2, 4) for j in (0, 3)]
    assert joined(squares) == [((0, 6), (0, 6))]
    assert joined(squares[:3]) == [((0, 2), (0, 6)), ((2, 4), (0, 3))]
    assert joined([()]) == [()] and joined([]) == []


def test_a_slice_of_heads_is_one_read():
    source = Counted(np.zeros((12, 5)))
    assert source.reshape((3, 4, 5))[1:3, :, 2:3].shape == (2, 4, 1)
    assert source.reads == [8]


def test_bfloat16_stays_bfloat16():
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    view = stack([ArrayTensor(array, "a").transpose()] * 2)
    assert view.read().dtype == view.dtype == array.dtype


RANGES = [  # source, target, values that fit, values that do not
    (np.float32, np.float16, [65519.0, -65519.0, 1e-30, np.inf, -np.inf, np.nan], [65520.0, -1e5]),
    (np.float32, ml_dtypes.bfloat16, [3.38e38, np.nan, -np.inf], [3.4e38, -3.4e38]),
    (np.float64, np.float32, [3.4e38, 1e-300, np.inf], [3.5e38, -1e300]),
    (ml_dtypes.bfloat16, np.float16, [1e4, np.nan], [99840.0]),
    (np.float32, ml_dtypes.float8_e4m3fn, [440.0, np.nan], [500.0, -500.0]),
    (np.int64, np.int32, [2**31 - 1, -(2**31)], [2**31, -(2**31) - 1, 2**40]),
    (np.int64, np.uint8, [0, 255], [-1, 256]),
    (np.int64, np.uint64, [0, 2**63 - 1], [-1]),
    (np.uint64, np.int64, [0, 2**63 - 1], [2**63, 2**64 - 1]),
    (np.int32, np.float16, [65519, -7], [65520, -(2**31)]),
    (np.float32, np.int32, [2.0**31 - 128, -(2.0**31)], [2.0**31, np.nan, np.inf]),
    (np.float16, np.uint8, [255.5, -0.5], [256.0, -1.0, np.nan]),
    (ml_dtypes.bfloat16, np.int8, [127.0, -128.0], [128.0, np.nan]),
    (np.float64, np.int64, [-(2.0**63), 0.0], [2.0**63]),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("source", "target", "fitting", "others"), RANGES)
def test_a_cast_refuses_what_its_dtype_cannot_hold(source, target, fitting, others):
    held = np.array(fitting, np.int64 if isinstance(fitting[0], int) else np.float64).astype(source)
    with np.errstate(all="ignore"):
        wanted = held.astype(target)
    assert ArrayTensor(held, "x").astype(target).read().tobytes() == wanted.tobytes()
    for other in others:
        array = np.concatenate([held, np.array([other]).astype(source)])
        tensor = ArrayTensor(array, "x").astype(target)
        assert tensor[: len(held),].tobytes() == wanted.tobytes()  # only what is read is checked
        dtype, name = np.dtype(source), np.dtype(target)
        message = (
            rf"Tensor x holds {re.escape(f'{array[-1]}')} \({dtype}\), which {name} cannot hold"
        )
        with pytest.raises(ValueError, match=message):
            tensor.read()


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda x: x.transpose(0, 0), r"`dims` must name each dimension of \(2, 3\) once.*x; got"),
        (lambda x: x.narrow(1, 2, 4), r"`start` and `stop` must lie in dimension 1 of \(2, 3\)"),
        (lambda x: x.reshape((4,)), r"`shape` must hold the 6 elements of x, .*got \(4,\)"),
        (
            lambda x: concatenate([x, x.transpose()], 0),
            "must agree in dtype and other dims: x is float64",
        ),
        (
            lambda x: concatenate([x, x.astype(np.int8)], 0),
            "must agree in dtype and other dims: x is float64",
        ),
        (lambda x: x[::2, :], r"`slices` of tensor x must be 2 slices with step 1"),
    ],
)
def test_views_that_are_refused(view, message: str):
    with pytest.raises(ValueError, match=message):
        view(ArrayTensor(np.zeros((2, 3)), "x"))


@pytest.mark.parametrize("in_host_memory", [True, False])
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_slices_of_sharded_arrays(in_host_memory: bool, data):
    # On other devices a stack is cut before it is copied to the host; on the CPU, too, if told so.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "_is_in_host_memory", lambda _: in_host_memory)
        zero = jz.Zero(jz.make_mesh(nodes=2))
        array = np.arange(4 * 17 * 6, dtype=np.float32).reshape(4, 17, 6)
        stored = zero.shard({"x": array})["x"]
        assert stored.data.shape == (4, 24, 6), "padded: 8 devices divide no dimension"
        tensor = ShardedTensor(stored.data, array.shape, "x")
        layer = data.draw(st.integers(0, 3))
        box = (slice(layer, layer + 1), *draw_box(data, (17, 6)))
        np.testing.assert_array_equal(tensor[box], array[box], strict=True)
        np.testing.assert_array_equal(tensor.read(), array, strict=True)


def test_slices_of_arrays_of_one_device_and_of_replicated_ones():
    array = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    whole = jax.sharding.NamedSharding(jz.make_mesh(nodes=2), jax.sharding.PartitionSpec())
    for held in (jnp.asarray(array), jax.device_put(array, whole)):
        tensor = ShardedTensor(held, (3, 4), "x")
        np.testing.assert_array_equal(tensor[1:3, 1:2], array[1:3, 1:2], strict=True)


def test_over_several_processes_other_shardings_are_refused(monkeypatch):
    monkeypatch.setattr(ShardedTensor, "collective", True)
    tensor = ShardedTensor(jnp.ones(3), (3,), "x")
    with pytest.raises(ValueError, match="must have a `NamedSharding`; got SingleDeviceSharding"):
        tensor.read()


def test_what_every_process_gets_stays_split_where_it_was():
    # Along another dim XLA would first copy all of it to each device.
    zero = jz.Zero(jz.make_mesh(nodes=2))
    stored = zero.shard({"x": np.zeros((16, 32), np.float32)})["x"]
    moved = sharded._in_each_process(stored)
    assert [x.sharding.shard_shape(x.shape) for x in (stored, moved)] == [(16, 4), (16, 4)]
