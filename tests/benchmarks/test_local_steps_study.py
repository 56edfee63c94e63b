"""The study of local steps: that its runs are what they say, against plain loops; its summary."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxzero as jz
from benchmarks.shared import _byte_decoder as decoder
from benchmarks.shared import _corpus, _rows
from benchmarks.shared._byte_training import held_out_losses, optimizer
from benchmarks.training import _local_steps_methods as methods
from benchmarks.training import _local_steps_summary as summary
from benchmarks.training import equal_time, local_steps

pytestmark = pytest.mark.standard_promotion  # the schedules of optax

TINY = local_steps.Study(
    steps=200,
    synchronous_steps=100,
    size=decoder.Size(layers=1, width=16, heads=2, length=8),
    seeds=(0,),
    nodes=(2,),
)


def _plain(tokens: np.ndarray, state: Any, rate: float = 1.0, inner: Any = "adamw") -> Any:
    """Train on one device without jaxzero."""
    tx = optimizer(rate * TINY.learning_rate, TINY.steps, inner=inner)

    def step(state, rows):
        params, opt_state = state
        grads = jax.grad(lambda p: decoder.losses(TINY.size, p, rows).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.jit(lambda state, tokens: jax.lax.scan(step, state, tokens)[0])(state, tokens)


@functools.cache
def _plain_loss(replicas: int, rate: float = 1.0, inner: Any = "adamw") -> float:
    """The held-out loss of the mean of replicas that part after the synchronous steps."""
    corpus = _corpus.read_corpus()
    shape, generator = (TINY.steps, TINY.rows), np.random.default_rng(0)
    tokens = _corpus.random_windows(corpus.train, shape, TINY.size.length, generator)
    params = jax.jit(functools.partial(decoder.init, TINY.size))(jax.random.key(0))
    tx = optimizer(TINY.learning_rate, TINY.steps, inner=inner)
    state = _plain(tokens[: TINY.synchronous_steps], (params, tx.init(params)), inner=inner)
    parts = np.split(tokens[TINY.synchronous_steps :], replicas, axis=1)
    found = [_plain(part, state, rate, inner)[0] for part in parts]
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *found)
    return float(held_out_losses(TINY.size, corpus, mean).mean())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "replicas", "rate", "inner"),
    [
        ("synchronous", 1, 1.0, "adamw"),
        ("average100", 2, 1.0, "adamw"),
        ("average100 rate 0.5", 2, 0.5, "adamw"),
        ("synchronous", 1, 1.0, "muon"),
        ("average100", 2, 1.0, "muon"),
    ],
)
def test_a_run_is_what_its_name_says(method, replicas, rate, inner):
    row = local_steps._run(dataclasses.replace(TINY, inner=inner), method, 2, 0)
    # Both round to float32 in other orders at each of 200 steps, which moves a loss of 4 by about
    # 200 * 2**-24 * 4 = 5e-5 if nothing cancels. One replica and two differ by 100 times as much.
    assert row["held_out_loss"] == pytest.approx(_plain_loss(replicas, rate, inner), abs=5e-5)
    assert abs(_plain_loss(1) - _plain_loss(2)) > 5e-3
    assert abs(_plain_loss(2, 0.5) - _plain_loss(2)) > 5e-3
    assert abs(_plain_loss(2, inner="muon") - _plain_loss(2)) > 5e-3
    assert len(row["train_loss_mean_of_100_steps"]) == 2
    assert (row["cosine_between_nodes"] is None) == (method == "synchronous")
    # As in rows that were made before there was another optimizer, or other data.
    assert not {"inner", "corpus"} & set(TINY.settings)


def test_the_agreement_of_nodes_is_the_cosine_of_what_they_change():
    params = jax.jit(functools.partial(decoder.init, TINY.size))(jax.random.key(0))
    state = params, TINY.tx().init(params)
    nodes = local_steps._agreement(TINY, 1.0)
    both = jax.tree.map(lambda x: jax.numpy.stack([x, x]), state)
    tokens = np.random.default_rng(0).integers(0, 256, (3, 4, 9)).astype(np.int32)
    ends = [jax.tree.leaves(_plain(part, state)[0]) for part in np.split(tokens, 2, axis=1)]
    starts = jax.tree.leaves(params)
    a, b = (
        np.concatenate([np.ravel(x - y) for x, y in zip(end, starts, strict=True)]).astype(float)
        for end in ends
    )
    expected = a @ b / np.sqrt((a @ a) * (b @ b))
    assert 0.01 < expected < 0.99
    # Changes are float32 differences of parameters of up to 1, at the start of the warm-up.
    assert float(nodes(*both, tokens)) == pytest.approx(expected, abs=1e-3)
    same = np.concatenate([tokens[:, :2]] * 2, axis=1)
    assert float(nodes(*both, same)) == pytest.approx(1, abs=1e-5)


def _row(method: str, nodes: int, seed: int, loss: float | None) -> dict[str, Any]:
    run = {"method": method, "nodes": nodes, "seed": seed, "held_out_loss": loss}
    return {"results": {**run, "settings": TINY.settings}}


def test_methods_are_compared_seed_by_seed():
    rows = [
        _row("synchronous", 2, 1, 3.0),
        _row("synchronous", 2, 1, 2.0),  # newer
        _row("synchronous", 2, 2, 4.0),
        _row("diloco30", 8, 1, 2.02),
        _row("diloco30", 8, 2, 3.96),
        _row("diloco30", 8, 3, 9.0),  # the baseline lacks this seed
        _row("diloco30", 8, 0, 9.0),  # not asked for
        _row("diloco1", 2, 2, None),  # diverged
    ]
    found = {(x.method, x.nodes): x for x in summary.summarize(rows, (1, 2, 3))}
    assert found["diloco30", 8].percent == pytest.approx({1: 1.0, 2: -1.0})
    assert found["diloco30", 8].losses == [2.02, 3.96]
    assert found["diloco1", 2].percent == {2: np.inf}
    assert found["synchronous", 2].percent == {1: 0.0, 2: 0.0}
    on_eight = [_row("synchronous", 8, 1, 2.0), _row("diloco30", 8, 1, 2.02)]
    assert summary.summarize(on_eight, (1,))[1].percent == pytest.approx({1: 1.0})
    cells = [column._cells for column in summary.table(list(found.values())).columns]
    assert list(zip(*cells, strict=True))[1] == (
        "diloco30", "8", "2.9900", "+0.00%", "-1.00 .. +1.00", "+0.00%", "2",
    )  # fmt: skip


def test_the_best_synchronous_run_on_the_same_tokens_is_shown_too():
    rows = [_row("synchronous", 2, 1, 2.0), _row("diloco30", 8, 1, 2.02)]
    other = dataclasses.replace(TINY, inner="muon", learning_rate=0.02).settings
    better = {"results": {**_row("synchronous", 2, 1, 1.6)["results"], "settings": other}}
    (_, found) = summary.summarize(rows, (1,), [*rows, better])
    assert found.percent == pytest.approx({1: 1.0})
    assert found.over_best == pytest.approx({1: 26.25})
    assert TINY.has_tokens_of(other)
    assert not TINY.has_tokens_of(dataclasses.replace(TINY, rows=16).settings)
    assert not TINY.has_tokens_of(dataclasses.replace(TINY, corpus="packages").settings)


def test_every_curve_is_of_methods_that_there_are_and_is_drawn(tmp_path, monkeypatch):
    curves = [*methods.OVER_EVERY.values(), *methods.OVER_DELAY.values()]
    for places in curves:
        for place, name in places.items():
            method = methods.method(name)
            assert (
                name in methods.DEFAULT
                and method is not None
                and place in (method.local.every, method.local.delay)
            )
    rows = [_row("synchronous", 2, 0, 2.0), _row("diloco10", 2, 0, 2.1)]
    (tmp_path / "local_steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(local_steps, "RESULTS", tmp_path)
    monkeypatch.setattr(
        local_steps, "read_rows", functools.partial(_rows.read_rows, directory=tmp_path)
    )
    local_steps.main(dataclasses.replace(TINY, summary=True))
    assert (tmp_path / "local_steps.png").stat().st_size > 10_000


def test_a_name_says_the_outer_optimizer_and_the_rate():
    settings = methods.method("diloco10 sgd(0.5, momentum=0.6, nesterov=True) rate 1.4")
    assert settings is not None
    described = local_steps._described(settings)
    assert described["outer"] == "sgd(0.5, momentum=0.6, nesterov=True)"
    assert (described["rate"], described["every"]) == (1.4, 10)
    outer = settings.local.outer
    grad, state = np.ones(3, np.float32), outer.init(np.zeros(3, np.float32))
    for momentum in (1.0, 1.6, 1.96):  # sums of the gradients so far, each step times 0.6
        update, state = outer.update(grad, state)
        assert np.allclose(update, -0.5 * (1 + 0.6 * momentum), rtol=1e-6)
    preset, given = jz.diloco().outer, methods.method("diloco10")
    assert given is not None
    for outer in (preset, given.local.outer):
        update, state = outer.update(grad, outer.init(grad))
        assert np.allclose(update, -0.7 * 1.9, rtol=1e-6)
        assert np.allclose(outer.update(grad, state)[0], -0.7 * (1 + 0.9 * 1.9), rtol=1e-6)
    defaults = [methods.method(name) for name in ("diloco10", "average30", "dasgd30")]
    outers = ["sgd(0.7, momentum=0.9, nesterov=True)", "sgd(1.0)", "sgd(1.0)"]
    assert [found and (found.outer, found.rate) for found in defaults] == [(o, 1.0) for o in outers]
    assert all(name == "synchronous" or methods.method(name) for name in methods.DEFAULT)
    assert methods.method("synchronous") is None


def test_windows_of_packages_come_once(monkeypatch):
    monkeypatch.setattr(
        local_steps, "read_packages", lambda: _corpus.read_packages(("optax",), ("rich",))
    )
    local_steps._corpus.cache_clear()
    study = dataclasses.replace(TINY, corpus="packages")
    tokens = local_steps._tokens(study, 0)
    assert tokens.shape == (study.steps, study.rows, study.size.length + 1)
    places = _corpus.read_packages(("optax",), ("rich",)).train
    places = places[: places.size // 9 * 9].reshape(-1, 9)
    known, number = np.unique(places, axis=0, return_counts=True)
    allowed = dict(zip(map(bytes, known), number, strict=True))
    found, number = np.unique(tokens.reshape(-1, 9).astype(np.uint8), axis=0, return_counts=True)
    assert all(n <= allowed[bytes(x)] for x, n in zip(found, number, strict=True))
    assert local_steps._data(study) != local_steps._data(TINY)
    local_steps._corpus.cache_clear()


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="`steps` must be a multiple of 100; got 250"):
        local_steps.Study(steps=250)
    with pytest.raises(ValueError, match="`steps` must be more than .* got 300"):
        local_steps.Study(steps=300, synchronous_steps=300)
    for name in (
        "diloco",
        "diloco10 adam(1.0)",
        "diloco10 rate",
        "diloco10 rate 1.2.3",
        "diloco10 sgd(1.0), rate 1.4",
    ):
        with pytest.raises(ValueError, match=f"`methods` must be .* got {re.escape(repr(name))}"):
            local_steps.Study(methods=(name,))
    with pytest.raises(ValueError, match=r"name outer optimizers as in .* got 'sgd\(0.7, 0.9\)'"):
        local_steps.Study(methods=("diloco10 sgd(0.7, 0.9)",))
    with pytest.raises(ValueError, match="a multiple of the 30 steps in a round of diloco30"):
        local_steps.main(dataclasses.replace(TINY, methods=("diloco30",)))


def test_equal_times_are_those_of_links_and_losses_those_of_runs_as_long(tmp_path, monkeypatch):
    def row(method, steps, seed, loss):
        settings = dataclasses.replace(equal_time._STUDY, steps=steps).settings
        return {"results": {**_row(method, 8, seed, loss)["results"], "settings": settings}}

    ten, thirty = equal_time._METHODS
    rows = [
        row("synchronous", 1100, 1, 2.0),
        row("synchronous", 1100, 2, 3.0),
        row(ten, 1500, 1, 1.5),
        row(thirty, 1500, 1, None),  # diverged
    ]
    (tmp_path / "local_steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(
        equal_time, "read_rows", functools.partial(_rows.read_rows, directory=tmp_path)
    )
    seconds = {"synchronous": 0.1, ten: 0.054, thirty: 0.02}
    costs = {
        name: {"megabytes_into_a_node": 1.0, "seconds": {"100 Mbit/s": x, "1 Gbit/s": x / 10}}
        for name, x in seconds.items()
    }
    # 600 synchronous steps and 900 others: 60 + 48.6 and 60 + 18 seconds; a synchronous one is 0.1.
    cells = [column._cells for column in equal_time._table(costs).columns]
    assert [*zip(*cells, strict=True)] == [
        ("synchronous", "1500", "0", "1.000", "150.0", "15.0", "not run", "0"),
        (ten, "1500", "900", "1.000", "108.6", "10.9", "1.5000", "1"),
        ("synchronous", "1100", "0", "1.000", "110.0", "11.0", "2.5000 ± 0.5000", "2"),
        (thirty, "1500", "900", "1.000", "78.0", "7.8", "inf", "1"),
        ("synchronous", "800", "0", "1.000", "80.0", "8.0", "not run", "0"),
    ]
