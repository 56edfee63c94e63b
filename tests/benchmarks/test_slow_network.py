"""The race over a slow network: its hosts, its runs, and the models that it trains."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from benchmarks.network import _hosts, _link
from benchmarks.network import _runs as _slow_runs
from benchmarks.network import race as slow_network
from benchmarks.network._hosts import Hosts
from benchmarks.network._runs import SIZES, Failed, Run, Runner
from benchmarks.shared import _peers, _rows

from .test_slow_network_tables import row_of

REASON = _hosts.missing()
on_hosts = pytest.mark.skipif(REASON is not None, reason=f"two hosts: {REASON}")
pytestmark = pytest.mark.xdist_group("hosts")  # as in `tests/distributed/test_several_hosts.py`


def test_peers_take_turns_there_and_back():
    peers = ("gspmd", "fsdp2")
    runs = list(slow_network.plan(["tiny"], ["none", "1gbit"], [1], peers, range(2)))
    assert [run.peer for run in runs] == ["gspmd", "fsdp2"] * 2 + ["fsdp2", "gspmd"] * 2
    assert [run.rate for run in runs[:4]] == ["none", "none", "1gbit", "1gbit"]
    assert [run.round for run in runs] == [0] * 4 + [1] * 4


class _NoHosts:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def study(tmp_path, monkeypatch):
    """`run` without hosts; the runs that it made, and its rows in `tmp_path`."""
    made = []

    def measure(self, one):
        made.append(one)
        if one.peer in ("fsdp2", "deepspeed qwz"):
            raise Failed("RuntimeError: no")
        return row_of(1.0, **vars(one))["results"]

    monkeypatch.setattr(slow_network, "Hosts", _NoHosts)
    monkeypatch.setattr(Runner, "measure", measure)
    for name in ("append_row", "read_rows"):
        function = getattr(_rows, name)
        monkeypatch.setattr(
            slow_network,
            name,
            lambda *args, function=function: function(*args, directory=tmp_path),
        )
    only = {"sizes": ["tiny"], "rates": ["none"], "microbatches": [1], "rounds": 1}
    return made, lambda *peers, **more: slow_network.run(peers=peers, **(only | more))


def test_a_run_whose_row_is_there_is_not_made_again(study, monkeypatch):
    made, run = study
    run("gspmd")
    run("gspmd", "jaxzero zero3")
    assert [one.peer for one in made] == ["gspmd", "jaxzero zero3"]
    monkeypatch.setattr(slow_network, "is_current", lambda row, *paths: False)
    run("gspmd", again=True)
    assert [one.peer for one in made] == ["gspmd", "jaxzero zero3", "gspmd"]


def test_a_run_that_fails_has_no_row_and_ends_no_other(study, tmp_path):
    made, run = study
    with pytest.raises(SystemExit, match="1 of 3 runs failed"):
        run("fsdp2", "gspmd", "deepspeed qwz")
    rows = _rows.read_rows(slow_network.NAME, directory=tmp_path)
    assert [row["results"]["settings"]["peer"] for row in rows] == ["gspmd", "deepspeed qwz"]
    assert rows[1]["results"]["not_run"] == "RuntimeError: no"  # as was to be expected


def test_a_link_is_busy_where_half_of_its_rate_flows():
    rate = 1000.0
    moved = [(1000, 1000), (600, 1000), (499, 800), (0, 0), (400, 300)]  # each in two seconds
    samples = [_link.Sample(0.0, 0, 0)]
    for sent, received in moved:
        last = samples[-1]
        samples.append(
            _link.Sample(last.seconds + 2, last.sent + 2 * sent, last.received + 2 * received)
        )
    shares = _link.shares_of(samples, rate)
    filled = (1000 + 1000 + 600 + 1000 + 499 + 800) / (2 * 3 * 1000)
    assert shares == {"both": 0.4, "one": 0.2, "neither": 0.4, "filled": round(filled, 3)}
    idle = _link.shares_of([_link.Sample(0.0, 5, 5), _link.Sample(1.0, 5, 5)], rate)
    assert idle == {"both": 0.0, "one": 0.0, "neither": 1.0, "filled": 0.0}


# One run.


def test_weights_are_those_of_the_model_and_always_the_same():
    size = SIZES["tiny"]
    leaves = _slow_runs.make_weights(size)
    model = jax.eval_shape(lambda: _peers.init(size, jax.random.key(0)))
    flat = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf.shape
        for path, leaf in jax.tree.leaves_with_path(model)
    }
    assert {name: leaf.shape for name, leaf in leaves.items()} == flat
    again = _slow_runs.make_weights(size)
    assert all((again[name] == leaf).all() for name, leaf in leaves.items())


def test_tokens_of_a_step_do_not_depend_on_how_many_there_are():
    tokens = _slow_runs.make_tokens(SIZES["tiny"], 2, 3)
    assert tokens.shape == (3, 2, 8, 65) and tokens.dtype == np.int32
    assert tokens.min() == 0 and tokens.max() < SIZES["tiny"].vocabulary
    assert (tokens[:2] == _slow_runs.make_tokens(SIZES["tiny"], 2, 2)).all()


def test_the_model_in_pytorch_is_the_model_in_jax(tmp_path):
    torch = pytest.importorskip("torch")
    from benchmarks.network import _jax as _slow_jax
    from benchmarks.network import _torch as _slow_torch

    size = SIZES["tiny"]
    np.savez(tmp_path / "weights.npz", **_slow_runs.make_weights(size))
    leaves = np.load(tmp_path / "weights.npz")
    tokens = _slow_runs.make_tokens(size, 1, 1)[0, 0]
    with jax.numpy_rank_promotion("allow"):  # the scales of norms
        value, grads = jax.value_and_grad(lambda p: _peers.loss(size, p, tokens))(
            _slow_jax._tree(leaves)
        )
    model = _slow_torch.Decoder(**vars(size))
    model.load_state_dict(_slow_torch._state(leaves))
    loss = model(torch.from_numpy(tokens).long())
    loss.backward()
    # Sums of up to 512 terms in float32, in two layers and back: a hundred roundings of 6e-8.
    assert loss.item() == pytest.approx(float(value), rel=6e-6)
    for name in ("q", "down"):
        grad = getattr(model.layers[1], name).weight.grad.T.numpy()
        expected = np.asarray(grads["layers"][1][name])
        np.testing.assert_allclose(grad, expected, atol=6e-6 * abs(expected).max())


def test_an_error_is_its_last_line_without_folders(tmp_path):
    log = tmp_path / "0.0.log"
    log.write_text(
        'Traceback:\n  File "/a/b.py", line 1\n[rank0]: ValueError: first\n'
        "RuntimeError: cannot open /opt/some-env/lib/thing.so: gone\n[Gloo] closing\n"
    )
    assert _slow_runs.last_error(log) == "RuntimeError: cannot open thing.so: gone"
    log.write_text("")
    assert _slow_runs.last_error(log) == "nothing was printed"


def test_a_run_that_takes_too_long_or_fails_is_given_up(tmp_path):
    (tmp_path / "1.0.log").write_text("ValueError: no\n")
    slow, bad = (
        subprocess.Popen([sys.executable, "-c", code])
        for code in ("import time; time.sleep(60)", "import sys; sys.exit(3)")
    )
    try:
        with pytest.raises(Failed, match="no end within 0 s"):
            _slow_runs.wait({"0.0": slow}, 0.3, tmp_path)
        with pytest.raises(Failed, match="worker 1.0 ended with 3: ValueError: no"):
            _slow_runs.wait({"0.0": slow, "1.0": bad}, 60, tmp_path)
    finally:
        slow.kill()
        slow.wait()


# Two hosts.


@on_hosts
def test_hosts_send_at_their_rate_and_leave_nothing(tmp_path):
    abandoned = "jz9999999a"  # no process has this number
    subprocess.run(["ip", "netns", "add", abandoned], check=True)
    send = (
        "import socket, sys, time; s = socket.create_connection(('10.77.0.1', 9000)); "
        "start = time.monotonic(); s.sendall(bytes(5_000_000)); s.shutdown(1); s.recv(1); "
        "print(time.monotonic() - start)"
    )
    receive = (
        "import socket; s, _ = socket.create_server(('10.77.0.1', 9000)).accept()\n"
        "while s.recv(1 << 20): pass\ns.sendall(b'1')"
    )
    with Hosts() as hosts:
        hosts.shape("100mbit")
        hosts.start(0, [sys.executable, "-c", receive])
        time.sleep(0.5)
        sender = hosts.start(1, [sys.executable, "-c", send], stdout=subprocess.PIPE)
        seconds = float(sender.communicate(timeout=30)[0])
        left = hosts.start(0, ["sleep", "1000"])
    assert seconds > 5e6 * 8 / 1e8 * 0.9  # the bucket holds 64 kB, which need not wait
    assert left.returncode == -9
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not {abandoned, *hosts.names} & set(there.split())


@pytest.mark.ci
@on_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "microbatches", "crossings"),
    [
        ("jaxzero zero3", 1, 3),
        pytest.param("gspmd", 4, 4, marks=pytest.mark.exhaustive),
        ("fsdp2", 4, 12),
    ],
)
def test_a_run_over_a_slow_link(peer, microbatches, crossings, tmp_path):
    """In a gather or reduction in float32 half a model crosses the link each way."""
    if peer == "fsdp2":
        pytest.importorskip("torch")
    run = Run(peer=peer, size="tiny", microbatches=microbatches, rate="100mbit", round=0)
    with Hosts() as hosts:
        results = Runner(hosts, tmp_path, timeout_seconds=120).measure(run)
    assert json.loads(json.dumps(results)) == results
    assert results["agrees"], results
    assert min(results["sent_bytes_per_step"]) > crossings * results["parameters"] / 2 * 4
    for host in results["link"]:
        assert host["both"] + host["one"] + host["neither"] == pytest.approx(1, abs=2e-3)


@pytest.mark.exhaustive
@on_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "every"), [("jaxzero streaming_diloco", 30), ("jaxzero streaming_diloco100", 100)]
)
def test_local_steps_over_a_slow_link(peer, every, tmp_path):
    """Hosts alone send next to nothing; rounds what the report says, and headers of packets."""
    run = Run(peer=peer, size="tiny", microbatches=2, rate="100mbit", round=0)
    with Hosts() as hosts:
        results = Runner(hosts, tmp_path, timeout_seconds=600).measure(run)
    assert json.loads(json.dumps(results)) == results
    assert results["agrees"], results
    assert len(results["losses"]) == every * 3 and results["loss_last"] < results["loss_first"]
    # Alone there are two barriers for each turn of 30 or more steps, of about 1 kB each.
    assert max(results["alone"]["sent_bytes_per_step"]) < 200
    # Leaves of this size are sent in float32, once in a round; fragments are padded.
    told = results["received_bytes_per_step_by_report"]
    assert told == pytest.approx(4 * results["parameters"] / every, rel=0.05)
    # Headers and acknowledgements: at most 2 x 66 bytes for each packet of 1448, and the barriers.
    assert told < min(results["sent_bytes_per_step"])
    assert max(results["sent_bytes_per_step"]) < told * (1 + 2 * 66 / 1448) + 200
