"""The command line: help that reads well, exit statuses, and the command that resumes."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxzero import cli, commands, distributed, jobs


def called_with(monkeypatch: pytest.MonkeyPatch, arguments: str) -> jobs.Train:
    seen = []
    monkeypatch.setattr(jobs, "train", lambda settings, console: seen.append(settings))
    assert cli.main(shlex.split(arguments)) == 0
    return seen[0]


def test_defaults(monkeypatch: pytest.MonkeyPatch):
    settings = called_with(monkeypatch, "train")
    assert settings == jobs.Train()
    assert settings.sharding.wire == "zeropp"


def test_flags_are_fields(monkeypatch: pytest.MonkeyPatch):
    settings = called_with(
        monkeypatch,
        "train --checkpoint c --data d --max-tokens 9 --steps 7 --batch-size 16 "
        "--learning-rate 0.5 --warmup-steps 3 --temperature 0.1 --seed 4 --stage 2 --wire bfloat16 "
        "--nodes 4 --devices 8 --name n --runs r --save-every 5 --resume --wandb p --profile 3:5",
    )
    assert settings == jobs.Train(
        checkpoint=Path("c"),
        data=jobs.Data(data=Path("d"), max_tokens=9),
        optimization=jobs.Optimization(
            steps=7, batch_size=16, learning_rate=0.5, warmup_steps=3, temperature=0.1, seed=4
        ),
        sharding=jobs.Sharding(stage=2, wire="bfloat16"),
        devices=jobs.Devices(nodes=4, devices=8),
        run=jobs.Run(name="n", runs=Path("r"), save_every=5, resume=True, wandb="p", profile="3:5"),
    )


@pytest.mark.parametrize("command", ["train", "report"])
def test_help_explains_every_field(command: str, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit:
        cli.main([command, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    groups = {"train": jobs.Train(), "report": commands.Report()}[command]
    fields = [field.name for field in dataclasses.fields(groups)]
    names = {"checkpoint"}
    for field in fields:
        group = getattr(groups, field)
        if dataclasses.is_dataclass(group):
            assert f"{field} options" in text
            names |= {each.name for each in dataclasses.fields(group)}
    for name in names:
        assert f"--{name.replace('_', '-')} " in text
    for unwanted in ("--data.", "--no-", "{None}", "tyro", "<"):
        assert unwanted not in text


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert "usage: jaxzero [-h] {train,report,plan,verify,sample,inspect,convert,launch}" in text
    assert "Fine-tune a decoder on text, or a text encoder to find code." in text


def test_a_mistyped_command_and_the_version(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trian", "--steps", "3"]) == 2
    assert capsys.readouterr().err == (
        "Error: There is no command `jaxzero trian`. Do you mean `jaxzero train`?\n"
    )
    assert cli.main(["xyz"]) == 2
    assert "There are train, report, plan, verify, sample, inspect" in capsys.readouterr().err
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"jaxzero \d+\.\d+\S*\n", capsys.readouterr().out)


def test_mistakes_are_one_line_and_status_2(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def fail(settings, console):
        raise ValueError("`x[0]` must be [bold]; got 3.")

    monkeypatch.setattr(jobs, "train", fail)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "Error: `x[0]` must be [bold]; got 3.\n"


@pytest.mark.parametrize(
    "line",
    [
        "train --steps x",
        "train --steps",
        "train --bogus 1",
        "plan --nodes two",
        "convert a",
        "convert a b --dtype int4",
        "launch --nodes two -- train.py",
    ],
)
def test_a_mistake_in_the_flags_points_to_the_help_of_the_command(line: str, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(line.split())
    assert exit.value.code == 2
    assert f"jaxzero {line.split()[0]} --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "plan --device h100 --model m --device a100",
        "plan --link=50 --link=12.5",
        "train --max-tokens 8 --max_tokens=16",  # of nested settings
        "train --offload weights --offload optimizer",
        "sample m --seed 1 --seed 1",
        "convert a b --dtype float32 --dtype bfloat16",
        "inspect a --key x --key y",
        "launch --nodes 2 --nodes 3 -- train.py",
    ],
)
def test_a_flag_given_twice_is_refused(line: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(line.split()) == 2
    assert "is given 2 times, with '" in capsys.readouterr().err


def test_the_error_for_a_flag_given_twice_names_its_values(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "--device", "h100", "--device", "a100"]) == 2
    assert capsys.readouterr().err == (
        "Error: `--device` is given 2 times, with 'h100', 'a100'. Give it once.\n"
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sample", "sample m --prompt a --prompt b --chat --chat"),
        ("report", "report --detail leaves --detail state"),
        ("launch", "launch --nodes 2 -- jaxzero train --nodes 4 --nodes 8"),
    ],
)
def test_flags_that_collect_values_may_be_repeated(name: str, line: str, monkeypatch):
    given = []
    monkeypatch.setattr(
        cli if name == "launch" else commands, name, lambda *x: given.append(x) or 0
    )
    assert cli.main(line.split()) == 0
    assert len(given) == 1


@pytest.mark.parametrize(("by_ctrl_c", "status"), [(True, 130), (False, 75)])
def test_a_stop_prints_the_command_that_resumes(
    monkeypatch, capsys: pytest.CaptureFixture[str], by_ctrl_c: bool, status: int
):
    def interrupted(settings, console):
        raise jobs.Interrupted("20260131-235959", 7, by_ctrl_c=by_ctrl_c)

    monkeypatch.setattr(jobs, "train", interrupted)
    monkeypatch.setenv("COLUMNS", "40")  # the command must not be broken into lines
    assert cli.main(["train", "--data", "my [old] code", "--steps", "9"]) == status
    lines = capsys.readouterr().out.splitlines()
    command = "jaxzero train --data 'my [old] code' --steps 9 --name 20260131-235959 --resume"
    assert lines[-1].strip() == command
    assert "after step 7" in " ".join(lines)


def test_ctrl_c_before_anything_was_saved(monkeypatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(settings, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "train", interrupted)
    assert cli.main(["train"]) == 130
    assert "nothing was saved" in capsys.readouterr().err


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FileNotFoundError("the checkpoint was deleted while it was read"), 74),
        (caused(RuntimeError("step 30 could not be saved"), OSError(28, "No space left")), 74),
        (jobs.Diverged("10 steps in a row"), 77),
        (distributed.ReplicasDiffer("two devices"), 77),
        (TimeoutError("process 1"), 76),
        (NotImplementedError("not yet"), 2),
    ],
)
def test_each_end_has_its_status(monkeypatch, capsys, error: Exception, status: int):
    def fail(settings, console):
        raise error

    monkeypatch.setattr(jobs, "train", fail)
    assert cli.main(["train"]) == status
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_an_error_of_no_file_has_its_traceback(monkeypatch):
    def fail(settings, console):
        raise RuntimeError("no such thing") from ConnectionResetError(104, "reset by peer")

    monkeypatch.setattr(jobs, "train", fail)
    with pytest.raises(RuntimeError, match="no such thing"):
        cli.main(["train"])


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("train", "jaxzero train --name n --resume"),
        ("train --name n", "jaxzero train --name n --resume"),
        ("train --name=n --seed 1", "jaxzero train --name=n --seed 1 --resume"),
        ("train --name n --resume", "jaxzero train --name n --resume"),
    ],
)
def test_resume_command(given: str, printed: str):
    assert cli.resume_command(given.split(), "n") == printed


WITHOUT_EXTRAS = """
import json, sys
from importlib.abc import MetaPathFinder

