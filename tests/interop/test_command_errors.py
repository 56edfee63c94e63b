"""`jaxzero inspect`, `convert` and `report` with files that fail, or that hold hostile names."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import cli, interop
from jaxzero.interop import ArrayTensor

MISTAKE, FILE_ERROR = 2, 74  # exit codes, as the documentation has them
FORMS = {"safetensors": "new/folder/out", "torch": "new/folder/out.pt", "dcp": "new/folder/out"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"x{number}": np.ones(5000, np.float32) for number in range(3)}, path)
    return path


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing more to a file fails, as on a full disk, with "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_is_full_is_one_line_and_nothing_is_left(form: str, source: Path, capsys):
    if form != "safetensors":
        pytest.importorskip("torch", reason="needs torch")
    target = source.parent / FORMS[form]
    with largest_file(30_000):
        assert cli.main(["convert", str(source), str(target), "--form", form]) == FILE_ERROR
    assert capsys.readouterr().err == f"Error: '{target}': File too large.\n"
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("place", ["a" * 300, "b/" * 20 + "c" * 300])
def test_a_path_that_is_too_long(place: str, source: Path, capsys):
    target = source.parent / place
    commands = [["convert", str(source), str(target)]]
    commands += [["inspect", str(target)]] if "/" not in place else []
    for command in commands:
        assert cli.main(command) == FILE_ERROR
        error = capsys.readouterr().err
        assert error.startswith("Error: '") and error.count("\n") == 1
        assert error.endswith("File name too long. Name a shorter path.\n")
    assert list(source.parent.iterdir()) == [source]


def test_a_name_that_only_its_temporary_folder_makes_too_long(source: Path, capsys):
    target = source.parent / "new" / ("a" * 250)
    assert cli.main(["convert", str(source), str(target)]) == FILE_ERROR
    assert f"'{target}': File name too long." in capsys.readouterr().err
    assert list(source.parent.iterdir()) == [source]


def test_each_error_of_a_file_says_what_to_do(monkeypatch, capsys):
    errors = [
        PermissionError(13, "Permission denied", "/x"),
        OSError(28, "No space left on device"),
        ConnectionResetError(104, "Connection reset by peer"),  # of no file
    ]

    def fail(settings, console):
        raise errors.pop(0)

    monkeypatch.setattr(cli.commands, "inspect", fail)
    for told in (
        "'/x': Permission denied. Check its permissions",
        "Error: No space left on device. Free some space",
    ):
        assert cli.main(["inspect", "x"]) == FILE_ERROR
        assert told in capsys.readouterr().err
    with pytest.raises(ConnectionResetError):
        cli.main(["inspect", "x"])


HOSTILE = "\x1b]0;title\x07\x1b[2J[bold red]\u202ename\n[/bold]"
VISIBLE = r"\x1b]0;title\x07\x1b[2J[bold red]\u202ename\n[/bold]"


def test_names_are_printed_without_what_a_terminal_obeys(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    save_file({HOSTILE: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    config = {"model_type": HOSTILE, "architectures": [HOSTILE, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(VISIBLE) == 3
    assert cli.main(["convert", str(tmp_path), str(tmp_path / f"out{HOSTILE[:9]}")]) == 0
    printed += capsys.readouterr().out
    target = str(tmp_path / "w.safetensors" / HOSTILE)
    assert cli.main(["inspect", target]) == MISTAKE
    printed += (error := capsys.readouterr().err)
    assert error.count("\n") == 1 and "[bold red]" in error
    assert not {"\x1b", "\x07", "\u202e"} & set(printed)


def test_proposals_are_printed_without_what_a_terminal_obeys():
    names = [HOSTILE, HOSTILE + "2", HOSTILE + "num_batches_tracked"]
    held = {name: ArrayTensor(np.zeros(3, np.float32), name) for name in names}
    leaf = jax.ShapeDtypeStruct((3,), np.float32)
    for tree in ({HOSTILE: leaf}, {"a": leaf, "b": leaf}, {"name": leaf}):
        found = interop.match(tree, held)
        with pytest.raises(ValueError) as raised:
            found.raise_if_undecided()
        for text in (str(found), str(raised.value)):
            assert not {"\x1b", "\x07", "\u202e"} & set(text)


@pytest.mark.parametrize("content", ["[1]", '{"model_type": "x", "architectures": 3}', "[" * 10**5])
def test_a_config_without_a_family_is_told(tmp_path: Path, capsys, content: str, source: Path):
    (source.parent / "config.json").write_text(content)
    assert cli.main(["inspect", str(source.parent)]) == 0
    assert "config.json says no `model_type`" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", [{"leaves": 3}, {"leaves": {"a": 3}, "step": HOSTILE}, {"mesh": 1}]
)
def test_a_description_of_a_run_is_not_trusted(tmp_path: Path, capsys, damage: dict):
    said = {
        "step": 1,
        "leaves": {HOSTILE: HOSTILE},
        "mesh": {},
        "versions": {},
        "saved": "",
        **damage,
    }
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "jaxzero.json").write_text(json.dumps(said))
    assert cli.main(["inspect", str(tmp_path / "1")]) in (0, MISTAKE)
    out, error = capsys.readouterr()
    assert not {"\x1b", "\x07", "\u202e"} & set(out + error)
    assert cli.main(["inspect", str(tmp_path / "1"), "--key", "model"]) == MISTAKE
    assert "a checkpoint of jaxzero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        (".", r"is a folder. Name a file in it, such as plan.png."),
        ("plan", "must end in .png, .svg, .pdf, which selects the format."),
        ("plan.txt", "must end in .png, .svg, .pdf, which selects the format."),
        ("nowhere/plan.png", "the folder nowhere does not exist."),
    ],
)
def test_a_plot_is_refused_before_the_work(plot: str, message: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("jaxzero.commands._report")
    monkeypatch.setattr(module, "set_up", lambda *_: pytest.fail("has begun"))
    assert cli.main(["report", "--plot", plot]) == MISTAKE
    assert message in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_a_plot_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("jaxzero.commands._report")

    def begin(*_, **__):
        raise ValueError("has begun")

    monkeypatch.setattr(module, "set_up", begin)
    for plot in ("/proc/x.png", f"{'a' * 300}.png"):
        assert cli.main(["report", "--plot", plot]) == FILE_ERROR
        error = capsys.readouterr().err
        assert error.startswith(f"Error: '{plot}': ") and error.count("\n") == 1
    (tmp_path / "kept.png").write_text("kept")
    for plot in ("kept.png", "new.png"):
        assert cli.main(["report", "--plot", plot]) == MISTAKE
        assert "has begun" in capsys.readouterr().err
    assert (tmp_path / "kept.png").read_text() == "kept" and os.listdir(tmp_path) == ["kept.png"]
