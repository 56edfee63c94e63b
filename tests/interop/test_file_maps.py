"""Values that were read from a file stay as they were, whoever writes to the file afterwards."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxzero as jz
from jaxzero import interop

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
