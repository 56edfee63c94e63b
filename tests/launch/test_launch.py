"""`jaxzero launch`: how processes end together, and start again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxzero.launch import _launch, _supervisor

from ._launching import PREAMBLE, PYTHON, ends, go_to, launch, wait_for


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_to(tmp_path, monkeypatch)


class TestEnds:
    def test_all_done(self, capfd):
        assert launch("time.sleep(0.1 * process)", nodes=8) == 0
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize(
        ("end", "status", "said"),
        [
            ("sys.exit(3)", 3, "exit code 3, after"),
            ("sys.exit('why')", 1, "exit code 1 (an error in the program), after"),
            ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL; often because memory ran out,"),
            ("os.kill(os.getpid(), 40)", 168, "killed by signal 40, after"),
        ],
    )
    def test_the_first_failure_ends_the_others(self, end, status, said, capfd):
        script = f"""
            if process == 1:
                print("here it is")
                {end}
            time.sleep(60)
        """
        start = time.monotonic()
        assert launch(script, nodes=3) == status
        assert time.monotonic() - start < 10
        err = capfd.readouterr().err
        assert f"launch: process 1 (node 1): {said}" in err
        assert "launch: asking 0, 2 to stop (SIGTERM; SIGKILL after 30 s)\n" in err
        assert "process 2 (node 2): killed by SIGTERM" in err
        assert f"all have ended; the cause: process 1 (node 1): {said}" in err
        assert "launch: the last lines of process 1:\n" in err
        assert "launch:   here it is\n" in err

    def test_the_last_lines_are_the_last(self, capfd):
        script = """
            if process == 1:
                for i in range(40): print("line", i)
                sys.exit(4)
            time.sleep(60)
        """
        assert launch(script, nodes=2) == 4
        told = re.findall(r"^launch:   (.*)$", capfd.readouterr().err, re.MULTILINE)
        assert told == [f"line {i}" for i in range(25, 40)]

    def test_who_ignores_sigterm_is_killed(self, capfd):
        script = """
            if process == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                helper = subprocess.Popen(["sleep", "60"])
                open("pid", "w").write(str(helper.pid))
            meet()
            if process == 1: sys.exit(3)
            time.sleep(60)
        """
        assert launch(script, nodes=2, grace=0.3) == 3
        err = capfd.readouterr().err
        assert "process 0 (node 0): did not end when asked, and was killed, after" in err
        assert ends(int(Path("pid").read_text()))

    @pytest.mark.parametrize("lost", ["sys.exit(76)", "os.abort()"])
    def test_the_true_cause_of_a_lost_peer(self, lost, capfd, monkeypatch):
        monkeypatch.setattr(_supervisor, "_CAUSE_SECONDS", 20.0)  # on a busy machine
        script = f"""
            if process == 0: {lost}
            time.sleep(0.3)
            if process == 1: sys.exit(5)
            time.sleep(60)
        """
        assert launch(script, nodes=3) == 5
        assert "the cause: process 1 (node 1): exit code 5" in capfd.readouterr().err

    def test_a_lost_peer_that_never_shows(self, capfd, monkeypatch):
        monkeypatch.setattr(_supervisor, "_CAUSE_SECONDS", 0.4)
        script = """
            if process == 0: sys.exit(76)
            os.kill(os.getpid(), signal.SIGSTOP)
        """
        assert launch(script, nodes=2, grace=0.2) == 76
        err = capfd.readouterr().err
        assert "process 1 (node 1): did not end when asked, and was killed" in err
        assert "the cause: process 0 (node 0): exit code 76 (another process is lost" in err

    def test_those_that_save_are_given_the_time(self, capfd):
        script = """
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(99))
            if process == 0: sys.exit(75)
            time.sleep(0.5)
            sys.exit(75)
        """
        assert launch(script, nodes=2) == 75
        assert "asking" not in capfd.readouterr().err

    def test_helpers_end_with_their_process(self):
        script = """
            helper = subprocess.Popen(["sleep", "60"])  # it holds the pipes open
            open("helper", "w").write(str(helper.pid))
        """
        start = time.monotonic()
        assert launch(script, nodes=1) == 0
        assert time.monotonic() - start < 4
        assert ends(int(Path("helper").read_text()))

    def test_a_helper_that_left_holds_nothing_up(self, monkeypatch):
        monkeypatch.setattr(_supervisor, "_OUTPUT_SECONDS", 0.3)
        script = """
            helper = subprocess.Popen(["sleep", "60"], start_new_session=True)
            open("helper", "w").write(str(helper.pid))
            print("last")
        """
        start = time.monotonic()
        assert launch(script, nodes=2) == 0
        assert time.monotonic() - start < 5
        os.kill(int(Path("helper").read_text()), signal.SIGKILL)

    def test_a_process_that_cannot_be_killed_is_left_behind_aloud(self, capfd, monkeypatch):
        script = """
            if process == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                open("pid", "w").write(str(os.getpid()))
            meet()
            if process == 1: sys.exit(3)
            time.sleep(60)
        """
        monkeypatch.setattr(os, "killpg", lambda group, number: None)
        for name in ("_KILL_SECONDS", "_OUTPUT_SECONDS"):
            monkeypatch.setattr(_supervisor, name, 0.2)
        assert launch(script, nodes=2, grace=0.1) == 3
        pid = Path("pid").read_text()
        said = f"launch: process 0 (node 0) outlives SIGKILL: its pid is {pid}\n"
        assert said in capfd.readouterr().err
        assert ends(int(pid))  # by the guard, which was still in charge of it

    def test_closed_streams_are_no_end(self):
        script = """
            os.close(1); os.close(2)
            time.sleep(0.3)
            os._exit(6)
        """
        assert launch(script, nodes=1) == 6

    def test_there_is_nothing_to_read(self):
        before = os.dup(0)
        read, write = os.pipe()
        os.write(write, b"what someone types")
        os.dup2(read, 0)
        for end in (read, write):
            os.close(end)
        try:
            assert launch("sys.exit(len(sys.stdin.read()))", nodes=1) == 0
        finally:
            os.dup2(before, 0)
            os.close(before)


class TestRestarts:
    def test_until_it_goes_well(self, capfd):
        script = """
            print(restarts, os.environ["JAXZERO_COORDINATOR"])
            sys.exit(9 if restarts < 2 and process == 1 else 0)
        """
        assert launch(script, nodes=2, restart=3) == 0
        out, err = capfd.readouterr()
        assert re.findall(r"starting again .*", err) == [
            f"starting again in 0.05 s, with 2 of 2 nodes (restart {n} of 3)" for n in (1, 2)
        ]
        addresses = re.findall(r"^\[1\] (\d) (\S+)$", out, re.MULTILINE)
        assert [int(attempt) for attempt, _ in addresses] == [0, 1, 2]
        assert len({address for _, address in addresses}) == 3

    def test_at_most_so_often(self, capfd):
        assert launch("sys.exit(9)", nodes=1, restart=2) == 9
        assert capfd.readouterr().err.count("starting again") == 2

    def test_pauses_grow(self, monkeypatch):
        pauses = []
        monkeypatch.setattr(_launch, "_LONGEST_PAUSE", 30.0)
        monkeypatch.setattr(
            _launch._Attempts, "_pause", lambda self, seconds: pauses.append(seconds)
        )
        assert launch("sys.exit(9)", nodes=1, restart=7) == 9
        assert pauses == [1, 2, 4, 8, 16, 30, 30]

    @pytest.mark.parametrize("status", [2, 77])
    def test_not_after_what_would_only_repeat(self, status, capfd):
        assert launch(f"sys.exit({status})", nodes=1, restart=2) == status
        assert "starting again" not in capfd.readouterr().err

    def test_after_a_preemption_that_was_not_ours(self):
        assert launch("sys.exit(0 if restarts else 75)", nodes=2, restart=1) == 0

    def test_with_fewer_nodes(self, capfd):
        script = """
            node, devices = (os.environ[name] for name in ("JAXZERO_NODE", "JAX_LOCAL_DEVICE_IDS"))
            print(restarts, node, processes, devices)
            meet()
            if restarts == 3: sys.exit()
            if process == 1: sys.exit(1)
            time.sleep(60)
        """
        assert launch(script, nodes=3, restart=3, min_nodes=2) == 0
        out, err = capfd.readouterr()
        assert err.count("node 1 is left out") == 1
        lines = sorted(line.split(maxsplit=1) for line in out.splitlines())
        first = [["[0]", "0 0 3 0"], ["[1]", "0 1 3 1"], ["[2]", "0 2 3 2"]]
        assert [line for line in lines if line[1].startswith("0 ")] == first
        later = [line for line in lines if not line[1].startswith("0 ")]
        assert later == sorted(
            [f"[{process}]", f"{attempt} {process} 2 {2 * process}"]
            for attempt in (1, 2, 3)
            for process in (0, 1)
        )


class TestRequests:
    """Signals to the launcher."""

    @pytest.fixture(autouse=True)
    def _signals_are_heeded(self):
        """Also where the tests run in the background or under nohup, and inherit ignored ones."""
        heeded = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
            signal.SIGHUP: signal.SIG_DFL,
        }
        before = {number: signal.signal(number, handler) for number, handler in heeded.items()}
        yield
        left = {number: signal.signal(number, handler) for number, handler in before.items()}
        assert left == heeded

    SAVES = """
        helper = subprocess.Popen(["sleep", "60"])  # it reads data, say
        def save(*_):
            print("saving")
            time.sleep(0.2)
            sys.exit(75 if helper.poll() is None else 1)
        signal.signal(signal.SIGTERM, save)
        open(str(process), "w").write("ready")
        time.sleep(60)
    """
    STUBBORN = """
        signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").write("yes"))
        open(str(process), "w").write("ready")
        while True: time.sleep(60)
    """

    def signalled(self, act: Callable[[], None], script: str, **options) -> int:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        try:
            return launch(script, **options)
        finally:
            thread.join()

    @pytest.mark.parametrize(
        ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
    )
    def test_all_are_asked_once_to_save(self, number, status, capfd):
        def act():
            wait_for("0", "1")
            os.kill(os.getpid(), number)

        assert self.signalled(act, self.SAVES, nodes=2, restart=2) == status
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["[0] saving", "[1] saving"]
        assert "asking 0, 1 to stop" in err and "starting again" not in err

    def test_a_save_that_was_cut_off_is_not_called_one(self, capfd):
        def act():
            wait_for("0")
            os.kill(os.getpid(), signal.SIGTERM)

        assert self.signalled(act, self.STUBBORN, nodes=1, grace=0.2) == 137
        assert "did not end when asked, and was killed" in capfd.readouterr().err

    def test_a_second_ctrl_c_kills_at_once(self):
        def act():
            wait_for("0")
            os.kill(os.getpid(), signal.SIGINT)
            wait_for("asked")
            os.kill(os.getpid(), signal.SIGINT)

        start = time.monotonic()
        assert self.signalled(act, self.STUBBORN, nodes=1, grace=60.0) == 130
        assert time.monotonic() - start < 10

    def test_in_the_pause_before_a_restart(self, monkeypatch):
        monkeypatch.setattr(_launch, "_LONGEST_PAUSE", 60.0)
        monkeypatch.setattr(
            _launch._Attempts, "_leave_out", lambda *_: Path("pausing").write_text("x")
        )

        def act():
            wait_for("pausing")
            os.kill(os.getpid(), signal.SIGTERM)

        assert self.signalled(act, "sys.exit(9)", nodes=1, restart=1) == 75


COMMAND = """
import sys
from jaxzero import cli
from jaxzero.launch import _launch, _supervisor
_launch._FLUSH_SECONDS = _supervisor._OUTPUT_SECONDS = 0.5
sys.exit(cli.main())
"""


class TestLauncher:
    """The launcher as a process."""

    def test_nothing_outlives_a_launcher_that_is_killed(self):
        script = PREAMBLE + textwrap.dedent("""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            helper = subprocess.Popen(["sleep", "60"])
            open(str(process), "w").write(f"{os.getpid()} {helper.pid}")
            time.sleep(60)
        """)
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, "launch", "--", *PYTHON, script]
        ) as launcher:
            wait_for("0", "1")
            numbers = [int(word) for name in "01" for word in Path(name).read_text().split()]
            launcher.kill()
        assert len(numbers) == 4
        assert all(ends(number) for number in numbers)

    @pytest.mark.ci
    def test_a_screen_that_is_stuck_does_not_hold_up_the_end(self):
        script = PREAMBLE + textwrap.dedent("""
            open(str(process), "w").write("ready")
            while True: print("x" * 1000)
        """)
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, "launch", "--grace", "1", "--", *PYTHON, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as launcher:
            wait_for("0", "1")
            time.sleep(0.5)
            launcher.terminate()
            try:
                assert launcher.wait(30) == 143
            finally:
                launcher.kill()
