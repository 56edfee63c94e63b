"""Several real processes: what they agree on, and what becomes of all when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxzero as jz
from jaxzero import distributed
from jaxzero._mesh import mesh as _mesh
from jaxzero._mesh.mesh import _by_node
from jaxzero._processes.coordination import exchange
from jaxzero.distributed import _agreement, _watchdog
from jaxzero.distributed._agreement import _difference, _flat
from tests.processes import ended, line_from, run, started

from .distributed_run import HEARTBEAT_SECONDS

DISTRIBUTED_RUN = Path(__file__).with_name("distributed_run.py")

# From the last beat: silence, then one look, then what a busy machine adds.
LOST_SECONDS = 2 * HEARTBEAT_SECONDS + 1 + 15


@contextlib.contextmanager
def started_and_saying(what: str, said: str) -> Iterator[list[subprocess.Popen]]:
    """Two processes of `distributed_run.py`, once both have come so far."""
    with started("tests.distributed.distributed_run", 2, what) as processes:
        for process in processes:
            line_from(process, said)
        yield processes


def test_settings_in_settings_are_named_one_by_one():
    told = [dict(_flat({"run": {"seed": seed, "rates": {"a": 1}}})) for seed in (3, 4)]
    texts = [{".".join(path): str(value) for path, value in each.items()} for each in told]
    assert _difference(texts).startswith("`run.seed` is 4 in process 1 and 3 in process 0.")


def test_nodes_are_slices_or_hosts_of_equally_many_devices(monkeypatch: pytest.MonkeyPatch):
    def devices(*places: tuple[int, int]) -> list[Any]:
        return [
            SimpleNamespace(process_index=process, slice_index=piece, id=number)
            for number, (process, piece) in enumerate(places)
        ]

    def numbers(*places: tuple[int, int]) -> list[list[int]]:
        return [[device.id for device in group] for group in _by_node(devices(*places))]

    assert numbers((0, 0), (0, 0), (1, 0), (1, 0)) == [[0, 1], [2, 3]]
    assert numbers((0, 1), (1, 0), (2, 1), (3, 0)) == [[0, 2], [1, 3]]
    with monkeypatch.context() as patch:  # two processes on each of two hosts
        patch.setattr(_mesh, "process_count", lambda: 4)
        patch.setattr(_mesh, "hosts", lambda: ["a", "b", "a", "b"])
        assert numbers((0, 0), (1, 0), (2, 0), (3, 0)) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="there are 1 on slice 0, 2 on slice 1. Pass `devices=`"):
        numbers((0, 0), (1, 1), (2, 1))


def test_one_process_needs_nothing():
    assert not distributed.initialize()
    distributed.check_same(settings={"a": 1}, seed=3)
    assert exchange("nothing", "mine", 1.0) == ["mine"]
    mesh = jz.make_mesh(2)
    whole = jax.device_put(1.5, NamedSharding(mesh, PartitionSpec()))
    distributed.check_replicas({"x": whole, "step": 3}, step=3)
    with distributed.Watchdog(step_seconds=60.0) as dog, distributed.StopRequest() as stop:
        dog.beat(0)
        assert not stop.reached()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reached() and not stop.interrupted
    # Where tests run in the background, SIGINT is ignored.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    with distributed.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reached() and stop.interrupted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    assert signal.signal(signal.SIGINT, usual) is signal.default_int_handler


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: Gloo: Connection closed by peer"), [60.0]),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), []),
        (ValueError("a mistake"), []),
    ],
)
def test_only_what_a_lost_process_may_have_caused_waits(error, waited, monkeypatch):
    left, slept = [], []
    monkeypatch.setattr(_watchdog, "_leave", lambda message, status: left.append(status))
    monkeypatch.setattr(_watchdog.time, "sleep", slept.append)
    dog = distributed.Watchdog(heartbeat_seconds=30.0)
    monkeypatch.setattr(_watchdog, "process_count", lambda: 2)
    dog.__exit__(type(error), error, None)
    assert (left, slept) == ([1], waited)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "bool", "float8_e4m3fn"])
def test_replicas_of_any_dtype_differ_by_one_bit(dtype: str):
    mesh = jz.make_mesh(2)
    sharding = NamedSharding(mesh, PartitionSpec("node"))
    values = jax.numpy.array([0, 1, 1, 0], dtype)
    pieces = [
        jax.device_put(values[index], device)
        for device, index in sharding.addressable_devices_indices_map((4,)).items()
    ]
    good = jax.make_array_from_single_device_arrays((4,), sharding, pieces)
    distributed.check_replicas({"x": good}, step=0)
    (device,) = pieces[5].devices()
    pieces[5] = jax.device_put(pieces[5][::-1], device)  # the same elements in another order
    bad = jax.make_array_from_single_device_arrays((4,), sharding, pieces)
    with pytest.raises(
        distributed.ReplicasDiffer, match=rf"`x`: device {device.id} .* against 3 others"
    ):
        distributed.check_replicas({"x": bad}, step=0)


def test_a_leaf_that_one_process_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    def exchange_json(name: str, value: Any, seconds: float) -> list[Any]:
        return [value, {"step": 3, "own": {}}]

    monkeypatch.setattr(_agreement, "exchange_json", exchange_json)
    with pytest.raises(distributed.ReplicasDiffer, match="the leaf `n` of process 1"):
        distributed.check_replicas({"n": 7}, step=3)


def test_two_processes_agree_or_say_why():
    ends = run("tests.distributed.distributed_run", 2, "agree")
    first, second = (json.loads(end.out.splitlines()[-1]) for end in ends)
    assert first == second, "all processes say the same"
    host = socket.gethostname()
    assert first == {
        "mesh": {"node": 1, "local": 4},  # two processes of one host
        "settings": f"`settings.rate` is 1.1 in process 1 ({host}) and 0.1 in process 0 ({host}). "
        "It must be equal in all processes of a run.",
        "missing": f"`settings.more` is 1 in process 1 ({host}) and missing in process 0 "
        f"({host}). It must be equal in all processes of a run.",
        "replicas whole": first["replicas whole"],
        "replicas split": None,  # no two devices hold the same piece
        "replicas number": f"After step 7 the leaf `n` of process 1 ({host}) differs from that of "
        f"process 0 ({host}). Compute it from what all processes share.",
        "replicas step": f"process 1 ({host}) is at step 8, process 0 ({host}) at 7. Start all of "
        "them from the same checkpoint.",
    }
    assert "1 of 4 leaves differ" in first["replicas whole"]
    assert f"`whole`: device 2049 of process 1 ({host}) against 3" in first["replicas whole"]


@pytest.mark.ci
def test_a_process_that_is_elsewhere_is_named():
    first, _ = run("tests.distributed.distributed_run", 2, "alone")
    assert "TimeoutError: At 'a place of its own' this process waited up to 2 s for process 1" in (
        first.err
    )


@pytest.mark.parametrize(
    ("number", "signum"),
    [
        (1, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.ci),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.ci),
    ],
    ids=["killed", "stopped", "coordinator stopped"],
)
def test_a_lost_process_ends_the_others(number: int, signum: signal.Signals):
    with started_and_saying("train", "training") as processes:
        began = time.monotonic()
        os.kill(processes[number].pid, signum)
        (end,) = ended([processes[1 - number]], seconds=60)
        took = time.monotonic() - began
    assert end.status == distributed.PEER_LOST, end.err
    assert f"process {number} (" in end.err and "it died, hangs, or" in end.err
    assert took < LOST_SECONDS


def test_a_coordinator_that_dies_ends_the_others():
    with started_and_saying("train", "training") as processes:
        processes[0].kill()
        (end,) = ended([processes[1]], seconds=60)
    # JAX may see the broken connection first, and then ends the process itself.
    assert end.status in (distributed.PEER_LOST, -signal.SIGABRT), end.err
    assert "process 0" in end.err or "another task died" in end.err


def test_an_exception_ends_all():
    first, second = run("tests.distributed.distributed_run", 2, "raise", seconds=60)
    assert second.status == 1 and "ValueError: a mistake of one process" in second.err
    assert first.status in (distributed.PEER_LOST, -signal.SIGABRT)


@pytest.mark.ci
def test_an_exit_of_one_process_alone_ends_all():
    first, second = run("tests.distributed.distributed_run", 2, "quit", seconds=60)
    assert second.status == 3 and "This process exits at once" in second.err
    assert first.status in (distributed.PEER_LOST, -signal.SIGABRT)


@pytest.mark.ci
def test_an_exception_before_training_ends_all_in_the_end():
    """JAX waits for the others, who wait for this one, as long as it was told to."""
    first, second = run("tests.distributed.distributed_run", 2, "early", seconds=90)
    assert "ValueError: a mistake before training" in second.err
    assert first.status != 0 != second.status  # JAX may abort them


@pytest.mark.ci
def test_a_process_that_makes_no_step_says_where_it_stands():
    first, second = run("tests.distributed.distributed_run", 2, "hang", seconds=60)
    assert {first.status, second.status} <= {distributed.PEER_LOST, -signal.SIGABRT}
    message = "No step for 6 s, since step 3; the traceback of this process is above. The others: "
    assert message in second.err and f'{DISTRIBUTED_RUN}", line' in second.err


@pytest.mark.ci
def test_a_process_may_wait_where_it_says_so():
    (end,) = run("tests.distributed.distributed_run", 1, "wait", seconds=60)
    assert end.out == "waited\n" and end.status == distributed.PEER_LOST
    assert end.err.endswith(
        "No step for 1 s, since the start; the traceback of this process is above.\n"
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wait long", "No step for 1 s, since the start"),
        ("limit", "the export took more than 1 s"),
    ],
)
def test_what_takes_too_long_is_ended(what: str, said: str):
    (end,) = run("tests.distributed.distributed_run", 1, what, seconds=60)
    assert end.status == distributed.PEER_LOST
    assert said in end.err and f'{DISTRIBUTED_RUN}", line' in end.err


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_sigterm_before_the_first_step_of_a_resumed_run(count: int):
    """JAX's service notes it, also where it serves one process alone."""
    with started("tests.distributed.distributed_run", count, "resume") as processes:
        for process in processes:
            line_from(process, "restoring")
        os.kill(processes[0].pid, signal.SIGTERM)
        for end in ended(processes, seconds=60):
            assert end.status == distributed.STOPPED, end.err
            assert "stopped after 41\n" in end.out


def test_sigterm_to_one_stops_all_after_the_same_step():
    with started_and_saying("train", "training") as processes:
        os.kill(processes[1].pid, signal.SIGTERM)
        first, second = ended(processes, seconds=60)
    assert first.status == second.status == distributed.STOPPED, first.err + second.err
    (step,) = {re.search(r"stopped after (\d+)", end.out)[1] for end in (first, second)}
    assert int(step) > 3
