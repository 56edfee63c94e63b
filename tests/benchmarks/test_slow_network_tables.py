"""The race over a slow network: its tables and its picture, made of rows."""

from __future__ import annotations

import pytest

from benchmarks.network import _runs as _slow_runs
from benchmarks.network import _summary
from benchmarks.network._runs import Run

RUN = Run(peer="gspmd", size="tiny", microbatches=1, rate="100mbit", round=0)


def row_of(seconds: float, losses=(4.0, 3.5, 3.0, 2.5), **settings):
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
        row_of(seconds + 0.1 * number, peer=peer, rate=rate, microbatches=count, round=number)
        for peer, seconds in times.items()
        for rate in ("100mbit", "none")
        for count in (1, 4)
        for number in range(3)
    ]


def row_of_rounds(seconds: float, alone: float, off: float = 0.0, **settings):
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
    again = row_of(100.0, peer="gspmd", round=1)
    groups = _summary.group([*rows, again])
    runs = groups["tiny", 1, "100mbit", "gspmd"]
    assert sorted(run["step_seconds_median"] for run in runs) == [4.0, 4.2, 100.0]


def test_quartiles_need_three_runs(rows):
    runs = _summary.group(rows)["tiny", 1, "100mbit", "gspmd"]
    assert _summary.quartiles(runs) == pytest.approx((4.05, 4.15))
    assert _summary.quartiles(runs[:2]) is None


def test_the_table_is_markdown_with_every_peer(rows, capsys):
    refused = {"settings": {**vars(RUN), "peer": "deepspeed qwz"}, "not_run": "RuntimeError: no"}
    wrong = row_of(2.0, losses=(4.0, 3.5, 3.0, 2.6), peer="deepspeed zero3")
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
        row_of_rounds(0.5, 0.4, rate="10mbit"),
        row_of_rounds(0.44, 0.4, rate="100mbit"),
        row_of_rounds(0.9, 0.4, rate="100mbit", peer="jaxzero diloco"),
        row_of_rounds(0.42, 0.4, rate="10mbit", peer="jaxzero streaming_diloco100"),
    ]
    _summary.print_table([*rows, *local])
    tables = capsys.readouterr().out.split("\n\n")
    heads, _, alone, streaming, longer, diloco, zeropp = tables[2].splitlines()  # after the link's
    assert "| 10 Mbit/s | 100 Mbit/s |" in heads and "unshaped" not in heads
    # 0.4 s and 0.6 s in turns, by the slower host; medians of two and of four turns.
    assert "without exchange | 0.50 s | 0.50 s |" in alone
    assert "| 0.62 s, 1.25x (1.25-1.25) | 0.55 s, 1.10x (1.10-1.10) | 0.61 (0.60) |" in streaming
    assert "(every=100)` | 0.53 s, 1.05x (1.05-1.05) |  | 2.05 (0.60) |" in longer
    assert "|  | 1.12 s, 2.25x (2.25-2.25) |" in diloco
    assert "|  | 0.60 s |" in zeropp
    assert "diloco" not in tables[0]


def test_the_picture_is_drawn_of_what_is_there(rows, tmp_path):
    file = tmp_path / "docs" / "race.png"
    more = [row_of(1.0, peer="jaxzero zero3"), row_of_rounds(0.5, 0.4, rate="10mbit")]
    _summary.draw([*rows, *more], "tiny", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="No run of size '40m'"):
        _summary.draw(rows, "40m", file)


# Which runs are made.


def test_the_table_has_how_the_link_was_used(rows, capsys):
    _summary.print_table(rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if "50%" in line]
    assert lines[0] == "| GSPMD, 100 Mbit/s | 50% | 25% | 30% | 90% |"
    assert len(lines) == 3 * 2 * 2  # peers, rates and numbers of micro-batches


def test_a_round_is_as_slow_as_its_slower_host_and_held_against_the_same_steps_alone():
    results = row_of_rounds(0.6, 0.4)["results"]
    assert results["step_seconds"] == [0.9, 0.6] and results["alone"]["step_seconds"] == [0.6, 0.4]
    assert results["step_over_alone"] == [1.5, 1.5]
    assert results["sent_bytes_per_step"] == [20_500] * 2
    assert results["received_bytes_per_step_by_report"] == 20_000
    assert results["losses"][:2] == [4.5, 4.0] and results["loss_deviation"] == 0
    assert results["agrees"] and not row_of_rounds(0.6, 0.4, off=1e-4)["results"]["agrees"]


@pytest.mark.parametrize(
    ("peer", "off", "agrees"),
    [("gspmd", 1e-6, True), ("gspmd", 1e-4, False), ("jaxzero zeropp", 1e-4, True)],
)
def test_losses_are_held_against_those_of_one_device(peer, off, agrees):
    results = row_of(1.0, losses=(4.0, 3.5, 3.0 * (1 + off), 2.5), peer=peer)["results"]
    assert results["loss_deviation"] == pytest.approx(off, rel=1e-2)
    assert results["agrees"] is agrees
    assert results["sent_bytes_per_step"] == [1_000_000, 2_000_000]
