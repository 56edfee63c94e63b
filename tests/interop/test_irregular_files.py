"""Named pipes and devices in place of each file of a checkpoint: nothing waits or fills memory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxzero import interop

from .fuzzing import bounds, check_refusal
from .torch_files import pack, tensor_pickle

DEEPSPEED = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"

# Numbered parts can be read without their index; the other file is of the form, and never read.
NOT_NEEDED = ("model.safetensors.index.json", "optimizer_state.pt")


def write_safetensors(folder: Path) -> None:
    for number in (1, 2):
        file = folder / f"model-{number:05}-of-00002.safetensors"
        save_file({f"x{number}": np.ones(2, np.float32)}, file)
    files = {f"x{number}": f"model-{number:05}-of-00002.safetensors" for number in (1, 2)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))


def write_torch(folder: Path) -> None:
    pack(folder / "a.bin", tensor_pickle(), {"0": bytes(16)})
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.bin"}}))


def write_dcp(folder: Path) -> None:
    pytest.importorskip("torch", reason="needs torch to write the form")
    tensors = {"x": interop.ArrayTensor(np.ones(2, np.float32), "x")}
    interop.write_checkpoint(tensors, folder / "dcp", form="dcp")


def write(case: str, folder: Path) -> Path:
    if case.startswith(("zero", "universal")):
        return shutil.copytree(DEEPSPEED / case, folder, ignore=lambda *_: ["expected.npz"])
    folder.mkdir()
    {"safetensors": write_safetensors, "torch": write_torch, "dcp": write_dcp}[case](folder)
    return folder / "dcp" if case == "dcp" else folder


def read(path: Path) -> dict[str, np.ndarray]:
    checkpoint = interop.open_checkpoint(path)
    held = {name: tensor.read() for name, tensor in checkpoint.items()}
    if checkpoint.moments is not None:
        held |= {f"{name}.m": tensor.read() for name, tensor in checkpoint.adam().exp_avg.items()}
    return held


@pytest.mark.parametrize("case", ["safetensors", "torch", "dcp", "zero1", "zero3", "universal"])
def test_each_file(case: str, tmp_path: Path):
    path = write(case, tmp_path / case)
    whole = read(path)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) > 1
    for file in files:
        content = file.read_bytes()
        for make in (os.mkfifo, lambda place: place.symlink_to("/dev/zero")):
            file.unlink(missing_ok=True)
            make(file)
            try:
                with bounds():
                    held = read(path)
            except ValueError as error:
                check_refusal(error, path)
            else:
                assert file.name in NOT_NEEDED
                assert all(np.array_equal(held[name], array) for name, array in whole.items())
            file.unlink()
        file.write_bytes(content)
    assert read(path).keys() == whole.keys()


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("zero1", "step3/mp_rank_00_model_states.pt"),
        ("zero1", "step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("universal", "step3/zero/up.weight/exp_avg.pt"),
        ("safetensors", "model-00002-of-00002.safetensors"),
    ],
)
def test_the_message_says_what_it_is(case: str, name: str, tmp_path: Path):
    path = write(case, tmp_path / case)
    (path / name).unlink()
    os.mkfifo(path / name)
    with bounds(), pytest.raises(ValueError, match=f"{name}' is a named pipe. Put the regular fi"):
        read(path)


def test_a_pipe_as_the_only_file(tmp_path: Path):
    os.mkfifo(tmp_path / "foo.safetensors")
    with bounds(), pytest.raises(ValueError, match=r"foo\.safetensors' is a named pipe\. Put the"):
        interop.open_checkpoint(tmp_path)
