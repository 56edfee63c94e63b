"""Files from before PyTorch 1.6: read as PyTorch reads them, or refused."""

from __future__ import annotations

import io
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxzero import interop

from .fuzzing import damaged, equal, fuzz
from .test_torch_fuzz import same
from .torch_files import pack_legacy, tensor_pickle

torch = pytest.importorskip("torch", reason="needs torch: it writes the files")

VALUES = np.arange(4, dtype=np.float32)
STORAGES = {"0": (4, VALUES.tobytes())}


def legacy(held: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(held, file, _use_new_zipfile_serialization=False, **options)
    return file.getvalue()


def tensors() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64"]
    return {
        "base": base,
        "view": base[1:3, 2:5],
        "strided": base.t()[1::2],
        "repeated": torch.ones(1).expand(8),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "complex": torch.ones(3, dtype=torch.complex64) * 1j,
        **{kind: torch.arange(3).to(getattr(torch, kind)) for kind in kinds},
    }


def checkpoints() -> list[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    return [tensors(), model.state_dict(), {"net": {"layers": run["model"]}, "epoch": 3}, run]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_they_are_read_as_torch_reads_them(protocol: int, tmp_path: Path):
    path = tmp_path / "m.pt"
    for held in checkpoints():
        path.write_bytes(legacy(held, pickle_protocol=protocol))
        checkpoint = interop.open_checkpoint(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of protocols
            theirs = torch.load(path, weights_only=False)
        theirs = theirs.get("net", {}).get("layers") or theirs.get("model") or theirs
        assert list(checkpoint) == list(theirs)
        assert all(equal(checkpoint[name].read(), theirs[name]) for name in theirs)
    moments = checkpoint.adam()
    assert moments.step == 1
    assert equal(moments.exp_avg["1.bias"].read(), held["optimizer"]["state"][3]["exp_avg"])


def test_a_slice_is_read_alone(tmp_path: Path):
    """Of a file with a hole of 64 GiB."""
    count = 2**34
    data = tensor_pickle(count=count, shape=(count,), strides=(1,), view=(None,))
    path = pack_legacy(tmp_path / "m.pt", data, {}, keys=["0"])
    with path.open("r+b") as file:
        file.seek(0, io.SEEK_END)
        file.write(count.to_bytes(8, "little"))
        file.truncate(file.tell() + 4 * count)
        file.seek(-16, io.SEEK_END)
        file.write(VALUES.tobytes())
    tensor = interop.open_checkpoint(path)["w"]
    np.testing.assert_array_equal(tensor[(slice(count - 4, count),)], VALUES)


def test_views_of_storages_and_text_of_python_2(tmp_path: Path):
    """As PyTorch wrote before 0.4, and under Python 2."""
    data = tensor_pickle(shape=(2,), strides=(1,), view=(("7", 1, 2),))
    old = data.replace(b"X\x01\x00\x00\x00w", b"U\x01w").replace(b"X\x07\x00\x00\x00", b"U\x07")
    assert old.count(b"U\x07storage") == 1
    for each in (data, old):
        path = pack_legacy(tmp_path / "m.pt", each, STORAGES)
        array = interop.open_checkpoint(path)["w"].read()
        np.testing.assert_array_equal(array, VALUES[1:3])
        np.testing.assert_array_equal(torch.load(path, weights_only=False)["w"], array)


@pytest.mark.parametrize(
    ("tensor", "file", "message"),
    [
        ({}, {"version": 1002}, "its version is 1002"),
        ({}, {"machine": {"little_endian": False}}, "was written on a big-endian machine"),
        ({}, {"machine": []}, "not a whole file"),
        ({}, {"end": b"\0"}, r"1 of its 1 storages are there, up to byte \d+ of \d+"),
        ({}, {"storages": {"0": (4, bytes(15))}}, "up to byte"),
        ({}, {"storages": {"0": (-4, bytes(16))}}, "has 4 elements, and the file -4"),
        ({}, {"storages": {"0": (5, bytes(20))}}, "has 4 elements, and the file 5"),
        ({"count": -4}, {"storages": {"0": (-4, b"")}}, "has -4 elements"),
        ({"count": 2**62}, {"storages": {"0": (2**62, bytes(16))}}, "up to byte"),
        ({}, {"storages": {}}, "0 of its 1 storages are there"),
        ({}, {"keys": ["0", "0"]}, "storage '0' has 4 elements"),
        ({}, {"keys": ["1"]}, "storage '1' has None elements"),
        ({}, {"keys": [[]]}, "the keys of its storages are"),
        ({"view": ()}, {}, "not enough values to unpack"),
        ({"view": (("7", 3, 2),)}, {}, "storage '0' of 4 x float32"),
        ({"view": (("7", -1, 2),)}, {}, "a storage described as"),
        ({"view": (("7", 1),)}, {}, "a storage described as"),
        ({"shape": (3, 2)}, {}, r"a tensor of shape \(3, 2\)"),
        ({"offset": -1}, {}, "a tensor of offset -1"),
        ({"shape": (10**15,), "strides": (0,)}, {}, "repeats elements"),
    ],
)
def test_files_that_lie(tensor: dict, file: dict, message: str, tmp_path: Path):
    storages = file.pop("storages", STORAGES)
    data = tensor_pickle(**{"view": (None,)} | tensor)
    path = pack_legacy(tmp_path / "m.pt", data, storages, **file)
    with pytest.raises(ValueError, match=rf"m\.pt' .*{message}"):
        interop.open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_what_is_not_read(tmp_path: Path):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for held, message in (
        ({"w": quantized}, r"a quantized tensor, .*dequantize"),
        (torch.nn.Linear(2, 2), "a whole module"),
    ):
        (tmp_path / "m.pt").write_bytes(legacy(held))
        with pytest.raises(ValueError, match=f"holds {message}"):
            interop.open_checkpoint(tmp_path / "m.pt")


def fuzz_legacy(path: Path, count: int, seed: int) -> None:
    files = [legacy(held) for held in checkpoints()]

    def damage(rng: random.Random) -> None:
        whole = rng.choice(files)
        path.write_bytes(damaged(whole, rng, range(len(whole))))

    def check(ours: dict[str, np.ndarray]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(path, weights_only=True, map_location="cpu")
        nets = [theirs, *(each for each in theirs.values() if isinstance(each, dict))]
        assert any(same(ours, each) for each in nets)

    accepted = fuzz(path, count, seed, damage=damage, read=interop.open_checkpoint, check=check)
    assert accepted > count // 50


def test_damaged_files(tmp_path: Path):
    fuzz_legacy(tmp_path / "m.pt", 150, seed=0)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")  # of a text in a damaged pickle
def test_many_damaged_files(tmp_path: Path):
    fuzz_legacy(tmp_path / "m.pt", 5000, seed=1)
