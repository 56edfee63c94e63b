"""Where processes learn who they are, and what they tell each other of their code."""

from __future__ import annotations

import jax
import pytest

from jaxzero import distributed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "`coordinator_address` is not given, and nothing here says it"),
        ({"coordinator_address": "a:1", "process_id": 0}, "`num_processes` is not given"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "`process_id` must be from 0 to 1, .* got 2",
        ),
        ({"start_seconds": 0}, "must be positive; got 0 and 100"),
    ],
)
def test_mistakes_in_arguments(options, message: str):
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NODE": None}, "`JAXZERO_NODE` must be a number, .* got None. Set all of"),
        ({"NUM_PROCESSES": "two"}, "`JAXZERO_NUM_PROCESSES` must be a number, .* got 'two'"),
        ({"PROCESS_ID": "2"}, "`process_id` must be from 0 to 1, .* got 2"),
        ({"COORDINATOR": "host"}, "`coordinator_address` must be host:port .* got 'host'"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch, changes, message: str):
    told = {"COORDINATOR": "a:1", "NUM_PROCESSES": "2", "PROCESS_ID": "0", "NODE": "0"}
    for name, value in (told | changes).items():
        if value is not None:
            monkeypatch.setenv(f"JAXZERO_{name}", value)
    with pytest.raises(ValueError, match=message):
        distributed.initialize()


def test_processes_that_nobody_joins_do_not_train_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(ValueError, match="`PMI_SIZE` says that there are 4 processes"):
        distributed.initialize()


def test_it_is_too_late_once_jax_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match="JAX has started already: .* Call it first"):
        distributed.initialize(coordinator_address="a:1", num_processes=2, process_id=0)
