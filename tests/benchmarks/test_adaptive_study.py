"""The study of adaptive batches: what it trains, and that its variants differ in nothing else."""

import dataclasses
import json
import math
from typing import Any

import jax
import numpy as np
import pytest

import jaxzero as jz
from benchmarks.shared import _rows
from benchmarks.shared._byte_decoder import Size
from benchmarks.shared._corpus import read_packages
from benchmarks.training import _simigrad_summary as summary
from benchmarks.training import _step_costs, simigrad
from benchmarks.training._adaptive_tasks import Bytes, Digits, Equal
from benchmarks.training._simigrad_summary import TUNING_SEED, Run

pytestmark = pytest.mark.standard_promotion  # the schedules of optax

TINY = Bytes(
    budget=512,
    updates=5,
    per_call=8,
    sizes=(2, 4, 8),
    size=Size(layers=1, width=16, heads=2, length=8),
    held_out=192,
    train_packages=("optax",),
    held_out_packages=("rich",),
)
RATE = TINY.learning_rate


def _run(equal: Equal, variant: str, seed: int = 0, task: Bytes = TINY) -> dict[str, Any]:
    with jax.numpy_dtype_promotion("standard"):  # before the mark, which is of a test, holds
        row = simigrad.run(task, Run(equal, variant, RATE, seed))
    return json.loads(json.dumps(row))


@pytest.fixture(scope="module")
def rows():
    return {name: _run("examples", name) for name in ("fixed 4", "walk")}


@pytest.fixture(scope="module")
def equal_updates():
    return _run("updates", "norm_test")


def test_a_fixed_batch_is_what_its_name_says(rows):
    row = rows["fixed 4"]
    assert row["updates"] == TINY.budget / TINY.rows / 4
    assert row["updates_by_batch_examples"] == [[4 * TINY.rows, row["updates"]]]


def test_adaptive_batches_stay_between_the_smallest_and_the_largest(rows, equal_updates):
    for row in (rows["walk"], equal_updates):
        batches = [size for size, _ in row["updates_by_batch_examples"]]
        assert min(batches) >= 2 * TINY.rows and max(batches) <= 8 * TINY.rows
        assert row["updates"] == sum(updates for _, updates in row["updates_by_batch_examples"])


def test_equal_updates_end_training_where_they_end(equal_updates):
    """The rest of the last call changes nothing: with shorter calls the result is the same."""
    assert equal_updates["updates"] == TINY.updates
    task = dataclasses.replace(TINY, per_call=1)
    shorter = _run("updates", "norm_test", task=task)
    assert shorter["updates_by_batch_examples"] == equal_updates["updates_by_batch_examples"]
    # The losses are about 5, so that one rounding in float32 is 5e-7, and there are 5 updates. A
    # sixth update would change the fourth decimal.
    assert shorter["held_out_loss"] == pytest.approx(equal_updates["held_out_loss"], abs=2e-5)


def test_batches_are_counted_from_the_updates_after_each_microbatch():
    updates = np.array([0, 0, 1, 1, 1, 1, 2, 3, 3])
    np.testing.assert_array_equal(simigrad._batch_sizes(updates), [2, 4, 1])


@pytest.mark.parametrize(
    ("equal", "batch", "budget"), [("examples", 10.0, 100), ("updates", 7.0, 10)]
)
def test_the_batch_doubles_at_fixed_parts_of_the_budget(equal, batch, budget):
    rule = simigrad.Doubling(2, budget, equal)
    memory, wanted = rule.init(), []
    for _ in range(10):
        steps, memory = rule.wanted(None, None, batch, None, memory)
        wanted.append(float(steps))
    assert wanted == [2, 4, 4, 8, 8, 16, 16, 16, 16, 16]


def test_the_norm_test_grows_a_batch_to_where_it_would_pass():
    """Halves of a batch of 8 with gradients (1, x) and (1, -x): variance x^2, of square 1."""
    x, target = 2.0, 0.2
    similarity = (1 - x**2) / (1 + x**2)
    allowed = (1 - target) / (1 + target)
    steps, _ = simigrad.NormTest().wanted(similarity, 8.0, None, target, ())
    assert float(steps) == math.ceil(8 * x**2 / allowed)
    assert float(simigrad.NormTest().wanted(0.5, 8.0, None, target, ())[0]) == 8


