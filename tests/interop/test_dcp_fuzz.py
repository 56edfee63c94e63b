"""Damaged distributed checkpoints: read exactly as PyTorch reads them, or refused."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxzero import interop

from .fuzzing import damaged, equal, fuzz

torch = pytest.importorskip("torch", reason="needs torch: it is what files are compared with")


def write(directory: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {
        "model": {
            "a": torch.arange(12.0).reshape(3, 4),
            "b": torch.ones(3, dtype=torch.bfloat16),
            "c": torch.tensor(7),
        }
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(directory), no_dist=True)


def read_by_torch(directory: Path) -> dict:
    """All tensors of a checkpoint, by the names in its metadata."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = FileSystemReader(directory).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return state


def fuzz_directories(source: Path, path: Path, count: int, seed: int) -> None:
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    (data,) = files.keys() - {".metadata"}

    def damage(rng: random.Random) -> None:
        name = rng.choice([".metadata", ".metadata", data])
        for each, whole in files.items():
            changed = damaged(whole, rng, range(len(whole))) if each == name else whole
            (path / each).write_bytes(changed)

    def check(ours: dict[str, np.ndarray]) -> None:
        # What was accepted names no code, so that PyTorch can unpickle it too.
        theirs = read_by_torch(path)
        theirs = {name.removeprefix("model."): tensor for name, tensor in theirs.items()}
        ours = {name.removeprefix("model."): array for name, array in ours.items()}
        assert ours.keys() == theirs.keys()
        assert all(equal(array, theirs[name]) for name, array in ours.items())

    accepted = fuzz(
        path,
        count,
        seed,
        damage=damage,
        read=interop.open_checkpoint,
        check=check,
        refusals=(ValueError, NotImplementedError),
    )
    assert accepted > count // 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dcp")
    write(directory)
    return directory


def test_damaged_directories(source: Path, tmp_path: Path):
    fuzz_directories(source, tmp_path, 60, seed=0)


@pytest.mark.ci
def test_many_damaged_directories(source: Path, tmp_path: Path):
    fuzz_directories(source, tmp_path, 2000, seed=1)


def test_chunks_with_an_overlap_and_a_gap(tmp_path: Path):
    """No array is handed out that was not written."""
    import pickle

    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

    write(tmp_path / "dcp")
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    entry = metadata.state_dict_metadata["model.a"]
    assert isinstance(entry, TensorStorageMetadata)
    place = metadata.storage_data.pop(MetadataIndex("model.a", torch.Size([0, 0])))
    rows = 70
    entry.size = torch.Size([rows, 4])
    offsets = [torch.Size([row, 0]) for row in [*range(60), *range(59, 69)]]
    entry.chunks = [ChunkStorageMetadata(offset, torch.Size([1, 4])) for offset in offsets]
    for offset in offsets:
        metadata.storage_data[MetadataIndex("model.a", offset)] = place
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"The 70 chunks of 'model\.a' .* without gap or overlap"):
        interop.open_checkpoint(tmp_path / "dcp")
    shutil.rmtree(tmp_path / "dcp")
