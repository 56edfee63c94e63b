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


def _line(text: str, start: str) -> str:
    """The one line of a text that starts so."""
    (line,) = [x for x in text.splitlines() if x.startswith(start)]
    return line


def test_local_steps_are_compared_on_request(printed):
    """At 1 MB/s, 30 steps without a word between nodes beat what sends in each of them."""
    status, text = printed(f"{JOB} --link 0.001 {STREAMING}")
    method = "local steps 30, 3 fragments, delay 5, int4"
    assert status == 0 and "ranked by lower bounds alone: there is none here" in text
    assert method in _line(text, "The best: ")
    assert "another training algorithm" in text
    status, text = printed(f"{JOB} --link 0.001")
    assert status == 0 and "local steps" not in text


def stacked():
    """A job whose layers are a stack at another path than the default."""

    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["net"]["blocks"])
        return jnp.mean(x**2)

    def init_fn():
        return {"net": {"blocks": jnp.zeros((4, 64, 64))}}

    return loss_fn, init_fn, jax.ShapeDtypeStruct((ROWS, 64), jnp.float32)


@pytest.mark.ci
def test_stages_where_links_are_slow(printed):
    command = f"{JOB.replace(':job', ':stacked')} --link 0.001"
    status, text = printed(f"{command} --layers net.blocks")
    assert status == 0
    assert "zero3 in 2 stages" in _line(text, "The best: ")
    assert "make_mesh(nodes=2, stages=2)" in _line(text, "zero = ")
    assert "layers='net.blocks'" in _line(text, "zero = ")
    status, text = printed(command)
    assert status == 0 and "No leaf of the parameters is a stack of layers" in text
    assert "stages" not in _line(text, "zero = ")
    status, text = printed(f"{command} --layers ''")
    assert status == 0 and "stages" not in text


def test_local_steps_need_several_nodes(printed):
    status, text = printed(f"{JOB.replace('--nodes 2', '--nodes 1')} {STREAMING}")
    assert status != 0 and "`local_steps`" in text and "one node" in text


def two():
    """A function that does not return what the command asks for."""
    return None, None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"--function {__name__}:job --link 50e9", "`link` is in gigabytes"),
        (f"--function {__name__}:job --memory -3", "`memory` must be positive; got -3"),
        (f"--function {__name__}:job --host-memory -3", "`host_memory` must not be negative"),
        (f"--function {__name__}:job --nodes 0", "`nodes` must be positive; got 0"),
        (f"--function {__name__}:job --rows inf", "`rows` must be positive and finite; got inf"),
        (f"--function {__name__}:job --nodes 3 --local 8 --rows 0.06", "Give 0.0416667"),
    ],
)
def test_bad_settings(capsys, monkeypatch, flags, message):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as error:
        cli.main(shlex.split(f"plan {flags}"))
    assert error.value.code == 2 and message in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{__name__}:two", "must return a tuple `(loss_fn, init_fn, batch)`; it returned"),
        ("tests.none_here:job", "Name a module that Python finds"),
    ],
)
def test_a_function_that_is_no_job(printed, function, message):
    status, text = printed(f"plan --function {function}")
    assert status != 0 and message in " ".join(text.split())


def test_a_module_that_cannot_be_imported_is_not_called_missing(printed, monkeypatch, tmp_path):
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status, text = printed("plan --function needs_more:job")
    assert status != 0
    assert "importing needs_more failed: No module named 'not_installed_anywhere'" in text
