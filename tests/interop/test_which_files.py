"""Which files of a directory are opened, by their names; and entries of files that have none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import cli, interop


def fill(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        save_file({f"x{number}": np.full(2, number, np.float32)}, folder / name)


@pytest.mark.parametrize(
    ("names", "opened"),
    [
        (["diffusion_pytorch_model.safetensors"], 1),
        (["model-00001-of-00001.safetensors"], 1),
        (["w-00001-of-00002.safetensors", "w-00002-of-00002.safetensors"], 2),
        (["model.safetensors", "adapter_model.safetensors", "consolidated.safetensors"], 1),
    ],
)
def test_other_names_are_opened_where_there_is_no_choice(tmp_path: Path, names, opened: int):
    fill(tmp_path, *names)
    checkpoint = interop.open_checkpoint(tmp_path)
    assert list(checkpoint) == [f"x{number}" for number in range(opened)]
    assert all(checkpoint[f"x{n}"].read().tolist() == [n, n] for n in range(opened))


def test_an_index_of_another_name_is_used(tmp_path: Path):
    fill(tmp_path, "a.safetensors", "b.safetensors", "fp16.safetensors")
    index = {"weight_map": {"x0": "a.safetensors", "x1": "b.safetensors"}}
    (tmp_path / "diffusion.safetensors.index.json").write_text(json.dumps(index))
    assert list(interop.open_checkpoint(tmp_path)) == ["x0", "x1"]
    (tmp_path / "other.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="nor one index, and several files: 'a.safetensors', 'b"):
        interop.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.safetensors", "b.safetensors"], r"several files: 'a\.safe.*\. Name the file to open"),
        (["w-00001-of-00002.safetensors"], r"in 2 parts; missing, .* 'w-00002-of-00002\.safe"),
        (
            ["w-00001-of-00001.safetensors", "v-00001-of-00001.safetensors"],
            r"several files: 'v-00001-of-00001\.safetensors', 'w-00001-of-00001",
        ),
        (
            ["w-00001-of-00001.safetensors", "w-00002-of-00001.safetensors"],
            r"not one of them: 'w-00002-of-00001\.safetensors'",
        ),
    ],
)
def test_several_files_that_nothing_joins_are_refused(tmp_path: Path, names, message: str):
    fill(tmp_path, *names)
    with pytest.raises(ValueError, match=message):
        interop.open_checkpoint(tmp_path)


def test_a_key_is_refused_where_there_is_one_state_dict(tmp_path: Path, capsys):
    fill(tmp_path, "model.safetensors")
    deepspeed = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"
    for path in (tmp_path, tmp_path / "model.safetensors", deepspeed / "zero2"):
        with pytest.raises(ValueError, match=r"`key` is 'model', but .* Leave `key` out"):
            interop.open_checkpoint(path, key="model")
    assert cli.main(["inspect", str(tmp_path), "--key", "model"]) == 2
    assert "Leave `key` out" in " ".join(capsys.readouterr().err.split())
