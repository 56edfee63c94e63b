"""`jaxzero plan`: the command, without a compiler for the cluster's GPUs."""

from __future__ import annotations

import importlib
import shlex

import jax
import jax.numpy as jnp
import pytest

from jaxzero import cli

SIZE, ROWS = 512, 16
JOB = f"plan --function {__name__}:job --nodes 2 --local 2 --limit 0 --unquantized"
STREAMING = "--local-steps 30 --local-fragments 3 --local-delay 5 --local-codec int4"


def job():
    """What `--function` names: a loss, its parameters, and a batch."""

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    def init_fn():
        return {"w": jnp.zeros((SIZE, SIZE))}

    return loss_fn, init_fn, jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs a command; its exit status, and what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    tune = importlib.import_module("jaxzero._planner.tune")
    monkeypatch.setattr(tune, "why_no_compiler", lambda cluster: "there is none here")

    def run(command: str) -> tuple[int, str]:
        status = cli.main(shlex.split(command))
        return status, "".join(capsys.readouterr())

    return run


def test_local_steps_are_compared_on_request(printed):
    """At 1 MB/s, 30 steps without a word between nodes beat what sends in each of them."""
    status, text = printed(f"{JOB} --link 0.001 {STREAMING}")
    method = "local steps 30, 3 fragments, delay 5, int4"
    assert status == 0 and "ranked by lower bounds alone: there is none here" in text
    best = text.splitlines()[-1]
    assert best.startswith("The best: ") and method in best
    assert "another training algorithm" in text
    status, text = printed(f"{JOB} --link 0.001")
    assert status == 0 and "local steps" not in text


def test_local_steps_need_several_nodes(printed):
    status, text = printed(f"{JOB} --nodes 1 {STREAMING}")
    assert status != 0 and "`local_steps`" in text and "one node" in text
