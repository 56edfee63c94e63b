"""What `jaxzero launch` runs: on which Python, and what it says of it before."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxzero import cli
from jaxzero.launch import Launch, launch

from ._launching import go_to

BASE = Path(getattr(sys, "_base_executable", sys.executable))
SHOWS = "import sys; print(sys.prefix, *sys.argv[1:])"
VERSION = sys.version.split()[0]
THIS = f"jaxzero itself runs in another environment, on Python {VERSION} at {sys.executable}"


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go_to(tmp_path, monkeypatch)
    Path("train.py").write_text(SHOWS)


@pytest.fixture
def first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that PATH has before all others."""
    folder = tmp_path / "first"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def environment(folder: Path) -> Path:
    """A virtual environment as `python -m venv` makes it; return its `python`."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(BASE)
    (folder / "bin" / "python3").symlink_to("python")
    (folder / "pyvenv.cfg").write_text(f"home = {BASE.parent}\n")
    return python


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(*command: str) -> int:
    return launch(Launch(nodes=1, command=command))


class TestScript:
    def test_a_script_alone_runs_on_this_interpreter(self, first_on_path, capfd):
        program(first_on_path / "python", "exit 9")
        assert cli.main(["launch", "--nodes", "2", "--", "train.py", "--nodes", "7"]) == 0
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == [f"[{i}] {sys.prefix} --nodes 7" for i in range(2)]
        this = f"Python {VERSION} at {sys.executable}, the interpreter that jaxzero runs on"
        assert err == f"launch: train.py runs on {this}\n"

    def test_it_is_said_that_its_first_line_is_not_followed(self, capfd):
        script = program(Path("loop.py"), "")
        script.write_text("#!/no/such/python\nprint('ran')\n")
        assert run(str(script.absolute())) == 0
        out, err = capfd.readouterr()
        assert out == "ran\n"
        assert err.endswith("jaxzero runs on; its first line (#!) is not followed\n")

    def test_none_there(self):
        with pytest.raises(
            ValueError, match=r"`command`.*'no\.py', and there is no such file in /"
        ):
            run("no.py")

    def test_a_program_on_path_may_be_called_so(self, first_on_path, capfd):
        program(first_on_path / "tool.py", "echo tool")
        assert run("tool.py") == 0
        assert capfd.readouterr() == ("tool\n", "")


class TestBarePython:
    def test_of_another_environment(self, tmp_path, monkeypatch, capfd):
        python = environment(tmp_path / "other")
        monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
        assert run("python", "train.py", "a b") == 0
        out, err = capfd.readouterr()
        assert out == f"{tmp_path / 'other'} a b\n"  # nothing is put in its place
        assert err.splitlines() == [
            f"launch: python is Python {VERSION} at {python}",
            f"launch: warning: {THIS}",
            "launch: To run on the interpreter of jaxzero, give: -- train.py 'a b'",
            f"launch: To run on this one without the warning: -- {python} train.py 'a b'",
        ]

    def test_behind_a_shim(self, tmp_path, first_on_path, capfd):
        python = environment(tmp_path / "other")
        shim = program(first_on_path / "python3.11", f'exec {python} "$@"')
        assert run("python3.11", "-c", SHOWS) == 0
        out, err = capfd.readouterr()
        assert out == f"{tmp_path / 'other'}\n"
        assert f"launch: python3.11 is {shim}, which starts Python " in err
        assert f"launch: warning: {THIS}\n" in err
        assert f"interpreter of jaxzero, give: -- {sys.executable} -c " in err

    def test_behind_a_shim_of_this_environment(self, first_on_path, capfd):
        shim = program(first_on_path / "python", f'exec {sys.executable} "$@"')
        assert run("python", "-c", SHOWS) == 0
        out, err = capfd.readouterr()
        assert out == f"{sys.prefix}\n"
        assert f"launch: python is {shim}, which starts Python " in err
        assert err.endswith(f"{sys.executable}, in the environment that jaxzero runs in\n")

    def test_by_another_name_in_the_same_folder(self, first_on_path, monkeypatch, capfd):
        python = program(first_on_path / "python", 'echo "${0##*/} $1"')
        python.with_name("python3").symlink_to("python")
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(subprocess, "run", None)  # nobody is asked
        for name in ("python", "python3"):
            assert run(name, "train.py") == 0
            out, err = capfd.readouterr()
            assert out == f"{name} train.py\n"
            found = python.with_name(name)
            assert err == f"launch: {name} is {found}, the interpreter that jaxzero runs on\n"

    @pytest.mark.parametrize(
        "version", [sys.version, "2.7.18 (of long ago)"], ids=["same", "other"]
    )
    def test_two_versions_with_one_prefix(self, version, first_on_path, capfd):
        answer = ascii(("/usr/bin/python3", sys.prefix, version))
        program(first_on_path / "python", f"echo {shlex.quote(answer)}")
        assert run("python", "train.py") == 0
        is_said = f"launch: warning: {THIS}\n" in capfd.readouterr().err
        assert is_said == (version != sys.version)

    @pytest.mark.parametrize("answer", ["sleep 60", "echo hello", "true"])
    def test_that_does_not_answer(self, answer, first_on_path, monkeypatch, capfd):
        ask = subprocess.run
        short = {"timeout": 0.2}
        monkeypatch.setattr(
            subprocess, "run", lambda *args, **options: ask(*args, **options | short)
        )
        asked = f'if [ "$1" = -c ]; then exec {answer}; fi; echo runs'
        shim = program(first_on_path / "python", asked)
        assert run("python", "train.py") == 0
        out, err = capfd.readouterr()
        assert out == "runs\n"
        assert f"launch: python is {shim}\nlaunch: warning: it does not say" in err

    def test_what_site_prints_is_not_the_answer(self, first_on_path, capfd):
        program(first_on_path / "python", f'echo hello; exec {sys.executable} "$@"')
        assert run("python", "-c", "") == 0
        assert "in the environment that jaxzero runs in" in capfd.readouterr().err

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("echo 'pyenv: python: command not found' >&2; exit 127", "pyenv: python: command not"),
            ("exit 127", r"exit code 127 \(the command was not found\)"),
        ],
    )
    def test_a_shim_with_nothing_behind_it(self, text, reason, first_on_path):
        program(first_on_path / "python", text)
        told = rf"`command` .*'python', which is .*/first/python, .*: {reason}(.|\n)*: -- train\.py"
        with pytest.raises(ValueError, match=told):
            run("python", "train.py")

    def test_one_that_cannot_start(self, first_on_path):
        """As that of a virtual environment that was moved. No other on PATH takes its place."""
        program(first_on_path / "python", "").write_text("#!/no/such/interpreter\n")
        with pytest.raises(ValueError, match=r"which is .*/first/python, .*: No such file"):
            run("python", "train.py")

    def test_none_on_path(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match=r"no such program.* PATH\. To run .*: -- train\.py$"):
            run("python", "train.py")

    def test_a_long_command_is_not_repeated(self, first_on_path, capfd):
        shim = program(first_on_path / "python", "")
        assert run("python", "-c", "1\n2") == 0
        remedies = [line for line in capfd.readouterr().err.splitlines() if " -- " in line]
        assert [line.partition(" -- ")[2] for line in remedies] == [
            f"{sys.executable} ...",
            f"{shim} ...",
        ]


def test_other_programs_run_as_they_are(tmp_path, capfd):
    """An interpreter with its path has been named by the user: nothing is to be said."""
    python = environment(tmp_path / "other")
    assert run(str(python), "-c", SHOWS) == 0
    assert run("echo", "python") == 0
    assert capfd.readouterr() == (f"{tmp_path / 'other'}\npython\n", "")
