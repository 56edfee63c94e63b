"""The race over a slow network: its hosts, its runs, and what is read from its rows."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from benchmarks.network import _hosts, _link, _summary
from benchmarks.network import _runs as _slow_runs
from benchmarks.network import race as slow_network
from benchmarks.network._hosts import Hosts
from benchmarks.network._runs import SIZES, Failed, Run, Runner
from benchmarks.shared import _peers, _rows

RUN = Run(peer="gspmd", size="tiny", microbatches=1, rate="100mbit", round=0)
REASON = _hosts.missing()
on_hosts = pytest.mark.skipif(REASON is not None, reason=f"two hosts: {REASON}")
pytestmark = pytest.mark.xdist_group("hosts")  # as in `tests/distributed/test_several_hosts.py`


def _row(seconds: float, losses=(4.0, 3.5, 3.0, 2.5), **settings):
    run = Run(**(vars(RUN) | settings))
    workers = [
        {
            "seconds": [seconds] * 3,
            "busy_seconds": 0.3,
            "sent_bytes": 3_000_000 * (host + 1),
            "link": {"both": 0.5, "one": 0.2 + 0.1 * host, "neither": 0.3, "filled": 0.9},
            "losses": list(losses),
        }
        for host in range(2)
    ]
    return {"results": _slow_runs.summary(run, workers, [4.0, 3.5, 3.0, 2.5])}


@pytest.fixture
def rows():
    times = {"gspmd": 4.0, "fsdp2": 8.0, "jaxzero zeropp": 0.5}
    return [
        _row(seconds + 0.1 * number, peer=peer, rate=rate, microbatches=count, round=number)
        for peer, seconds in times.items()
        for rate in ("100mbit", "none")
        for count in (1, 4)
        for number in range(3)
    ]


def _row_of_rounds(seconds: float, alone: float, off: float = 0.0, **settings):
    run = Run(**(vars(RUN) | {"peer": "jaxzero streaming_diloco"} | settings))
    curve = [4.0, 3.5, 3.0, 2.5, *[2.0] * 86]

    def measured(seconds, sent, host):
        return {
            "seconds": [seconds * (1 + 0.5 * host), seconds],  # of a step; the second host is slow
            "steps": 60,
            "busy_seconds": 6.0,
            "sent_bytes": sent,
            "losses": [loss + host for loss in curve],
            "received_bytes_by_report": 600_000,
        }

    workers = [
        {"exchanging": measured(seconds, 1_230_000, host), "alone": measured(alone, 0, host)}
        for host in range(2)
    ]
    references = [[4.0 * (1 + off), 3.5, 3.0, 2.5], [5.0, 4.5, 4.0, 3.5]]
    return {"results": _slow_runs.summary_of_rounds(run, workers, references)}


# What is read from rows.


def test_a_speed_up_is_over_the_faster_baseline(rows):
    groups = _summary.group(rows)
    key = ("tiny", 1, "100mbit", "jaxzero zeropp")
    assert _summary.step_seconds(groups[key]) == pytest.approx(0.6)
    assert _summary.speed_up(groups, key) == pytest.approx(4.1 / 0.6)
    groups[key] = [run for run in groups[key] if run["settings"]["round"] == 2]
    assert _summary.speed_up(groups, key) == pytest.approx(4.2 / 0.7), "of the same round"
    del groups["tiny", 1, "100mbit", "fsdp2"]
    assert _summary.speed_up(groups, key) is None


def test_the_newest_row_of_a_round_counts(rows):
    again = _row(100.0, peer="gspmd", round=1)
    groups = _summary.group([*rows, again])
    runs = groups["tiny", 1, "100mbit", "gspmd"]
    assert sorted(run["step_seconds_median"] for run in runs) == [4.0, 4.2, 100.0]


def test_quartiles_need_three_runs(rows):
    runs = _summary.group(rows)["tiny", 1, "100mbit", "gspmd"]
    assert _summary.quartiles(runs) == pytest.approx((4.05, 4.15))
    assert _summary.quartiles(runs[:2]) is None


def test_the_table_is_markdown_with_every_peer(rows, capsys):
    refused = {"settings": {**vars(RUN), "peer": "deepspeed qwz"}, "not_run": "RuntimeError: no"}
    wrong = _row(2.0, losses=(4.0, 3.5, 3.0, 2.6), peer="deepspeed zero3")
    _summary.print_table([*rows, wrong, {"results": refused}])
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| jaxzero `zeropp()` | 0.60 s (0.55-0.65), 6.8x | 0.60 s (0.55-0.65), 6.8x | 2.0 | 3 |"
        in (lines[5])
    )
    assert lines[0].startswith(
        "| 0.0M parameters, one micro-batch, 512 tokens a step | 100 Mbit/s |"
    )
    assert lines[3].startswith("| PyTorch FSDP2 | 8.10 s (8.05-8.15) |")
    deepspeed = next(line for line in lines if "DeepSpeed ZeRO-3" in line)
    assert "2.00 s, 2x |  |" in deepspeed and "4e-02 (!)" in deepspeed  # not run unshaped
    assert lines[-2] == "deepspeed qwz was not run: RuntimeError: no"


def test_local_steps_have_a_table_of_their_own(rows, capsys):
    local = [
        _row_of_rounds(0.5, 0.4, rate="10mbit"),
        _row_of_rounds(0.44, 0.4, rate="100mbit"),
        _row_of_rounds(0.9, 0.4, rate="100mbit", peer="jaxzero diloco"),
    ]
    _summary.print_table([*rows, *local])
    tables = capsys.readouterr().out.split("\n\n")
    heads, _, alone, streaming, diloco, zeropp = tables[2].splitlines()  # after the use of the link
    assert "| 10 Mbit/s | 100 Mbit/s |" in heads and "unshaped" not in heads
    # 0.4 s and 0.6 s in turns, by the slower host; medians of two and of four turns.
    assert "without exchange | 0.50 s | 0.50 s |" in alone
    assert "| 0.62 s, 1.25x (1.25-1.25) | 0.55 s, 1.10x (1.10-1.10) | 0.61 (0.60) |" in streaming
    assert "|  | 1.12 s, 2.25x (2.25-2.25) |" in diloco
    assert "|  | 0.60 s |" in zeropp
    assert "diloco" not in tables[0]


def test_the_picture_is_drawn_of_what_is_there(rows, tmp_path):
    file = tmp_path / "docs" / "race.png"
    more = [_row(1.0, peer="jaxzero zero3"), _row_of_rounds(0.5, 0.4, rate="10mbit")]
    _summary.draw([*rows, *more], "tiny", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="No run of size '40m'"):
        _summary.draw(rows, "40m", file)


# Which runs are made.


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
        return _row(1.0, **vars(one))["results"]

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


def test_the_table_has_how_the_link_was_used(rows, capsys):
    _summary.print_table(rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if "50%" in line]
    assert lines[0] == "| GSPMD, 100 Mbit/s | 50% | 25% | 30% | 90% |"
    assert len(lines) == 3 * 2 * 2  # peers, rates and numbers of micro-batches


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


@pytest.mark.parametrize(
    ("peer", "off", "agrees"),
    [("gspmd", 1e-6, True), ("gspmd", 1e-4, False), ("jaxzero zeropp", 1e-4, True)],
)
def test_losses_are_held_against_those_of_one_device(peer, off, agrees):
    results = _row(1.0, losses=(4.0, 3.5, 3.0 * (1 + off), 2.5), peer=peer)["results"]
    assert results["loss_deviation"] == pytest.approx(off, rel=1e-2)
    assert results["agrees"] is agrees
    assert results["sent_bytes_per_step"] == [1_000_000, 2_000_000]


def test_a_round_is_as_slow_as_its_slower_host_and_held_against_the_same_steps_alone():
    results = _row_of_rounds(0.6, 0.4)["results"]
    assert results["step_seconds"] == [0.9, 0.6] and results["alone"]["step_seconds"] == [0.6, 0.4]
    assert results["step_over_alone"] == [1.5, 1.5]
    assert results["sent_bytes_per_step"] == [20_500] * 2
    assert results["received_bytes_per_step_by_report"] == 20_000
    assert results["losses"][:2] == [4.5, 4.0] and results["loss_deviation"] == 0
    assert results["agrees"] and not _row_of_rounds(0.6, 0.4, off=1e-4)["results"]["agrees"]


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
    [("jaxzero zero3", 1, 3), ("gspmd", 4, 4), ("fsdp2", 4, 12)],
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
def test_local_steps_over_a_slow_link(tmp_path):
    """Hosts alone send next to nothing; rounds what the report says, and headers of packets."""
    run = Run(peer="jaxzero streaming_diloco", size="tiny", microbatches=2, rate="100mbit", round=0)
    with Hosts() as hosts:
        results = Runner(hosts, tmp_path, timeout_seconds=600).measure(run)
    assert json.loads(json.dumps(results)) == results
    assert results["agrees"], results
    assert len(results["losses"]) == 30 * 3 and results["loss_last"] < results["loss_first"]
    # Alone there are two barriers for each turn of 30 steps, of about 1 kB each.
    assert max(results["alone"]["sent_bytes_per_step"]) < 200
    # Leaves of this size are sent in float32, once in a round; fragments are padded.
    told = results["received_bytes_per_step_by_report"]
    assert told == pytest.approx(4 * results["parameters"] / 30, rel=0.05)
    # Headers and acknowledgements: at most 2 x 66 bytes for each packet of 1448, and the barriers.
    assert told < min(results["sent_bytes_per_step"])
    assert max(results["sent_bytes_per_step"]) < told * (1 + 2 * 66 / 1448) + 200
