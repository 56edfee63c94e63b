"""Values that were read from a file stay as they were, whoever writes to the file afterwards."""

import gc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxzero as jz
from jaxzero import interop
from jaxzero.interop import FileTensor

SHAPE = (512, 256)  # large enough to be mapped


@pytest.fixture(params=[np.float32, ml_dtypes.bfloat16])
def written(request, tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A file whose data begin where a CPU device could use them in place, and what it holds."""
    array = np.arange(512 * 256).reshape(SHAPE).astype(request.param)
    for padding in range(8):
        save_file({"x": array}, tmp_path / "x.safetensors", {"padding": "." * 8 * padding})
        if interop.tensors_in(tmp_path / "x.safetensors")["x"].offset % 64 == 0:
            return tmp_path / "x.safetensors", array
    raise AssertionError("no header of this length")


def overwrite(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-SHAPE[0] * SHAPE[1], 2)
        opened.write(b"\xff" * SHAPE[0] * SHAPE[1])


@pytest.mark.parametrize("transposes", [True, False])
@pytest.mark.parametrize("num_devices", [1, 8])
def test_arrays_on_devices_do_not_change_with_the_file(written, transposes: bool, num_devices: int):
    file, array = written
    zero = jz.Zero(jz.make_mesh(1, devices=jax.devices()[:num_devices]))
    tensor = interop.tensors_in(file)["x"]
    wanted = array.T if transposes else array
    loaded = zero.shard({"x": tensor.transpose() if transposes else tensor})
    overwrite(file)
    np.testing.assert_array_equal(zero.unshard(loaded)["x"], wanted, strict=True)
    assert not (interop.tensors_in(file)["x"].read() == array).all(), "it was overwritten"


def test_arrays_that_are_read_do_not_change_with_the_file(written):
    file, array = written
    tensor = interop.tensors_in(file)["x"]
    whole, rows, turned = tensor.read(), tensor[100:400, :], tensor.transpose().read()
    overwrite(file)
    np.testing.assert_array_equal(whole, array, strict=True)
    np.testing.assert_array_equal(rows, array[100:400], strict=True)
    np.testing.assert_array_equal(turned, array.T, strict=True)
    whole[:] = 0  # and they are the caller's own


def test_a_borrowed_array_is_the_file(written):
    """Which is why it is copied at once."""
    file, array = written
    borrowed = interop.tensors_in(file)["x"].borrow((slice(None), slice(None)))
    assert not borrowed.flags.writeable
    overwrite(file)
    assert not (borrowed == array).all()


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_one_map_serves_all_devices(tmp_path: Path, monkeypatch, dtype, axis_type):
    arrays = {
        "even": np.arange(512 * 256).reshape(SHAPE).astype(dtype),
        "padded": np.arange(1001 * 77).reshape(1001, 77).astype(dtype),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    tensors = interop.tensors_in(tmp_path / "x.safetensors")
    leaves = {
        **tensors,
        "turned": tensors["even"].transpose(),
        "padded, turned": tensors["padded"].transpose(),
        "rows": tensors["even"].narrow(0, 100, 404),
    }
    mapped = []
    map_file = FileTensor._mapped
    monkeypatch.setattr(FileTensor, "_mapped", lambda *args: mapped.append(1) or map_file(*args))
    mesh = jz.make_mesh(nodes=2)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(axis_type,) * 2)
    zero = jz.Zero(mesh)
    loaded = zero.unshard(zero.shard(leaves))
    assert len(mapped) <= len(leaves), "not once for each of 8 devices"
    wanted = {
        **arrays,
        "turned": arrays["even"].T,
        "padded, turned": arrays["padded"].T,
        "rows": arrays["even"][100:404],
    }
    for name, array in wanted.items():
        np.testing.assert_array_equal(loaded[name], array, strict=True)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
@pytest.mark.parametrize("nodes", [1, 2])
def test_rows_that_collide_in_the_cache(tmp_path: Path, dtype, nodes: int):
    """Each thread copies such matrices to the same memory, one after another."""
    columns = 4096 // np.dtype(dtype).itemsize
    random = np.random.default_rng(0)
    arrays = {
        str(i): random.integers(-99, 99, (rows, factor * columns)).astype(dtype)
        for i, (rows, factor) in enumerate([(48, 1), (33, 2), (64, 1), (1, 3), (5, 2)] * 5)
    }
    save_file(arrays, tmp_path / "x.safetensors")
    tensors = interop.tensors_in(tmp_path / "x.safetensors")
    zero = jz.Zero(jz.make_mesh(nodes=nodes))
    loaded = zero.unshard(zero.shard({k: x.transpose() for k, x in tensors.items()}))
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array.T, strict=True)


def test_which_tensors_are_borrowed_without_a_copy(written):
    tensor = interop.tensors_in(written[0])["x"]
    for view in (tensor, tensor.transpose(), tensor.narrow(0, 1, 500).transpose()):
        assert view.is_in_file
        borrowed = view.borrow((slice(None), slice(None)))
        assert not borrowed.flags.owndata and not borrowed.flags.writeable
    for view in (tensor.astype(np.float16), tensor.reshape((256, 512))):
        assert not view.is_in_file


def test_64_bits_stay_where_they_are_enabled_in_one_thread(tmp_path: Path):
    array = np.arange(512 * 256, dtype=np.float64).reshape(SHAPE) + 2.0**-40
    save_file({"x": array}, tmp_path / "x.safetensors")
    tensor = interop.tensors_in(tmp_path / "x.safetensors")["x"]
    with jax.enable_x64(True):
        zero = jz.Zero(jz.make_mesh(nodes=2))
        loaded = zero.unshard(zero.shard({"x": tensor.transpose()}))["x"]
        np.testing.assert_array_equal(loaded, array.T, strict=True)


@pytest.mark.parametrize("transposes", [True, False])
def test_loaded_arrays_can_be_donated(written, transposes: bool):
    file, array = written
    tensor = interop.tensors_in(file)["x"]
    zero = jz.Zero(jz.make_mesh(nodes=2))
    loaded = zero.shard({"x": tensor.transpose() if transposes else tensor})
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    twice = step(step(loaded))
    wanted = (array + array) + (array + array)
    found = zero.unshard(twice)["x"]
    np.testing.assert_array_equal(found, wanted.T if transposes else wanted, strict=True)
    np.testing.assert_array_equal(tensor.read(), array, strict=True)  # nothing wrote to the file


def test_a_file_that_is_cut_off_after_it_was_opened(written):
    file, _ = written
    tensor = interop.tensors_in(file)["x"]
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="ends inside tensor 'x': it was cut off after it"):
        jz.Zero(jz.make_mesh(nodes=2)).shard({"x": tensor.transpose()})
    assert gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was_before(written, collects: bool):
    file, _ = written
    try:
        if not collects:
            gc.disable()
        jz.Zero(jz.make_mesh(nodes=2)).shard({"x": interop.tensors_in(file)["x"]})
        assert gc.isenabled() == collects
    finally:
        gc.enable()
