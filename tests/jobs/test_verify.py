"""`jaxzero verify` and `jaxzero train --verify`."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxzero import cli, jobs

from .tiny_job import with_run


def _init():
    return {"w": jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)}


def _batch():
    x = jax.random.normal(jax.random.key(0), (16, 6))
    return {"x": x, "y": jnp.sin(3 * x[:, :4])}


def right():
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    return loss, _init, _batch(), optax.sgd(0.1)


def wrong():
    def loss(params, batch):
        return jnp.sqrt(jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2))

    return loss, _init, _batch()


def without_values():
    return (*right()[:2], jax.eval_shape(_batch))


def _run(capsys, monkeypatch, *arguments):
    monkeypatch.setenv("COLUMNS", "120")
    status = cli.main(["verify", *arguments])
    return status, " ".join("".join(capsys.readouterr()).split())


def test_the_status_says_whether_all_holds(capsys, monkeypatch):
    status, text = _run(capsys, monkeypatch, f"{__name__}:right", "--microbatches", "2")
    assert status == 0 and "The step computes what one device would: 3 results" in text
    status, text = _run(capsys, monkeypatch, f"{__name__}:wrong")
    assert status == 1 and "the loss is no mean of rows" in text
    assert "`sqrt` at" in text and "test_verify.py:33" in text


def test_a_batch_without_values(capsys, monkeypatch):
    status, text = _run(capsys, monkeypatch, f"{__name__}:without_values")
    assert status == 2 and "must return a batch with values" in text


@pytest.mark.ci
@pytest.mark.standard_promotion
def test_a_training_run_verifies_its_first_step(settings, console):
    settings = with_run(settings, verify=True)
    optimization = dataclasses.replace(settings.optimization, steps=1)
    jobs.train(dataclasses.replace(settings, optimization=optimization), console)
    assert "The step computes what one device would" in console.export_text()
