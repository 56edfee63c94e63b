"""Damaged distributed checkpoints: read exactly as PyTorch reads them, or refused."""

from __future__ import annotations

import itertools
import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxzero import interop
from jaxzero.interop._torch.dcp import covers_exactly

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


def counted(shape, boxes) -> np.ndarray:
    """How many boxes each element is in, element by element."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(*bounds) for bounds in box)] += 1
    return counts


def grid(*sizes: tuple[int, ...]) -> list:
    """Boxes that divide each dim into parts of the given sizes."""
    bounds = [
        list(zip([0, *itertools.accumulate(parts)][:-1], itertools.accumulate(parts), strict=True))
        for parts in sizes
    ]
    return list(itertools.product(*bounds))


def test_cover_against_counting():
    rng = random.Random(0)
    exact = 0
    for _ in range(2000):
        shape = (4, 6, 2)
        boxes = grid(
            rng.choice([(4,), (1, 3)]),
            rng.choice([(6,), (2, 4), (1,) * 6]),
            rng.choice([(2,), (1, 1)]),
        )
        for _ in range(rng.choice([0, 0, 1, 2])):
            at, dim = rng.randrange(len(boxes)), rng.randrange(3)
            start, stop = sorted(rng.sample(range(shape[dim] + 1), 2))
            boxes[at] = (*boxes[at][:dim], (start, stop), *boxes[at][dim + 1 :])
        expected = bool((counted(shape, boxes) == 1).all())
        assert covers_exactly(shape, boxes) == expected
        exact += expected
    assert 500 < exact < 1800


@pytest.mark.parametrize("count", [65, 100, 5000])
def test_an_overlap_and_a_gap_among_many_chunks(count: int):
    boxes = [((row, row + 1), (0, 3)) for row in range(count)]
    assert covers_exactly((count, 3), boxes)
    # As many elements as before: two rows in the last place of a column, none in that of another.
    boxes[10] = ((10, 11), (0, 2))
    boxes[40] = ((40, 41), (0, 3))
    boxes.append(((50, 51), (1, 2)))
    assert not covers_exactly((count, 3), boxes)
    assert counted((count, 3), boxes).sum() == 3 * count


def test_corners_of_covers():
    assert covers_exactly((), [()])
    assert not covers_exactly((), [])
    assert not covers_exactly((), [(), ()])
    assert covers_exactly((0, 3), [])
    assert not covers_exactly((2,), [])
    assert covers_exactly((2, 0), [])
    with pytest.raises(ValueError, match="chunks divide 5 dimensions, and at most 4"):
        covers_exactly((2,) * 5, [((0, 1),) * 5])


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
