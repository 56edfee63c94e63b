"""`jaxzero launch`: what it takes, what processes are told, and how they are heard."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxzero import cli
from jaxzero import launch as launcher

from ._launching import EXIT_CODES, go_to, launch


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_to(tmp_path, monkeypatch)


class TestOutput:
    def test_lines_are_whole_and_numbered(self, capfd):
        script = """
            for i in range(100):
                for part in (f"line {i} ", "of ", f"{process}\\n"):
                    sys.stdout.write(part)
                    sys.stdout.flush()
        """
        assert launch(script, nodes=2, procs_per_node=2) == 0
        lines = capfd.readouterr().out.splitlines()
        for process in range(4):
            mine = [line for line in lines if line.startswith(f"[{process}] ")]
            assert mine == [f"[{process}] line {i} of {process}" for i in range(100)]
        assert len(lines) == 400

    def test_streams_stay_apart(self, capfd):
        assert launch("print('out'); print('err', file=sys.stderr)", nodes=2) == 0
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["[0] out", "[1] out"]
        assert sorted(err.splitlines()) == ["[0] err", "[1] err"]

    def test_one_process_is_shown_as_it_is(self, capfd):
        assert launch("print('plain')", nodes=1) == 0
        assert capfd.readouterr().out == "plain\n"

    def test_any_bytes(self, capfdbinary, tmp_path):
        script = """
            write = lambda data: os.write(1, data)
            write(b"\\xff\\xfe not UTF-8\\n\\n")
            write(b"10%\\r"); write(b"55%\\r100%\\r"); write(b"\\n")
            write(b"dos\\r"); write(b"\\n")
            write(b"x" * 200_000 + b"\\n")
            write(b"no end")
        """
        assert launch(script, nodes=1, log_dir=tmp_path / "new" / "logs") == 0
        out = capfdbinary.readouterr().out.split(b"\n")
        assert out[:4] == [b"\xff\xfe not UTF-8", b"", b"100%", b"dos"]
        assert b"".join(out[4:-2]) == b"x" * 200_000
        assert max(map(len, out)) <= 64 * 1024
        assert out[-2:] == [b"no end", b""]
        log = (tmp_path / "new" / "logs" / "process-0.log").read_bytes()
        assert log.startswith(b"\xff\xfe not UTF-8\n\n10%\r55%\r100%\r\ndos\r\nxxx")
        assert log.endswith(b"xxx\nno end")

    def test_a_long_line_without_end_is_not_held_in_memory(self, capfdbinary):
        script = """
            for _ in range(64): os.write(1, b"y" * 65536)
        """
        assert launch(script, nodes=1) == 0
        out = capfdbinary.readouterr().out
        assert out.count(b"y") == 64 * 65536
        assert max(map(len, out.split(b"\n"))) == 64 * 1024

    def test_a_long_progress_bar_is_one_line(self, capfd):
        script = """
            for i in range(4000): os.write(1, b"%60d steps\\r" % i)
            os.write(1, b"done\\n")
        """
        assert launch(script, nodes=2) == 0
        assert sorted(capfd.readouterr().out.splitlines()) == ["[0] done", "[1] done"]

    def test_a_log_that_cannot_be_written_ends_alone(self, capfd, tmp_path):
        (tmp_path / "process-1.log").symlink_to("/dev/full")
        assert launch("print('on')", nodes=2, log_dir=tmp_path) == 0
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == ["[0] on", "[1] on"]
        assert (tmp_path / "process-0.log").read_text() == "on\n"
        assert err == f"launch: {tmp_path}/process-1.log ends here: No space left on device\n"

    def test_output_is_not_held_back(self, capfd, monkeypatch):
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        script = "import os; print('seen'); os.kill(os.getpid(), 9)"
        assert (
            launcher.launch(launcher.Launch(nodes=1, command=(sys.executable, "-c", script))) == 137
        )
        assert capfd.readouterr().out == "seen\n"

    def test_a_terminal_gets_colours(self, monkeypatch, capfd):
        monkeypatch.setattr(os, "isatty", lambda fd: fd == 1)
        monkeypatch.delenv("NO_COLOR", raising=False)
        script = "print('out'); print('err', file=sys.stderr)"
        assert launch(script, nodes=2) == 0
        out, err = capfd.readouterr()
        assert "\x1b[0;33m[1]\x1b[0m out" in out.splitlines()
        assert sorted(err.splitlines()) == ["[0] err", "[1] err"]
        monkeypatch.setenv("NO_COLOR", "1")
        assert launch(script, nodes=2) == 0
        assert sorted(capfd.readouterr().out.splitlines()) == ["[0] out", "[1] out"]


class TestCommand:
    def test_no_such_program(self, capsys):
        assert cli.main(["launch", "--", "no-such-program", "--x"]) == 2
        assert "`command` starts with 'no-such-program', and there is no such program" in " ".join(
            capsys.readouterr().err.split()
        )

    def test_a_file_that_is_no_program(self, tmp_path):
        path = tmp_path / "train.sh"
        path.write_text("")
        with pytest.raises(ValueError, match=r"`command`.*not executable.*-- bash .*train\.sh"):
            launcher.launch(launcher.Launch(command=(str(path),)))

    def test_a_program_that_cannot_start(self, tmp_path):
        path = tmp_path / "train"
        path.write_text("#!/no/such/interpreter\n")
        path.chmod(0o755)
        with pytest.raises(ValueError, match=r"`command` cannot be run: .*train: No such file"):
            launcher.launch(launcher.Launch(command=(str(path),)))

    def test_what_was_started_ends_if_the_rest_cannot(self, monkeypatch):
        started = []

        def second_fails(*arguments, **options):
            if "env" in options and started:
                raise OSError(11, "Resource temporarily unavailable")
            process = popen(*arguments, **options)
            if "env" in options:
                started.append(process)
            return process

        popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", second_fails)
        with pytest.raises(ValueError, match=r"`command` cannot be run.*unavailable"):
            launch("time.sleep(60)", nodes=2)
        assert started[0].returncode == -signal.SIGKILL

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"nodes": 0}, "`nodes` must be positive; got 0"),
            ({"procs_per_node": -1}, "`procs_per_node` must be positive; got -1"),
            ({"devices_per_proc": 0}, "`devices_per_proc` must be positive; got 0"),
            ({"restart": -1}, "`restart` cannot be negative; got -1"),
            ({"grace": float("nan")}, "`grace` must be a number of seconds, 0 or more; got nan"),
            ({"restart": 1, "min_nodes": 3}, "`min_nodes` can be at most `nodes`, 2; got 3"),
            ({"min_nodes": 1}, "`min_nodes`.*give `restart` too"),
            ({"command": ()}, "`command` is missing.*-- train.py"),
        ],
    )
    def test_mistakes(self, options, message):
        with pytest.raises(ValueError, match=message):
            launcher.Launch(**{"command": ("true",), **options})

    def test_a_log_dir_that_is_a_file(self, tmp_path):
        (tmp_path / "logs").write_text("")
        with pytest.raises(ValueError, match="`log_dir` .*logs cannot be made: File exists"):
            launch("", log_dir=tmp_path / "logs")

    def test_the_command_line(self, capfd):
        script = "import json, sys; print(json.dumps(sys.argv[1:]))"
        arguments = ["--nodes", "7", "-h", "--", "$HOME", "a b"]
        status = cli.main(
            ["launch", "--nodes", "1", "--", sys.executable, "-c", script, *arguments]
        )
        assert status == 0
        assert json.loads(capfd.readouterr().out) == arguments

    def test_help_explains_fields_and_codes(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit):
            cli.main(["launch", "--help"])
        text = capsys.readouterr().out
        for name in launcher.Launch.__dataclass_fields__.keys() - {"command"}:
            assert f"--{name.replace('_', '-')} " in text
        for code in EXIT_CODES:
            assert re.search(rf"\b{code}\b", text)
        assert "resume from its last checkpoint" in " ".join(text.split()).replace("│ │ ", "")


class TestEnvironment:
    def test_what_a_process_is_told(self, capfd):
        script = """
            for name in sorted(os.environ):
                if name.startswith(("JAXZERO_", "JAX_LOCAL", "JAX_NUM")):
                    print(f"{name}={os.environ[name]}", end=" ")
            print()
        """
        assert launch(script, nodes=2, procs_per_node=2, devices_per_proc=4) == 0
        lines = sorted(capfd.readouterr().out.splitlines())
        (port,) = set(re.findall(r"COORDINATOR=127\.0\.0\.1:(\d+) ", "\n".join(lines)))
        assert lines == [
            f"[{process}] JAXZERO_COORDINATOR=127.0.0.1:{port} JAXZERO_NODE={process // 2} "
            f"JAXZERO_NUM_PROCESSES=4 JAXZERO_PROCESS_ID={process} JAXZERO_RESTARTS=0 "
            f"JAX_LOCAL_DEVICE_IDS={','.join(str(4 * process + i) for i in range(4))} "
            "JAX_NUM_CPU_DEVICES=4 "
            for process in range(4)
        ]

    def test_processes_find_each_other_and_nodes_are_hosts(self, capfd):
        script = """
            import jax
            import jaxzero as jz
            from jaxzero import distributed

            assert distributed.initialize()
            mesh = jz.make_mesh()
            axes = ("node", "local")
            summed = jax.jit(
                jax.shard_map(
                    lambda: jax.lax.psum(2.0 ** jax.lax.axis_index(axes), axes),
                    mesh=mesh, in_specs=(), out_specs=jax.P(),
                )
            )()
            owners = [[device.process_index for device in node] for node in mesh.devices]
            print("found", dict(mesh.shape), owners, float(summed))
        """
        sizes = ["--nodes", "2", "--procs-per-node", "1", "--devices-per-proc", "2"]
        command = [sys.executable, "-c", textwrap.dedent(script)]
        assert cli.main(["launch", *sizes, "--", *command]) == 0
        out = capfd.readouterr().out
        assert sorted(line for line in out.splitlines() if "] found " in line) == [
            f"[{process}] found {{'node': 2, 'local': 2}} [[0, 0], [1, 1]] 15.0"
            for process in (0, 1)
        ]
