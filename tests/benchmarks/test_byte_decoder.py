"""The byte decoder that the training studies train, and the data that they train it on."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shared import _byte_decoder as decoder
from benchmarks.shared import _corpus

SIZE = decoder.Size(layers=2, width=32, heads=2, length=12)
TOKENS = np.random.default_rng(1).integers(0, 256, (3, SIZE.length + 1)).astype(np.int32)


@functools.cache
def params() -> dict[str, Any]:
    return jax.jit(functools.partial(decoder.init, SIZE))(jax.random.key(0))


def logits(tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_logits(params(), tokens))


_logits = jax.jit(functools.partial(decoder.logits, SIZE))


def test_shapes():
    scores = jax.eval_shape(functools.partial(decoder.logits, SIZE), params(), TOKENS)
    assert scores.shape == (3, SIZE.length + 1, 256)
    losses = jax.eval_shape(functools.partial(decoder.losses, SIZE), params(), TOKENS)
    assert (losses.shape, losses.dtype) == ((3, SIZE.length), jnp.float32)


def test_default_size():
    size = decoder.Size()
    tree = jax.eval_shape(functools.partial(decoder.init, size), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(tree)) == 1_017_216
    matrices = [leaf.size for name, leaf in tree["layers"].items() if not name.startswith("norm")]
    assert min(matrices) >= size.layers * 2**14  # what is smaller is not quantised


def test_sees_no_later_byte():
    changed = TOKENS.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = logits(TOKENS), logits(changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_positions_matter():
    """The last byte is scored by what came before it in which order, not by what alone."""
    swapped = TOKENS[:, [1, 0, *range(2, SIZE.length + 1)]]
    assert not np.allclose(logits(TOKENS)[:, -1], logits(swapped)[:, -1], atol=1e-6)


def test_losses_are_of_the_next_byte():
    exponentials = np.exp(logits(TOKENS)[:, :-1].astype(np.float64))
    expected = -np.log(exponentials / exponentials.sum(-1, keepdims=True))
    expected = np.take_along_axis(expected, TOKENS[:, 1:, None], -1)[..., 0]
    found = jax.jit(functools.partial(decoder.losses, SIZE))(params(), TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # a few roundings of small scores
    # A fresh model knows nothing. Scores deviate by 0.02 sqrt(width) = 0.11, and the mean loss is
    # above log 256 by half the square of that, and by what these 36 scores happen to be.
    assert abs(float(found.mean()) - math.log(256)) < 0.1


def _write(directory: Path, modules: list[str]) -> None:
    for module in modules:
        path = directory / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {module}\n")


def _lines(corpus: _corpus.Corpus) -> list[list[str]]:
    """Of both parts."""
    return [
        bytes(getattr(corpus, field.name)).decode().splitlines()
        for field in dataclasses.fields(corpus)
    ]


def test_corpus_is_split_by_module(tmp_path: Path):
    modules = [f"package/module{i}.py" for i in range(40)]
    _write(tmp_path, modules)
    _write(
        tmp_path, ["test/a.py", "package/tests/b.py", "site-packages/c.py", "test_d.py", "e.txt"]
    )
    train, held_out = _lines(_corpus.read_corpus(tmp_path))
    assert train and held_out
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(f"# {module}" for module in modules)
    assert train == sorted(train)
    assert all(_corpus.is_held_out(line.removeprefix("# ")) for line in held_out)


def test_windows_are_runs_of_bytes():
    data = np.arange(200, dtype=np.uint8)
    windows = _corpus.random_windows(data, (4, 3), 8, np.random.default_rng(0))
    assert (windows.shape, windows.dtype) == ((4, 3, 9), np.int32)
    again = _corpus.random_windows(data, (4, 3), 8, np.random.default_rng(0))
    np.testing.assert_array_equal(windows, again)
    even = _corpus.even_windows(data, 5, 8)
    assert (even[0, 0], even[-1, -1]) == (0, 199)
    for each in (windows, even):
        np.testing.assert_array_equal(np.diff(each), 1)


def _install(directory: Path, package: str, files: dict[str, str]) -> None:
    """As an installer does it: files, and a list of them."""
    information = directory / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in files))


def test_packages_are_held_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    first = {
        "corpusone/b.py": "one b\n",
        "corpusone/a.pyi": "one a\n",
        "corpusone/a.py": "same\n",
        "corpusone/notes.md": "one notes\n",
        "corpusone/data.txt": "not read\n",
        "corpusone/tests/a.py": "not read\n",
        "corpusone/_vendor/a.py": "not read\n",
        "corpusone/test_a.py": "not read\n",
        "corpusone/a_test.py": "not read\n",
    }
    _install(tmp_path, "corpusone", first)
    _install(tmp_path, "corpustwo", {"corpustwo/a.py": "same\n", "corpustwo/b.py": "two b\n"})
    corpus = _corpus.read_packages(("corpusone",), ("corpustwo",))
    # By path; what both packages have is in neither twice.
    assert _lines(corpus) == [["same", "one a", "one b", "one notes"], ["two b"]]
    described = corpus.described()
    assert (described["train_bytes"], described["held_out_bytes"]) == (27, 6)
    (tmp_path / "corpusone" / "b.py").write_text("one c\n")
    _corpus.read_packages.cache_clear()
    changed = _corpus.read_packages(("corpusone",), ("corpustwo",)).described()
    assert changed["sha256"] != described["sha256"]
    with pytest.raises(ValueError, match="'corpusthree' is not one"):
        _corpus.read_packages(("corpusone",), ("corpusthree",))
    with pytest.raises(ValueError, match="both have \\['corpusone'\\]"):
        _corpus.read_packages(("corpusone",), ("corpusone", "corpustwo"))


def test_distinct_windows_share_no_byte():
    data = np.arange(200, dtype=np.uint8)
    windows = _corpus.distinct_windows(data, 22, 8, np.random.default_rng(0))
    assert windows.shape == (22, 9)
    assert np.unique(windows).size == windows.size
    assert list(windows[:, 0]) != sorted(windows[:, 0])
    np.testing.assert_array_equal(np.diff(windows), 1)
    with pytest.raises(ValueError, match="at most the 22 windows that `data` holds; got 23"):
        _corpus.distinct_windows(data, 23, 8, np.random.default_rng(0))
