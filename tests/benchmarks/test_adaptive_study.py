"""The study of adaptive batches: what it trains, and that its variants differ in nothing else."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.shared import _rows
from benchmarks.shared._byte_decoder import Size
from benchmarks.training import simigrad
from benchmarks.training._adaptive_tasks import Bytes, Digits

pytestmark = pytest.mark.standard_promotion  # the schedules of optax

TINY = Bytes(
    budget=256,
    rows=2,
    per_call=8,
    sizes=(2, 4, 8),
    size=Size(layers=1, width=16, heads=2, length=8),
    held_out=192,
)


@pytest.fixture(scope="module")
def rows():
    with jax.numpy_dtype_promotion("standard"):  # before the mark, which is of a test, holds
        return {name: simigrad.run(TINY, name, 0) for name in ("fixed 4", "walk")}


def test_a_fixed_batch_is_what_its_name_says(rows):
    row = rows["fixed 4"]
    assert row["updates"] == TINY.budget / TINY.rows / 4
    assert row["mean_batch_examples"] == 4 * TINY.rows


def test_adaptive_batches_stay_between_the_smallest_and_the_largest(rows):
    batches = [size for _, size, *_ in rows["walk"]["loss_batch_similarity_noise_scale"]]
    assert min(batches) >= 2 * TINY.rows
    assert max(batches) <= 8 * TINY.rows


def test_the_batch_doubles_at_fixed_parts_of_the_budget():
    rule = simigrad.Doubling(initial=2, budget=100)
    memory, wanted = rule.init(), []
    for _ in range(10):
        steps, memory = rule.wanted(None, None, 10.0, None, memory)
        wanted.append(float(steps))
    assert wanted == [2, 4, 4, 8, 8, 16, 16, 16, 16, 16]


def test_training_lowers_the_loss_and_depends_on_the_seed(rows):
    untrained = TINY.evaluate(TINY.init(jax.random.key(0)))["held_out_loss"]
    assert rows["fixed 4"]["held_out_loss"] < untrained
    assert simigrad.run(TINY, "fixed 4", 1)["held_out_loss"] != rows["fixed 4"]["held_out_loss"]


def test_a_run_whose_row_is_there_is_not_run_again(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(simigrad, "RESULTS", tmp_path)
    monkeypatch.setattr(simigrad, "is_current", lambda row, *paths: True)
    made = []
    monkeypatch.setattr(simigrad, "run", lambda task, name, seed: made.append(name) or rows[name])
    monkeypatch.setattr(
        simigrad,
        "append_row",
        lambda name, results: _rows.append_row(name, results, directory=tmp_path),
    )
    for variants in (("fixed 4",), ("fixed 4", "walk")):
        simigrad._run_all(TINY, 1, variants)
    assert made == ["fixed 4", "walk"]
    assert list(simigrad._by_variant(TINY)) == ["fixed 4", "walk"]
    other = dataclasses.replace(TINY, target=0.4)  # other settings: nothing is there
    assert simigrad._by_variant(other) == {}


def test_the_table_and_the_figure_show_every_variant(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(simigrad, "RESULTS", tmp_path)
    found = {name: [json.loads(json.dumps(row))] for name, row in rows.items()}
    assert simigrad._table(TINY, found).columns[0]._cells == list(rows)
    simigrad._draw(TINY, found)
    assert (tmp_path / "simigrad_bytes.png").stat().st_size > 10_000


def test_digits_are_shifted_by_at_most_a_pixel_and_none_is_held_out_and_trained_on():
    pytest.importorskip("sklearn")
    task = Digits(budget=64, rows=4, per_call=8)
    images, labels = next(task.batches(0))
    assert images.shape == (8, 4, 8, 8) and labels.shape == (8, 4)
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    train = np.delete(np.arange(1797), np.s_[::5])
    padded = np.pad(digits.images[train] / 16, ((0, 0), (1, 1), (1, 1))).astype(np.float32)
    views = np.stack([padded[:, i : i + 8, j : j + 8] for i in range(3) for j in range(3)], 1)
    for image, label in zip(images.reshape(-1, 8, 8), labels.ravel(), strict=True):
        of = (views == image).all((-1, -2)).any(-1)
        assert label in digits.target[train][of]


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="`budget` must be a multiple of 4 rows x 32"):
        Bytes(budget=100)
    with pytest.raises(ValueError, match="`sizes` must rise, from 2"):
        Bytes(sizes=(1, 2))