EXTRAS = "flax grain matplotlib safetensors tensorboardX tokenizers torch transformers".split()

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from jaxzero.cli import main

launch = ["launch", "--nodes", "1", "--", sys.executable, "-c", "print('launched')"]
sample, plan = ["sample", "x", "--prompt", "a"], ["plan", "--model", "x"]
commands = (launch, ["train"], ["report"], sample, plan, ["inspect", "x"], ["convert", "x", "y"])
print(json.dumps([main(command) for command in commands]))
"""


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        pytest.param("train", "train", marks=pytest.mark.ci),
        ("plan", None),
        ("verify", None),
        *(
            pytest.param(command, extra, marks=pytest.mark.exhaustive)
            for command, extra in (
                *((x, "torch") for x in ("report", "sample", "inspect", "convert")),
                ("launch", None),
            )
        ),
    ],
)
def test_a_command_imports_no_more_than_the_extra_that_its_help_names(
    command: str, extra: str | None, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ("Needs no extra" if extra is None else f"Needs the extra {extra}") in words
    needed = {"torch": ["flax", "jinja2", "safetensors", "torch", "transformers", "tokenizers"]}
    needed["train"] = [*needed["torch"], "grain", "matplotlib", "tensorboardX"]
    others = set(needed["train"]) - set(needed.get(extra or "", ()))
    room = {"train": "jobs", "launch": "launch"}.get(command, "commands")
    program = f"import sys\nfor x in {sorted(others)}: sys.modules[x] = None\n"
    program += f"from jaxzero.{room} import {command}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_launch_needs_no_extra_and_the_others_name_theirs(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launched, statuses = done.stdout.splitlines()
    assert launched == "launched" and json.loads(statuses) == [0, 2, 2, 2, 2, 2, 2]
    errors = " ".join(done.stderr.split())
    assert errors.count("which is not installed. Install it with `pip install") == 6
    for name, extra in {"train": "train", "report": "torch", "inspect": "torch"}.items():
        assert f"Error: `{name}` needs the package '" in errors
        assert f'with `pip install "jaxzero[{extra}]"`' in errors