def test_training_lowers_the_loss_and_depends_on_the_seed(rows):
    untrained = TINY.evaluate(TINY.init(jax.random.key(0)))["held_out_loss"]
    assert rows["fixed 4"]["held_out_loss"] < untrained
    assert _run("examples", "fixed 4", 1)["held_out_loss"] != rows["fixed 4"]["held_out_loss"]


def test_a_run_sees_no_window_twice():
    batches = list(TINY.batches(0))
    assert len(batches) * TINY.per_call * TINY.rows > TINY.budget
    data = read_packages(("optax",), ("rich",)).train
    windows = np.concatenate(batches).reshape(-1, TINY.size.length + 1)
    places = data[: data.size // 9 * 9].reshape(-1, 9)
    used = np.unique(places, axis=0, return_counts=True)
    found = np.unique(windows, axis=0, return_counts=True)
    allowed = dict(zip(map(bytes, used[0]), used[1], strict=True))
    for window, number in zip(found[0].astype(np.uint8), found[1], strict=True):
        assert number <= allowed[bytes(window)]


def _fake(
    variant: str, rate: float, seed: int, loss: float, rows: dict[str, Any]
) -> dict[str, Any]:
    of = dataclasses.asdict(Run("examples", variant, rate, seed))
    return {**rows["walk"], **of, "held_out_loss": loss}


def test_rates_are_tuned_and_no_run_whose_row_is_there_is_made_again(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(simigrad, "RESULTS", tmp_path)
    monkeypatch.setattr(simigrad, "is_current", lambda row, *paths: True)
    made = []

    def run(task: Bytes, of: Run) -> dict[str, Any]:
        made.append(of)
        return _fake(of.variant, of.learning_rate, of.seed, abs(of.learning_rate - 1e-3), rows)

    monkeypatch.setattr(simigrad, "run", run)
    monkeypatch.setattr(
        simigrad,
        "append_row",
        lambda name, results: _rows.append_row(name, results, directory=tmp_path),
    )
    for variants in (("fixed 4",), ("fixed 4", "walk")):
        simigrad._run_all(TINY, 1, variants, ("examples",))
    expected = [(rate, TUNING_SEED) for rate in (2e-3, 1e-3, 4e-3)] + [(1e-3, 0)]
    for variant in ("fixed 4", "walk"):
        runs = [(of.learning_rate, of.seed) for of in made if of.variant == variant]
        assert runs == expected
    assert set(simigrad._newest(TINY)) == set(made)
    other = dataclasses.replace(TINY, target=0.4)  # other settings: nothing is there
    assert simigrad._newest(other) == {}
    monkeypatch.setattr(simigrad, "read_rows", lambda *args, **kwargs: [])
    assert simigrad._newest(TINY) == {}


def test_a_summary_of_part_of_the_runs_says_how_many_there_are(tmp_path, rows):
    losses = {
        ("fixed 2", 2e-3, TUNING_SEED): 2.0,
        ("fixed 2", 1e-3, TUNING_SEED): 1.9,
        ("fixed 2", 1e-3, 0): 1.5,
        ("fixed 2", 1e-3, 1): 1.7,
        ("fixed 2", 2e-3, 0): 0.1,  # not the rate of the best trial
        ("walk", 2e-3, TUNING_SEED): 3.0,
        ("walk", 2e-3, 0): 1.6,
        ("walk", 2e-3, 1): 1.7,
        ("jump", 4e-3, TUNING_SEED): 4.0,
    }
    done = {
        Run("examples", *key): _fake(*key, loss, rows)  # pyright: ignore[reportArgumentType]
        for key, loss in losses.items()
    }
    done[Run("examples", "norm_test", 2e-3, TUNING_SEED)] = {**rows["walk"], "held_out_loss": None}
    found = summary.summarize(TINY, simigrad.variants_of(TINY), done)["examples"]
    assert [x.variant for x in found] == ["fixed 2", "walk", "jump"]  # what diverged is left out
    smallest, walk, jump = found
    assert (smallest.learning_rate, smallest.trials, sorted(smallest.runs)) == (1e-3, 2, [0, 1])
    assert smallest.mean_and_error() == pytest.approx((1.6, 0.1))  # 0.2 / sqrt(2) / sqrt(2)
    assert walk.over(smallest) == pytest.approx((0.05, 0.05))  # by seed: 0.1 and 0.0
    columns = {
        column.header: column._cells for column in summary.table(TINY, "examples", found).columns
    }
    assert columns["seeds"] == ["2", "2", "0"] and columns["trials"] == ["2", "1", "1"]
    assert columns["loss"] == ["1.6000 ± 0.1000", "1.6500 ± 0.0500", "(4.0000)"]
    assert columns["over fixed 2"] == ["", "+0.0500 ± 0.0500", ""]
    minutes = rows["walk"]["predicted_seconds"]["12.5 GB/s"] / 60
    assert columns["minutes at 12.5 GB/s"] == [f"{minutes:.1f}"] * 3
    assert not jump.runs
    summary.draw(TINY, {"examples": found}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_predicted_seconds_are_those_of_compiled_steps(monkeypatch):
    steps = {16: 0.5, 32: 0.75}
    rows = [
        {"results": _step_costs._STEP | _compiled(batch, seconds)}
        for batch, seconds in [(16, 9.9), *steps.items(), (64, 5.0)]
    ]
    rows[-1]["results"]["variant"] = "zero3"
    monkeypatch.setattr(_step_costs, "read_rows", lambda name: rows)
    _step_costs._step_seconds.cache_clear()
    found = _step_costs.predicted_seconds([(16, 10), (24, 4), (32, 2)])  # the newest row counts
    assert found == {"12.5 GB/s": 10 * 0.5 + 4 * 0.625 + 2 * 0.75, "1.25 GB/s": 90.0}
    with pytest.raises(
        ValueError, match="batches of 32 to 33 sequences; compiled are \\[16, 32\\]"
    ):
        _step_costs.predicted_seconds([(32, 1), (33, 1)])
    _step_costs._step_seconds.cache_clear()


def _compiled(batch: int, seconds: float) -> dict[str, Any]:
    links = {"12.5 GB/s between nodes": seconds, "1.25 GB/s between nodes": 5.625}
    return {
        "batch": batch,
        "schedule": json.loads(json.dumps(dataclasses.asdict(jz.CommSchedule()))),
        "predicted": {link: {"step_seconds": x} for link, x in links.items()},
    }


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
    with pytest.raises(ValueError, match="`budget` must be a multiple of 8 rows x 32"):
        Bytes(budget=100)
    with pytest.raises(ValueError, match="`sizes` must rise, from 2"):
        Bytes(sizes=(1, 2))


@pytest.mark.parametrize(
    "new, same",
    [
        ('"""Twice x."""\n    if x is None:\n        raise ValueError\n    return 2 * x', True),
        ('"""Twice x."""\n    if x is None:\n        raise ValueError\n    return 3 * x', False),
        ('"""Twice x."""\n    return 2 * x', False),
    ],
    ids=["other_texts", "other_number", "no_check"],
)
def test_a_row_holds_until_the_program_changes(new, same, tmp_path, monkeypatch):
    old = "if x is None:  # no number\n        raise ValueError('None')\n    return 2 * x"
    old, new = ("def f(x):\n    " + body for body in (old, new))
    (tmp_path / "f.py").write_text(new)
    answers = {"rev-parse": str(tmp_path), "diff": "f.py", "show": old}
    monkeypatch.setattr(_rows, "_git", lambda command, *_: answers[command])
    assert _rows.is_current({"commit": "abc", "uncommitted_changes": False}, "f.py") is same
    assert not _rows.is_current({"commit": "abc", "uncommitted_changes": True}, "f.py")
