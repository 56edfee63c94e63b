"""Bytes to train on: the Python standard library, or the sources of installed packages.

What is held out is another module of the library, or a whole package: files of one package
resemble each other. Windows of bytes are drawn anywhere, evenly, or so that none comes twice.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# All are requirements of the extras `torch`, `test` and `benchmarks`, or of what these bring.
TRAIN_PACKAGES = (
    "flax",
    "jax",
    "jaxlib",
    "matplotlib",
    "numpy",
    "orbax-checkpoint",
    "scikit-learn",
    "scipy",
    "sympy",
    "torch",
    "transformers",
)
HELD_OUT_PACKAGES = ("huggingface_hub", "networkx", "optax", "rich")

_SKIPPED_FOLDERS = frozenset({"_vendor", "idle_test", "site-packages", "test", "tests"})
_SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst"})
_HELD_OUT_SHARE = 8  # one module in so many


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes of files, split so that what is held out is not a neighbour of what is trained on.

    Attributes:
        train: uint8.
        held_out: uint8.
    """

    train: np.ndarray
    held_out: np.ndarray

    def described(self) -> dict[str, int | str]:
        """Sizes in bytes, and a hash of both parts: what a row says of its data."""
        digest = hashlib.sha256(self.train.data)
        digest.update(self.held_out.data)
        return {
            "train_bytes": self.train.size,
            "held_out_bytes": self.held_out.size,
            "sha256": digest.hexdigest(),
        }


def read_corpus(directory: Path | None = None) -> Corpus:
    """All Python files under `directory`, in sorted order; by default the standard library.

    Tests and installed packages are left out.
    """
    directory = Path(sysconfig.get_paths()["stdlib"]) if directory is None else directory
    modules = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*.py")}
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for module in sorted(filter(_is_wanted, modules)):
        parts[is_held_out(module)].append(modules[module].read_bytes())
    return Corpus(_joined(parts[False]), _joined(parts[True]))


@functools.cache
def read_packages(
    train: tuple[str, ...] = TRAIN_PACKAGES, held_out: tuple[str, ...] = HELD_OUT_PACKAGES
) -> Corpus:
    """The sources, stubs and texts that installed packages list as theirs, tests left out.

    The bytes depend on the versions of the packages and on nothing else: files come in sorted
    order, and one whose bytes came earlier, in whichever package, is left out.

    Args:
        train: names of distributions.
        held_out: of those that training never sees.

    Raises:
        ValueError: a name is in both, or no package of that name is installed.
    """
    if both := sorted(set(train) & set(held_out)):
        raise ValueError(
            f"`train` and `held_out` must have no package in common; both have {both}."
        )
    seen: set[bytes] = set()
    return Corpus(*(_joined(_sources(packages, seen)) for packages in (train, held_out)))


def _sources(packages: tuple[str, ...], seen: set[bytes]) -> list[bytes]:
    """The files of these packages, without those in `seen`, which grows."""
    texts = []
    for package in packages:
        try:
            files = importlib.metadata.files(package)
        except importlib.metadata.PackageNotFoundError:
            files = None
        if not files:
            raise ValueError(
                f"`train` and `held_out` must name installed packages; {package!r} is not one, or "
                "lists no files. Install `jaxzero[torch,test,benchmarks]`, or name others."
            )
        for file in sorted(files, key=str):
            if file.suffix in _SUFFIXES and _is_wanted(file.as_posix()):
                text = Path(str(file.locate())).read_bytes()
                if text not in seen:
                    seen.add(text)
                    texts.append(text)
    return texts


def _is_wanted(path: str) -> bool:
    *folders, name = path.split("/")
    is_test = name.startswith("test_") or name.endswith("_test.py")
    return not is_test and _SKIPPED_FOLDERS.isdisjoint(folders)


def _joined(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8)


def is_held_out(module: str) -> bool:
    """Whether training never sees this module: a hash of its path decides."""
    return zlib.crc32(module.encode()) % _HELD_OUT_SHARE == 0


def random_windows(
    data: np.ndarray, shape: Sequence[int], length: int, generator: np.random.Generator
) -> np.ndarray:
    """Windows of `length + 1` bytes from anywhere: int32 `[*shape, length + 1]`."""
    starts = generator.integers(0, data.size - length, shape)
    return data[starts[..., None] + np.arange(length + 1)].astype(np.int32)


def distinct_windows(
    data: np.ndarray, number: int, length: int, generator: np.random.Generator
) -> np.ndarray:
    """Windows of which no two share a byte, in random order: uint8 `[number, length + 1]`.

    Raises:
        ValueError: `data` has fewer.
    """
    places = data.size // (length + 1)
    if number > places:
        raise ValueError(
            f"`number` must be at most the {places} windows that `data` holds; got {number}. "
            "Train on less, or read more packages."
        )
    chosen = generator.permutation(places)[:number]
    assert np.unique(chosen).size == number, "a window comes twice"
    return data[: places * (length + 1)].reshape(places, length + 1)[chosen]


def even_windows(data: np.ndarray, number: int, length: int) -> np.ndarray:
    """The same windows every time, spread evenly: int32 `[number, length + 1]`."""
    starts = np.linspace(0, data.size - length - 1, number).astype(np.int64)
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
