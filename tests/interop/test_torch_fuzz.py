"""Damaged files of torch.save: read exactly as PyTorch reads them, or refused."""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxzero import interop

from .fuzzing import damaged, equal, fuzz
from .torch_files import pack, tensor_pickle

torch = pytest.importorskip("torch", reason="needs torch: it is what files are compared with")


def genuine() -> list[bytes]:
    base = torch.arange(24.0).reshape(4, 6)
    adam = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.99)}
    made = []
    for held in (
        {"a": base, "b": torch.ones(3, dtype=torch.bfloat16), "t": base.t(), "s": base[1:3, 2:5]},
        {"e": torch.ones(1).expand(8), "p": torch.nn.Parameter(torch.ones(2, 2))},
        {
            "model": {"x": torch.ones(2).half(), "y": torch.tensor(3)},
            "optimizer": {"state": {0: adam}, "param_groups": [group]},
        },
        {
            "c": torch.ones(4, dtype=torch.complex64),
            "z": torch.zeros(0, 3),
            "i": torch.arange(6).reshape(2, 3),
            "b": torch.tensor([True, False]),
        },
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict(),
    ):
        file = io.BytesIO()
        torch.save(held, file)
        made.append(file.getvalue())
    return made


def structure_of(whole: bytes) -> list[int]:
    """Positions of everything but the data of storages and the bytes that align it."""
    found: list[int] = []
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for info in archive.infolist():
            header, (_, name) = info.header_offset, info.filename.split("/", 1)
            lengths = (
                int.from_bytes(whole[header + 26 : header + 28], "little"),
                int.from_bytes(whole[header + 28 : header + 30], "little"),
            )
            body = header + 30 + sum(lengths)
            end = body + info.file_size
            found += range(header, header + 30 + lengths[0])
            if not name.startswith("data/"):
                found += [*range(body, end)] * (4 if name == "data.pkl" else 1)
            found += range(end, end + 16)
        return [*found, *range(archive.start_dir, len(whole))]


def same(ours: dict[str, np.ndarray], theirs: Any) -> bool:
    """Whether tensors are those of a dict that PyTorch read, or of one dict in it."""
    candidates = [theirs, *(each for each in theirs.values() if isinstance(each, dict))]
    for held in candidates:
        held = {str(key): value for key, value in held.items() if value is not None}
        if held.keys() == ours.keys():
            return all(equal(array, held[name]) for name, array in ours.items())
    return False


def fuzz_archives(path: Path, count: int, seed: int) -> None:
    files = [(whole, structure_of(whole)) for whole in genuine()]

    def damage(rng: random.Random) -> None:
        whole, positions = rng.choice(files)
        path.write_bytes(damaged(whole, rng, positions))

    def check(ours: dict[str, np.ndarray]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(path, weights_only=True, map_location="cpu")
        assert same(ours, theirs)

    accepted = fuzz(path, count, seed, damage=damage, read=interop.open_checkpoint, check=check)
    assert accepted > count // 50


def test_damaged_archives(tmp_path: Path):
    fuzz_archives(tmp_path / "m.pt", 150, seed=0)


@pytest.mark.ci
def test_many_damaged_archives(tmp_path: Path):
    fuzz_archives(tmp_path / "m.pt", 5000, seed=1)


@pytest.mark.parametrize("delta", [-20, -1, 1, 16, 64])
def test_an_offset_in_the_directory_that_is_wrong(tmp_path: Path, delta: int):
    whole = bytearray(genuine()[0])
    with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
        (info,) = [each for each in archive.infolist() if each.filename.endswith("data/0")]
        entry = whole.index(info.filename.encode(), archive.start_dir)
    place = slice(entry - 4, entry)  # the last field before the name
    assert int.from_bytes(whole[place], "little") == info.header_offset
    whole[place] = (info.header_offset + delta).to_bytes(4, "little")
    path = tmp_path / "m.pt"
    path.write_bytes(bytes(whole))
    with pytest.raises(ValueError, match=r"m\.pt' is not a whole file .*data/0' begins at byte"):
        interop.open_checkpoint(path)


@pytest.mark.parametrize("field, size", [(8, 2), (10, 2), (12, 4), (16, 4)])
def test_a_number_that_only_the_64_bit_record_has(tmp_path: Path, field: int, size: int):
    """As the end of an archive's directory says it of numbers too large for its fields."""
    whole = bytearray(genuine()[0])
    end = len(whole) - 22  # numbers of entries at 8 and 10, size at 12, first byte at 16
    assert whole[end : end + 4] == b"PK\x05\x06" and b"PK\x06\x06" in whole
    whole[end + field : end + field + size] = b"\xff" * size
    path = tmp_path / "m.pt"
    path.write_bytes(bytes(whole))
    ours = {name: tensor.read() for name, tensor in interop.open_checkpoint(path).items()}
    assert same(ours, torch.load(path, weights_only=True))
    whole[end + field] = 0xFE
    path.write_bytes(bytes(whole))
    with pytest.raises(ValueError, match="its last bytes do not describe its directory"):
        interop.open_checkpoint(path)


@pytest.mark.parametrize("offset", [0, 1, 3, 30, 33])
def test_a_local_header_that_is_none(tmp_path: Path, offset: int):
    """Its signature, and its name."""
    whole = bytearray(genuine()[0])
    with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
        (info,) = [each for each in archive.infolist() if each.filename.endswith("data/0")]
    whole[info.header_offset + offset] ^= 1
    path = tmp_path / "m.pt"
    path.write_bytes(bytes(whole))
    with pytest.raises(ValueError, match=r"data/0' is not at byte \d+, where its directory says"):
        interop.open_checkpoint(path)


@pytest.mark.parametrize(
    "view",
    [
        torch.ones(1).expand(8),
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0).unfold(0, 3, 1),
        torch.arange(24.0).reshape(4, 6)[::2, 1::3],
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(9.0).reshape(3, 3).diagonal(),
        torch.tensor(2.5).expand(2, 2),
        torch.zeros(0, 4),
    ],
)
def test_views(tmp_path: Path, view):
    torch.save({"w": view}, tmp_path / "m.pt")
    tensor = interop.open_checkpoint(tmp_path / "m.pt")["w"]
    np.testing.assert_array_equal(tensor.read(), view.numpy())
    inner = tuple(slice(size // 3, size) for size in view.shape)
    np.testing.assert_array_equal(tensor[inner], view.numpy()[inner])


def test_a_view_of_terabytes(tmp_path: Path):
    torch.save({"w": torch.ones(1).expand(10**12)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"repeats elements.*4000000000000|repeats elements"):
        interop.open_checkpoint(tmp_path / "m.pt")


def test_values_that_are_computed_when_read(tmp_path: Path):
    torch.save({"w": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"tensor with .*'conj': True.*resolve_conj"):
        interop.open_checkpoint(tmp_path / "m.pt")


def test_one_storage_of_two_dtypes(tmp_path: Path):
    """PyTorch believes the first description of a storage."""
    first = tensor_pickle()[2:-1]
    second = tensor_pickle(storage="IntStorage").replace(b"w", b"v", 1)[3:-1]
    path = pack(tmp_path / "m.pt", b"\x80\x02" + first + second + b".", {"0": bytes(16)})
    with pytest.raises(ValueError, match="storage '0' of two dtypes or sizes"):
        interop.open_checkpoint(path)
